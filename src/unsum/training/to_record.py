"""The record of a step, made from the numbers that were observed in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unsum.samples import Dim, Samples
from unsum.training.ids import Named
from unsum.training.observed import Observed, Rows
from unsum.training.outliers import Outliers
from unsum.training.record import Layer, NonFinite, Record


def record(seen: Observed, step: int, named: Named, outliers: Outliers, samples: Samples) -> Record:
    """The record of a step."""
    n = sum(seen.sizes)
    said = [] if samples.ids is None else samples.ids.tolist() * max(len(seen.sizes), 1)
    ids: list[int | str] = named.ids if len(named.ids) == n else said if len(said) == n else list(range(n))
    found = Record(step, sum(seen.losses), ids=ids, refused=seen.refused, rank=rank())
    if seen.refused is None:
        found.norms = seen.squares.sum(0).sqrt() if seen.names else torch.zeros(n, dtype=torch.float64)
        found.noise_scale = noise_scale(seen.all_squares, seen.total, seen.all_samples, seen.weights_of)
        if seen.broken() is None:  # else all samples' gradients are, and none stands out
            found.outliers = [ids[row] for row in outliers(found.norms)]
        texts = dict(zip(ids, named.texts, strict=True)) if len(named.texts) == n else {}
        found.texts = {each: texts[each] for each in found.outliers if each in texts}
    found.layers = _layers(seen)
    found.nonfinite = _nonfinite(seen, found, samples)
    return found


def sizes(model: nn.Module) -> tuple[int, int]:
    """How many numbers the parameters of a model are, and how many of these are trained."""
    known = {id(p): p for p in model.parameters()}.values()
    return sum(p.numel() for p in known), sum(p.numel() for p in known if p.requires_grad)


def rank() -> int:
    """This process's rank."""
    is_one_of_many = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_one_of_many else 0


def noise_scale(squares: float, total: float, n: int, weights: tuple[float, float] | None = None) -> float | None:
    """tr Σ / |G|² of McCandlish et al. (2018), each of the two without bias, from Σ|g|², |Σ w g|² and n samples.

    `weights` is (Σ w, Σ w²); None: all weights are 1. They differ where the means of micro-batches of different sizes
    were added up. On average Σ|g|² / n is |G|² + tr Σ, and |Σ w g|² is (Σ w)² |G|² + Σ w² tr Σ.

    Examples:
        >>> round(noise_scale(squares=10.0, total=4.0, n=2), 3)  # two samples with gradients (1, 2) and (1, -2)
        -2.667
    """
    once, twice = weights or (float(n), float(n))
    if n < 2 or not math.isfinite(squares + total + once) or once**2 <= twice:
        return None
    mean_square = squares / n
    signal = (total - twice * mean_square) / (once**2 - twice)
    noise = mean_square - signal
    return noise / signal if signal else math.inf if noise else None


def put_updates(found: Record, updates: dict[str, float]) -> None:
    """The optimizer's changes of parameters, over their size, layer by layer."""
    squares: dict[str, float] = {}
    for name, value in updates.items():
        layer = _module_of(name)
        squares[layer] = squares.get(layer, 0.0) + value**2
    for layer, square in squares.items():
        if layer in found.layers and found.layers[layer].weight:
            found.layers[layer].update = math.sqrt(square) / (found.layers[layer].weight or 1.0)


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _layers(seen: Observed) -> dict[str, Layer]:
    owners = {name: number for number, name in enumerate(dict.fromkeys(map(_module_of, seen.weights)))}
    found = {name: Layer() for name in owners}

    def put(kind: str, names: Sequence[str], values: Tensor) -> None:
        """Add up the squares of each layer's parameters: (names,) or (names, n)."""
        rows = torch.tensor([owners[_module_of(name)] for name in names])
        sums = values.new_zeros(len(owners), *values.shape[1:]).index_add_(0, rows, values)
        if values.dim() == 1:
            for layer, value in zip(found.values(), sums.sqrt().tolist(), strict=True):
                setattr(layer, kind, value)
            return
        means, largest = sums.mean(1).sqrt().tolist(), sums.amax(1).sqrt().tolist()
        for layer, mean, most in zip(found.values(), means, largest, strict=True):
            layer.norm, layer.largest = mean, most

    for kind, norms in (("weight", seen.weights), ("grad", seen.grads)):
        if norms:
            put(kind, list(norms), torch.tensor(list(norms.values()), dtype=torch.float64).square())
    if seen.squares.numel() and seen.refused is None:
        put("norm", seen.names, seen.squares)
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for rows, total, _ in seen.rows:
        key = rows.spot.place.name, rows.spot.kind
        if key[0] in found:
            before, count = sums.get(key, (0.0, 0))
            sums[key] = before + total, count + math.prod(rows.shape)
    for (where, kind), (total, count) in sums.items():
        setattr(found[where], kind, math.sqrt(total / count) if count and total >= 0 else None)
    return found


