"""What an edit does to a tensor: `scale(2.0)`, `clip(-1, 1)`, `steer(v)`, ...

A verb is a function from a tensor to a tensor of the same shape, dtype and device; it never changes its argument.
Each has `.at(samples=, positions=, features=)`, which limits it to a part (`part.py`): the verb sees that part alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from typing import Any

import torch
from torch import Tensor

from unsum.errors import VerbError
from unsum.part import Index, Part, broadcast, positions_of


@dataclass(frozen=True)
class Verb:
    """A function from a tensor to a tensor, with a name. Call it with a tensor, or pass it to `unsum.edit`.

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
    value: Callable[[Tensor], Tensor] | None = None  # what is put in, made from the whole tensor; see `_put`
    has_positions: bool = False  # the value's own were chosen: `.at` says where they go
    part: Part = field(default_factory=Part)

    def at(
        self,
        *,
        samples: Index | None = None,
        positions: Index | None = None,
        features: Index | None = None,
        dims: Mapping[int, Index] | None = None,
        paired: bool = False,
    ) -> Verb:
        """The same verb on a part: samples are dimension 0, positions dimension 1, features the last; `dims` names
        any others. An index is a number, a slice, a range, a list, or a mask.

        Indices of several dimensions combine as an outer product: `samples=[0, 1], positions=[3, 5]` is positions 3 and
        5 of both samples. With `paired=True` the entries of lists go together: position 3 of sample 0 and position 5 of
        sample 1. A single number then goes with every pair, and a slice is taken whole for every pair; the verb sees a
        tensor (pairs, other dimensions).

        Examples:
            >>> zero().at(positions=[0, 2])(torch.ones(1, 3, 2))
            tensor([[[0., 0.],
                     [1., 1.],
                     [0., 0.]]])
            >>> zero().at(samples=[0, 1], positions=[0, 2])(torch.ones(2, 3))
            tensor([[0., 1., 0.],
                    [0., 1., 0.]])
            >>> zero().at(samples=[0, 1], positions=[0, 2], paired=True)(torch.ones(2, 3))
            tensor([[0., 1., 1.],
                    [1., 1., 0.]])
        """
        given = {"samples": samples, "positions": positions, "features": features}
        chosen = Part({name: index for name, index in given.items() if index is not None}, dims or {}, paired)
        if not chosen:
            raise VerbError(f"{self.name}.at(): name samples=, positions=, features= or dims=")
        return with_fields(self, part=self.part.and_also(chosen))

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.has_positions:
            self._refuse_unclear_positions()
        if not self.part:
            return self.function(tensor)
        if self.value is None:
            return self.part.on(tensor, self.function)
        value = self.part.fitted(self.value(tensor), tensor, has_positions=self.has_positions)
        return self.part.on(tensor, lambda t: _put(value, t, self.part))

    def _refuse_unclear_positions(self) -> None:
        if self.part.paired:
            raise VerbError(
                "with paired=True, give the rows themselves, one for each pair",
                write="unsum.replace(v[[0, 1], [2, 4]]).at(samples=[0, 1], positions=[3, 5], paired=True)",
            )
        if "positions" not in self.part.named and 1 not in self.part.dims:
            raise VerbError(
                "positions= says which positions of the value are taken; say where they go, too",
                write="unsum.replace(v, positions=[2, 4]).at(positions=[3, 5])",
            )

    def __repr__(self) -> str:
        return f"{self.name}{self.part}"


def scale(c: float) -> Verb:
    """Multiply by `c`.

    Examples:
        >>> scale(2.0)(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """
    return Verb(f"scale({_short(c)})", lambda t: t * c)


