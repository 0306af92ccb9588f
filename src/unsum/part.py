"""The part of a tensor that an edit changes: `.at(samples=, positions=, features=, dims=, paired=)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unsum.errors import VerbError

Index = int | slice | range | Sequence[int] | Sequence[bool] | Tensor

NAMED = {"samples": 0, "positions": 1, "features": -1}
"""The dimension that each name of `.at` stands for."""

_LONG = 60  # letters of an index that are repeated in a message


@dataclass(frozen=True)
class Part:
    """An index for each chosen dimension, as it was written; the empty part is the whole tensor.

    Examples:
        >>> Part({"positions": [0, 2]})
        .at(positions=[0, 2])
        >>> Part({"positions": [0, 2]}).taken(torch.arange(4.0).view(1, 4)).tolist()
        [[0.0, 2.0]]
    """

    named: Mapping[str, Index] = field(default_factory=dict)
    dims: Mapping[int, Index] = field(default_factory=dict)
    paired: bool = False

    def __bool__(self) -> bool:
        return bool(self.named or self.dims)

    def __repr__(self) -> str:
        written = [f"{name}={_written(index)}" for name, index in self.named.items()]
        if self.dims:
            written.append(f"dims={{{', '.join(f'{dim}: {_written(index)}' for dim, index in self.dims.items())}}}")
        written += ["paired=True"] if self.paired else []
        return f".at({', '.join(written)})" if written else ""

    def and_also(self, more: Part) -> Part:
        """Both choices together. Raises where a dimension is named twice, or where pairs would be unclear."""
        if self and (self.paired or more.paired):
            raise VerbError(f"{self}{more}: with paired=True, name all dimensions in one .at(...)")
        mine, new = self._indices(), more._indices()
        if twice := mine.keys() & new.keys() or more._twice():
            raise VerbError(f"{self}{more}: dimension {min(twice)} is named twice")
        if more.paired and sum(not isinstance(index, int | slice) for index in new.values()) < 2:
            raise VerbError(f"{more}: paired=True pairs the entries of two or more lists; name at least two")
        return Part({**self.named, **more.named}, {**self.dims, **more.dims}, more.paired)

    def on(self, tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """The tensor, with its part changed by a function that sees this part alone."""
        outer, pairs = self._resolved(tensor)
        return self._within(tensor, outer, lambda t: self._on_pairs(t, pairs, function))

    def taken(self, tensor: Tensor) -> Tensor:
        """The part itself: with pairs (pairs, the other dimensions), else with the tensor's dimensions."""
        outer, pairs = self._resolved(tensor)
        for dim, index in outer.items():
            tensor = tensor.index_select(dim, index)
        return tensor.movedim(list(pairs), list(range(len(pairs))))[tuple(pairs.values())] if pairs else tensor

    def fitted(self, value: Tensor, tensor: Tensor, *, has_positions: bool = False) -> Tensor:
        """What is put into the part of `tensor`, from a value that is made for the whole or for the part.

        Along a chosen dimension in which the value is as long as the whole tensor, the same part of it is taken (not
        along the positions, if the value `has_positions` of its own). With pairs, a value of as many dimensions as the
        tensor is one for the whole.
        """
        if self.paired:
            whole = value.dim() == tensor.dim() and _broadcasts(value.shape, tensor.shape)
            return self.taken(value.expand(tensor.shape)) if whole else value
        outer, _ = self._resolved(tensor)
        for dim, index in outer.items():
            own = dim - tensor.dim() + value.dim()
            if own >= 0 and value.shape[own] == tensor.shape[dim] and not (has_positions and dim == 1):
                value = value.index_select(own, index)
        return value

    def _indices(self) -> dict[int, Index]:
        return {NAMED[name]: index for name, index in self.named.items()} | dict(self.dims)

    def _twice(self) -> set[int]:
        return {NAMED[name] for name in self.named} & {*self.dims}

    def _resolved(self, tensor: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """The chosen numbers along each dimension: those of every combination, and those that come in pairs."""
        outer: dict[int, Tensor] = {}
        pairs: dict[int, Tensor] = {}
        for dim, index in self._indices().items():
            shape = tuple(tensor.shape)
            if not -tensor.dim() <= dim < tensor.dim():
                raise VerbError(f"{self} names dimension {dim} of a tensor of shape {shape}")
            at = dim % tensor.dim()
            if at in outer or at in pairs:
                raise VerbError(f"{self} names dimension {at} of shape {shape} twice")
            is_paired = self.paired and not isinstance(index, slice)
            numbers = self._numbers(dim, index, tensor.shape[dim], tensor.device)
            if is_paired:
                pairs[at] = numbers
            else:
                outer[at] = _each_once(numbers)
        return outer, self._as_pairs(pairs)

    def _numbers(self, dim: int, index: Index, size: int, device: torch.device) -> Tensor:
        kind = next((name for name, named in NAMED.items() if named == dim and name in self.named), "entries")
        if isinstance(index, bool):
            raise VerbError(f"{self}: a mask has one truth value for each of the {size} {kind}")
        if isinstance(index, str | float) or (isinstance(index, Tensor) and index.dim() > 1):
            raise VerbError(
                f"{self}: {kind} are numbers, slices, lists of numbers or a mask with {size} values; a mask (samples, "
                "positions) is written as samples, positions = mask.nonzero(as_tuple=True), "
                ".at(samples=samples, positions=positions, paired=True)"
            )
        if isinstance(index, Tensor):
            index = index.to(device)
        elif isinstance(index, slice):
            index = list(range(size)[index])
        elif not isinstance(index, int):
            index = list(index)
        try:
            return torch.arange(size, device=device)[index].reshape(-1)
        except (IndexError, TypeError, ValueError) as error:
            one = {"entries": "entry"}.get(kind, kind.removesuffix("s"))
            raise VerbError(f"{self}: there {f'is 1 {one}' if size == 1 else f'are {size} {kind}'}") from error

    def _as_pairs(self, pairs: dict[int, Tensor]) -> dict[int, Tensor]:
        """Lists of one length, each pair once; a single number goes with every pair."""
        if not pairs:
            return pairs
        lengths = {len(numbers) for numbers in pairs.values()} - {1} or {1}
        if len(lengths) > 1:
            told = " and ".join(str(len(numbers)) for numbers in pairs.values())
            raise VerbError(f"{self}: paired=True needs lists of one length, got lengths {told}")
        rows = torch.stack([numbers.expand(*lengths) for numbers in pairs.values()], dim=1)
        once = list(dict.fromkeys(map(tuple, rows.tolist())))
        rows = torch.tensor(once, device=rows.device, dtype=torch.long).reshape(-1, len(pairs))
        return dict(zip(pairs, rows.unbind(1), strict=True))

    def _within(self, tensor: Tensor, indices: dict[int, Tensor], function: Callable[[Tensor], Tensor]) -> Tensor:
        if not indices:
            return function(tensor)
        (dim, index), *rest = indices.items()
        part = tensor.index_select(dim, index)
        new = self._of_shape(self._within(part, dict(rest), function), part)
        return tensor.index_copy(dim, index, new.to(tensor.dtype))

    def _on_pairs(self, tensor: Tensor, pairs: dict[int, Tensor], function: Callable[[Tensor], Tensor]) -> Tensor:
        if not pairs:
            return function(tensor)
        first, index = list(range(len(pairs))), tuple(pairs.values())
        moved = tensor.movedim(list(pairs), first)
        part = moved[index]
        new = self._of_shape(function(part), part)
        return moved.index_put(index, new.to(tensor.dtype)).movedim(first, list(pairs))

    def _of_shape(self, new: Tensor, part: Tensor) -> Tensor:
        if new.shape != part.shape:
            raise VerbError(f"got {tuple(new.shape)}, needs {tuple(part.shape)}, the shape of the part {self}")
        return new


def positions_of(value: Tensor, index: Index) -> Tensor:
    """The positions of a value that an index chooses, in its order, a number twice if it is there twice."""
    part = Part({"positions": index})
    if value.dim() < 2:
        raise VerbError(f"replace(v, positions=...): v has shape {tuple(value.shape)}, needs (samples, positions, ...)")
    return value.index_select(1, part._numbers(1, index, value.shape[1], value.device))


def numbers(index: Index, size: int, name: str) -> list[int]:
    """The numbers that an index chooses among `size`, each once; `name` is one of `.at`'s.

    Examples:
        >>> numbers([0, -1], 5, "positions"), numbers(slice(3), 5, "positions")
        ([0, 4], [0, 1, 2])
    """
    part = Part({name: index})
    return _each_once(part._numbers(NAMED[name], index, size, torch.device("cpu"))).tolist()


def _each_once(numbers: Tensor) -> Tensor:
    """In the order given."""
    if numbers.unique().numel() == numbers.numel():
        return numbers
    return torch.tensor(list(dict.fromkeys(numbers.tolist())), device=numbers.device)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether torch's `expand` makes one shape into the other."""
    ends = list(zip(reversed(shape), reversed(to), strict=False))
    return len(shape) <= len(to) and all(one in (1, size) for one, size in ends)


def broadcast(value: Tensor, to: Tensor, part: Part) -> Tensor:
    """The value in the shape of a tensor, or of the part of one. Raises with what to write where it does not fit."""
    if value.shape == to.shape:
        return value
    if _broadcasts(value.shape, to.shape):
        return value.expand(to.shape)
    got, needs = tuple(value.shape), tuple(to.shape)
    where = f", the shape of the part {part}" if part else ""
    said = f"got {got}, which does not broadcast to {needs}{where}"
    differ = [k for k, (one, size) in enumerate(zip(got, needs, strict=False)) if one not in (1, size)]
    if len(got) != len(needs) or differ != [1]:
        raise VerbError(said)
    count = min(got[1], needs[1])
    # The last ones of both: prompts of different lengths mostly end alike.
    goes = str(part) if part and got[1] > needs[1] else f".at(positions=range({needs[1] - count}, {needs[1]}))"
    raise VerbError(
        f"{said}: {got[1]} positions for {needs[1]}. Between runs of different lengths, say which positions go where",
        write=f"unsum.replace(v, positions=range({got[1] - count}, {got[1]})){goes}",
    )


def _written(index: Index) -> str:
    if isinstance(index, Tensor):
        is_short = index.dim() <= 1 and index.numel() <= 8
        return repr(index.tolist()) if is_short else f"tensor of shape {tuple(index.shape)}"
    text = repr(index)
    return text if len(text) <= _LONG else f"{text[: _LONG - 1]}…{text[-1]}"
