"""`unsum.sites`: the sites of a model as a table, with blocks that are alike shown once, and shapes after a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unsum.capture import capture
from unsum.learn.state import State
from unsum.nested import format_path
from unsum.notebook import element, table
from unsum.repeats import repeats, span
from unsum.sites import Asked, Names, is_container, parse, site_name
from unsum.types import KINDS, Path

Shape = tuple[int, ...]
_NOT_SEEN = "-"
_SHOWN = 3  # tensors of one output


@dataclass(frozen=True)
class _Row:
    """A module in the table."""

    name: str
    type: str
    output: str
    sites: str
    parameters: tuple[tuple[int, ...], ...]  # their shapes, by which blocks are compared

    def beyond(self, depth: int) -> tuple[Any, ...]:
        """What must be equal in blocks that are alike: all but the first `depth` parts of the name."""
        return (*self.path[depth:], None, self.type, self.output, self.sites, self.parameters)

    @property
    def path(self) -> list[str]:
        return self.name.split(".") if self.name else []


class Sites:
    """The sites of a model: iterate over the names of all, or print it as a table. `shapes` has the shape of every
    tensor that a module returned, by site, if a batch was given."""

    def __init__(
        self,
        model: nn.Module,
        *asked: Asked,
        run: Callable[[], object] | None = None,
        given: Any = None,
        fold: bool = True,
    ) -> None:
        self._names, self._fold = Names(model), fold
        self._sites = self._chosen(asked) if asked else self._all()
        self._outputs = None if run is None else _outputs(self._names, run, given)
        self.shapes: dict[str, Shape] = {}
        for name, calls in (self._outputs or {}).items():
            for k, call in enumerate(calls):
                at = k if len(calls) > 1 else None
                self.shapes |= {site_name(name, "output", at, path): shape for path, shape in call.items()}

    def _all(self) -> dict[str, list[str]]:
        parameters: dict[str, list[str]] = {}
        for parameter, owner in self._names.owners.items():
            parameters.setdefault(owner, []).append(f"{parameter}:grad")
        found = {}
        for name, module in self._names.modules.items():
            own = [] if is_container(module) else [f"{name}:{kind}" for kind in KINDS[:-1]]
            own += parameters.get(name, [])
            if own:
                found[name] = own
        return found

    def _chosen(self, asked: tuple[Asked, ...]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for site in [parse(a, self._names.model) for a in asked]:
            for name in self._names.find(site):
                owner = self._names.owners[name] if site.kind == "grad" else name
                found.setdefault(owner, []).append(site_name(name, site.kind, site.call, site.path))
        return found

    def __iter__(self) -> Iterator[str]:
        return (site for row in self._sites.values() for site in row)

    def __len__(self) -> int:
        return sum(map(len, self._sites.values()))

    def __contains__(self, site: object) -> bool:
        return any(site in row for row in self._sites.values())

    def _lines(self) -> list[tuple[str, ...] | str]:
        """The rows of the table, headings first; of blocks that are alike a line in words."""
        rows = [self._row(name, own) for name, own in self._sites.items()]
        lines = [_Row("module", "type", "output", "sites", ()), *(_folded(rows) if self._fold else rows)]
        return [line if isinstance(line, str) else self._cells(line) for line in lines]

    def _repr_html_(self) -> str:
        heading, *rows = self._lines()
        return element(table(heading, rows))

    def __repr__(self) -> str:
        cells = self._lines()
        widths = [
            max(map(len, column)) for column in zip(*(row for row in cells if isinstance(row, tuple)), strict=True)
        ]
        widths[-1] = 0  # nothing comes after it
        return "\n".join(
            row if isinstance(row, str) else "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
            for row in cells
        )

    def _cells(self, row: _Row) -> tuple[str, ...]:
        shape = [] if self._outputs is None else [row.output]
        return (row.name or '""', row.type, *shape, row.sites)

    def _row(self, name: str, own: list[str]) -> _Row:
        module = self._names.modules[name]
        kinds = " ".join(site[len(name) :].lstrip(".") if name else site for site in own)
        output = _told(self._outputs.get(name, [])) if self._outputs is not None else ""
        shapes = tuple(tuple(p.shape) for p in module._parameters.values() if p is not None)
        return _Row(name, type(module).__name__, output, kinds, shapes)


# ---- blocks that are alike -------------------------------------------------------------------------------------------


def _folded(rows: list[_Row], depth: int = 0) -> Iterator[_Row | str]:
    """The rows, and of numbered blocks in a row that are alike the first with a line that says how many there are.
    All rows have the first `depth` parts of their names in common."""
    groups = [list(group) for _, group in itertools.groupby(rows, lambda row: row.path[depth : depth + 1])]
    k = 0
    while k < len(groups):
        group = groups[k]
        if len(group[0].path) == depth:  # the module that holds the others
            yield from group
            k += 1
            continue
        _, times = repeats(k, len(groups), lambda k, other, _: _follows(groups[k], groups[other], depth, other - k))
        inside = list(_folded(group, depth + 1))
        if len(group) * times > len(group) + 1:  # else a line more is no line less
            first, last = (".".join(g[0].path[: depth + 1]) for g in (group, groups[k + times - 1]))
            yield f"{span(first, last, times)}: {times} × the same"
        else:
            times = 1
        yield from inside
        k += times


def _follows(group: list[_Row], other: list[_Row], depth: int, times: int) -> bool:
    """Whether `other` is alike, and its number is that of the group and `times`."""
    key, following = group[0].path[depth], other[0].path[depth]
    if not (key.isdecimal() and following.isdecimal() and int(following) == int(key) + times):
        return False
    return [row.beyond(depth + 1) for row in group] == [row.beyond(depth + 1) for row in other]


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _outputs(names: Names, run: Callable[[], object], given: Any) -> dict[str, list[dict[Path, Shape]]]:
    """Of each module the shapes that each of its calls returned. The state of the model and of
    the arguments that it was `given` (a cache of keys and values) is put back."""
    modules = {
        name: module
        for name, module in names.modules.items()
        if not is_container(module) and not isinstance(module, torch.jit.ScriptModule)
    }
    state = State(names.model, given, strict=False)
    asked = [f"{name}:output" for name in modules]
    try:
        with torch.no_grad(), capture(names.model, *asked, missing="ignore", reduce=lambda tensor: None) as got:
            run()
    finally:
        state.restore()
    found: dict[int, list[dict[Path, Shape]]] = {}  # by the id of the module, which may have several names
    for event in got.trace():
        site = parse(event.site)
        assert isinstance(site.where, str)
        calls = found.setdefault(id(names.modules[site.where]), [])
        calls += [{} for _ in range(event.call + 1 - len(calls))]
        calls[event.call][site.path] = event.shape
    return {name: found[id(module)] for name, module in modules.items() if id(module) in found}


def _told(calls: list[dict[Path, Shape]]) -> str:
    """The shapes that a module returned, in a few words."""
    told = list(dict.fromkeys(_call_told(call) for call in calls))
    if not told:
        return _NOT_SEEN
    several = f" in each of {len(calls)} calls" if len(told) == 1 else f" in {len(calls)} calls"
    return "; ".join(told[:_SHOWN]) + ("; …" if len(told) > _SHOWN else "") + (several if len(calls) > 1 else "")


def _call_told(call: Mapping[Path, Shape]) -> str:
    told = [f"{format_path(path)} {shape}".lstrip() for path, shape in itertools.islice(call.items(), _SHOWN)]
    return ", ".join(told) + (f", … {len(call)} tensors" if len(call) > _SHOWN else "") if told else _NOT_SEEN


def sites(model: nn.Module, *asked: Asked, batch: Any = None, fold: bool = True) -> Sites:
    """Every site of `model`, or those that the given patterns choose. Prints as a table; iterates over names.

    Args:
        model: Any module.
        asked: Patterns, as `unsum.capture` takes them.
        batch: Input for one run of the model without gradients; the table then shows the shape of what each module
            returned. A tensor is the one argument, a tuple or list the arguments, a mapping the keyword arguments.
            Buffers and random numbers are restored. "-": the module was not called, or returned no tensor.
        fold: Whether the table shows identical numbered blocks once (same types, names, shapes of parameters and
            outputs). Iteration always gives every name.

    Examples:
        >>> print(sites(nn.Sequential(nn.Linear(2, 3), nn.ReLU())))
        module  type        sites
        ""      Sequential  :input :output :grad_input :grad_output
        0       Linear      :input :output :grad_input :grad_output weight:grad bias:grad
        1       ReLU        :input :output :grad_input :grad_output
        >>> list(sites(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), (nn.Linear, "input")))
        ['0:input']
        >>> print(sites(nn.Sequential(*(nn.Linear(3, 3) for _ in range(12))), "*:output", batch=torch.ones(5, 3)))
        module  type    output  sites
        0 … 11: 12 × the same
        0       Linear  (5, 3)  :output
    """
    return Sites(model, *asked, run=None if batch is None else lambda: _called(model, batch), given=batch, fold=fold)


def _called(model: nn.Module, batch: Any) -> object:
    args: tuple[Any, ...] = (batch,)
    kwargs: dict[str, Any] = {}
    how = "model(batch)"
    if isinstance(batch, Mapping):
        args, kwargs, how = (), dict(batch), "model(**batch)"
    elif isinstance(batch, tuple | list):
        args, how = tuple(batch), "model(*batch)"
    try:
        return model(*args, **kwargs)
    except Exception as error:
        error.add_note(f"unsum: sites(batch=) has called {how}; a tuple holds the arguments, a mapping the keywords")
        raise
