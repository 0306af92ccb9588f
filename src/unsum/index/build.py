"""`build`: the projected gradients of a data set, shard by shard, on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unsum.check import LossFunction
from unsum.choice import exactly
from unsum.curvature import Curvature, load
from unsum.errors import OptionError, SamplesError, UnsupportedError
from unsum.examples import Examples, SamplesOfBatch, losses_of, refuse_not_finite, refuse_other_number, samples_of
from unsum.fingerprint import fingerprint
from unsum.gradients import gradients
from unsum.index import store
from unsum.index.sketch import Leading, Projected, Rows, Sketch
from unsum.nested import leaves
from unsum.progress import progress
from unsum.reducers import Norms

CURVATURE = "curvature.safetensors"
_SHARD = 1 << 26  # bytes, about, if nobody says how many batches


def build(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Any,
    path: str | os.PathLike[str],
    project: int = 16,
    seed: int = 0,
    curvature: Curvature | None = None,
    dtype: Literal["float16", "bfloat16", "float32"] = "float16",
    samples: SamplesOfBatch = None,
    tokens: bool = False,
    *,
    params: str | Sequence[str] | None = None,
    batch_size: int = 32,
    shard_batches: int | None = None,
    part: tuple[int, int] | None = None,
) -> None:
    """The gradient of every example of a data set, projected, in a folder. `unsum.index.open` reads it.

    A build that was interrupted, however that came, is continued by calling `build` again with the same arguments, and
    gives the same bytes. Shards that were damaged since are built again, alone.

    Args:
        model: Any module, most often in eval mode.
        loss_fn: `loss_fn(model, batch)` returns one loss for each sample, (n,).
        data: A DataLoader (not shuffled) or another iterable of batches that can be read again, or a Dataset or a list
            of examples.
        path: The folder; it is made.
        project: k: each parameter is mapped to k² numbers (see `unsum.Project`).
        seed: Of the random projections.
        curvature: What `unsum.curvature.fit` gives: instead of random projections, the k² coordinates of each block's
            eigenbasis with the largest eigenvalues are kept, and queries may ask for influence.
        dtype: What numbers are stored in; each row has a power of two of its own beside them.
        samples: Where the samples are, as in `unsum.gradients`, or a function of the batch (packed documents).
        tokens: Rows for every token are not built yet: True is refused. `unsum.influence(tokens=True)` scores tokens.
        params: A glob that chooses parameters by name, or a list of globs; None: those of the curvature, or all.
        batch_size: Of examples that are taken together, where `data` gives examples.
        shard_batches: Batches in a shard; None: about 64 MB.
        part: (i, n): only every n-th shard, from the i-th on: for n processes or machines that share the folder. Call
            `build` without it when all are done; it finds them there.

    Examples:
        >>> import tempfile, unsum
        >>> model, folder = nn.Linear(3, 2), tempfile.mkdtemp()
        >>> examples = [(torch.randn(3), torch.tensor(k % 2)) for k in range(10)]
        >>> loss = lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1], reduction="none")
        >>> build(model, loss, examples, f"{folder}/index", project=2)
        >>> unsum.index.open(f"{folder}/index")
        index of 10 rows, K = 6 (float16): i.query(model, loss_fn, batch), i.rows(0, 10), i.info
    """
    if tokens:
        raise UnsupportedError(
            "build(tokens=True): rows for every token are not built yet; unsum.influence scores tokens"
        )
    _check(loss_fn, project, seed, curvature, dtype, shard_batches, part)
    examples = Examples(data, batch_size=batch_size, what="build")
    if examples.is_once or examples.is_shuffled:
        raise OptionError("build: the data must come in the same order again: no iterator, no shuffle=True")
    maker = Maker(model, loss_fn, samples, sketch_of(model, project, seed, curvature, params), params, curvature)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with store.locked(folder, "build" if part is None else f"part-{part[0]}-of-{part[1]}"):
        if part is None:
            store.sweep(folder)
        plan = _planned(folder, maker, examples, dtype, shard_batches, curvature)
        _fill(folder, plan, maker, examples, part)


def _check(loss_fn: Any, project: Any, seed: Any, curvature: Any, dtype: Any, shard_batches: Any, part: Any) -> None:
    if not callable(loss_fn) or isinstance(loss_fn, nn.Module):
        raise OptionError("build needs loss_fn(model, batch), which returns one loss for each sample, (n,)")
    for name, value, least in (("project", project, 1), ("seed", seed, 0), ("shard_batches", shard_batches, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise OptionError(f"{name}={value!r}: a whole number, {least} or more")
    if curvature is not None and not isinstance(curvature, Curvature):
        raise OptionError(f"curvature={curvature!r}: what unsum.curvature.fit gives, or None")
    if dtype not in store.DTYPES:
        raise OptionError(f"dtype={dtype!r}: choose 'float16', 'bfloat16' or 'float32'")
    if part is not None:
        is_pair = isinstance(part, tuple) and len(part) == 2 and all(type(each) is int for each in part)
        if not is_pair or not 0 <= part[0] < part[1]:
            raise OptionError(f"part={part!r}: (i, n) with 0 ≤ i < n, the i-th of n processes")


def sketch_of(
    model: nn.Module, k: int, seed: int, curvature: Curvature | None, params: str | Sequence[str] | None
) -> Sketch:
    """How the gradients of a model become rows."""
    if curvature is not None:
        curvature.refuse_changed(parameters_of(model, [exactly(name) for name in curvature.parameters]))
        return Leading(curvature, k)
    chosen = parameters_of(model, "*" if params is None else params)
    return Projected({name: tuple(p.shape) for name, p in chosen.items()}, k, seed)


def parameters_of(model: nn.Module, params: str | Sequence[str]) -> dict[str, Tensor]:
    """The parameters that are chosen, by their first names."""
    with gradients(model, Norms(), params=params, grad=False) as chosen:
        found: dict[str, Tensor] = {name: chosen.parameters[name] for name in chosen}
    if not found:
        raise OptionError("no parameters are trained (requires_grad=False, or params= chooses none)")
    return found


class Maker:
    """Makes rows of batches."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, samples: SamplesOfBatch, sketch: Sketch,
        params: str | Sequence[str] | None, curvature: Curvature | None,
    ) -> None:  # fmt: skip
        self._model, self._loss_fn, self._samples, self.sketch = model, loss_fn, samples, sketch
        self._params = "*" if params is None else params
        if curvature is not None:
            self._params = [exactly(name) for name in curvature.parameters]
        self.parameters = parameters_of(model, self._params)

    def rows(self, batch: Any, first: int, what: str) -> Tensor:
        """(n, K) of a batch whose first example has this number."""
        reducer: Rows = self.sketch.rows()
        samples = samples_of(self._samples, batch)
        with gradients(self._model, reducer, samples=samples, params=self._params, grad=False):
            losses = losses_of(self._loss_fn, self._model, batch, first, what, are_samples=samples is None)
            if not len(losses):
                return torch.zeros(0, self.sketch.width)
            losses.sum().backward()
        found = reducer.matrix()
        refuse_other_number(len(losses), len(found), what)
        refuse_not_finite(found.sum(1), first, what, "gradient")
        return found

    def audit(self, batch: Any) -> float:
        """How far the sum of the samples' gradients is from plain autograd's, on one batch, relative to it."""
        samples = samples_of(self._samples, batch)
        with gradients(self._model, samples=samples, params=self._params, grad=False) as g:
            losses = losses_of(self._loss_fn, self._model, batch, 0, "build", are_samples=samples is None)
            losses.sum().backward(retain_graph=True)
        wanted = torch.autograd.grad(losses.sum(), list(self.parameters.values()), allow_unused=True)
        off = size = 0.0
        for name, grad in zip(self.parameters, wanted, strict=True):
            if grad is not None:
                grad = grad.to_dense() if grad.layout != torch.strided else grad
                off += float((g[name].sum() + g[name].shared() - grad).double().norm()) ** 2
                size += float(grad.double().norm()) ** 2
        return float((off / size) ** 0.5) if size else 0.0


