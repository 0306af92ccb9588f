"""What a batch of another shape costs: a step with norms over a plain step of the same shape.

    python benchmarks/shapes.py [--quick] [--json PATH] [--device cuda] [--threads N] [--only NAME] [--seconds S]

A plain step is forward, loss, backward and zero_grad; the other has the norms of all parameters beside that, and reads
them. Each fresh copy of a model goes through one loop: its first batch; a few batches of other lengths; then lengths
that it has never seen, all of them once ("new length"), and again in other orders ("seen once before", "seen twice",
"seen often": six times); then the usual length with numbers of samples that are new ("fewer samples").

Right before each step that is timed, the plain one runs at that shape three times, of which the last is timed, and once
right after: the ratio is to the mean of these two, and "plain, again" is the ratio of the second to the first. Shown
are the median and the quartiles over all lengths of all copies; --quick has one copy go through the whole loop, and
after --seconds no other does. On a GPU another copy of the model has had its first batches before, so that kernels are
compiled. Norms are compared with those of gradients that were computed one sample at a time: at the first batch, at a
new length, at one that has been seen often, and with fewer samples.
"""

from __future__ import annotations

import copy
import gc
import random
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unsum
from measuring import machine, now, options_of, parsed, ratios, write
from models import GPT

FIRST, NEW, ONCE, TWICE, OFTEN = "first batch", "new length", "seen once before", "seen twice", "seen often"
FEWER, AGAIN = "fewer samples", "plain, again"
OFTEN_IS = 6  # times before


@dataclass(frozen=True)
class Case:
    """A model and the shapes of its batches."""

    make: Callable[[], nn.Module]
    vocabulary: int
    batch: int
    usual: int  # length
    lengths: tuple[int, ...]  # which others there are
    new: int = 8  # how many of them are measured
    before: int = 4  # batches of other lengths that come first
    samples: int = 4  # compared with the truth


def transformers_gpt2(depth: int, width: int, heads: int, vocabulary: int, longest: int) -> nn.Module:
    """GPT-2 of `transformers`, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=depth, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=longest,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def gpt2_small(longest: int) -> nn.Module:
    return GPT(width=768, length=longest, depth=12, heads=12, vocabulary=50304)


CPU = {
    "GPT-2 of transformers, L=6 d=256 B=8 T=64…128": Case(
        lambda: transformers_gpt2(6, 256, 4, 4000, 128), 4000, 8, 96, tuple(range(64, 129))
    ),
}
CUDA = {
    "GPT-2 small shape B=16 T=768…1024": Case(lambda: gpt2_small(1024), 50304, 16, 1024, tuple(range(768, 1024, 8))),
    "launch-bound: GPT-2 small shape B=8 T=64…192": Case(
        lambda: gpt2_small(192), 50304, 8, 128, tuple(range(64, 193, 8))
    ),
}


# ---- steps ----------------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum")


def plain(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss_of(model, x, y).backward()
    model.zero_grad(set_to_none=True)


def with_norms(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with unsum.gradients(model, unsum.Norms()) as g:
        loss_of(model, x, y).backward()
    squares = g[unsum.Norms].sq_norms()
    model.zero_grad(set_to_none=True)
    return squares


def truth(model: nn.Module, x: Tensor, y: Tensor, count: int) -> Tensor:
    """Squared norms of the first samples' gradients, one at a time."""
    squares, parameters = [], list(model.parameters())
    for n in range(min(count, len(x))):
        grads = torch.autograd.grad(loss_of(model, x[n : n + 1], y[n : n + 1]), parameters)
        squares.append(sum(g.float().square().sum() for g in grads))
    return torch.stack(squares)


def checked(model: nn.Module, x: Tensor, y: Tensor, found: Tensor, count: int) -> str:
    loose = 0.05 if any(p.dtype == torch.bfloat16 for p in model.parameters()) else 1e-3
    squares = truth(model, x, y, count)
    off = float((found[: len(squares)].float() / squares - 1).abs().max())
    return f"off by {off:.0e}" if off < loose else f"WRONG norms, off by {off:.0e}"


# ---- measuring ------------------------------------------------------------------------------------------------------