def add(v: float | Tensor) -> Verb:
    """Add `v`, a number or a tensor that broadcasts to the tensor at the site.

    Examples:
        >>> add(1.0)(torch.tensor([1.0, 2.0]))
        tensor([2., 3.])
    """
    _refuse_no_value("add", v)
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
    """Scale the tensor down to the Euclidean norm `c` if its norm is larger.

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
    """Replace by zeros, also where there was NaN or infinity.

    Examples:
        >>> zero()(torch.tensor([1.0, float("nan")]))
        tensor([0., 0.])
    """
    return Verb("zero()", lambda t: t.masked_fill(torch.ones((), dtype=torch.bool, device=t.device), 0))


def replace(v: float | Tensor, *, positions: Index | None = None) -> Verb:
    """Replace by `v`: a number, or a tensor that broadcasts as in `torch.Tensor.expand` (an activation of another
    run, a vector over the features, a value (1, positions, features) for every sample).

    With `.at(...)`, `v` broadcasts to the part. Along a chosen dimension in which `v` is as long as the whole tensor,
    the same part of `v` is taken; otherwise `v` has as many entries there as are chosen, in the order of the index.

    Between runs of different lengths, `positions` chooses positions of `v` (its dimension 1), and `.at(positions=...)`
    says where each of them goes, in order: `replace(clean, positions=[3, -1]).at(positions=[5, -1])`.

    Examples:
        >>> replace(7.0)(torch.tensor([1.0, 2.0]))
        tensor([7., 7.])
        >>> replace(torch.tensor([1.0, 2.0]))(torch.zeros(2, 2))
        tensor([[1., 2.],
                [1., 2.]])
        >>> replace(torch.tensor([[5.0, 6.0]])).at(positions=[3, 1])(torch.zeros(1, 4))
        tensor([[0., 6., 0., 5.]])
        >>> longer = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
        >>> replace(longer, positions=[1, -1]).at(positions=[0, -1])(torch.zeros(1, 3))
        tensor([[2., 0., 5.]])
    """
    _refuse_no_value("replace", v)
    if positions is None:
        return _putting(f"replace({_short(v)})", lambda t: _value(v, t))
    if not isinstance(v, Tensor):
        raise VerbError(f"replace({v!r}, positions=...): a number has no positions; leave positions= out")
    chosen = positions_of(v, positions)
    verb = _putting(f"replace({_short(v)}, positions={_short(positions)})", lambda t: _value(chosen, t))
    return with_fields(verb, has_positions=True)


def mean_ablate(mean: float | Tensor | None = None, *, over: int | Sequence[int] | None = None) -> Verb:
    """Replace by a mean: `mean`, captured before and broadcast as in `replace`, or the mean of the tensor itself.

    Without `mean`, it is the mean over all dimensions but the last: one for each feature, over the samples and
    positions of this batch, padding included. `over=0` takes it over the samples alone, position by position. With
    `.at(...)` the mean is that of the whole tensor, and replaces only that part. No gradient flows into the mean.

    Examples:
        >>> t = torch.tensor([[[1.0, 2.0], [3.0, 6.0]]])
        >>> mean_ablate().at(positions=0)(t)
        tensor([[[2., 4.],
                 [3., 6.]]])
        >>> mean_ablate(torch.tensor([9.0, 8.0])).at(positions=0)(t)
        tensor([[[9., 8.],
                 [3., 6.]]])
    """
    if mean is not None:
        if over is not None:
            raise VerbError("mean_ablate(): a mean that is given is not taken over anything; leave over= out")
        _refuse_no_value("mean_ablate", mean)
        return _putting(f"mean_ablate({_short(mean)})", lambda t: _value(mean, t))
    said = "" if over is None else f"over={over!r}"
    return _putting(f"mean_ablate({said})", lambda t: _mean(t, over))


def _putting(name: str, value: Callable[[Tensor], Tensor]) -> Verb:
    return Verb(name, lambda t: _put(value(t), t, Part()), value=value)


def _put(value: Tensor, t: Tensor, part: Part) -> Tensor:
    value = broadcast(value, t, part)
    # where, and not the value alone: what comes before stays in the graph, with a gradient of zero.
    return torch.where(torch.ones((), dtype=torch.bool, device=t.device), value, t)


def _value(v: float | Tensor, t: Tensor) -> Tensor:
    value = _fitting(v, t)
    if isinstance(value, Tensor) and value.dtype != t.dtype:
        raise VerbError(f"got {v.dtype}, needs {t.dtype}: write v.to({t.dtype})")  # type: ignore[union-attr]
    if not isinstance(value, Tensor):
        if not t.is_floating_point() and not t.is_complex() and value != int(value):
            raise VerbError(f"got {value!r}, needs a whole number")
        return torch.full((), value, dtype=t.dtype, device=t.device)
    return value.to(t.device)  # a single number may be elsewhere


def _mean(t: Tensor, over: int | Sequence[int] | None) -> Tensor:
    _needs_floats(t)
    dims = list(range(t.dim() - 1)) if over is None else [over] if isinstance(over, int) else list(over)
    if any(not -t.dim() <= dim < t.dim() for dim in dims):
        raise VerbError(f"over={over!r} names a dimension that {tuple(t.shape)} does not have")
    if math.prod(t.shape[dim] for dim in dims) <= 1:
        raise VerbError(
            f"the mean of {tuple(t.shape)} is over a single entry, which would change nothing: "
            "give a mean that was captured before, mean_ablate(mean)"
        )
    return t.detach().mean(dims, keepdim=True)


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
    """Project out the direction of `v`, a vector over the features.

    Examples:
        >>> remove(torch.tensor([0.0, 5.0]))(torch.tensor([[1.0, 2.0]]))
        tensor([[1., 0.]])
    """

    def removed(t: Tensor) -> Tensor:
        direction = _direction(v, t)
        return t - (t @ direction.conj()).unsqueeze(-1) * direction

    return Verb(f"remove({_short(v)})", removed)


def reverse(c: float = 1.0) -> Verb:
    """Multiply a gradient by `-c` (gradient reversal). For gradient sites only.

    Examples:
        >>> reverse(0.5)(torch.tensor([2.0]))
        tensor([-1.])
    """
    return Verb(f"reverse({c!r})", lambda t: t * -c, on_gradients_only=True)


def _refuse_no_value(verb: str, v: Any) -> None:
    """Raise for what is neither a number nor a tensor: a capture, the list of its calls, a list of numbers."""
    if isinstance(v, Tensor | int | float | complex):
        return
    if isinstance(v, list | tuple) and v and all(isinstance(one, Tensor) for one in v):
        mean = verb == "mean_ablate"
        write = "unsum.mean_ablate(torch.stack(got.calls(site)).mean(0))" if mean else f"unsum.{verb}(tensors[0])"
    elif isinstance(v, list | tuple) or hasattr(v, "__array__"):
        write = f"unsum.{verb}(torch.as_tensor(v))"
    else:
        write = f"unsum.{verb}(got[site])"
    raise VerbError(f"{verb}() takes a number or a tensor, got {type(v).__name__}.", write=write)


def _fitting(v: float | Tensor, t: Tensor) -> float | Tensor:
    """`v`, if it is on the same device as the tensor it meets; floats in that tensor's precision."""
    if isinstance(v, Tensor) and v.dim() and v.device != t.device:
        raise VerbError(f"got a tensor on {v.device}, needs one on {t.device}")
    if isinstance(v, Tensor) and v.is_floating_point() and t.is_floating_point():
        return v.to(t.dtype)
    return v


def _direction(v: Tensor | Sequence[float], t: Tensor) -> Tensor:
    _needs_floats(t)
    v = torch.as_tensor(v, device=None if isinstance(v, Tensor) else t.device)
    if v.shape != t.shape[-1:]:
        raise VerbError(
            f"got a direction of shape {tuple(v.shape)}, needs {tuple(t.shape[-1:])}, the features' own",
            write="v.flatten()" if v.numel() == t.shape[-1] else (),
        )
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