def _planned(
    folder: Path, maker: Maker, examples: Examples, dtype: str, shard_batches: int | None, curvature: Curvature | None
) -> dict[str, Any]:
    """What is to be built: written down before anything is, and compared when a build goes on."""
    known = store.read_json(folder, store.PLAN)
    wanted: dict[str, Any] = {
        "format": store.FORMAT, "version": store.VERSION, "dtype": dtype, "width": maker.sketch.width,
        "sketch": maker.sketch.told(), "parameters": {n: fingerprint(p) for n, p in maker.parameters.items()},
        "data": {"batches": examples.batches(), "begins": _begin(examples)},
    }  # fmt: skip
    if known is not None:
        different = [key for key, value in wanted.items() if known.get(key) != value]
        if shard_batches is not None and known["shard_batches"] != shard_batches:
            different.append("shard_batches")
        if different:
            raise OptionError(
                f"{folder}: an index of something else: {', '.join(_words(key) for key in different)}.\n"
                "  give the same arguments, or another path"
            )
        return known
    if any(folder.glob("shard-*")) or (folder / store.MANIFEST).exists():
        raise OptionError(f"{folder}: has shards and no {store.PLAN}; give another path")
    first = next(iter(examples), None)
    if first is None:
        raise SamplesError("build: the data is empty")
    rows = max(len(maker.rows(first, 0, "build")), 1)
    size = rows * maker.sketch.width * torch.finfo(store.DTYPES[dtype]).bits // 8
    wanted["shard_batches"] = shard_batches or max(1, _SHARD // max(size, 1))
    wanted["audit"] = maker.audit(first)
    if wanted["audit"] > 1e-2:
        raise UnsupportedError(
            f"build: the gradients of the samples do not add up to .grad (off by {wanted['audit']:.1e}).\n"
            "  unsum.check(model, loss_fn, batch) says where"
        )
    if curvature is not None:
        curvature.save(folder / CURVATURE)
    store.write_json(folder, store.PLAN, wanted)
    return wanted


def _begin(examples: Examples) -> str:
    """A number that the first batch has: another data set has another."""
    for batch in examples:
        return ", ".join(fingerprint(tensor) for _, tensor in leaves(batch))
    return ""


def _words(key: str) -> str:
    return {
        "parameters": "the model's parameters differ", "sketch": "the projection or curvature differs",
        "data": "the data differs", "dtype": "the dtype differs", "width": "the number of columns differs",
    }.get(key, f"{key} differs")  # fmt: skip


def _fill(
    folder: Path, plan: Mapping[str, Any], maker: Maker, examples: Examples, part: tuple[int, int] | None
) -> None:
    """Build the shards that are not there."""
    batches, each = examples.batches(), plan["shard_batches"]
    if part is not None and batches is None:
        raise OptionError("build(part=...): data that knows how many batches it has is needed (len())")
    total = None if batches is None else -(-batches // each)
    line: progress[Any] = progress(iter(()), "index") if total is None else progress(total, "index")
    shards: list[store.Shard] = []
    with line:
        number = 0
        while total is None or number < total:
            if part is not None and number % part[1] != part[0]:
                number += 1
                line.step()
                continue
            shard = store.shard_at(folder, number)
            if shard is None:
                first = sum(known.rows for known in shards) if part is None else 0
                made = _shard(maker, examples, number * each, each, first)
                if made is None:
                    break
                told = {"dtype": plan["dtype"], "number": number, "batches": [number * each, (number + 1) * each]}
                store.write_shard(folder, number, made, told)
                shard = store.Shard(folder, number)
            shards.append(shard)
            number += 1
            line.step()
    if part is None:
        _finish(folder, plan, shards)


def _shard(maker: Maker, examples: Examples, begin: int, count: int, first: int) -> Tensor | None:
    """The rows of some batches; None if there are none."""
    found: list[Tensor] = []
    for k, batch in enumerate(examples.skipping(begin)):
        if k == count:
            break
        found.append(maker.rows(batch, first + sum(map(len, found)), "build"))
    return torch.cat(found) if found else None


def _finish(folder: Path, plan: Mapping[str, Any], shards: Sequence[store.Shard]) -> None:
    """Everything is there: say so."""
    told = [{"file": s.path.name, "rows": s.rows, "crc": s.told["crc"]} for s in shards]
    manifest = {**plan, "shards": told, "rows": sum(s.rows for s in shards)}
    if not manifest["rows"]:
        raise SamplesError("build: the data is empty")
    store.write_json(folder, store.MANIFEST, manifest)


def sketch_from(folder: Path, model: nn.Module, told: Mapping[str, Any]) -> tuple[Sketch, Curvature | None]:
    """How queries of an index become rows."""
    if told["kind"] == "eigenbasis":
        curvature = load(folder / CURVATURE)
        return Leading(curvature, told["k"]), curvature
    chosen = parameters_of(model, [exactly(name) for name in told["columns"]])
    return Projected({name: tuple(p.shape) for name, p in chosen.items()}, told["k"], told["seed"]), None
