"""One table: what each quantity costs on each kind of model, beside what was aimed for.

    python benchmarks/summary.py [--device cuda] [--part eager] [--only NAME] [--quick] [--json PATH]

The models and ways are those of quantities.py (eager), compiled.py (compiled, also with CUDA graphs) and norms.py
(peers), each run by its own script's code in this process: medians and quartiles of ratios to the plain step of the
same repetition, with the plain step against itself as the noise. `--part` and `--only` run some of the models, and keep
the rows of the others that the file has, each with the day it was measured on.
"""

from __future__ import annotations

import gc
import json
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

import compiled
import norms
import quantities
from measuring import machine, options_of, parsed, write
from peers import reason


@dataclass(frozen=True)
class Row:
    """One line of the table. Ratios are to the plain step that `over` names; peak memory is to the same."""

    part: str
    model: str
    what: str
    over: str
    median: float
    low: float
    high: float
    memory: float | None
    aim: float | None = None  # the ratio that was aimed for
    date: str = ""


SMALL, LARGE, SHORT = ("GPT-2 small shape B=16 T=1024", "GPT L=8 d=2048 B=8 T=2048",
                       "launch-bound: GPT-2 small shape B=8 T=128")  # fmt: skip
MIDDLE = "GPT-2 small shape B=8 T=512"
RESNET, EXPERTS = (
    "ResNet-50 224×224 B=64, channels last, eval",
    "experts: Mixtral-like, 8 of d=1024, 4 layers, B=8 T=512",
)
LOOP, LSTM = "the same experts in a loop", "LSTM language model, d=1024, B=32 T=128"

Aims = dict[str, float | None]
EAGER: dict[str, dict[str, Aims]] = {  # device, model, {way: aim}
    "cuda": {
        SMALL: {"norms": 1.05, "clipped": 1.12, "projected": 0.90, "tokens": None, "captured": None},
        LARGE: {"norms": 1.05, "clipped": 1.12, "projected": 0.80, "tokens": None, "captured": None},
        SHORT: {
            "norms": 1.30,
            "clipped": 1.6,
            "projected": None,
            "tokens": None,
            "captured": None,
            "captured, hooks by hand": None,
        },
        MIDDLE: {"norms": None, "clipped": None},
        RESNET: {"norms": 1.25, "clipped": None},
        EXPERTS: {"norms": 1.25},
        LOOP: {"norms": 1.25},
        LSTM: {"norms": 1.6, "clipped": None},
    },
    "cpu": {
        "GPT L=4 d=256 T=128 B=16": {"norms": None, "clipped": None},
        "ResNet-50 64×64 B=4, eval": {"norms": None, "clipped": None},
        "experts: Mixtral-like, 8 of d=128, 2 layers, B=4 T=64": {"norms": None},
        "the same experts in a loop": {"norms": None},
        "LSTM language model, d=256, B=16 T=64": {"norms": 2.0, "clipped": None},
        "GRU language model, d=256, B=16 T=64": {"norms": 2.0, "clipped": None},
        "RNN language model, d=256, B=16 T=64": {"norms": 2.0, "clipped": None},
    },
}
COMPILED: dict[str, dict[tuple[str, str | None], Aims]] = {  # device, (model, mode), {way: aim}
    "cuda": {
        (SMALL, None): {"norms, compiled": 1.08, "clipped sum, compiled": None},
        (LARGE, None): {"norms, compiled": 1.08, "clipped sum, compiled": None},
        (SHORT, None): {"norms, compiled": 1.20, "clipped sum, compiled": None},
        (SHORT, "reduce-overhead"): {"norms, compiled": 1.30, "clipped sum, compiled": None},
    },
    "cpu": {("GPT L=2 d=128 T=64 B=8", None): {"norms, compiled": None, "clipped sum, compiled": None}},
}
NOISE = {"plain, again", "plain, compiled, again"}


