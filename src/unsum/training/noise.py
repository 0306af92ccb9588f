"""Random numbers for private training: Gaussian noise and uniform numbers for Poisson sampling, each from a source of
its own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from math import pi, prod
from typing import Any, Protocol

import torch
from torch import Tensor

from unsum.errors import OptionError

_AT_ONCE = 1 << 20  # numbers that are made of the system's random bytes at a time
_DRAWS = 4  # Gaussian draws that are added up for one secure number
_BITS = 53  # of a float64's fraction


class Source(Protocol):
    """Where random numbers come from."""

    def normal(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Independent N(0, 1)."""
        ...

    def uniform(self, n: int) -> Tensor:
        """(n,): independent and uniform in [0, 1), in float64, on the CPU."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Seeded:
    """Pseudo-random numbers of torch, one generator for each device. Each use of a seed has a stream of its own, by
    `purpose`."""

    def __init__(self, seed: int, purpose: str, generator: torch.Generator | None = None) -> None:
        self._seed, self._purpose, self._given = seed, purpose, generator
        self._generators: dict[str, torch.Generator] = {}

    def _on(self, device: torch.device) -> torch.Generator:
        if self._given is not None:
            return self._given
        key = str(device)
        if key not in self._generators:
            digest = hashlib.sha256(f"{self._seed} {self._purpose} {key}".encode()).digest()
            self._generators[key] = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big"))
        return self._generators[key]

    def normal(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        generator = self._on(device)
        return torch.randn(tuple(shape), generator=generator, device=generator.device, dtype=dtype).to(device)

    def uniform(self, n: int) -> Tensor:
        generator = self._on(torch.device("cpu"))
        return torch.rand(n, generator=generator, device=generator.device, dtype=torch.float64).cpu()

    def state_dict(self) -> dict[str, Any]:
        known = {"given": self._given} if self._given is not None else self._generators
        return {key: generator.get_state() for key, generator in known.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state and ("given" in state) != (self._given is not None):
            raise OptionError(
                "unsum.private: the state is that of a run with generator=, or this run has one: give the same option"
            )
        for key, value in state.items():
            (self._given or self._on(torch.device(key))).set_state(value)


class Secure:
    """Numbers from the operating system's cryptographic generator (`os.urandom`).

    A Gaussian number is the sum of four, halved. Each of the four is made in float64 by Box and Muller's method. The
    low bits of one floating-point Gaussian can tell the value that it was added to (Mironov 2012); for the sum of four
    that is out of reach (Holohan and Braghin 2021).
    """

    def normal(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        n = prod(shape)
        parts = [self._normal(min(_AT_ONCE, n - first)) for first in range(0, n, _AT_ONCE)]
        whole = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
        return whole.view(tuple(shape)).to(device, dtype)

    def _normal(self, n: int) -> Tensor:
        draws = _DRAWS // 2 * n  # of which Box and Muller's method makes two Gaussians each
        radius = (-2 * (1 - self.uniform(draws)).log()).sqrt()  # of numbers in (0, 1]
        angle = 2 * pi * self.uniform(draws)
        return torch.cat([radius * angle.cos(), radius * angle.sin()]).view(_DRAWS, n).sum(0) / _DRAWS**0.5

    def uniform(self, n: int) -> Tensor:
        if not n:
            return torch.zeros(0, dtype=torch.float64)
        bits = torch.frombuffer(bytearray(os.urandom(8 * n)), dtype=torch.int64)
        return (bits & ((1 << _BITS) - 1)).double() / (1 << _BITS)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def sources(
    seed: int | None, generator: torch.Generator | None, *, secure: bool, rank: int
) -> tuple[Source, Source, str]:
    """Where the noise comes from and where the sampling's numbers do, and the first in words."""
    if secure:
        return Secure(), Secure(), "from os.urandom"
    told = f"seed {seed}" if seed is not None else "seeded by the operating system"
    if generator is not None:  # whose next number begins the sampling's own stream
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        told = f"from the given generator, on {generator.device}"
    elif seed is None:
        seed = int.from_bytes(os.urandom(16), "big")
    return Seeded(seed, "noise", generator), Seeded(seed, f"sampling of rank {rank}"), told
