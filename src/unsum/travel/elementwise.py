"""Numbers that stay where they are: elementwise operations with broadcasting, views, dimensions that change places."""

from __future__ import annotations

from math import prod

from torch import Tensor

from unsum.graph.layout import Layout, Mapped, Regular, reshaped
from unsum.graph.nodes import signed
from unsum.travel.table import MIXED, SILENT, Answer, At, travels


@travels(
    "Add Sub Rsub Mul Div Neg Exp Exp2 Expm1 Log Log1P Log2 Log10 Sqrt Rsqrt Reciprocal Pow Abs Sigmoid Tanh Relu "
    "LeakyRelu Elu Celu Gelu Silu Mish Softplus Hardsigmoid Hardswish Hardtanh Hardshrink Softshrink Clamp "
    "ClampMin ClampMax Erf Erfc Erfinv Sin Cos Tan Asin Acos Atan Atan2 Sinh Cosh Asinh Acosh Atanh Sinc Addcmul "
    "Addcdiv Lerp Maximum Minimum Fmax Fmin Where MaskedFill NativeDropout PreluKernel RreluWithNoise LogSigmoid "
    "Threshold Sgn Fmod Remainder NanToNum Logit Xlogy Hypot Logaddexp Logaddexp2 MseLoss SmoothL1Loss HuberLoss "
    "BinaryCrossEntropy BinaryCrossEntropyWithLogits SoftMarginLoss Angle Complex Polar Clone ToCopy Alias Copy "
    "Conj ConjPhysical Expand Tril Triu Copysign Lgamma Digamma I0 Ldexp FusedDropout SpecialI0E SpecialI1 "
    "SpecialNdtri SpecialErfcx SpecialEntr SpecialXlog1Py SpecialLogNdtr Polygamma Mvlgamma Nextafter LiftFresh"
)
def elementwise(at: At) -> Layout | Answer:
    """An argument that was spread over samples gets the sum of their gradients."""
    missing = len(at.shape) - len(at.arg)
    if not missing and at.arg == at.shape:
        return at.same()
    here = [d - missing for d in at.varies]
    spread = [j < 0 or (at.arg[j] == 1 and at.shape[j + missing] != 1) for j in here]
    if all(spread):
        return MIXED
    if any(spread):
        return SILENT
    if isinstance(at.layout, Regular):
        return at.along(here[0])
    return at.same_if(not missing)


@travels("View UnsafeView ReshapeAlias Squeeze Unsqueeze")
def view(at: At) -> Layout | Answer:
    """The order of numbers is kept."""
    return reshaped(at.layout, at.arg, at.journey.n) if prod(at.shape) == prod(at.arg) else SILENT


_PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Convolution")  # whose results have their first dimension outermost


@travels("AsStrided")
def as_strided(at: At) -> Layout | Answer:
    """A view that torch has made anew after a change in place, of all numbers of a layer's result. If samples follow
    each other in memory, they do in both, however the rest is arranged. Others are asked: how an argument lies in
    memory is written nowhere."""
    layout, strides = at.layout, tuple(signed(stride) for stride in at.saved("stride"))
    if not isinstance(layout, Regular) or layout.dim or layout.n * layout.block != at.shape[0] or not at.arg:
        return SILENT
    if not _is_changed_product(at) or strides[0] != prod(at.shape[1:]) or prod(at.shape) != prod(at.arg):
        return SILENT
    found = reshaped(layout, at.arg, at.journey.n)
    return found if isinstance(found, Regular) and not found.dim and not signed(at.saved("storage_offset")) else SILENT


def _is_changed_product(at: At) -> bool:
    """Whether the argument is what a layer has returned, changed in place."""
    below = at.node.next_functions[at.edge][0]
    was_changed = False
    while below is not None and below.name().endswith("CopySlices"):
        was_changed, below = True, below.next_functions[0][0]
    return was_changed and below is not None and below.name().removesuffix("Backward0") in _PRODUCTS


@travels("ViewAsReal ViewAsComplex")
def parts(at: At) -> Layout | Answer:
    """A complex number has two parts along a last dimension."""
    return at.same_if(all(d < len(at.arg) and d < len(at.shape) for d in at.varies))


@travels("T Transpose Permute")
def permute(at: At) -> Layout | Answer:
    """Dimensions change places."""
    rank = len(at.shape)
    order = list(range(rank))
    if at.kind == "Permute":
        order = at.dims("dims")
    elif rank > 1:
        a, b = (rank - 2, rank - 1) if at.kind != "Transpose" else (*at.dims("dim0"), *at.dims("dim1"))
        order[a], order[b] = b, a
    layout = at.layout
    if isinstance(layout, Regular):
        return at.along(order[layout.dim])
    lead = layout.map.dim()
    if order[:lead] == list(range(lead)):
        return at.same()
    owner = _inverse(layout.beside(layout.map).expand(at.shape), order)
    kept = max(order[k] for k in range(lead)) + 1  # behind it, the sample changes along no dimension
    for _ in order[kept:]:
        owner = owner.select(-1, 0)
    found = Mapped(owner, at.arg[kept:], layout.is_whole)
    return found.narrowed() if owner.device.type == "cpu" else found


def _inverse(owner: Tensor, order: list[int]) -> Tensor:
    back = [0] * len(order)
    for k, d in enumerate(order):
        back[d] = k
    return owner.permute(back)
