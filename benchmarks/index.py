"""Gradients on disk: what building an index costs, how large it is, how fast and how well it answers.

    python benchmarks/index.py --json benchmarks/results/index_cpu.json [--quick] [--only build]
    python benchmarks/index.py --device cuda --json benchmarks/results/index_cuda.json
    python benchmarks/index.py --tables          # docs/gradient_index.md again, from what lies in results/

Parts: `large` (100,000 examples: time, memory, bytes, and queries over plain reads of the same bytes), `recall` (of the
exact first ten, over how much is kept; scikit-learn for digits), `build` (over plain steps, beside bergson where it is
installed). A table of cost up to 10¹² tokens is computed from these. Results are written after each part.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import index_build
import index_query
import index_recall
from index_tables import PARTS, constants, costs, tables
from measuring import fill, machine, options_of, parsed, write

RESULTS = Path(__file__).resolve().parent / "results"


def results() -> list[dict[str, Any]]:
    """What lies in results/."""
    paths = [RESULTS / f"index_{device}.json" for device in ("cpu", "cuda")]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def fill_pages() -> None:
    for part in PARTS:
        fill(f"benchmarks/index.py {part}", tables(results(), part))


def run(options: Any) -> dict[str, Any]:
    device, quick = options.device, options.quick
    report: dict[str, Any] = {
        "machine": machine(device), "device": device, "quick": quick, "build": [], "large": [], "recall": [],
    }  # fmt: skip
    threads = tuple(n for n in (1, 2) if n <= (os.cpu_count() or 1))
    wanted = [options.only] if options.only else ["large", "recall", "build"]
    if "large" in wanted:  # first: what other parts leave in memory is not its own
        examples = 5_000 if quick else index_query.LARGE
        seconds = options.seconds or (2.0 if quick else 30.0)
        for found in index_query.measure(device, seconds, examples=examples, threads=threads):
            keep(report, "large", found, options.json)
    if "recall" in wanted and device == "cpu":
        some = {"kept": (2, 8), "sketches": (1, 4)} if quick else {}
        for found in index_recall.measure(quick, **some):
            keep(report, "recall", found, options.json)
    if "build" in wanted:
        seconds, batches = options.seconds or (5.0 if quick else 240.0), 1 if quick else 4
        for count in threads if device == "cpu" else (None,):
            keep(report, "build", index_build.measure(device, count, seconds, batches=batches), options.json)
    known = constants(report)
    if known is not None:
        report["computed"] = {"from": known, "costs": costs(known)}
        write(options.json, report)
    return report


def keep(report: dict[str, Any], part: str, found: dict[str, Any], path: Path | None) -> None:
    report[part].append(found)
    write(path, report)
    told = {key: value for key, value in found.items() if not isinstance(value, list | dict)}
    print(f"{part}: " + ", ".join(f"{key} {value}" for key, value in told.items()), flush=True)


def main() -> None:
    parser = options_of(__doc__ or "")
    parser.add_argument("--only", choices=["build", "large", "recall"], help="this part alone")
    parser.add_argument(
        "--tables", action="store_true", help="fill docs/gradient_index.md from results/, and measure nothing"
    )
    options = parsed(parser)
    warnings.simplefilter("ignore")
    logging.getLogger("unsum").setLevel(logging.WARNING)  # bergson has every library tell what it does
    if options.tables:
        fill_pages()
        return
    report = run(options)
    for part in PARTS:
        print("\n" + tables([report], part))
    if options.json is not None and options.json.resolve().parent == RESULTS:
        fill_pages()


if __name__ == "__main__":
    main()
