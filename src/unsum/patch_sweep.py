"""`patch_sweep`: activation patching over a grid of sites and positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unsum.capture import capture
from unsum.chance import Chance
from unsum.edit import edit
from unsum.errors import OptionError, SiteError, VerbError
from unsum.heat_grid import figures, grid, table
from unsum.learn.state import State
from unsum.nested import leaves
from unsum.part import Index, numbers
from unsum.picture import Picture
from unsum.progress import progress
from unsum.sites import Asked, Site, parse
from unsum.step.calls import positions_of
from unsum.verbs import replace

Metric = Callable[[Any], Any]


@dataclass(frozen=True, eq=False)
class PatchSweep:
    """The result of `unsum.patch_sweep`: it prints as a table, draws itself in a notebook, and saves its picture.

    Attributes:
        sites: The rows, in the order in which they fired.
        positions: The columns: positions of the corrupt run.
        values: (sites, positions) float64: the metric of the corrupt run with this one clean activation put in.
        clean: The metric of the clean run.
        corrupt: The metric of the corrupt run.

    Examples:
        >>> PatchSweep(["fc:output"], [0, 1], torch.tensor([[1.0, 3.5]]), clean=4.0, corrupt=1.0)
        clean 4.0, corrupt 1.0
        site         0    1
        fc:output  1.0  3.5
    """

    sites: list[str]
    positions: list[int]
    values: Tensor
    clean: float
    corrupt: float

    @property
    def recovered(self) -> Tensor:
        """(sites, positions): the share of the difference that each patch restores: 0 is corrupt, 1 is clean."""
        if self.clean == self.corrupt:
            raise OptionError(
                f"recovered: the metric is {self.clean:.6g} in the clean run and in the corrupt one, so there is no "
                "difference to bring back; choose inputs or a metric that differ"
            )
        return (self.values - self.corrupt) / (self.clean - self.corrupt)

    def picture(self, tokens: Sequence[str] | None = None, *, recovered: bool = False) -> Picture:
        """A heat map: a row for each site, a column for each position, with its token where `tokens` has one for each
        position of the input. `recovered=True` draws `recovered` instead of the metric itself."""
        words = None if tokens is None else _words(tokens, self.positions)
        title = f"activation patching: {_count(self.sites, 'site')} × {_count(self.positions, 'position')}"
        values, clean, corrupt = (self.recovered, 1.0, 0.0) if recovered else (self.values, self.clean, self.corrupt)
        what = "share of the difference brought back by one activation" if recovered else None
        return Picture(grid(title, self.sites, self.positions, words, values, clean, corrupt, what), title)

    def save(self, path: str | Path, tokens: Sequence[str] | None = None, *, recovered: bool = False) -> Path:
        """Write the picture as `.svg` or `.html`. Missing folders are made."""
        return self.picture(tokens, recovered=recovered).save(path)

    def _repr_svg_(self) -> str:
        return self.picture().svg

    def __repr__(self) -> str:
        said = figures(self.values, self.corrupt, self.clean)
        head = f"clean {said(self.clean)}, corrupt {said(self.corrupt)}"
        return f"{head}\n{table(self.sites, self.positions, self.values, self.corrupt)}"


def patch_sweep(
    model: nn.Module,
    clean: Any,
    corrupt: Any,
    sites: Asked | Sequence[Asked],
    metric: Metric,
    positions: Index | None = None,
    *,
    align: Mapping[int, int] | None = None,
) -> PatchSweep:
    """Activation patching over a grid: for each site and each position, run `corrupt` with the activation of `clean`
    put in at that place alone, and record the metric. It takes sites × positions + 2 forwards, without gradients.

    Args:
        model: Any module, also wrapped. Both runs must have the same number of samples, and the same number of
            positions unless `align` is given.
        clean: The input whose activations are put in: a tensor, a tuple of arguments, or a mapping of keywords.
        corrupt: The input that is run with them.
        sites: One site or a list: `"blocks.*.mlp:output"`, `(Block, "output")`, `"attn:output[0]"`. Dimension 1 of the
            tensor there is the position.
        metric: A function from the model's output to one number.
        positions: Positions of the corrupt run; None for all (with `align`: all that it names).
        align: {position of the clean run: position of the corrupt run}, for inputs of different lengths. Negative
            numbers count from the end of each: `{0: 0, -1: -1}`.

    Examples:
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Flatten(), nn.Linear(12, 1))
        >>> clean, corrupt = torch.tensor([[0, 1, 2]]), torch.tensor([[0, 4, 2]])
        >>> sweep = patch_sweep(model, clean, corrupt, ["0:output", "1:output"], lambda out: out.item())
        >>> sweep.values.shape
        torch.Size([2, 3])
        >>> sweep.recovered.round(decimals=3).abs()
        tensor([[0., 1., 0.],
                [0., 1., 0.]], dtype=torch.float64)
    """
    asked = _asked(sites)
    runs = _Runs(model, clean, corrupt)
    with torch.no_grad(), runs:
        with capture(model, *asked, keep="clone") as given:
            clean_value = _number(metric, runs.first("clean"))
        with capture(model, *asked, reduce=lambda t: t.shape) as met:
            corrupt_value = _number(metric, runs.first("corrupt"))
        patches = dict(given.items())
        _refuse_several(patches, asked)
        _refuse_other_dimension(patches, clean)
        length, other = _lengths(patches, dict(met.items()), is_aligned=align is not None)
        source = _sources(align, length, other)
        chosen = _positions(positions, source, other)
        values = torch.empty(len(patches), len(chosen), dtype=torch.float64)
        line: progress[None] = progress(values.numel(), "patching")
        with line:
            for row, (site, patch) in enumerate(patches.items()):
                line.say(site)
                for column, position in enumerate(chosen):
                    verb = replace(patch, positions=source[position]).at(positions=position)
                    # With gradients on, a patch that nothing reads is noticed (UnreadEdit): once for each site.
                    with torch.set_grad_enabled(not column), edit(model, {site: verb}):
                        values[row, column] = _number(metric, runs.run("corrupt"))
                    line.step()
    return PatchSweep(list(patches), chosen, values, clean_value, corrupt_value)


def _asked(sites: Asked | Sequence[Asked]) -> list[Asked]:
    is_one = isinstance(sites, str) or (
        isinstance(sites, tuple) and len(sites) == 2 and not isinstance(sites[0], str | tuple)
    )
    if callable(sites) and not isinstance(sites, str):
        raise SiteError(
            "sites is a function: the sites come before the metric.",
            write="unsum.patch_sweep(model, clean, corrupt, sites, metric)",
        )
    asked: list[Any] = [sites] if is_one else list(sites)
    if not asked:
        raise SiteError(
            "name at least one site: unsum.patch_sweep(model, clean, corrupt, 'blocks.*.mlp:output', metric)"
        )
    for one in asked:
        if (site := parse(one)).kind not in ("input", "output"):
            raise SiteError(f"{site}: a sweep patches activations; did you mean '{site.kind.removeprefix('grad_')}'?")
    return asked


class _Runs:
    """The model's two runs, any number of times. Each begins with the state that the model and its arguments had at
    first (buffers, a cache of keys and values), and at the end they have it again."""

    def __init__(self, model: nn.Module, clean: Any, corrupt: Any) -> None:
        for name, given in (("clean", clean), ("corrupt", corrupt)):
            if not isinstance(given, Tensor | Mapping | tuple | list):
                raise OptionError(
                    f"{name}: give the model's input as a tensor, a tuple of arguments or a mapping of keywords, "
                    f"not {type(given).__name__}"
                )
        self._model, self._given = model, {"clean": clean, "corrupt": corrupt}
        self._state, self._chance = State(model, clean, corrupt, strict=False), Chance()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._state.restore()

    def first(self, name: str) -> Any:
        """A run; raises if it draws random numbers."""
        found = self.run(name)
        if self._chance.was_drawn():
            raise OptionError(
                "the model draws random numbers (dropout), so that runs differ by chance: call model.eval()"
            )
        return found

    def run(self, name: str) -> Any:
        self._state.restore()
        given = self._given[name]
        if isinstance(given, Tensor):
            return self._model(given)
        return self._model(**given) if isinstance(given, Mapping) else self._model(*given)


def _number(metric: Metric, output: Any) -> float:
    if not callable(metric):
        raise OptionError(
            f"metric is a function from the model's output to one number, got {type(metric).__name__}.",
            write="unsum.patch_sweep(model, clean, corrupt, sites, metric)",
        )
    value = metric(output)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise OptionError(f"metric gave a tensor of shape {tuple(value.shape)}; it must give one number")
    try:
        found = float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError):
        raise OptionError(f"metric gave a {type(value).__name__}; it must give one number") from None
    if math.isnan(found):
        raise OptionError("metric gave NaN: a sweep cannot compare it")
    return found


def _refuse_several(names: Iterable[str], asked: Sequence[Asked]) -> None:
    """Raise where a site without a path found several tensors: a patch goes into one."""
    paths = {parse(one).path for one in asked}
    found: dict[Site, list[str]] = {}
    for name in names:
        site = parse(name)
        found.setdefault(with_fields(site, path=()), []).append(name)
        several = found[with_fields(site, path=())]
        if len(several) > 1 and any(parse(one).path not in paths for one in several):
            raise SiteError(f"{site.where}:{site.kind}: holds several tensors; name one of them: {', '.join(several)}")


def _refuse_other_dimension(patches: Mapping[str, Tensor], clean: Any) -> None:
    """Raise if dimension 1 of a patch is something else than the positions of the input: heads, say."""
    given = positions_of([tensor for _, tensor in leaves(clean)])
    for site, patch in patches.items():
        if given is not None and patch.dim() > 3 and patch.shape[1] != given and given in patch.shape[2:]:
            raise SiteError(
                f"{site}: is {tuple(patch.shape)}, and a sweep patches along dimension 1, which is not the {given} "
                "positions of the input (heads?)"
            )


def _lengths(patches: Mapping[str, Tensor], met: Mapping[str, torch.Size], *, is_aligned: bool) -> tuple[int, int]:
    """How many positions the clean and the corrupt run have, the same at every site."""
    lengths: dict[tuple[int, int], str] = {}
    for site, patch in patches.items():
        if site not in met:
            raise SiteError(f"{site}: fired in the clean run and not in the corrupt one; a sweep needs it in both")
        own, other = tuple(patch.shape), tuple(met[site])
        if len(own) < 3:
            raise SiteError(f"{site}: is {own}; a sweep needs (samples, positions, ...) there")
        if (own[0], *own[2:]) != (other[0], *other[2:]):
            raise SiteError(
                f"{site}: {own} in the clean run, {other} in the corrupt one; a sweep needs as many samples and "
                "features in both"
            )
        if own[1] != other[1] and not is_aligned:
            same = min(own[1], other[1])
            shifted = ", ".join(f"{k - same}: {k - same}" for k in range(same)[-3:])
            raise SiteError(
                f"{site}: {own} in the clean run, {other} in the corrupt one; a sweep patches position by position. "
                "Say which clean position goes to which corrupt one.",
                write=[
                    f"unsum.patch_sweep(model, clean, corrupt, sites, metric, align={{{shifted}}})  # the last ones",
                    f"unsum.patch_sweep(model, clean, corrupt, sites, metric, align={{k: k for k in range({same})}})",
                ],
            )
        lengths.setdefault((own[1], other[1]), site)
    if len(lengths) > 1:
        told = ", ".join(f"{length} at {site}" for (length, _), site in lengths.items())
        raise SiteError(f"the sites have different numbers of positions: {told}; sweep over them one by one")
    return next(iter(lengths))


def _sources(align: Mapping[int, int] | None, clean: int, corrupt: int) -> dict[int, int]:
    """Of each corrupt position the clean one whose activation is put there."""
    if align is None:
        return {k: k for k in range(corrupt)}
    if not isinstance(align, Mapping) or not align:
        raise OptionError(f"align={align!r}: a mapping, {{clean position: corrupt position}}, such as {{0: 0, -1: -1}}")
    found: dict[int, int] = {}
    for pair in align.items():
        for position, size, run in zip(pair, (clean, corrupt), ("clean", "corrupt"), strict=True):
            if isinstance(position, bool) or not isinstance(position, int) or not -size <= position < size:
                raise OptionError(f"align={align!r}: {position!r} is no position of the {run} run, which has {size}")
        source, goes = pair[0] % clean, pair[1] % corrupt
        if goes in found:
            raise OptionError(f"align={align!r}: two clean positions go to corrupt position {goes}")
        found[goes] = source
    return found


def _positions(index: Index | None, source: Mapping[int, int], size: int) -> list[int]:
    try:
        chosen = list(source) if index is None else numbers(index, size, "positions")
    except VerbError as error:
        raise OptionError(f"positions={index!r}: {str(error).rpartition(': ')[2]}") from None
    if not chosen:
        raise OptionError(f"positions={index!r}: names none of the {size} positions")
    if beside := [position for position in chosen if position not in source]:
        raise OptionError(f"positions={index!r}: align= names no clean position for {beside[0]}")
    return chosen


def _words(tokens: Sequence[str], positions: Sequence[int]) -> list[str]:
    if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
        raise OptionError("tokens= takes a list of strings, one for each position of the input")
    if len(tokens) <= max(positions):
        raise OptionError(f"tokens= has {len(tokens)} strings, and there is a position {max(positions)}")
    return [tokens[position] for position in positions]


def _count(things: Sequence[Any], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"
