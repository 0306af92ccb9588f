"""What building an index costs: the rows of a GPT, over plain training steps in the same run, beside bergson.

A plain step is the forward and backward of the same losses, with `.grad` of all parameters. One repetition goes through
a few batches in every way, in random order: `rows` projects gradients and drops them, `written` makes a shard of them
on disk (journal, checksums, fsync). Shards here are smaller than those that `build` chooses, so waits for the disk
count for more than they do in practice.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import index_bergson
import unsum
from measuring import now, ratios, threads_of
from models import GPT
from peers import reason
from unsum.factors.factors import projection, sides
from unsum.index.builder import Builder
from unsum.index.data import cut
from unsum.index.maker import Maker, sketch_of
from unsum.index.ranks import Ranks

PROJECT = 16
LINEAR = ("*.attn.*.weight", "*.mlp.*.weight")  # the weights of linear layers in blocks: what bergson projects
WARM = 2  # turns before the clock runs
Step = Callable[[int], None]  # goes through some batches, those of a shard


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int
    dtype: str = "float32"

    def __str__(self) -> str:
        sizes = f"L={self.layers} d={self.width} T={self.length} B={self.batch}"
        return f"GPT-2 {sizes}, vocabulary {self.vocabulary}, {self.dtype}"


SHAPES = {
    "cpu": Shape(4, 256, 4, 1000, 128, 16),
    "cuda": Shape(12, 768, 12, 50257, 1024, 16, "bfloat16"),
}
TINY = Shape(1, 32, 2, 50, 8, 4)


def gpt(shape: Shape) -> tuple[nn.Module, str]:
    """A GPT-2 with random weights, and whose it is: transformers', or our own of that shape where that is absent."""
    torch.manual_seed(0)
    if importlib.util.find_spec("transformers") is None:
        sizes = {"depth": shape.layers, "heads": shape.heads, "vocabulary": shape.vocabulary, "tied": True}
        return GPT(width=shape.width, length=shape.length, **sizes), "benchmarks/models.py (transformers is absent)"
    logging.getLogger("transformers").setLevel(logging.ERROR)
    import transformers

    config = transformers.GPT2Config(
        n_layer=shape.layers, n_embd=shape.width, n_head=shape.heads, n_positions=shape.length,
        vocab_size=shape.vocabulary, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), f"transformers {transformers.__version__}"


def losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """(n,): the sum over a document's tokens, each foretold from those before it."""
    tokens = tokens.to(next(model.parameters()).device)
    found = model(tokens)
    logits = found.logits if hasattr(found, "logits") else found
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(
        len(tokens), -1
    ).sum(1)  # fmt: skip


