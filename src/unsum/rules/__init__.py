"""Rules: what a kind of node brings to a tensor, as factors. One file per family; all else is replayed."""

from unsum.rules import batched, convolution, elementwise, float8, linear, lookup, norm, recurrent
from unsum.rules.registry import Rule, find, rule

__all__ = [
    "Rule", "batched", "convolution", "elementwise", "find", "float8", "linear", "lookup", "norm", "recurrent", "rule",
]  # fmt: skip
