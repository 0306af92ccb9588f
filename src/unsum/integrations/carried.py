"""Ids and texts of examples that travel inside the Trainer's batches, from the collator to the step that uses them.

A list beside the batches would go wrong: loaders fetch batches ahead, in other processes too, and the Trainer collates
evaluation batches with the same collator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from unsum.errors import OptionError

IDS, TEXTS = "unsum_ids", "unsum_texts"  # keys of a batch
Where = str | Callable[[Any], Any]  # a key of an example, or a function of it


class Carrying:
    """A collator that calls another one, and puts the examples' ids and texts into the batch that it returns.

    Keys that hold ids or texts are left out of what the other collator is given; the examples themselves stay as they
    are. A batch in which no example has an id (of an evaluation set, say) is collated as without.

    Examples:
        >>> examples = [{"x": 1.0, "index": 7}, {"x": 2.0, "index": 3}]
        >>> Carrying(torch.utils.data.default_collate, ids="index")(examples)
        {'x': tensor([1., 2.], dtype=torch.float64), 'unsum_ids': tensor([7, 3])}
    """

    def __init__(self, collate: Callable[[list[Any]], Any], *, ids: Where | None, text: Where | None = None) -> None:
        if not callable(collate):
            raise OptionError(f"collator: {collate!r} is no collator: expected a function of a list of examples")
        given = {IDS: ids, TEXTS: text}
        self._where = {name: where for name, where in given.items() if where is not None}
        for name, where in self._where.items():
            if not isinstance(where, str) and not callable(where):
                option = "ids" if name == IDS else "text"
                raise OptionError(f"collator: {option}={where!r}: a key of an example, or a function of it")
        self._collate = collate

    def __call__(self, examples: Sequence[Any]) -> Any:
        found = {name: [_read(each, where) for each in examples] for name, where in self._where.items()}
        keys = {where for where in self._where.values() if isinstance(where, str)}
        batch = self._collate([_without(each, keys) for each in examples])
        for name, values in found.items():
            has_one = [value is not None for value in values]
            if not any(has_one):
                continue
            if not all(has_one):
                raise OptionError(
                    f"collator: example {has_one.index(False)} of a batch has no {self._where[name]!r}, others have one"
                )
            if not isinstance(batch, MutableMapping):
                raise OptionError(f"collator: the batch is a {type(batch).__name__}: ids can join a dict alone")
            batch[name] = _sendable(values, as_text=name == TEXTS)
        return batch


def take(batch: Any) -> dict[str, Any]:
    """Take what was carried out of a batch."""
    known = isinstance(batch, MutableMapping)
    return {name: batch.pop(name) for name in (IDS, TEXTS) if known and name in batch}


def drop_from_calls(model: nn.Module) -> None:
    """Leave what is carried out of the arguments of the model's calls: in evaluation nobody takes it before."""
    model.register_forward_pre_hook(_drop, with_kwargs=True, prepend=True)


def _drop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    if IDS not in kwargs and TEXTS not in kwargs:
        return None
    return args, {name: value for name, value in kwargs.items() if name not in (IDS, TEXTS)}


def _read(example: Any, where: Where) -> Any:
    if callable(where):
        return where(example)
    value: Any = example.get(where) if isinstance(example, Mapping) else getattr(example, where, None)
    return value.item() if hasattr(value, "item") else value


def _without(example: Any, keys: set[str]) -> Any:
    """The example without these keys, as another object: data sets may keep the one that they gave."""
    if not isinstance(example, Mapping) or keys.isdisjoint(example):
        return example
    return {name: value for name, value in example.items() if name not in keys}


def _sendable(values: list[Any], *, as_text: bool) -> Any:
    """Whole numbers as a tensor, which accelerate can send to other processes; else strings."""
    if not as_text and all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return torch.tensor(values)
    return [str(value) for value in values]
