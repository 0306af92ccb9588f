"""Whether a plain step costs more after blocks were opened and closed than in a process that never opened one.

    python benchmarks/afterwards.py [--quick] [--json PATH]

For each way, two processes run the same plain step of the same tiny model by turns: one has never opened a block, in
the other blocks of that way were opened and closed (on this model, or on another: "elsewhere"). Both have imported
unsum. "none" is the same process twice, and shows what such a comparison can tell. Several pairs of processes; in each
pair the ratio is taken turn by turn, of the median step of each turn. The table has the median and the quartiles of all
turns, and the lowest and highest median of a pair.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import unsum
from measuring import machine, options_of, parsed, write

STEPS = 60  # in one turn


def made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(
        8, 16
    )


def plain(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(x).square().sum().backward()


def blocks(model: nn.Module, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What is done in the other process before the plain steps, by name."""

    def in_block(block: Any) -> None:
        with block:
            plain(model, x)

    return {
        "none": lambda: None,
        "gradients": lambda: in_block(unsum.gradients(model, unsum.Norms())),
        "gradients, engine='graph'": lambda: in_block(unsum.gradients(model, unsum.Norms(), engine="graph")),
        "capture": lambda: in_block(unsum.capture(model, (nn.Linear, "input"), (nn.Linear, "grad_output"))),
        "capture of weights": lambda: in_block(unsum.capture(model, "*.weight:grad")),
        "edit": lambda: in_block(unsum.edit(model, {"0:output": unsum.scale(0.5)})),
    }


def serve(way: str) -> None:
    """A process of a pair: prepares itself, then times one turn for every line that it is sent."""
    torch.set_num_threads(1)
    name, _, where = way.partition("/")
    model, x = made()
    other = made() if where == "elsewhere" else (model, x)
    if name:
        block = blocks(*other)[name]
        for _ in range(20):
            block()
    for _ in range(2 * STEPS):
        plain(model, x)
    for _ in sys.stdin:
        times = []
        for _ in range(STEPS):
            began = time.process_time()
            plain(model, x)
            times.append(time.process_time() - began)
        print(statistics.median(times), flush=True)


class Server:
    """A process that times turns when it is asked."""

    def __init__(self, way: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", way], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def turn(self) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compared(way: str, *, pairs: int, turns: int) -> dict[str, Any]:
    """The ratio of plain steps after blocks of this way to plain steps before any, and the time of the latter."""
    ratios, medians, before = [], [], []
    for pair in range(pairs):
        servers = Server("/"), Server(way)
        of_pair = []
        for turn in range(turns):
            order = (0, 1) if (turn + pair) % 2 else (1, 0)
            times = {which: servers[which].turn() for which in order}
            of_pair.append(times[1] / times[0])
            before.append(times[0])
        for server in servers:
            server.close()
        ratios += of_pair
        medians.append(statistics.median(of_pair))
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "median": round(middle, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "pairs": [round(each, 4) for each in sorted(medians)],
        "plain_us": round(statistics.median(before) * 1e6, 1),
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", metavar="NAME", help="ways whose name contains this")
    options = parsed(parser)
    pairs, turns = (3, 20) if options.quick else (6, 30)
    report: dict[str, Any] = {"machine": machine("cpu"), "pairs": pairs, "turns": turns, "ways": {}}
    print(f"{'a plain step after':<40}{'over before':>12}{'quartiles':>18}{'pairs from':>12}{'to':>8}{'plain':>10}")
    for name in blocks(*made()):
        for way in [f"{name}/", f"{name}/elsewhere"] if name == "gradients" else [f"{name}/"]:
            if options.only and options.only not in way:
                continue
            row = report["ways"][way.strip("/")] = compared(way, pairs=pairs, turns=turns)
            print(
                f"{way.strip('/'):<40}{row['median']:>12.3f}{row['low']:>10.3f}{row['high']:>8.3f}"
                f"{row['pairs'][0]:>12.3f}{row['pairs'][-1]:>8.3f}{row['plain_us']:>7.0f} µs",
                flush=True,
            )
            write(options.json, report)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main()