class Loop:
    """One copy of a model, and the batches that it has seen. `times`: {row: [(plain, step, plain)]}."""

    def __init__(self, case: Case, model: nn.Module, device: str, times: dict[str, list[tuple[float, ...]]]) -> None:
        self.case, self.model, self.device, self.times = case, model, device, times
        self.checks: dict[str, str] = {}

    def batch(self, n: int, length: int) -> tuple[Tensor, Tensor]:
        x, y = torch.randint(self.case.vocabulary, (2, n, length), device=self.device)
        return x, y

    def timed(self, step: Callable[..., Any], x: Tensor, y: Tensor) -> tuple[float, Any]:
        start = now(self.device)
        made = step(self.model, x, y)
        return now(self.device) - start, made

    def measure(self, row: str, n: int, length: int) -> None:
        """One step with norms between plain ones of its shape."""
        x, y = self.batch(n, length)
        for _ in range(2):
            plain(self.model, x, y)
        with torch.autograd.set_multithreading_enabled(False):  # cuDNN prepares itself for a shape thread by thread,
            plain(self.model, x, y)  # and a backward in a block runs on the thread that called it
        gc.collect()
        gc.disable()
        before = self.timed(plain, x, y)[0]
        middle, found = self.timed(with_norms, x, y)
        after = self.timed(plain, x, y)[0]
        gc.enable()
        self.times.setdefault(row, []).append((before, middle, after))
        if row in (FIRST, NEW, FEWER, OFTEN) and row not in self.checks:
            self.checks[row] = checked(self.model, x, y, found, self.case.samples)

    def first(self) -> None:
        self.measure(FIRST, self.case.batch, self.case.usual)

    def rest(self) -> None:
        case, n, new = self.case, self.case.batch, self.case.new
        drawn = random.sample([t for t in case.lengths if t != case.usual], case.before + new)
        for length in (case.usual, *drawn[: case.before], case.usual):  # the structure is known by now
            with_norms(self.model, *self.batch(n, length))
        fresh = drawn[case.before :]
        rows = {0: NEW, 1: ONCE, 2: TWICE, OFTEN_IS: OFTEN}
        for seen in range(OFTEN_IS + 1):
            for length in random.sample(fresh, len(fresh)):
                if seen in rows:
                    self.measure(rows[seen], n, length)
                else:
                    with_norms(self.model, *self.batch(n, length))
        for fewer in range(n - 1, max(n - 1 - new, n // 4), -1):
            self.measure(FEWER, fewer, case.usual)


def run(
    name: str, case: Case, *, device: str, dtype: torch.dtype, quick: bool, seconds: float | None
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = case.make().to(device, dtype)
    if device == "cuda":  # kernels are compiled once in a process
        other = Loop(case, copy.deepcopy(model), device, {})
        for length in (case.usual, case.usual, case.usual, *case.lengths[:2]):
            with_norms(other.model, *other.batch(case.batch, length))
        del other
    times: dict[str, list[tuple[float, ...]]] = {}
    checks: dict[str, str] = {}
    start = time.perf_counter()
    for k in range(3):
        loop = Loop(case, copy.deepcopy(model), device, times)
        loop.first()
        enough = k and (quick or (seconds is not None and time.perf_counter() - start > seconds))
        if not enough:
            loop.rest()
        checks = loop.checks | checks
        del loop
        gc.collect()
    return {"model": name, "rows": [row_of(row, times[row], checks) for row in times] + [noise(times)]}


def row_of(row: str, each: list[tuple[float, ...]], checks: dict[str, str]) -> dict[str, Any]:
    columns = {"plain": [(a + b) / 2 for a, _, b in each], "norms": [middle for _, middle, _ in each]}
    return {"way": row, "ms": milliseconds(columns["norms"]), "plain_ms": milliseconds(columns["plain"]),
            "to_plain": ratios(columns, "norms", "plain"), "repetitions": len(each),
            "norms": checks.get(row, "-")}  # fmt: skip


def noise(times: dict[str, list[tuple[float, ...]]]) -> dict[str, Any]:
    pairs = [(a, b) for each in times.values() for a, _, b in each]
    columns = {"first": [a for a, _ in pairs], "second": [b for _, b in pairs]}
    return {"way": AGAIN, "ms": milliseconds(columns["second"]), "plain_ms": milliseconds(columns["first"]),
            "to_plain": ratios(columns, "second", "first"), "repetitions": len(pairs), "norms": "-"}  # fmt: skip


def milliseconds(values: list[float]) -> float:
    return round(1e3 * statistics.median(values), 2)


def table(result: dict[str, Any]) -> str:
    lines = [result["model"]]
    lines.append(
        f"  {'step':<20}{'plain, ms':>11}{'with norms':>12}{'to plain':>10}{'25 %':>9}{'75 %':>9}{'times':>7}  norms"
    )
    for row in result["rows"]:
        median, low, high = row["to_plain"].values()
        lines.append(
            f"  {row['way']:<20}{row['plain_ms']:>11.2f}{row['ms']:>12.2f}{median:>10.3f}{low:>9.3f}{high:>9.3f}"
            f"{row['repetitions']:>7}  {row['norms']}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", default="", help="models whose name contains this")
    options = parsed(parser)
    warnings.simplefilter("ignore")
    random.seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    cases = {k: v for k, v in (CUDA if options.device == "cuda" else CPU).items() if options.only in k}
    about = machine(options.device)
    print(", ".join(f"{key} {value}" for key, value in about.items()), f"threads {options.threads}", end="\n\n")
    report = {"machine": about, "device": options.device, "threads": options.threads, "models": []}
    for name, case in cases.items():
        measured = run(name, case, device=options.device, dtype=dtype, quick=options.quick, seconds=options.seconds)
        report["models"].append(measured)
        print(table(measured), end="\n\n", flush=True)
        write(options.json, report)  # after each: a limit of time loses nothing
        gc.collect()


if __name__ == "__main__":
    main()
