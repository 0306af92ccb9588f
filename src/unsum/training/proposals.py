"""What messages propose to write: they are worded for a block of `unsum.gradients`, and reworded for other blocks."""

from __future__ import annotations

import re

_OPTIONS = re.compile(r"with unsum\.gradients\(model, (.+?)\) as g:(?: \.\.\.)?")
_PLAIN = re.compile(r"with unsum\.gradients\(model\) as g:")


def reworded(message: str, *, options: str, plain: str) -> str:
    r"""The message for another block: `options` is what to write with options (`\1`), `plain` without.

    Examples:
        >>> said = "write: with unsum.gradients(model, samples=unsum.dim(1)) as g: ...  # samples along dimension 1"
        >>> reworded(said, options=r"unsum.watch(model, \1)", plain="with watch:")
        'write: unsum.watch(model, samples=unsum.dim(1))  # samples along dimension 1'
    """
    return _PLAIN.sub(plain, _OPTIONS.sub(options, message))
