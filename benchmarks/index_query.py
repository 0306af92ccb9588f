"""What an index costs when it is large: building it, its memory, its size, and how fast queries go through it.

A query is held against a plain read of the same bytes: each shard's file is mapped into memory, and copied block by
block into a buffer (on a GPU: into its memory). All files are in the system's cache.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import unsum
from lds_problems import class_losses, mlp
from measuring import now, ratios, threads_of
from unsum.index.best import best_rows
from unsum.index.stored import Stored

DTYPES = ("float16", "bfloat16", "float32")
BLOCK = 1 << 20  # bytes that a plain read copies at a time: they stay in the processor's cache
SIZES = (64, 64, 64, 64, 64, 64, 64, 10)  # of the model's layers
LARGE, BATCH = 100_000, 100


def task(examples: int, device: str) -> tuple[nn.Module, Callable[..., Tensor], TensorDataset]:
    torch.manual_seed(0)
    model = mlp(*SIZES).to(device)
    data = TensorDataset(torch.randn(examples, SIZES[0]), torch.randint(SIZES[-1], (examples,)))

    def losses(model: nn.Module, batch: Any) -> Tensor:
        return class_losses(model, tuple(part.to(device) for part in batch))

    return model, losses, data


# ---- building -------------------------------------------------------------------------------------------------------


def megabytes() -> float:
    """Of this process's own memory; files that are mapped do not count."""
    lines = Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else []
    return round(next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), float("nan")), 1)


def built(folder: Path, examples: int, dtype: str, device: str, threads: int | None) -> dict[str, Any]:
    """Build an index; what it took."""
    model, losses, data = task(examples, device)
    seen, held = [0], {}

    def collate(some: list[Any]) -> Any:
        seen[0] += len(some)
        held[seen[0]] = megabytes()
        return default_collate(some)

    with threads_of(threads):
        begin = time.perf_counter()
        unsum.index.build(model, losses, data, folder, dtype=dtype, batch_size=BATCH, collate=collate)
        took = time.perf_counter() - begin
    i = unsum.index.open(folder)
    shares = {share: next(mb for count, mb in held.items() if count >= share * seen[0]) for share in (0.1, 0.5, 1.0)}
    files = sum(path.stat().st_size for path in i.files())
    return {
        "examples": examples, "dtype": dtype, "width": i.info["width"], "shards": len(i.info["shards"]),
        "threads": threads, "batch": BATCH, "seconds": round(took, 2), "examples_per_second": round(examples / took, 1),
        "megabytes": {f"{share:.0%}": mb for share, mb in shares.items()}, "most_megabytes": max(held.values()),
        "bytes_per_example": round(files / examples, 1), "bytes": files,
    }  # fmt: skip


# ---- asking ---------------------------------------------------------------------------------------------------------


def plain_read(folder: Path, device: str, *, keep: bool) -> Callable[[], int]:
    """Copies all shards into a buffer; how many bytes. `keep`: the files stay mapped from one read to the next."""
    paths = [folder / shard["file"] for shard in unsum.index.open(folder).info["shards"]]

    def mapped() -> list[Tensor]:
        return [torch.from_numpy(np.memmap(path, np.uint8, "c")) for path in paths]

    kept = mapped() if keep else None
    size = BLOCK if device == "cpu" else 32 * BLOCK
    buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def read() -> int:
        total = 0
        for part in kept or mapped():
            for begin in range(0, len(part), size):
                some = part[begin : begin + size]
                buffer[: len(some)].copy_(some)
            total += len(part)
        return total

    return read


def scanned(folder: Path, queries: int, device: str) -> Callable[[], Any]:
    """The scan alone: what `i.query` does between the queries' own gradients and the table of hits."""
    stored = Stored(folder, unsum.index.open(folder).info)
    asked = torch.randn(queries, stored.info["width"], dtype=torch.float64, device=device)
    return lambda: best_rows(stored.shards, stored.starts, asked, 10)


def asked(folder: Path, examples: int, queries: int, device: str) -> Callable[[], Any]:
    model, losses, data = task(examples, device)
    i, batch = unsum.index.open(folder), data[:queries]
    return lambda: i.query(model, losses, batch, k=10)


def bandwidth(folder: Path, examples: int, device: str, threads: int | None, seconds: float) -> dict[str, Any]:
    """GB/s of plain reads, of scans and of whole queries, interleaved, and ratios of the reads' time to theirs."""
    ways = {
        "plain read": plain_read(folder, device, keep=False),
        "plain read, again": plain_read(folder, device, keep=False),
        "plain read, mapped before": plain_read(folder, device, keep=True),
    }
    for queries in (1, 8):
        name = f"{queries} quer{'y' if queries == 1 else 'ies'}"
        ways |= {f"scan, {name}": scanned(folder, queries, device), name: asked(folder, examples, queries, device)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    with threads_of(threads):
        size = ways["plain read"]()
        for way in ways.values():
            way()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or len(times["plain read"]) < 3:
            for name in random.sample(list(ways), len(ways)):
                now(device)
                begin = time.perf_counter()
                ways[name]()
                now(device)
                times[name].append(time.perf_counter() - begin)
    rows = []
    for name, each in times.items():
        middle = statistics.median(each)
        speed = {"seconds": round(middle, 5), "gb_per_second": round(size / middle / 1e9, 3)}
        rows.append({"way": name, **speed, "of_plain": ratios(times, "plain read", name)})
    return {"threads": threads, "bytes": size, "repetitions": len(times["plain read"]), "rows": rows}


def nearest(folder: Path, examples: int, device: str) -> bool:
    """Whether a query finds the rows that have the highest inner products with its own, by plain arithmetic."""
    model, losses, data = task(examples, device)
    i = unsum.index.open(folder)
    numbers = torch.arange(0, len(i), max(1, len(i) // 4))[:4]
    hits = i.query(model, losses, data[numbers], k=3)
    rows = i.rows(0, len(i))
    scores = rows[numbers] @ rows.T  # queries are examples of the index: their rows are in it
    return bool(torch.isclose(hits.scores.float(), scores.gather(1, hits.ids), rtol=0.02).all()) and bool(
        torch.isclose(hits.scores.float(), scores.topk(3).values, rtol=0.02).all()
    )


def measure(device: str, seconds: float, *, examples: int = LARGE, threads: tuple[int, ...] = (1, 2)) -> Iterator[Any]:
    """What building each dtype took, and how fast it is asked; one dtype after the other."""
    counts: tuple[int | None, ...] = threads if device == "cpu" else (None,)
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path) / "index"
            found = built(folder, examples, dtype, device, counts[-1])
            found["nearest"] = nearest(folder, examples, device)
            found["asked"] = [bandwidth(folder, examples, device, count, seconds) for count in counts]
        yield found
