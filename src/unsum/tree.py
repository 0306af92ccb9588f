"""The names in a model, remembered from one block to the next.

Most models do not change between two steps, and to look whether one has takes a fifth of the time of naming everything
again. Compared are the modules with their types, and what each holds under which key, by identity. What is remembered
holds no module and no parameter: as soon as one of them is gone, so is the memory, and no new one can be mistaken for
it.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

Found = dict[tuple[Any, bool], tuple[str, ...]]  # what was found by a type or a pattern


class _Tree:
    """How the tree of a model was."""

    def __init__(
        self,
        modules: dict[str, nn.Module],
        parameters: dict[str, nn.Parameter],
        owners: dict[str, str],
        found: Found,
    ) -> None:
        self.module_names, self.owners, self.found = tuple(modules), owners, found
        held = _held(list(modules.values()))
        at = {id(thing): place for place, thing in enumerate(held)}
        self.parameters = [(name, at[id(parameter)]) for name, parameter in parameters.items()]
        self.types = [type(module) for module in modules.values()]
        self.is_whole = True  # nothing of it is gone
        self.modules = [self._weakly(module) for module in modules.values()]
        self._rest = [self._weakly(thing) for thing in held if not isinstance(thing, str | nn.Module | None)]
        self.keys = [thing for thing in held if isinstance(thing, str)]  # kept, so that their ids stay theirs
        self.ids = list(map(id, held))

    def _weakly(self, thing: Any) -> weakref.ref[Any]:
        tree = weakref.ref(self)

        def gone(_: object) -> None:
            if (own := tree()) is not None:
                own.is_whole = False

        return weakref.ref(thing, gone)


class Recalled(NamedTuple):
    """The modules and parameters of a model by name, the parameters' modules, and what was found in it before."""

    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    owners: dict[str, str]
    found: Found


_trees: MutableMapping[nn.Module, _Tree] = WeakIdKeyDictionary()


def _held(modules: Sequence[nn.Module]) -> list[Any]:
    """Each module, and the keys and values of what it holds: from this the tree could be read back."""
    held: list[Any] = []
    for module in modules:
        children, parameters = module._modules, module._parameters
        held.append(module)
        if children:
            held += children
            held += children.values()
        if parameters:
            held += parameters
            held += parameters.values()
    return held


def remember(
    model: nn.Module,
    modules: dict[str, nn.Module],
    parameters: dict[str, nn.Parameter],
    owners: dict[str, str],
    found: Found,
) -> None:
    """Keep the names of a model, if its tree is an ordinary one. `found` may still be added to."""
    known = set(map(id, modules.values()))
    for module in modules.values():
        tables = module._modules, module._parameters
        if not all(isinstance(table, dict) for table in tables):
            return  # a torch.jit module
        if any(child is not None and id(child) not in known for child in module._modules.values()):
            return  # a wrapper, which the names leave out
    _trees[model] = _Tree(modules, parameters, dict(owners), found)


def recall(model: nn.Module) -> Recalled | None:
    """The names of a model, if nothing in its tree has changed since they were remembered."""
    tree = _trees.get(model)
    if tree is None or not tree.is_whole:
        return None
    modules: list[Any] = [module() for module in tree.modules]
    held = _held(modules) if None not in modules else []
    if list(map(id, held)) != tree.ids or list(map(type, modules)) != tree.types:
        return None
    return Recalled(
        dict(zip(tree.module_names, modules, strict=True)),
        {name: held[place] for name, place in tree.parameters},
        dict(tree.owners),
        tree.found,
    )
