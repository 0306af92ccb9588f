"""How samples travel: kind of node → where the samples of its arguments lie, given those of its result. No numbers are
needed for it, and no sizes that were seen before. One file for each family of operations."""

from unsum.travel import elementwise, indexing, joining, layers, products, reductions  # noqa: F401  they register
from unsum.travel.table import MIXED, SILENT, Answer, Journey, down, start

__all__ = ["MIXED", "SILENT", "Answer", "Journey", "down", "start"]
