"""How a captured tensor is kept: by reference, as a copy, attached to the graph, reduced at the place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from unsum.errors import OptionError, SiteError
from unsum.nested import children, find, put
from unsum.seams.checkpoints import saved_hooks
from unsum.seams.scaler import current_scale
from unsum.seams.tensors import version_of

Keep = Literal["reference", "clone", "graph"]
Reduce = Callable[[Tensor], Any] | Literal["norm", "mean", "finite"]


@dataclass(frozen=True)
class Finite:
    """How many elements are NaN or infinite. True if all elements are finite.

    Examples:
        >>> Finite(nan=1, inf=0, total=6)
        Finite(nan=1, inf=0, total=6)
        >>> bool(Finite(nan=0, inf=0, total=6))
        True
    """

    nan: int
    inf: int
    total: int

    def __bool__(self) -> bool:
        return self.nan == 0 and self.inf == 0


class Kept(NamedTuple):
    """A value that was kept. `read` gives it back, or says that it is no longer what was seen."""

    value: Any
    version: int | None = None  # None: nobody else can change it
    arrives: Any = None  # the CUDA event after which a copy to the CPU is complete
    finish: Callable[[Any], Any] | None = None

    def read(self, name: str) -> Any:
        if self.version is not None and version_of(self.value) != self.version:
            raise SiteError(
                f"{name}: the tensor was changed in place after it was captured.\n"
                '  keep="clone" takes a copy when it is captured'
            )
        if self.arrives is not None:
            self.arrives.synchronize()
        return self.value if self.finish is None else self.finish(self.value)


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(_values(tensor).to(_wide(tensor)))


def _mean(tensor: Tensor) -> Tensor:
    return _values(tensor).sum(dtype=_wide(tensor)) / tensor.numel()


def _values(tensor: Tensor) -> Tensor:
    """The elements that are not zero by definition."""
    return tensor if tensor.layout == torch.strided else tensor.coalesce().values()


def _own(result: Any, tensor: Tensor) -> Any:
    """A reduction's result, with copies of whatever in it is still the tensor's own memory."""
    if type(result).__name__ == "ndarray":
        return result.copy()
    if isinstance(result, Tensor):
        return result.clone() if _shares_memory(result, tensor) else result
    parts = {(step,): _own(part, tensor) for step, part in children(result)}
    return put(result, {path: new for path, new in parts.items() if new is not find(result, path)[1]})


def _count(tensor: Tensor) -> Tensor:
    total, tensor = tensor.numel(), _values(tensor)
    nan = tensor.isnan().sum()
    return torch.stack([nan, tensor.isinf().sum(), torch.full_like(nan, total)])


def _wide(tensor: Tensor) -> torch.dtype:
    if tensor.is_complex():
        return tensor.dtype
    return torch.promote_types(tensor.dtype, torch.float32)


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"norm": _norm, "mean": _mean, "finite": _count}


@dataclass(frozen=True)
class Keeping:
    """The options of a capture that say how tensors are kept."""

    keep: Keep = "reference"
    to: str | torch.device | None = None
    dtype: torch.dtype | None = None
    slice: Any = None
    reduce: Reduce | None = None
    scaler: Any = None
    _plain: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.keep not in get_args(Keep):
            raise OptionError(f"keep={self.keep!r}: choose one of {', '.join(map(repr, get_args(Keep)))}")
        if self.reduce is not None and not callable(self.reduce) and self.reduce not in _REDUCTIONS:
            raise OptionError(f"reduce={self.reduce!r}: a callable, or one of {', '.join(map(repr, _REDUCTIONS))}")
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise OptionError(f"dtype={self.dtype!r}: expected a torch.dtype such as torch.float32")
        if isinstance(self.scaler, int | float) and not 0 < self.scaler < float("inf"):
            raise OptionError(f"scaler={self.scaler!r}: a scale is a positive number")
        if self.to is not None:
            torch.device(self.to)  # a typo shows here, not in the middle of a forward
        options = (self.to, self.dtype, self.slice, self.reduce)
        object.__setattr__(self, "_plain", self.keep == "reference" and all(o is None for o in options))

    @property
    def is_plain(self) -> bool:
        """Whether values and gradients are kept by reference, as they are."""
        return self._plain and self.scaler is None

    def value(self, tensor: Tensor) -> Kept:
        if self._plain and not tensor.is_inference():
            return Kept(tensor.detach(), version_of(tensor))
        return self._keep(tensor)

    def gradient(self, grad: Tensor, *, is_parameter: bool) -> Kept:
        if self.scaler is not None:
            grad = unscaled(grad, self.scaler)
        if self._plain and not grad.requires_grad:
            # Torch may make this very tensor a leaf's .grad, to be added to in place; it copies if somebody holds it.
            return Kept(grad, None if is_parameter else version_of(grad))
        return self._keep(grad, copy=True) if is_parameter and self.keep != "graph" else self.value(grad)

    def _keep(self, tensor: Tensor, *, copy: bool = False) -> Kept:
        attached = self.keep == "graph"
        with _unseen_by_checkpoints() if attached else torch.no_grad():
            result: Any = tensor if attached else tensor.detach()
            if self.slice is not None:
                result = result[self.slice]
            if self.dtype is not None:
                result = result.to(self.dtype)
            finish = None
            if self.reduce is not None:
                result = self._reduced(result)
                finish = _finite if self.reduce == "finite" else None
            if not isinstance(result, Tensor):
                return Kept(_own(result, tensor), finish=finish)
            # A slice or a reduction that is a view would keep all of the tensor in memory.
            copy = copy or self.keep == "clone" or self.slice is not None or self.reduce is not None
            copy = copy or tensor.is_inference()
            if copy and not attached and _shares_memory(result, tensor):
                result = result.clone()
            result, arrives = self._moved(result)
        shared = _shares_memory(result, tensor) and not result.is_inference()
        return Kept(result, version_of(result) if shared else None, arrives, finish)

    def _reduced(self, tensor: Tensor) -> Any:
        if not callable(self.reduce):
            assert self.reduce is not None
            return _REDUCTIONS[self.reduce](tensor)
        before = None if tensor.is_inference() else version_of(tensor)
        result = self.reduce(tensor)
        if before is not None and version_of(tensor) != before:
            raise OptionError("reduce= changed the tensor in place, and so what the model computes; let it copy first")
        return result

    def _moved(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """On the device that was asked for. From CUDA to the CPU nobody waits: the copy is awaited when it is read."""
        if self.to is None or torch.device(self.to) == tensor.device:
            return tensor, None
        if torch.device(self.to).type == "cpu" and tensor.is_cuda and self.keep != "graph":
            pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
            pinned.copy_(tensor, non_blocking=True)
            arrives = torch.cuda.Event()
            arrives.record(torch.cuda.current_stream(tensor.device))
            return pinned, arrives
        return tensor.to(self.to, non_blocking=self.keep != "graph" and torch.device(self.to).type != "cpu"), None


def unscaled(grad: Tensor, scaler: Any) -> Tensor:
    """A gradient without the loss scale of a GradScaler (or of the scale itself). Half precision is widened first:
    what the scale has saved from underflow would be lost again."""
    scale = current_scale(scaler)
    if scale is None:
        return grad
    if grad.dtype == torch.float16:
        grad = grad.float()
    return grad / (scale.to(grad.device) if isinstance(scale, Tensor) else scale)


def _finite(counts: Tensor) -> Finite:
    return Finite(*(int(count) for count in counts.tolist()))


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    if one.layout != torch.strided or other.layout != torch.strided or one.device != other.device:
        return one.layout == other.layout and one.device == other.device
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # tensor subclasses without a storage of their own
        return True


def _unseen_by_checkpoints() -> AbstractContextManager[Any]:
    """Inside a checkpoint, what is computed for us alone must not count among what it will compute again."""
    if saved_hooks(True) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
