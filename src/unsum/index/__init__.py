"""The gradients of a data set on disk: built once, asked often."""

from unsum.index.build import build
from unsum.index.index import Hits, Index, open

__all__ = ["Hits", "Index", "build", "open"]
