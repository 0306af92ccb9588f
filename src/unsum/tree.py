"""The names of the modules in a model, remembered from one block to the next.

Most models do not change between two steps, and to look whether one has takes a fraction of the time of naming
everything again. Compared are the modules with their types, and which others each holds under which key, by identity.
What is remembered holds no module: as soon as one is gone, so is the memory, and no new one can be mistaken for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

Found = dict[Any, tuple[str, ...]]
"""The names of the modules that a type or a pattern has chosen."""


class _Tree:
    """How the tree of a model was."""

    def __init__(self, modules: dict[str, nn.Module], found: Found) -> None:
        self.names, self.found = tuple(modules), found
        self.is_whole = True  # no module of it is gone
        own = weakref.ref(self)

        def gone(_: object) -> None:
            if (tree := own()) is not None:
                tree.is_whole = False

        self.modules = [weakref.ref(module, gone) for module in modules.values()]
        self.types = [type(module) for module in modules.values()]
        tables = [module._modules for module in modules.values()]
        self.sizes = list(map(len, tables))
        self.parents = [k for k, size in enumerate(self.sizes) if size]
        held = _held(tables, self.parents)
        self.keys = [key for key in held if isinstance(key, str)]  # kept, so that their ids stay theirs
        self.ids = list(map(id, held))


_trees: MutableMapping[nn.Module, _Tree] = WeakIdKeyDictionary()


def _held(tables: Sequence[Mapping[str, Any]], parents: Sequence[int]) -> list[Any]:
    """The keys and values of these tables, in a row."""
    held: list[Any] = []
    for k in parents:
        held += tables[k]
        held += tables[k].values()
    return held


def remember(model: nn.Module, modules: dict[str, nn.Module], found: Found) -> None:
    """Keep the names of a model's modules, if its tree is an ordinary one. `found` may still be added to."""
    known = set(map(id, modules.values()))
    for module in modules.values():
        if not isinstance(module._modules, dict):
            return  # a torch.jit module
        if any(child is not None and id(child) not in known for child in module._modules.values()):
            return  # a wrapper, which the names leave out
    _trees[model] = _Tree(modules, found)


def recall(model: nn.Module) -> tuple[dict[str, nn.Module], Found] | None:
    """The modules of a model by name, if nothing in its tree has changed since they were remembered."""
    tree = _trees.get(model)
    if tree is None or not tree.is_whole:
        return None
    modules: list[Any] = [module() for module in tree.modules]
    if list(map(type, modules)) != tree.types:
        return None
    tables = [module._modules for module in modules]
    if list(map(len, tables)) != tree.sizes or list(map(id, _held(tables, tree.parents))) != tree.ids:
        return None
    return dict(zip(tree.names, modules, strict=True)), tree.found
