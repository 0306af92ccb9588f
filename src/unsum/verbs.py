"""What an edit does to a tensor: `scale(2.0)`, `clip(-1, 1)`, `steer(v)`, ...

A verb is a function from a tensor to a tensor of the same shape, dtype and device; it never changes its argument.
Each has `.at(samples=, positions=, features=)`, which limits it to a part: the verb then sees that part alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from typing import Any

import torch
from torch import Tensor

from unsum.errors import VerbError

Index = int | slice | range | Sequence[int] | Sequence[bool] | Tensor


@dataclass(frozen=True)
class Verb:
    """An edit with a name. Call it with a tensor, or hand it to `unsum.edit`.

    Examples:
        >>> import unsum
        >>> verb = unsum.scale(2.0)
        >>> verb(torch.ones(2))
        tensor([2., 2.])
        >>> model = torch.nn.Identity()
        >>> with unsum.edit(model, {":output": verb}):
        ...     model(torch.ones(2))
        tensor([2., 2.])
    """

    name: str
    function: Callable[[Tensor], Tensor]
    on_gradients_only: bool = False
    draws: bool = False  # random numbers, from this generator or torch's own
    generator: torch.Generator | None = None
    value: Tensor | None = None  # what `replace` puts in, for a part may be given as the whole
    dims: Mapping[int, Index] = field(default_factory=dict)

    def at(
        self,
        *,
        samples: Index | None = None,
        positions: Index | None = None,
        features: Index | None = None,
        dims: Mapping[int, Index] | None = None,
    ) -> Verb:
        """The same verb on a part: samples are dimension 0, positions dimension 1, features the last; `dims` names
        any others. An index is a number, a slice, a list, or a mask.

        Examples:
            >>> zero().at(positions=[0, 2])(torch.ones(1, 3, 2))
            tensor([[[0., 0.],
                     [1., 1.],
                     [0., 0.]]])
        """
        named = {0: samples, 1: positions, -1: features}
        chosen = {dim: index for dim, index in named.items() if index is not None}
        twice = {*self.dims, *chosen} & {*(dims or {})} | {*self.dims} & {*chosen}
        if twice:
            raise VerbError(f"{self.name}.at(): dimension {twice.pop()} is named twice")
        chosen |= dims or {}
        if not chosen:
            raise VerbError(f"{self.name}.at(): name samples=, positions=, features= or dims=")
        return with_fields(self, dims={**self.dims, **chosen})

    def __call__(self, tensor: Tensor) -> Tensor:
        if not self.dims:
            return self.function(tensor)
        indices: dict[int, Tensor] = {}
        for dim, index in self.dims.items():
            if not -tensor.dim() <= dim < tensor.dim():
                raise VerbError(f".at() names dimension {dim} of a tensor of shape {tuple(tensor.shape)}")
            if dim % tensor.dim() in indices:
                raise VerbError(f".at() names dimension {dim % tensor.dim()} of shape {tuple(tensor.shape)} twice")
            indices[dim % tensor.dim()] = _positions(index, tensor.shape[dim], tensor.device)
        return self._on_part(tensor, list(indices.items()))

    def _on_part(self, tensor: Tensor, indices: list[tuple[int, Tensor]]) -> Tensor:
        verb = self
        if self.value is not None and self.value.shape == tensor.shape:
            # A whole tensor to replace a part with: take the same part of it.
            value = self.value
            for dim, index in indices:
                value = value.index_select(dim, index)
            verb = replace(value)
        return _within(tensor, indices, verb.function)

    def __repr__(self) -> str:
        return self.name + (f".at(dims={dict(self.dims)})" if self.dims else "")


def _within(tensor: Tensor, indices: list[tuple[int, Tensor]], function: Callable[[Tensor], Tensor]) -> Tensor:
    if not indices:
        return function(tensor)
    (dim, index), *rest = indices
    part = tensor.index_select(dim, index)
    new = _within(part, rest, function)
    if new.shape != part.shape:
        raise VerbError(f"got {tuple(new.shape)}, needs {tuple(part.shape)}, the shape of the part that .at() chooses")
    return tensor.index_copy(dim, index, new.to(tensor.dtype))


def _positions(index: Index, size: int, device: torch.device) -> Tensor:
    if isinstance(index, bool):
        raise VerbError(f".at() names {index!r}; a mask has one truth value for each of the {size}")
    if isinstance(index, Tensor):
        index = index.to(device)
    elif isinstance(index, slice):
        index = list(range(size)[index])
    elif not isinstance(index, int):
        index = list(index)
    try:
        chosen = torch.arange(size, device=device)[index].reshape(-1)
    except (IndexError, TypeError, ValueError) as error:
        raise VerbError(f".at() names {index!r} where there are {size}") from error
    if chosen.unique().numel() < chosen.numel():  # in the order given, each once
        chosen = torch.tensor(list(dict.fromkeys(chosen.tolist())), device=device)
    return chosen


def scale(c: float) -> Verb:
    """Multiply by `c`.

    Examples:
        >>> scale(2.0)(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """
    return Verb(f"scale({_short(c)})", lambda t: t * c)


def add(v: float | Tensor) -> Verb:
    """Add `v`, a number or a tensor that broadcasts to the place.

    Examples:
        >>> add(1.0)(torch.tensor([1.0, 2.0]))
        tensor([2., 3.])
    """
    return Verb(f"add({_short(v)})", lambda t: t + _fitting(v, t))


def clip(lo: float | None = None, hi: float | None = None) -> Verb:
    """Limit every element to [lo, hi]; None for no limit.

    Examples:
        >>> clip(-1, 1)(torch.tensor([-3.0, 0.5]))
        tensor([-1.0000,  0.5000])
    """
    if lo is None and hi is None:
        raise VerbError("clip needs a lower or an upper limit")
    return Verb(f"clip({lo!r}, {hi!r})", lambda t: t.clamp(lo, hi))


def clip_norm(c: float) -> Verb:
    """Scale the tensor down to the Euclidean norm `c` if it is longer.

    Examples:
        >>> clip_norm(1.0)(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """

    if not c >= 0:
        raise VerbError(f"clip_norm({c!r}): a norm is not negative")

    def clipped(t: Tensor) -> Tensor:
        _needs_floats(t)
        norm = torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32))
        # 0/0 where the tensor is zero: the second where leaves it as it is. A NaN norm stays visible in the result.
        factor: Tensor = torch.where(norm <= c, torch.ones_like(norm), c / norm)
        return (t * factor).to(t.dtype)

    return Verb(f"clip_norm({c!r})", clipped)


def zero() -> Verb:
    """Put zeros there, also where there was NaN or infinity.

    Examples:
        >>> zero()(torch.tensor([1.0, float("nan")]))
        tensor([0., 0.])
    """
    return Verb("zero()", lambda t: t.masked_fill(torch.ones((), dtype=torch.bool, device=t.device), 0))


def replace(v: float | Tensor) -> Verb:
    """Put `v` there: a tensor of the same shape (a patch from another run), or one number everywhere.

    With `.at(...)`, a tensor of the whole shape or of the part's.

    Examples:
        >>> replace(7.0)(torch.tensor([1.0, 2.0]))
        tensor([7., 7.])
    """

    def put(t: Tensor) -> Tensor:
        value = _fitting(v, t)
        if not isinstance(value, Tensor):
            if not t.is_floating_point() and not t.is_complex() and value != int(value):
                raise VerbError(f"got {value!r}, needs a whole number")
            value = torch.full_like(t, value)
        if value.shape != t.shape:
            raise VerbError(f"got {tuple(value.shape)}, needs {tuple(t.shape)}")
        if value.dtype != t.dtype:
            raise VerbError(f"got {value.dtype}, needs {t.dtype}")
        # where, and not the value alone: what comes before stays in the graph, with a gradient of zero.
        return torch.where(torch.ones((), dtype=torch.bool, device=t.device), value, t)

    return Verb(f"replace({_short(v)})", put, value=v if isinstance(v, Tensor) else None)


def noise(std: float, generator: torch.Generator | None = None) -> Verb:
    """Add Gaussian noise of this standard deviation.

    Examples:
        >>> noise(0.1, torch.Generator().manual_seed(0))(torch.zeros(3)).shape
        torch.Size([3])
    """

    if not std >= 0:
        raise VerbError(f"noise({std!r}): a standard deviation is not negative")

    def noisy(t: Tensor) -> Tensor:
        _needs_floats(t)
        device = t.device if generator is None else generator.device
        drawn = torch.randn(t.shape, generator=generator, dtype=t.dtype, device=device)
        return t + std * drawn.to(t.device)

    return Verb(f"noise({std!r})", noisy, draws=True, generator=generator)


def steer(v: Tensor | Sequence[float], c: float = 1.0) -> Verb:
    """Add `c` times the direction of `v`, a vector over the features.

    Examples:
        >>> steer(torch.tensor([0.0, 5.0]), 2.0)(torch.zeros(1, 2))
        tensor([[0., 2.]])
    """
    return Verb(f"steer({_short(v)}, {c!r})", lambda t: t + c * _direction(v, t))


def remove(v: Tensor | Sequence[float]) -> Verb:
    """Project the direction of `v`, a vector over the features, out.

    Examples:
        >>> remove(torch.tensor([0.0, 5.0]))(torch.tensor([[1.0, 2.0]]))
        tensor([[1., 0.]])
    """

    def removed(t: Tensor) -> Tensor:
        direction = _direction(v, t)
        return t - (t @ direction.conj()).unsqueeze(-1) * direction

    return Verb(f"remove({_short(v)})", removed)


def reverse(c: float = 1.0) -> Verb:
    """Multiply a gradient by `-c`: what comes before learns the opposite. For gradient sites only.

    Examples:
        >>> reverse(0.5)(torch.tensor([2.0]))
        tensor([-1.])
    """
    return Verb(f"reverse({c!r})", lambda t: t * -c, on_gradients_only=True)


def _fitting(v: float | Tensor, t: Tensor) -> float | Tensor:
    """`v`, if it is on the same device as the tensor it meets."""
    if isinstance(v, Tensor) and v.dim() and v.device != t.device:
        raise VerbError(f"got a tensor on {v.device}, needs one on {t.device}")
    return v


def _direction(v: Tensor | Sequence[float], t: Tensor) -> Tensor:
    _needs_floats(t)
    v = torch.as_tensor(v, device=None if isinstance(v, Tensor) else t.device)
    if v.shape != t.shape[-1:]:
        raise VerbError(f"got a direction of shape {tuple(v.shape)}, needs {tuple(t.shape[-1:])}, the features' own")
    _fitting(v, t)
    if v.is_complex() and not t.is_complex():
        raise VerbError("got a complex direction, needs a real one")
    v = v.to(torch.promote_types(torch.promote_types(v.dtype, t.dtype), torch.float32))
    longest = v.abs().max() if v.numel() else v.new_zeros(())  # so that squares neither overflow nor vanish
    if not longest > 0:
        raise VerbError("got a direction of length 0")
    v = v / longest
    return (v / torch.linalg.vector_norm(v)).to(t.dtype)


def _needs_floats(t: Tensor) -> None:
    if not t.is_floating_point() and not t.is_complex():
        raise VerbError(f"needs floating point numbers, got {t.dtype}")


def _short(v: Any) -> str:
    return f"tensor of shape {tuple(v.shape)}" if isinstance(v, Tensor) else repr(v)
