"""Whether parameters and data are what they were: a number that a change of any bit changes, equal on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

from unsum.nested import children

_PART = 1 << 22  # numbers at a time
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(parameter: Tensor) -> str:
    """Of a tensor's values, shape and dtype.

    Examples:
        >>> fingerprint(torch.zeros(2))
        'float32 2 0000000000000000'
        >>> fingerprint(torch.ones(2)) == fingerprint(torch.tensor([1.0, 2.0]))
        False
    """
    value = parameter.detach()
    value = torch.view_as_real(value) if value.is_complex() else value
    flat = value.contiguous().view(-1)
    bits = flat.view(_BITS[flat.element_size()])
    total = 0
    for k, part in enumerate(bits.split(_PART)):
        total += int((part.to(torch.int64) * _weights(part.device)[: len(part)]).sum()) * (2 * k + 1)
    shape = "×".join(map(str, parameter.shape))
    return f"{str(parameter.dtype).removeprefix('torch.')} {shape} {total % (1 << 64):016x}"


def of_others(parameters: Mapping[str, Tensor], chosen: Iterable[Tensor]) -> dict[str, str]:
    """Fingerprints of a model's parameters apart from those that are chosen (frozen ones, say), tied ones once; tensors
    of a kind of their own (quantised, say) are left out."""
    known, found = {id(p) for p in chosen}, {}
    for name, p in parameters.items():
        if id(p) not in known and p.layout == torch.strided and type(p.detach()) is Tensor:
            found[name] = fingerprint(p)
        known.add(id(p))
    return found


def changed(known: Mapping[str, str], parameters: Mapping[str, Tensor]) -> list[str]:
    """The names of what is not as it was."""
    return [name for name, value in known.items() if name not in parameters or fingerprint(parameters[name]) != value]


@lru_cache(maxsize=4)
def _weights(device: torch.device) -> Tensor:
    """Odd numbers: where one bit changes, a sum of products changes (to the modulus 2⁶⁴, in any order)."""
    return torch.arange(_PART, device=device, dtype=torch.int64) * 0x5851F42D4C957F2E + 0x14057B7EF767814F


def content(value: object) -> str:
    """Of anything that data sets have: tensors, arrays, texts and numbers, in lists, tuples and mappings.

    Examples:
        >>> content({"text": "a", "ids": torch.tensor([1, 2])}) == content({"text": "a", "ids": torch.tensor([1, 3])})
        False
    """
    found = blake2b(digest_size=8)
    _add(value, found.update)
    return found.hexdigest()


def _add(value: object, update: Callable[[bytes], None]) -> None:
    if isinstance(value, Tensor):
        update(f"tensor {fingerprint(value)}".encode() if value.layout == torch.strided else repr(value).encode())
    elif isinstance(value, str | bytes | int | float | complex | None):
        update(f"{type(value).__name__} {value!r}\n".encode(errors="backslashreplace"))
    elif hasattr(value, "__array__") and hasattr(value, "tobytes"):
        update(f"{getattr(value, 'dtype', '')} {getattr(value, 'shape', '')}".encode() + value.tobytes())
    else:
        parts = list(children(value))
        update(f"{type(value).__name__} of {len(parts)}\n".encode())
        for name, part in parts:
            update(f"{name!r}:".encode(errors="backslashreplace"))
            _add(part, update)
