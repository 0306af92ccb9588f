"""Sites: the names of the places where something flows, and how a name finds its places.

    <module path glob>:<kind>[@call][nested path]        "enc:output@1", "lm:output.logits", "blocks.*.attn:output[0]"

`*` also crosses dots; the root module is the empty name (`:output`). Instead of a name, a module type or a predicate
`(name, module) -> bool` may choose the modules: `(nn.Linear, "input")`. A tensor that `unsum.mark` names "y" is
`"mark:y:output"` and `"mark:y:grad_output"`; where there is no model, also `"y:output"`.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from unsum.errors import SiteError, UnsupportedError
from unsum.nested import format_path, parse_path
from unsum.seams.sharding import Sharded, sharded_parameters
from unsum.tree import Found, ParameterNames, Tree, is_as_it_was, recall, remember
from unsum.types import KINDS, Kind, Path

Where = str | type | Callable[[str, nn.Module], bool]
Asked = str | tuple[type | Callable[[str, nn.Module], bool], str]
"""What a user may write for a site."""

_GRAMMAR = re.compile(rf"(?P<where>.*):(?P<kind>{'|'.join(KINDS)})(?:@(?P<call>\d+))?(?P<path>[.\[].*)?")

# What wraps a model and is not part of it: the attribute that holds the model, by the wrapper's class.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


@dataclass(frozen=True)
class Site:
    """A site as it was asked for."""

    where: Where
    kind: Kind
    call: int | None = None
    path: Path = ()

    def __str__(self) -> str:
        where = self.where if isinstance(self.where, str) else getattr(self.where, "__name__", repr(self.where))
        return site_name(where, self.kind, self.call, self.path)


@dataclass(eq=False, slots=True)  # not frozen: that takes twice as long, for every module in every step
class Place:
    """A module, a parameter or a mark, under the name that the user gave it."""

    name: str
    thing: nn.Module | nn.Parameter | None = None  # None: a mark


@functools.lru_cache(4096)  # in every call of every module that is captured
def site_name(where: str, kind: str, call: int | None = None, path: Path = ()) -> str:
    """How a site is written.

    Examples:
        >>> site_name("attn", "output", 1, (0,))
        'attn:output@1[0]'
    """
    return f"{where}:{kind}{'' if call is None else f'@{call}'}{format_path(path)}"


def parse(asked: Asked, model: object = None) -> Site:
    """Read a site. Where it is misspelt, the error proposes sites of `model`, if one is given.

    Examples:
        >>> parse("blocks.*.attn:output@1[0].logits")
        Site(where='blocks.*.attn', kind='output', call=1, path=(0, 'logits'))
    """
    if isinstance(asked, tuple) and len(asked) == 2 and callable(asked[0]) and isinstance(asked[1], str):
        where, text = cast("Where", asked[0]), f":{asked[1].lstrip(':')}"
    elif isinstance(asked, str):
        where, text = asked.partition(":")[0], asked
    else:
        raise SiteError(_no_site(asked, model))
    if (read := _read(text)) is None:
        raise SiteError(_misspelt(asked, text, model))
    return Site(read[0] if isinstance(where, str) else where, *read[1:])


@functools.lru_cache(1024)
def _read(text: str) -> tuple[str, Kind, int | None, Path] | None:
    match = _GRAMMAR.fullmatch(text)
    if match is None:
        return None
    call = None if match["call"] is None else int(match["call"])
    return match["where"], cast("Kind", match["kind"]), call, parse_path(match["path"] or "")


def _no_site(asked: object, model: object) -> str:
    said = f"a site is written 'name:kind' or (module type or predicate, 'kind'), not a {type(asked).__name__}"
    if isinstance(asked, nn.Module) and isinstance(model, nn.Module):
        inner = unwrapped(asked)
        name = next((name for name, module in Names(model).modules.items() if module is inner), None)
        return said if name is None else f"{said}\n  write: {site_name(name, 'output')!r}"
    return f"{said}: {asked!r}" if isinstance(asked, tuple | int | None) else said


def _misspelt(asked: Asked, text: str, model: object) -> str:
    lines = [f"no site {asked!r}: it is written <module>:<kind>[@call][path], and the kinds are {', '.join(KINDS)}"]
    if "@" in text:
        lines.append("  a call is a number from 0: '@0' is the first call in the block")
    where, _, kind = text.rpartition(":") if ":" in text else (text, "", "")
    kinds = difflib.get_close_matches(re.split(r"[@.\[]", kind)[0], KINDS, 2) if kind else ["output"]
    if isinstance(asked, str) and isinstance(model, nn.Module):
        names = Names(model)
        near = list(dict.fromkeys(site for k in kinds for site in names.corrected(where, cast("Kind", k))))[:4]
        if near:
            lines.append(f"  near: {', '.join(map(repr, near))}")
    elif kinds:
        lines.append(f"  near kinds: {', '.join(map(repr, kinds))}")
    return "\n".join(lines)


def is_container(thing: object) -> bool:
    """Whether a module holds others and is never called itself."""
    holds = isinstance(thing, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
    return holds and type(thing).forward is nn.Module.forward  # type: ignore[attr-defined]


class Names:
    """The modules and parameters of a model under the user's own names: wrappers (DDP, FSDP, `torch.compile`,
    checkpoint wrappers) do not show. A module or parameter that is in several places has several names."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise SiteError(f"expected an nn.Module (or None, for marks alone), got {type(model).__name__}")
        self.model = unwrapped(model)
        self.modules: dict[str, nn.Module] = {}
        self._found: Found = {}
        self._tree: Tree | None
        if (known := recall(self.model)) is not None:
            self.modules, self._tree = known
            self._found = known[1].found
        else:
            self._add(self.model, "", set())
            self._tree = remember(self.model, self.modules, self._found)
        self._parameter_names = ParameterNames() if self._tree is None else self._tree.parameters

    @functools.cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for (name, _), parameter in self._named_parameters() if parameter is not None}

    @functools.cached_property
    def owners(self) -> dict[str, str]:
        """Of each parameter the module."""
        return {name: owner for (name, owner), parameter in self._named_parameters() if parameter is not None}

    @functools.cached_property
    def parts(self) -> dict[str, nn.Parameter]:
        """Of parameters that are spread over processes (FSDP2), what this process holds of each."""
        found = {}
        for name, owner in self.owners.items() if self._sharded else ():
            spread = self._sharded.get((id(self.modules[owner]), name.rpartition(".")[2]))
            if spread is not None:
                found[name] = spread.part
        return found

    @functools.cached_property
    def _sharded(self) -> dict[tuple[int, str], Sharded]:
        return sharded_parameters(self.model)

    def are_still_right(self) -> bool:
        """Whether the model has the same modules and parameters as when it was read."""
        modules = list(self.modules.values())
        if self._tree is None or self._sharded or not is_as_it_was(self._tree, modules):
            return False
        now = [p for module in modules for p in module._parameters.values() if p is not None]
        return list(map(id, now)) == list(map(id, self.parameters.values()))

    def _named_parameters(self) -> Iterable[tuple[tuple[str, str], nn.Parameter | None]]:
        """The name of each parameter and that of its module, and the parameter; None for one that is not there."""
        found = self._parameter_names.of(self.modules)
        if not (sharded := self._sharded):
            return found
        return [
            ((name, owner), parameter if parameter is None or spread is None else spread.whole)
            for (name, owner), parameter in found
            for spread in [sharded.get((id(self.modules[owner]), name.rpartition(".")[2]))]
        ]

    def _add(self, module: nn.Module, name: str, above: set[nn.Module]) -> None:
        self.modules[name] = module
        above.add(module)
        for key, child in module._modules.items():
            if child is not None and child not in above:
                self._add(unwrapped(child), f"{name}.{key}" if name else key, above)
        above.remove(module)

    def find(self, site: Site) -> dict[str, nn.Module] | dict[str, nn.Parameter]:
        """What a site names: one entry for each module or parameter. Raises where there is none."""
        table: Mapping[str, Any] = self.parameters if site.kind == "grad" else self.modules
        # Among the same modules a type or a pattern chooses the same; a predicate or an abstract class may not.
        lasts = type(site.where) in (str, type) and site.kind != "grad"
        if isinstance(site.where, str) and site.where in table:
            found = {site.where: table[site.where]}
        elif lasts and site.where in self._found:
            return {name: table[name] for name in self._found[site.where]}
        else:
            found = self._chosen(site, table)
        if not found:
            raise SiteError(self._unknown(site))
        for name, module in found.items():
            if isinstance(module, torch.jit.ScriptModule):
                raise UnsupportedError(
                    f"{name}:{site.kind}: {type(module).__name__} is a torch.jit module, which does not run hooks as "
                    "they are.\n  capture and edit the nn.Module that it was made from"
                )
        if lasts and len(found) > 1 and len(self._found) < 64:
            self._found[site.where] = tuple(found)
        return found

    def _chosen(self, site: Site, table: Mapping[str, Any]) -> dict[str, Any]:
        fits = self._matcher(site)
        found: dict[str, Any] = {}
        seen: set[int] = set()
        for name, thing in table.items():
            if fits(name) and id(thing) not in seen and not is_container(thing):
                found[name] = thing
                seen.add(id(thing))
        return found

    def _matcher(self, site: Site) -> Callable[[str], object]:
        where = site.where
        if isinstance(where, str):
            glob = re.compile(fnmatch.translate(where)).match
            return lambda name: name and glob(name)
        modules = self.modules
        if site.kind == "grad":
            modules = {name: self.modules[owner] for name, owner in self.owners.items()}
        if isinstance(where, type):
            return lambda name: isinstance(modules[name], where)
        owners = self.owners if site.kind == "grad" else dict(zip(modules, modules, strict=True))
        return lambda name: where(owners[name], modules[name])

    def _unknown(self, site: Site) -> str:
        lines = [f"no site {str(site)!r} in {type(self.model).__name__}."]
        if isinstance(site.where, str):
            near = self.near(site.where, site.kind)
            if near:
                lines.append(f"  near: {', '.join(map(repr, near))}")
        is_word = isinstance(site.where, str) and not set(site.where) & set(":.*?[")
        may_be_mark = is_word and site.kind in ("output", "grad_output")
        mark = f"; a tensor named with unsum.mark: {f'mark:{site}'!r}" if may_be_mark else ""
        lines.append(f"  list them: unsum.sites(model){mark}")
        return "\n".join(lines)

    def corrected(self, where: str, kind: Kind) -> list[str]:
        """The site of this name, or pattern, and kind if there is one; else those that are near."""
        there = where in self._table(kind) or (any(self._matches(where, kind)) and not self._names_jit(where, kind))
        return [site_name(where, kind)] if there else self.near(where, kind)

    def near(self, where: str, kind: Kind) -> list[str]:
        """Sites for one that does not exist. Each of them does: no container, which is never called, and neither call
        nor path, which only a run can show."""
        modules = self._table("output")
        if kind != "grad" and where == "*":
            return [site_name("", kind)] if "" in modules else []  # the root, which a glob does not name
        if kind == "grad" and where in self.modules:
            own = [f"{name}:grad" for name, owner in self.owners.items() if owner == where][:4]
            return own or ([site_name(where, "grad_output")] if where in modules else [])
        if kind != "grad" and where in self.parameters:
            return [f"{where}:grad"]
        table = self._table(kind)
        names = difflib.get_close_matches(where, table, 4, 0.5) or difflib.get_close_matches(where, table, 2, 0.2)
        names += [n for n in table if n.endswith(f".{where}") and n not in names][:2]
        return [site_name(name, kind) for name in names]

    def _names_jit(self, pattern: str, kind: Kind) -> bool:
        """Whether a pattern also names torch.jit modules, which are refused."""
        jit = (name for name, module in self.modules.items() if isinstance(module, torch.jit.ScriptModule))
        return kind != "grad" and any(fnmatch.fnmatchcase(name, pattern) for name in jit)

    def _table(self, kind: Kind) -> Mapping[str, Any]:
        """The things that have a site of this kind, by name."""
        if kind == "grad":
            return self.parameters
        refused = torch.jit.ScriptModule
        return {n: m for n, m in self.modules.items() if not is_container(m) and not isinstance(m, refused)}

    def _matches(self, where: str, kind: Kind) -> Iterator[bool]:
        glob = re.compile(fnmatch.translate(where)).match
        return (bool(name and glob(name)) for name in self._table(kind))


def unwrapped(module: nn.Module) -> nn.Module:
    """The module itself, out of whatever wraps it."""
    while (inside := _wrapped_in(type(module))) is not None:  # type: ignore[arg-type]
        module = getattr(module, inside)
    return module


@functools.cache
def _wrapped_in(cls: type) -> str | None:
    """The attribute that holds the model, if this is a class of wrappers."""
    return next((_WRAPPERS[c.__name__] for c in cls.__mro__ if c.__name__ in _WRAPPERS and _is_torchs(c)), None)


def _is_torchs(cls: type) -> bool:
    return cls.__module__.startswith("torch.")