def _nonfinite(seen: Observed, found: Record, samples: Samples) -> NonFinite | None:
    """The first value that is not finite: in a parameter, from an earlier step; in the forward, in the loss, in the
    backward, in a parameter's gradient."""
    if (broken := seen.broken()) is not None:
        name, largest = broken
        return NonFinite(name, "nan" if math.isnan(largest) else "inf", None, None, name, 0, found.rank)
    bad = [(rows, row) for rows, _, row in seen.rows if row >= 0]
    forward = [each for each in bad if each[0].spot.kind == "output"]
    losses = [k for k, loss in enumerate(seen.losses) if not math.isfinite(loss)]
    if forward:
        return _at_rows(seen, found, samples, *forward[0])
    rows = seen.first_bad()
    sample = None if rows is None else found.ids[rows[1]]
    if losses:
        value = "nan" if math.isnan(seen.losses[losses[0]]) else "inf"
        parameter = None if rows is None else rows[0]
        return NonFinite("loss", value, sample, None, parameter, losses[0], found.rank)
    if bad:
        return _at_rows(seen, found, samples, *bad[0])
    if rows is not None:
        name, row = rows
        value = "nan" if bool(seen.squares[seen.names.index(name), row].isnan()) else "inf"
        return NonFinite(f"{name}:grad", value, sample, None, name, _microbatch(seen.sizes, row), found.rank)
    return None


def _at_rows(seen: Observed, found: Record, samples: Samples, rows: Rows, row: int) -> NonFinite:
    k = rows.microbatch
    n = seen.sizes[k] if k < len(seen.sizes) else 0
    owner, position = _place(rows.shape, row, samples, n)
    first = sum(seen.sizes[:k])
    sample = None if owner is None else found.ids[first + owner] if first + owner < len(found.ids) else owner
    where = rows.spot.place.name
    parameter = next((name for name in seen.weights if _module_of(name) == where), None)
    if parameter is None and (bad := seen.first_bad()) is not None:
        parameter = bad[0]
    value = "nan" if bool(rows.norms.reshape(-1)[row].isnan()) else "inf"
    return NonFinite(rows.site, value, sample, position, parameter, k, found.rank)


def _place(shape: Sequence[int], row: int, samples: Samples, n: int) -> tuple[int | None, int | tuple[int, ...] | None]:
    """The sample of a row, and its position in it, of a tensor of this shape."""
    outer = tuple(shape[:-1]) if len(shape) > 1 else tuple(shape)
    index = [int(i) for i in torch.unravel_index(torch.tensor(row), outer)] if outer else []
    if isinstance(samples, Dim):
        if samples.k >= len(index) or (n and outer[samples.k] != n):
            return None, tuple(index) if len(index) > 1 else index[0] if index else None
        owner: int | None = index.pop(samples.k)
    else:
        layout = samples.owners(tuple(shape), n or None)
        if layout is None:
            return None, tuple(index) if len(index) > 1 else index[0]
        owners = layout.owner(torch.device("cpu"))
        whose = int(owners[(*index, 0)] if owners.dim() > len(index) else owners[tuple(index)])
        owner = whose if whose >= 0 else None
    return owner, None if not index else index[0] if len(index) == 1 else tuple(index)


def _microbatch(sizes: Sequence[int], row: int) -> int:
    for k in range(len(sizes)):
        if row < sum(sizes[: k + 1]):
            return k
    return 0
