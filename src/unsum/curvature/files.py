"""Curvatures on disk: a safetensors file, with a manifest in its header. Nothing is unpickled."""

from __future__ import annotations

import importlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unsum.curvature.blocks import Basis, Block
from unsum.curvature.curvature import Curvature, Origin
from unsum.curvature.pieces import Matrix
from unsum.curvature.sums import Bias, Pair, ParameterSums
from unsum.errors import NotInstalled, OptionError, UnsupportedError

_FORMAT, _VERSION = "unsum curvature", 1
_OF_BLOCK = ("rows", "columns", "row_values", "column_values")  # of its basis


def save(curvature: Curvature, path: str | os.PathLike[str]) -> None:
    """Write a curvature, with its eigenvectors where they were computed: another machine may compute others, of another
    sign, rounded otherwise, or turned in a space of equal eigenvalues."""
    tensors = to_tensors(curvature.sums)
    manifest = manifest_of(curvature.origin, curvature.sums) | {
        "n": curvature.n,
        "biases": {name: [bias.name, bias.side] for name, bias in curvature.biases.items()},
    }
    if curvature.is_decomposed:
        manifest["blocks"] = {}
        for name, block in curvature.blocks.items():
            if block.basis is not None:
                for key in _OF_BLOCK:
                    if (value := getattr(block.basis, key)) is not None:
                        tensors[f"block/{key}/{name}"] = value
                tensors[f"block/eigenvalues/{name}"] = block.eigenvalues
                manifest["blocks"][name] = {"precision": block.precision}
    write(path, tensors, manifest)


def load(path: str | os.PathLike[str]) -> Curvature:
    """Read a curvature that `c.save` wrote. Nothing is unpickled, so loading a file executes no code.

    Examples:
        >>> import tempfile, unsum
        >>> model, data = torch.nn.Linear(3, 1), [torch.randn(3) for _ in range(8)]
        >>> c = unsum.curvature.fit(model, lambda m, x: m(x).square().sum(1), data, kind="kfac")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     c.save(f"{folder}/c.safetensors")
        ...     unsum.curvature.load(f"{folder}/c.safetensors")
        kfac of 8 samples (empirical, expand): 2 tensors, 2 in Kronecker products, 0 by their diagonal
    """
    tensors, manifest = read(path)
    if "pass" in manifest:
        raise OptionError(f"{path}: the state of a fit that is not done; call fit(resume=...) again to finish it")
    sums = from_tensors(tensors, manifest)
    biases = {name: Bias(bias, sums[bias].shape, side) for name, (bias, side) in manifest["biases"].items()}
    found = Curvature(origin_of(manifest), manifest["n"], sums, biases)
    if "blocks" not in manifest:
        return found
    blocks: dict[str, Block] = {}
    for name in sums:
        if name in {bias.name for bias in biases.values()}:
            continue
        if (told := manifest["blocks"].get(name)) is None:
            blocks[name] = found.made(name)
            continue
        basis = Basis(*(tensors.get(f"block/{key}/{name}") for key in _OF_BLOCK))  # type: ignore[arg-type]
        blocks[name] = Block(
            name, biases.get(name), sums[name].shape, sums[name].matrix, basis,
            tensors[f"block/eigenvalues/{name}"], told["precision"],
        )  # fmt: skip
    return Curvature(found.origin, found.n, sums, found.biases, blocks)


def manifest_of(origin: Origin, sums: Mapping[str, ParameterSums]) -> dict[str, Any]:
    """What is written beside the tensors."""
    parameters = {}
    for name, each in sums.items():
        matrix = None if each.matrix is None else [each.matrix.stack, each.matrix.rows, each.matrix.columns]
        parameters[name] = {"shape": list(each.shape), "matrix": matrix, "sides": list(each.pairs)}
    return {
        "format": _FORMAT, "version": _VERSION, "kind": origin.kind, "setting": origin.setting,
        "likelihood": origin.likelihood, "fingerprints": dict(origin.fingerprints), "parameters": parameters,
        "others": dict(origin.others),
    }  # fmt: skip


def origin_of(manifest: Mapping[str, Any]) -> Origin:
    """What was written of where a curvature comes from."""
    others = manifest.get("others", {})  # of older files nothing is known
    return Origin(manifest["kind"], manifest["setting"], manifest["likelihood"], manifest["fingerprints"], others)


def to_tensors(sums: Mapping[str, ParameterSums]) -> dict[str, Tensor]:
    """Sums under names."""
    found: dict[str, Tensor] = {}
    for name, each in sums.items():
        if each.squares is not None:
            found[f"squares/{name}"] = each.squares
        for side, pair in each.pairs.items():
            found |= {f"{side}/{key}/{name}": value for key, value in pair.tensors().items()}
    return found


def from_tensors(tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> dict[str, ParameterSums]:
    """Sums from tensors under names."""
    found = {}
    for name, told in manifest["parameters"].items():
        pairs = {
            side: Pair(
                tensors[f"{side}/a/{name}"].clone(),
                tensors[f"{side}/delta/{name}"].clone(),
                tensors[f"{side}/count/{name}"].clone(),
                tensors.get(f"{side}/total/{name}"),
            )
            for side in told["sides"]
        }
        matrix = None if told["matrix"] is None else Matrix(*told["matrix"])
        found[name] = ParameterSums(tuple(told["shape"]), matrix, pairs, tensors.get(f"squares/{name}"))
    return found


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> None:
    """Through a file beside it, so that one that was there stays whole until the new one is."""
    kept = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    manifest = {**manifest, "sums": {name: _checksum(value) for name, value in kept.items()}}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        _safetensors().save_file(kept, beside, metadata={"unsum": json.dumps(manifest)})
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the manifest of a file that is whole."""
    if not Path(path).is_file():
        raise OptionError(f"{path}: there is no such file")
    _safetensors()
    opener = importlib.import_module("safetensors").safe_open
    try:
        with opener(path, framework="pt") as file:
            told = (file.metadata() or {}).get("unsum")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise OptionError(f"{path}: damaged, or not a safetensors file ({error})") from error
    manifest = {} if told is None else json.loads(told)
    if manifest.get("format") != _FORMAT:
        raise OptionError(f"{path}: a safetensors file, but not of a curvature that unsum saved")
    if manifest["version"] > _VERSION:
        raise UnsupportedError(f"{path}: written by a newer unsum (version {manifest['version']} of the format)")
    known = manifest.pop("sums")
    damaged = [name for name in known if name not in tensors or _checksum(tensors[name]) != known[name]]
    if damaged or known.keys() != tensors.keys():
        raise OptionError(f"{path}: damaged: {damaged[0] if damaged else 'its tensors'} is not what was written")
    return tensors, manifest


def _checksum(value: Tensor) -> int:
    return zlib.crc32(value.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise NotInstalled(
            "curvatures are saved by safetensors, which is not installed: pip install safetensors numpy"
        ) from error
