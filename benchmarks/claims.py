"""Write the measured figures in the prose of README.md, docs/index.md and others from the last results.

    python benchmarks/claims.py          # fill the figures in
    python benchmarks/claims.py --demo   # run the demo first, and keep its figures as results/demo.json

A figure stands between two marks, which no reader sees:

    a step took <!-- figure: norms on the H200 -->1.03 to 1.22<!-- /figure --> times as long

A mark never begins a line: there, Markdown takes it for a block of HTML and ends the paragraph. `FIGURES` says how the
text between the marks follows from the results. tests/test_claims.py compares, and finds measured figures that stand
outside of marks.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
PAGES = tuple(ROOT.parent / page for page in ("README.md", "docs/index.md", "docs/torch_internals.md"))
MARKED = re.compile(r"<!-- figure: (?P<name>[^>]*?) -->(?P<text>.*?)<!-- /figure -->", re.S)
UNMARKED = re.compile(  # what is measured: a ratio, a share, a time, a size, a count out of others
    r"\d[\d.,]*\s*(?:×|%|times\b|fold\b|percent\b|[mµ]?s\b|seconds\b|minutes\b|[KMG]i?B\b)"
    r"|\b\d+ of (?:the |these |its )?\d+\b"
    r"|\b\d+\.\d\d\b"
)
PEERS = ("Opacus, per-sample gradients", "Opacus, ghost norms", "torch.func, vmap of grad")
LARGE = ("GPT-2 small shape B=16 T=1024", "GPT L=8 d=2048 B=8 T=2048")
SMALL = ("launch-bound: GPT-2 small shape B=8 T=128", "GPT-2 small shape B=8 T=128")
Results = Callable[[str], dict[str, Any]]


def read(name: str) -> dict[str, Any]:
    """One file of results."""
    found: dict[str, Any] = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def ratios(result: dict[str, Any], ways: Iterable[str], models: Iterable[str]) -> list[float]:
    """How long these ways took over a plain step, for these models."""
    chosen = [model for model in result["models"] if model["model"] in models]
    return [row["to_plain"]["median"] for model in chosen for row in model["rows"] if row["way"] in ways]


def span(values: list[float], digits: int = 2) -> str:
    """`1.03 to 1.22`, or one number where both ends are the same."""
    ends = [f"{value:.{digits}f}" for value in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def norms(results: Results, models: Iterable[str]) -> list[float]:
    """Of both benchmarks that measure them."""
    return ratios(results("norms_cuda"), ["unsum, Norms"], models) + ratios(
        results("quantities_cuda"), ["norms"], models
    )


def score(results: Results, problem: str, method: str) -> str:
    """A linear datamodeling score."""
    (found,) = (each for each in results("lds_cpu")["problems"] if each["problem"] == problem)
    (row,) = (row for row in found["rows"] if row["method"] == method)
    return f"{row['lds']:.2f}"


def found_by(results: Results, score: str) -> str:
    """How many planted sentences are among as many with the highest scores."""
    demo = results("demo")
    return f"{demo['precision'][score] * demo['planted']:.0f}"


FIGURES: dict[str, Callable[[Results], str]] = {
    "norms on the H200": lambda r: span(norms(r, LARGE)),
    "norms on the H200, small steps": lambda r: span(norms(r, SMALL)),
    "clipping on the H200": lambda r: span(ratios(r("quantities_cuda"), ["clipped"], LARGE)),
    "norms of peers on the H200": lambda r: span(ratios(r("norms_cuda"), PEERS, LARGE), 1),
    "first batch on the H200": lambda r: span(ratios(r("norms_cuda"), ["unsum, first batch"], LARGE), 0),
    "first batch on the H200, small steps": lambda r: span(ratios(r("norms_cuda"), ["unsum, first batch"], SMALL), 0),
    "watching on the H200": lambda r: f"{r('watching_cuda')['models']['GPT-2 shape']['every=1']['median']:.2f}",
    "architectures of the tests": lambda r: str(len(r("coverage")["rows"])),
    "sentences of the demo": lambda r: f"{r('demo')['sentences']:,}",
    "planted in the demo": lambda r: str(r("demo")["planted"]),
    "planted in the demo, found by norms": lambda r: found_by(r, "gradient norm"),
    "planted in the demo, found by losses": lambda r: found_by(r, "loss"),
    "a plain step after gradients blocks": lambda r: f"{r('afterwards')['ways']['gradients']['median']:.2f}",
    "EK-FAC on digits": lambda r: score(r, "digits", "EK-FAC"),
    "kronfluence on digits": lambda r: score(r, "digits", "kronfluence EK-FAC"),
}

INSTEAD = "instead of seams, "  # and a way of benchmarks/seams.py: its time over that of the way in use


def figure(name: str, results: Results) -> str:
    """What stands between the marks of this name."""
    if name in FIGURES:
        return FIGURES[name](results)
    ways = {way: row for rows in results("seams_cpu")["rows"].values() for way, row in rows.items()}
    if name.startswith(INSTEAD) and (way := name.removeprefix(INSTEAD)) in ways:
        return f"{ways[way]['over_ours']['median']:.2f}"
    raise SystemExit(f"no figure {name!r}; there are: {', '.join([*FIGURES, *(INSTEAD + way for way in ways)])}")


def filled(page: str, results: Results = read) -> str:
    """The page with every figure as the results have it."""
    return MARKED.sub(lambda m: f"<!-- figure: {m['name']} -->{figure(m['name'], results)}<!-- /figure -->", page)


def unmarked(page: str) -> list[str]:
    """The measured figures of the prose that do not come from results."""
    code_or_version = r"^```.*?^```$|`[^`\n]*`|\b(?:[Pp]ython3?|torch|CUDA) \(?\d[\d.]*"
    prose = re.sub(code_or_version, "", MARKED.sub("", page), flags=re.M | re.S)
    return [match[0] for match in UNMARKED.finditer(prose)]


def main() -> None:
    """Fill the figures of all pages in."""
    if "--demo" in sys.argv:
        asked = [sys.executable, "-m", "unsum", "demo", "--json", "--out", str(ROOT.parent / "demo")]
        told = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
        from measuring import machine

        told = {"machine": machine("cpu")} | {key: value for key, value in told.items() if key != "files"}
        (ROOT / "results" / "demo.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
