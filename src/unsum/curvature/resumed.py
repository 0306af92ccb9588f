"""A fit that was interrupted goes on: its state after every chunk of batches, in a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from unsum.curvature.corrected import Corrected
from unsum.curvature.curvature import Origin
from unsum.curvature.files import from_tensors, manifest_of, origin_of, read, to_tensors, write
from unsum.curvature.sums import Sums
from unsum.errors import OptionError


class Resumed:
    """The state of a fit that is under way."""

    def __init__(self, path: str | os.PathLike[str], chunk: int, origin: Origin, options: Mapping[str, Any]) -> None:
        self._path, self._chunk, self._origin, self._options = Path(path), chunk, origin, dict(options)
        self._tensors: Mapping[str, Tensor] = {}
        self._manifest: Mapping[str, Any] = {}
        if self._path.is_dir():
            raise OptionError(f"resume={str(path)!r} is a folder; give the path of a file in it")
        if self._path.exists():
            self._tensors, self._manifest = read(self._path)
            if "pass" not in self._manifest:
                raise OptionError(f"{path}: a curvature that is done, not the state of a fit; give another path")
            if origin_of(self._manifest) != origin or self._manifest["options"] != self._options:
                raise OptionError(
                    f"{path}: the state of a fit with other options, on other data, or of other parameters.\n"
                    "  remove it, or give the arguments that it was begun with"
                )
        self._batches = list(self._manifest.get("batches", (0, 0)))  # that each pass has read

    def begin(self, sums: Sums) -> int:
        """Put in what was summed before; how many batches that was."""
        if self._manifest:
            sums.parameters = from_tensors(self._tensors, self._manifest)
            sums.n = self._manifest["n"]
            sums.off = {(name, side): float(value) for name, side, value in self._manifest["off"]}
            sums.without_squares = set(self._manifest["without_squares"])
        return int(self._batches[0])

    def begin_correction(self, corrected: Corrected) -> int:
        """The same of the second pass."""
        for name in corrected.blocks:
            if f"corrected/{name}" in self._tensors:
                corrected.sums[name] = self._tensors[f"corrected/{name}"].clone()
        corrected.n = self._manifest.get("corrected", 0)
        return int(self._batches[1])

    def keep(self, batches: int, sums: Sums, corrected: Corrected | None = None) -> None:
        """So many batches of this pass are read: written where a chunk ends."""
        self._batches[0 if corrected is None else 1] = batches
        if batches % self._chunk:
            return
        off = [[*key, float(value)] for key, value in sums.off.items()]
        tensors, told = to_tensors(sums.parameters), {"n": sums.n, "off": off, "options": self._options}
        told["without_squares"] = sorted(sums.without_squares)
        if corrected is not None:
            tensors |= {f"corrected/{name}": value for name, value in corrected.sums.items()}
            told["corrected"] = corrected.n
        told |= {"pass": 0 if corrected is None else 1, "batches": self._batches}
        write(self._path, tensors, manifest_of(self._origin, sums.parameters) | told)

    def remove(self) -> None:
        """The fit is done."""
        self._path.unlink(missing_ok=True)