def eager(name: str, aims: Aims, device: str, seconds: float) -> Iterator[Row]:
    found = quantities.run(name, quantities.MODELS[device][name][0], tuple(aims), device=device, seconds=seconds)
    yield from rows("eager", name, found["rows"], "to_plain", "plain", aims)


def traced(name: str, mode: str | None, aims: Aims, device: str, seconds: float) -> Iterator[Row]:
    chosen = lambda way: way.startswith(("plain", "norms")) or way in aims
    make = compiled.MODELS[device][name]
    found = compiled.run(name, make, device=device, seconds=seconds, chosen=chosen, mode=mode)
    yield from rows("compiled", name, found["rows"], "to_compiled", _over(mode), aims)


def peers(name: str, device: str, seconds: float) -> Iterator[Row]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    found = norms.run(name, _with_peers(device)[name], device=device, dtype=dtype, seconds=seconds)
    others = [row for row in found["rows"] if "to_plain" in row and not row["way"].startswith("unsum, first")]
    yield from rows("peers", name, others, "to_plain", "plain", dict.fromkeys(row["way"] for row in others))


def _over(mode: str | None) -> str:
    return "plain, compiled" if mode is None else f"plain, {mode}"


def _with_peers(device: str) -> dict[str, Any]:
    return dict(list((norms.CUDA if device == "cuda" else norms.CPU).items())[:2])


Section = tuple[str, str, str]  # the part, the model, and what its ratios are to


def sections(device: str) -> dict[Section, Callable[[float], Iterator[Row]]]:
    """The table's, in its order, and what measures each."""
    found: dict[Section, Callable[[float], Iterator[Row]]] = {}
    for name, aims in EAGER[device].items():
        found["eager", name, "plain"] = partial(eager, name, aims, device)
    for (name, mode), aims in COMPILED[device].items():
        found["compiled", name, _over(mode)] = partial(traced, name, mode, aims, device)
    for name in _with_peers(device):
        found["peers", name, "plain"] = partial(peers, name, device)
    return found


def rows(
    part: str, model: str, found: list[dict[str, Any]], ratio: str, over: str, aims: dict[str, float | None]
) -> Iterator[Row]:
    for row in found:
        if row["way"] in aims or row["way"] in NOISE:
            yield Row(
                part, model, row["way"], over, **row[ratio], memory=row.get("memory"), aim=aims.get(row["way"])
            )  # fmt: skip


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--part", choices=["eager", "compiled", "peers"], help="only this one")
    parser.add_argument("--only", default="", help="models whose name, or what its ratios are to, contains this")
    options = parsed(parser)
    warnings.simplefilter("ignore")
    random.seed(0)
    about, known = machine(options.device), sections(options.device)
    kept: dict[Section, list[dict[str, Any]]] = {}
    if options.json and options.json.exists() and (options.part or options.only):
        before = json.loads(options.json.read_text())
        for row in before["rows"]:
            own = {"date": row.get("date") or before["machine"]["date"]}
            kept.setdefault((row["part"], row["model"], row["over"]), []).append(row | own)
    for section, run in known.items():
        part, name, over = section
        if options.part not in (None, part) or not (options.only in name or options.only in over):
            continue
        try:
            found = list(run(options.seconds or (3 if options.quick else 15)))
        except (ImportError, torch.OutOfMemoryError) as error:
            print(f"{part}, {name}: {reason(error)}", flush=True)
            continue
        kept[section] = [asdict(row) | {"date": about["date"]} for row in found]
        for row in found:
            memory = "" if row.memory is None else f", memory {row.memory:.3f}"
            print(f"{row.model} | {row.what}: {row.median:.3f} ({row.low:.3f}, {row.high:.3f}){memory}", flush=True)
        order = [*known, *(each for each in kept if each not in known)]
        write(options.json, {"machine": about, "device": options.device,
                             "rows": [row for each in order for row in kept.get(each, ())]})  # fmt: skip
        gc.unfreeze()
        gc.collect()


if __name__ == "__main__":
    main()
