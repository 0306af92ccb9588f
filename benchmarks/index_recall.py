"""How many of the examples that whole gradients find are found by an index, over how much of a gradient it keeps.

The truth is `unsum.influence` without a curvature: the ten examples with the highest scores for each query. Shown is
the mean share of them, over queries and seeds of the projection, that is among the index's first 10, among its first
100, and among the first 10 after `rerank=100`.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import TensorDataset

import unsum
from lds import full_model, scored
from lds_problems import Problem, digits, documents, text

KEPT, SKETCHES, SCORES = (2, 4, 8, 16, 32), (1, 4), ("dot", "cosine")
TOP, WIDE = 10, 100
DOCUMENTS = 2000  # lds.py has 400, of which a hundred would be a quarter


def problems(quick: bool) -> Iterator[tuple[str, Any]]:
    """(name, how the problem is made)."""
    yield "digits", lambda: digits(quick)
    made = (lambda: text(quick)) if quick else lambda: replace(text(quick), train=documents(DOCUMENTS, 1))
    yield "documents", made


def shared(found: Tensor, wanted: Tensor) -> float:
    """The mean share of each row of `wanted` that is in the same row of `found`."""
    return float((wanted[:, :, None] == found[:, None, :]).any(2).double().mean())


def recall(
    problem: Problem, model: nn.Module, truth: dict[str, Tensor], project: int, sketches: int, seeds: int
) -> list[dict[str, Any]]:
    """A row for each score: recall of the truth's first ten."""
    found: dict[str, list[tuple[float, float, float]]] = {score: [] for score in truth}
    train, width, bars = TensorDataset(*problem.train), 0, []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"project": project, "seed": seed, "sketches": sketches, "batch_size": 250}
            unsum.index.build(model, problem.losses, train, Path(folder) / "index", **options)
            i = unsum.index.open(Path(folder) / "index", train)
            width = i.info["width"]
            for score, exact in truth.items():
                best = exact.topk(TOP).indices
                hits = i.query(model, problem.losses, problem.query, k=WIDE, score=score)
                again = i.query(model, problem.losses, problem.query, k=TOP, score=score, rerank=WIDE)
                shares = shared(hits.ids[:, :TOP], best), shared(hits.ids, best), shared(again.ids, best)
                found[score].append(shares)
                if hits.errors is not None and score == "dot":
                    off = (hits.scores - exact.gather(1, hits.ids)).abs()
                    bars.append(float((off <= 2 * hits.errors).double().mean()))
    rows = []
    for score, shares in found.items():
        top, wide, reranked = (round(statistics.mean(each), 4) for each in zip(*shares, strict=True))
        row = {"project": project, "sketches": sketches, "score": score, "width": width, "bytes": 2 * width + 4}
        row |= {"top10": top, "top100": wide, "reranked": reranked}
        rows.append(row | ({"in_two_errors": round(statistics.mean(bars), 4)} if bars and score == "dot" else {}))
    return rows


def measure(
    quick: bool, *, kept: tuple[int, ...] = KEPT, sketches: tuple[int, ...] = SKETCHES, only: str | None = None
) -> Iterator[dict[str, Any]]:
    """One problem after the other; one whose data is absent is told with the reason."""
    for name, make in problems(quick):
        if only not in (None, name):
            continue
        try:
            problem = make()
        except ImportError as error:
            yield {"problem": name, "note": f"not measured: {error}"}
            continue
        attention = sdpa_kernel(SDPBackend.MATH) if name == "documents" else contextlib.nullcontext()
        with attention:  # the one that trains many models at once
            model = full_model(problem)
        truth = {score: scored(problem, model, score=score) for score in SCORES}
        rows = []
        for many in sketches:
            for project in kept:
                rows += recall(problem, model, truth, project, many, seeds=1 if quick else 3)
        yield {
            "problem": problem.name, "about": problem.about, "examples": len(problem.train[0]),
            "queries": len(problem.query[0]), "seeds": 1 if quick else 3, "rows": rows,
            "parameters": sum(p.numel() for p in model.parameters()), "by_chance": TOP / len(problem.train[0]),
        }  # fmt: skip
