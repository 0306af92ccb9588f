"""The statistics of one tensor, taken at the place, so that the tensor itself is not kept."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unsum.seams.tensors import version_of

NAN = float("nan")
BINS = 24
DRAWN = 65_536  # values that a histogram counts: of a larger tensor, so many evenly over it
LISTED = 64  # dead units are counted all and named up to here


@dataclass(frozen=True)
class Idle:
    """The units along one dimension whose every value is zero."""

    units: int
    count: int
    named: tuple[int, ...]  # the first of them
    seen: int  # values of each unit


@dataclass(frozen=True)
class Stats:
    """Statistics of a tensor. NaN and infinite values are counted, and are left out of all statistics but the norm."""

    shape: tuple[int, ...]
    mean: float
    std: float
    min: float
    max: float
    norm: float  # NaN where a value is not finite
    zeros: float  # share
    nan: int
    inf: int
    histogram: tuple[int, ...] = ()  # from min to max
    idle: dict[str, Idle] = field(default_factory=dict)  # "first": dimension 1, "last": the last one
    is_data: bool = False  # the user's own batch, or a view of it

    @property
    def is_finite(self) -> bool:
        return not self.nan and not self.inf


def measure(tensor: Tensor) -> Stats:
    """The statistics of a tensor of any kind.

    Examples:
        >>> measure(torch.tensor([[0.0, 1.0], [0.0, 3.0]])).idle["last"].named
        (0,)
    """
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    values = tensor.abs() if tensor.is_complex() else tensor
    if values.dtype != torch.float64:
        values = values.float()
    flat = values.reshape(-1)
    shape = tuple(tensor.shape)
    if not flat.numel():
        return Stats(shape, NAN, NAN, NAN, NAN, 0.0, 0.0, 0, 0)
    low, high = flat.aminmax()
    nan = inf = 0
    total = flat.numel()
    if not bool((high - low).isfinite()):  # looked at closely only where something is wrong
        nan, inf = int(flat.isnan().sum()), int(flat.isinf().sum())
        flat = flat[flat.isfinite()]
        if not flat.numel():
            return Stats(shape, NAN, NAN, NAN, NAN, NAN, 0.0, nan, inf)
        low, high = flat.aminmax()
    std, mean = torch.std_mean(flat, correction=0)
    zeros = int((flat == 0).sum())
    length = NAN if nan or inf else float(torch.linalg.vector_norm(flat))
    return Stats(
        shape, float(mean), float(std), float(low), float(high), length, zeros / total, nan, inf,
        _histogram(flat, low, high), _idle(tensor) if zeros and tensor.dim() > 1 else {},
    )  # fmt: skip


def _histogram(flat: Tensor, low: Tensor, high: Tensor) -> tuple[int, ...]:
    if bool(low == high):
        return (flat.numel(),)
    if flat.numel() > DRAWN:
        flat = flat[:: -(-flat.numel() // DRAWN)]
    width = high.double() - low.double()  # of float32's extremes the difference may be infinite
    place = ((flat.double() - low) * (BINS / width)).long().clamp_(0, BINS - 1)
    return tuple(torch.bincount(place, minlength=BINS).tolist())


def _idle(tensor: Tensor) -> dict[str, Idle]:
    found = {}
    for name, dim in (("first", 1), ("last", tensor.dim() - 1)):
        others = [d for d in range(tensor.dim()) if d != dim]
        still = ~(tensor != 0).any(dim=others)
        at = still.nonzero().flatten().tolist()
        if at:
            found[name] = Idle(len(still), len(at), tuple(at[:LISTED]), tensor.numel() // len(still))
    return found


def norm(tensor: Tensor) -> float:
    """The norm over all elements; NaN where one is not finite."""
    value = float(torch.linalg.vector_norm(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()))
    return value if math.isfinite(value) else NAN


class Measuring:
    """Measures what a capture hands it. A tensor that passes several places at once (a layer's output is the next
    one's input, and the output of the block around it) is measured once: it is held for a moment, so that its memory
    is not given to another one meanwhile."""

    def __init__(self, data: Iterable[Tensor] = ()) -> None:
        self._data = {_memory(tensor) for tensor in data}
        self._recent: deque[tuple[Tensor, int, Stats]] = deque(maxlen=6)
        self.elements = 0  # of all that was measured: how much there is to hold

    def __call__(self, tensor: Tensor) -> Stats:
        for held, version, stats in self._recent:
            if _is_same(held, tensor) and version == version_of(tensor):
                return stats
        stats = measure(tensor)
        if _memory(tensor) in self._data and _memory(tensor) is not None:
            stats = Stats(**{**vars(stats), "is_data": True})
        if not tensor.is_inference():
            self._recent.append((tensor, version_of(tensor), stats))
        self.elements += tensor.numel()
        return stats


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.is_inference() or other.is_inference() or one.layout != torch.strided or other.layout != torch.strided:
        return False
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
        other.data_ptr(), other.shape, other.stride(), other.dtype,
    )  # fmt: skip


def _memory(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # tensors without a storage of their own
        return None
