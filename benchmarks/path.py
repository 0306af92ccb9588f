"""The path of a step: which files of unsum a step with a block visits, and how often it goes from one to another.

    python benchmarks/path.py [--list]

For each quantity a small GPT makes some steps, until everything is learnt; in the next one every call of a function of
unsum's is noted (Python's own profiler hook). A file counts once, however many functions of it are called; a change of
file is a call, or a return, that leads from one file of unsum's to another. Calls that torch or Python makes in between
do not count. `--list` prints the files in the order in which the step with norms first comes to them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unsum
from models import GPT

HOME = Path(unsum.__file__).parent


def visited(step: Callable[[], Any]) -> list[str]:
    """The files of unsum's in which the step is, one after the other, each as often as it comes there from another."""
    path: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "return":
            frame = frame.f_back
        elif event != "call":
            return
        while frame is not None and not frame.f_code.co_filename.startswith(str(HOME)):
            frame = frame.f_back
        if frame is not None:
            name = str(Path(frame.f_code.co_filename).relative_to(HOME))
            if not path or path[-1] != name:
                path.append(name)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return path


def steps(model: nn.Module, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    def block(*reducers: Any, **options: Any) -> None:
        with unsum.gradients(model, *reducers, **options):
            model(x).square().sum().backward()

    def captured() -> None:
        with unsum.capture(model, (nn.Linear, "input"), (nn.Linear, "grad_output"), keep="reference"):
            model(x).square().sum().backward()

    return {
        "norms": lambda: block(unsum.Norms()),
        "kept": lambda: block(),
        "tokens": lambda: block(unsum.TokenNorms()),
        "projected": lambda: block(unsum.Project(k=4), grad=False),
        "clipped": lambda: block(unsum.WeightedSum(lambda norms: (1 / norms).clamp(max=1))),
        "captured": captured,
    }


def main() -> None:
    torch.manual_seed(0)
    model = GPT(width=64, depth=2, heads=2, vocabulary=100, length=16)
    x = torch.randint(100, (4, 16))
    print(f"{'a step with':<14}{'files':>6}{'changes of file':>17}")
    for name, step in steps(model, x).items():
        for _ in range(6):
            step()
        path = visited(step)
        print(f"{name:<14}{len(set(path)):>6}{len(path) - 1:>17}")
        if name == "norms" and "--list" in sys.argv:
            print("\n".join(f"    {file}" for file in dict.fromkeys(path)))


if __name__ == "__main__":
    main()
