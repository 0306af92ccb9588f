"""The names of the modules in a model, remembered from one block to the next.

Most models do not change between two steps, and to look whether one has takes a fraction of the time of naming
everything again. Compared are the modules with their types, and which others each holds under which key, by identity.
What is remembered holds no module: as soon as one is gone, so is the memory, and no new one can be mistaken for it.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
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
        self.modules = [weakref.ref(module, self._gone(weakref.ref(self))) for module in modules.values()]
        self.types = [type(module) for module in modules.values()]
        held = _held(list(modules.values()))
        self.keys = [key for key in held if isinstance(key, str)]  # kept, so that their ids stay theirs
        self.ids = list(map(id, held))

    @staticmethod
    def _gone(tree: weakref.ref[_Tree]) -> Any:
        def gone(_: object) -> None:
            if (own := tree()) is not None:
                own.is_whole = False

        return gone


_trees: MutableMapping[nn.Module, _Tree] = WeakIdKeyDictionary()


def _held(modules: Sequence[nn.Module]) -> list[Any]:
    """Each module with the keys and values of what it holds, in a row: keys are as many as values, so the tree could be
    read back from it."""
    held: list[Any] = []
    for module in modules:
        held.append(module)
        if children := module._modules:
            held += children
            held += children.values()
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
    if list(map(type, modules)) != tree.types or list(map(id, _held(modules))) != tree.ids:
        return None
    return dict(zip(tree.names, modules, strict=True)), tree.found
