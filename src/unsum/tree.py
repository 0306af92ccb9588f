"""The names of the modules in a model, remembered from one block to the next.

Most models do not change between two steps, and to look whether one has takes a fraction of the time of naming
everything again. Compared are the modules with their types, and which others each holds under which key, by identity.
What is remembered holds no module: as soon as one is gone, so is the memory, and no new one can be mistaken for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from operator import methodcaller
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

Found = dict[Any, tuple[str, ...]]
"""The names of the modules that a type or a pattern has chosen."""


class ParameterNames:
    """The names of parameters in a tree. They are named again only if a key has come or gone."""

    def __init__(self) -> None:
        self._keys: list[str] = []  # of the parameters of all modules, in a row
        self._counts: list[int] = []  # how many each module has
        self._names: list[tuple[str, str]] = []

    def of(self, modules: Mapping[str, nn.Module]) -> Iterator[tuple[tuple[str, str], nn.Parameter | None]]:
        """The name of each parameter and that of its module, and the parameter."""
        tables = [module._parameters for module in modules.values()]
        keys, counts = list(chain.from_iterable(map(_keys, tables))), list(map(len, tables))
        if keys != self._keys or counts != self._counts:
            owners = chain.from_iterable([name] * count for name, count in zip(modules, counts, strict=True))
            self._names = [(f"{o}.{key}" if o else key, o) for o, key in zip(owners, keys, strict=True)]
            self._keys, self._counts = keys, counts
        return zip(self._names, chain.from_iterable(map(_values, tables)), strict=True)


class Tree:
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
        self.parameters = ParameterNames()


_keys, _values = methodcaller("keys"), methodcaller("values")  # a torch.jit module's tables have these alone
_trees: MutableMapping[nn.Module, Tree] = WeakIdKeyDictionary()


def _held(tables: Sequence[Mapping[str, Any]], parents: Sequence[int]) -> list[Any]:
    """The keys and values of these tables, in a row."""
    held: list[Any] = []
    for k in parents:
        held += tables[k]
        held += tables[k].values()
    return held


def remember(model: nn.Module, modules: dict[str, nn.Module], found: Found) -> Tree | None:
    """Keep the names of a model's modules, if its tree is an ordinary one. `found` may still be added to."""
    known = set(map(id, modules.values()))
    for module in modules.values():
        if not isinstance(module._modules, dict):
            return None  # a torch.jit module
        if any(child is not None and id(child) not in known for child in module._modules.values()):
            return None  # a wrapper, which the names leave out
    tree = _trees[model] = Tree(modules, found)
    return tree


def recall(model: nn.Module) -> tuple[dict[str, nn.Module], Tree] | None:
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
    return dict(zip(tree.names, modules, strict=True)), tree


def is_as_it_was(tree: Tree, modules: Sequence[nn.Module]) -> bool:
    """Whether these modules, which are those of a tree that was recalled a moment ago, still hold each other so."""
    return tree.is_whole and list(map(id, _held([module._modules for module in modules], tree.parents))) == tree.ids
