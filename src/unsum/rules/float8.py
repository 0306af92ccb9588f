"""Linear layers of float8 training (torchao). The factors are those before they are rounded to float8: the input that
the layer has saved, and the gradient that arrives."""

from __future__ import annotations

from torch import Tensor

from unsum.factors.outer import Outer
from unsum.rules.registry import Call, rule


@rule("matmul_with_hp_or_float8_argsBackward", 1)
def matmul(call: Call) -> Outer | None:
    """y = a @ W, of `Float8Linear`."""
    return _outer(call, turned=True)


@rule("mx_mmBackward", 1)
def mx_matmul(call: Call) -> Outer | None:
    """y = a @ W.T, of `MXFP8Linear`."""
    return _outer(call, turned=False)


def _outer(call: Call, *, turned: bool) -> Outer | None:
    a = call.node.saved_tensors[0].detach()
    if type(a) is not Tensor:  # rounded before the layer got it
        return None
    return Outer(call.take(a), call.take(call.delta), call.shape, turned=turned)
