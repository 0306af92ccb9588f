"""The text that the tokens of a batch stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unsum.errors import OptionError
from unsum.nested import leaves

Text = Sequence[Sequence[str]] | Callable[[int], str] | Any
"""Strings for each sample, or what turns the id of a token into a string: a function, or anything with `decode`."""


def words(text: Text | None, batch: Any, n: int) -> list[list[str]] | None:
    """The tokens of each of the n samples.

    Examples:
        >>> words(lambda k: "abc"[k], torch.tensor([[0, 2], [1, 1]]), 2)
        [['a', 'c'], ['b', 'b']]
    """
    if text is None:
        return None
    if hasattr(text, "decode") and not isinstance(text, str):
        return [[str(text.decode([k])) for k in row] for row in _ids(batch, n)]
    if callable(text):
        return [[str(text(k)) for k in row] for row in _ids(batch, n)]
    if isinstance(text, str) or not isinstance(text, Sequence):
        raise OptionError(f"text= takes a list of tokens for each sample, a tokenizer or a function; got {_kind(text)}")
    if len(text) != n:
        raise OptionError(f"text= has the tokens of {len(text)} samples, and there are {n} losses")
    return [[str(token) for token in row] for row in text]


def labelled(labels: Sequence[str] | None, n: int) -> list[str] | None:
    """The label of each of the n samples."""
    if labels is None:
        return None
    if isinstance(labels, str) or not isinstance(labels, Sequence) or len(labels) != n:
        got = f"{len(labels)}" if isinstance(labels, list | tuple) else _kind(labels)
        raise OptionError(f"labels= takes a list of one string for each of the {n} samples; got {got}")
    return [str(label) for label in labels]


def _ids(batch: Any, n: int) -> list[list[int]]:
    for _, tensor in leaves(batch):
        if _are_ids(tensor) and tensor.dim() == 2 and len(tensor) == n:
            return tensor.tolist()
    raise OptionError(
        f"text= is a function of token ids, and the batch holds no integers of shape ({n}, t); give the tokens "
        "themselves: a list of strings for each sample"
    )


def _are_ids(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _kind(value: object) -> str:
    return type(value).__name__
