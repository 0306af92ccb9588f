"""The plan of an index: everything that decides its rows, written down before the first of them, and compared when a
build goes on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unsum.curvature import Curvature
from unsum.errors import EmptyData, OptionError, UnsupportedError
from unsum.fingerprint import content
from unsum.index import store
from unsum.index.data import SHARDS, Cut
from unsum.index.maker import Maker, curvature_at
from unsum.report.frame import version

_BYTES = 1 << 26  # of a shard, at most, unless somebody says how many examples it has


def wanted(maker: Maker, cut: Cut, dtype: str, *, tokens: bool) -> dict[str, Any]:
    """What is asked for. Which shards it is cut into is still open."""
    marks = maker.marks()
    return {
        "format": store.FORMAT, "version": store.VERSION, "dtype": dtype, "tokens": tokens,
        "sketch": maker.sketch.told(), "parameters": marks["parameters"], "rest": marks["rest"], "data": cut.told(),
    }  # fmt: skip


def make(asked: dict[str, Any], maker: Maker, cut: Cut, shard_size: int | None, shards: int | None) -> dict[str, Any]:
    """A plan, from a first look at the data: how large a row is, and whether the gradients add up."""
    first = cut.first()
    if first is None:
        raise EmptyData(
            "build: the data is empty.", write="unsum.index.build(model, loss_fn, TensorDataset(x, y), path)"
        )
    numbered = (lambda k: k) if maker.has_documents else first.number
    maker.leave_out(first.batch, numbered)
    rows = maker.first_rows(first.batch, "build", numbered)
    examples = len(first.examples) if first.examples is not None else 1
    many = rows.shape[:-1].numel() / max(examples if cut.unit == "examples" else 1, 1)  # rows of an example, or batch
    by_bytes = max(1, int(_BYTES // max(many * maker.sketch.width * _bytes(asked["dtype"]), 1)))
    audit = maker.audit(first.batch)
    if audit > 1e-2:
        raise UnsupportedError(
            f"build: the gradients of the samples do not add up to .grad (off by {audit:.1e}).\n"
            "  unsum.check(model, loss_fn, batch) says where"
        )
    return {
        **asked,
        "columns": maker.sketch.columns,
        "width": maker.sketch.width,
        "covered": {name: maker.sketch.how(name) for name in maker.parameters},
        "cut": {"of": cut.unit, "size": _size(cut, by_bytes, shard_size, shards)},
        "audit": audit,
        "made with": {"unsum": version(), "torch": torch.__version__, "python": sys.version.split()[0]},
    }


def _size(cut: Cut, by_bytes: int, size: int | None, shards: int | None) -> int:
    """How many examples, or batches, a shard has."""
    if size is not None:
        return size
    total = cut.total
    if shards is not None:
        if total is None:
            raise OptionError("build(shards=...): the data does not say how long it is; give shard_size= instead")
        return max(1, -(-total // shards))
    wanted = by_bytes if total is None else -(-total // SHARDS)
    return max(1, min(by_bytes, -(-max(wanted, cut.least) // cut.least) * cut.least))


def refuse_other(
    folder: Path, known: Mapping[str, Any], asked: Mapping[str, Any], cut: Cut, size: int | None, shards: int | None
) -> None:
    """Raise if the folder has an index of something else; the message says what differs."""
    different = difference(known, asked)
    has = known["cut"]["size"]
    if size is not None and has != size:
        different = "; ".join(filter(None, (different, f"shard_size={size}, and it has {has}")))
    if shards is not None and cut.total is not None and has != max(1, -(-cut.total // shards)):
        there = -(-cut.total // has)
        different = "; ".join(filter(None, (different, f"shards={shards}, and it has {there}")))
    if different:
        raise OptionError(
            f"{folder}: an index of something else: {different}.\n  give the same arguments, or another path"
        )


def difference(known: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """What differs, in words; nothing if all is the same."""
    return "; ".join(_words(key, known.get(key), value) for key, value in asked.items() if known.get(key) != value)


def _words(key: str, known: Any, given: Any) -> str:
    if key == "parameters" and isinstance(known, dict):
        if others := sorted(known.keys() ^ given.keys()):
            return f"other parameters are chosen (params=, requires_grad): {', '.join(others[:3])}"
        names = [name for name in known if known[name] != given[name]]
        return f"the model's parameters differ ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})"
    if key in ("sketch", "data") and isinstance(known, dict):
        parts = [f"{name}: {known.get(name)!r}, now {given.get(name)!r}"
                 for name in {**known, **given} if known.get(name) != given.get(name)]  # fmt: skip
        what = "the projection or curvature" if key == "sketch" else "the data"
        return f"{what} differs ({', '.join(parts)})"
    if key == "texts" and isinstance(known, dict):
        return f"{' and '.join(f'{name}=' for name in known if known[name] != given.get(name))} differ"
    if key == "rest":
        return "what is not trained of the model (frozen parameters, buffers) differs"
    return f"the {key} differs ({known!r}, now {given!r})"


def _bytes(dtype: str) -> int:
    return torch.finfo(store.DTYPES[dtype]).bits // 8


def keep_curvature(folder: Path, curvature: Curvature | None, told: Mapping[str, Any]) -> None:
    """The curvature beside the rows, for queries, unless it is there whole. It is there before the plan that speaks of
    it."""
    if curvature is None:
        return
    try:
        curvature_at(folder, told)
    except OptionError:
        beside = folder / f".{store.CURVATURE}.part"
        with store.telling(folder / store.CURVATURE):
            curvature.save(beside)
            store.sync(beside)
            os.replace(beside, folder / store.CURVATURE)
            store.sync(folder)


def mark(known: Mapping[str, Any]) -> str:
    """What shards say they belong to: all that decides rows, whoever made the plan."""
    decides = {name: value for name, value in known.items() if name not in ("audit", "made with")}
    return content(json.dumps(decides, sort_keys=True))


def from_manifest(folder: Path) -> dict[str, Any] | None:
    """The plan that an index was built by; None if there is no manifest."""
    known = store.read_json(folder, store.MANIFEST)
    return known and {name: value for name, value in known.items() if name not in ("shards", "rows", "examples")}