class Documents(Dataset[Tensor]):
    """Documents of random tokens by their numbers, without end."""

    def __init__(self, shape: Shape, different: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(shape.vocabulary, (different, shape.length), generator=generator)

    def __len__(self) -> int:
        return 1_000_000_000

    def __getitem__(self, number: int) -> Tensor:
        return self._tokens[number % len(self._tokens)]

    def batch(self, size: int, number: int) -> Tensor:
        return torch.stack([self[k] for k in range(number * size, (number + 1) * size)])


# ---- ways -----------------------------------------------------------------------------------------------------------


@dataclass
class Task:
    """A model, its data, and how many batches a way goes through before it is another's turn."""

    model: nn.Module
    documents: Documents
    shape: Shape
    batches: int

    def each(self, turn: int) -> Iterator[Tensor]:
        for k in range(turn * self.batches, (turn + 1) * self.batches):
            yield self.documents.batch(self.shape.batch, k)

    @cached_property
    def curvature(self) -> Any:
        """K-FAC of the weights in blocks: that of embeddings would have a side as long as the vocabulary."""
        batches = [self.documents.batch(self.shape.batch, k) for k in range(2)]
        loader: DataLoader[Tensor] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
        return unsum.curvature.fit(self.model, losses, loader, kind="kfac", params=LINEAR)

    def maker(self, *, curvature: bool = False, params: Any = None) -> Maker:
        own = self.curvature if curvature else None
        sketch, chosen = sketch_of(self.model, PROJECT, 0, 1, own, params, tokens=False)
        return Maker(self.model, losses, None, sketch, chosen)


def task_of(shape: Shape, device: str, batches: int) -> tuple[Task, str]:
    """A task, and whose model it has."""
    model, whose = gpt(shape)
    model = model.eval().to(device, getattr(torch, shape.dtype))
    return Task(model, Documents(shape, 64 * shape.batch), shape, batches), whose


def plain(task: Task, held: ExitStack) -> Step:
    def step(turn: int) -> None:
        for batch in task.each(turn):
            task.model.zero_grad(set_to_none=True)
            losses(task.model, batch).sum().backward()

    return step


def rows(**given: Any) -> Callable[[Task, ExitStack], Step]:
    def make(task: Task, held: ExitStack) -> Step:
        maker = task.maker(**given)

        def step(turn: int) -> None:
            for batch in task.each(turn):
                maker.rows(batch, "build")

        return step

    return make


def written(**given: Any) -> Callable[[Task, ExitStack], Step]:
    def make(task: Task, held: ExitStack) -> Step:
        maker = task.maker(**given)
        data = cut(
            task.documents, batch_size=task.shape.batch, batch_tokens=None, collate=None, length=None, what="build"
        )
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        curvature = task.curvature if given.get("curvature") else None
        builder = Builder(folder, maker, data, "float16", curvature, ranks=Ranks(alone=True))
        builder.prepare(task.batches * task.shape.batch, None)

        def step(turn: int) -> None:
            if not builder.make(turn, lambda examples, size: None):
                raise AssertionError("the data has no end")

        return step

    return make


def bergson(*, on_disk: bool) -> Callable[[Task, ExitStack], Step]:
    def make(task: Task, held: ExitStack) -> Step:
        one = index_bergson.collector(
            copy.deepcopy(task.model), PROJECT, task.shape.batch, held.enter_context(tempfile.TemporaryDirectory()),
            on_disk=on_disk,
        )  # fmt: skip

        def step(turn: int) -> None:
            for batch in task.each(turn):
                one(batch)

        return step

    return make


WAYS: dict[str, Callable[[Task, ExitStack], Step]] = {
    "plain": plain,
    "plain, again": plain,
    "rows": rows(),
    "rows, written": written(),
    "rows, curvature": rows(curvature=True),
    "rows, curvature, written": written(curvature=True),
    "rows of linear weights": rows(params=LINEAR),
    "rows of linear weights, written": written(params=LINEAR),
    "bergson, linear weights": bergson(on_disk=False),
    "bergson, linear weights, written": bergson(on_disk=True),
}


# ---- measuring ------------------------------------------------------------------------------------------------------


def agreement(task: Task, count: int = 2) -> float:
    """How far rows are from gradients of plain autograd, one document at a time, projected; relative."""
    batch = task.documents.batch(task.shape.batch, 0)
    maker = task.maker()
    found = maker.rows(batch, "build")[:count].double()
    wanted = []
    for n in range(count):
        grads = torch.autograd.grad(losses(task.model, batch[n : n + 1]).sum(), list(maker.parameters.values()))
        wanted.append(torch.cat([projected(name, grad) for name, grad in zip(maker.parameters, grads, strict=True)]))
    truth = torch.stack(wanted)
    return float((found - truth).norm() / truth.norm())


def projected(name: str, grad: Tensor) -> Tensor:
    needed = sides(grad.shape, PROJECT)
    if needed is None:
        return grad.flatten().double().cpu()
    left, right = (matrix.double().cpu() for matrix in projection(name, 0, *needed))
    matrix = left @ grad.double().cpu().view(needed[1], needed[2])
    return (matrix @ right if grad.dim() > 1 else matrix).flatten()


def measure(
    device: str, threads: int | None, seconds: float, *, batches: int, shape: Shape | None = None
) -> dict[str, Any]:
    """Every way to rows over plain steps; ratios are of the wall's clock, and of the processor's time beside it."""
    shape = shape or SHAPES[device]
    with threads_of(threads), ExitStack() as held:
        task, whose = task_of(shape, device, batches)
        ways, notes = made(task, held)
        times, processor = timed(ways, device, seconds)
        width = task.maker().sketch.width
        linear = task.maker(params=LINEAR).sketch.width if "rows of linear weights" in ways else None
        off = agreement(task)
    report: list[dict[str, Any]] = []
    for name in WAYS:
        if name not in ways:
            report.append({"way": name, "note": notes[name]})
            continue
        seconds_each = statistics.median(times[name]) / batches
        row = {"way": name, "ms": round(1e3 * seconds_each, 3), "to_plain": ratios(times, name, "plain")}
        row["tokens_per_second"] = round(shape.batch * shape.length / seconds_each, 1)
        if device == "cpu":
            row["processor"] = ratios(processor, name, "plain")
        report.append(row)
    tokens = {"length": shape.length, "batch": shape.batch}
    return {
        "shape": str(shape), "model": whose, "threads": threads if device == "cpu" else None, **tokens,
        "width": width, "width_linear": linear, "batches": batches, "repetitions": len(times["plain"]), "rows": report,
        "off": off, "parameters": sum(p.numel() for p in task.model.parameters()),
    }  # fmt: skip


def made(task: Task, held: ExitStack) -> tuple[dict[str, Step], dict[str, str]]:
    """The ways that can do a step, warmed by two turns; and of the others why not."""
    ways: dict[str, Step] = {}
    notes: dict[str, str] = {}
    for name, make in WAYS.items():
        try:
            ways[name] = make(task, held)
            for turn in range(WARM):
                ways[name](turn)
        except Exception as error:  # whatever a library raises is what the table says of it
            if name in ("plain", "rows", "rows, written"):
                raise
            ways.pop(name, None)
            absent = isinstance(error, ModuleNotFoundError)
            notes[name] = f"not installed ({error.name})" if absent else reason(error)  # type: ignore[attr-defined]
            print(f"{name}: {notes[name]}", flush=True)
    return ways, notes


def timed(ways: dict[str, Step], device: str, seconds: float) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """{way: seconds of each repetition}, by the clock on the wall and by the processor's."""
    wall: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    until, turn = time.perf_counter() + seconds, WARM - 1
    while time.perf_counter() < until or turn < WARM + 2:
        turn += 1
        for name in random.sample(list(ways), len(ways)):
            now(device)  # waits for the GPU
            begin, cpu = time.perf_counter(), time.process_time()
            ways[name](turn)
            now(device)
            wall[name].append(time.perf_counter() - begin)
            processor[name].append(time.process_time() - cpu)
    return wall, processor
