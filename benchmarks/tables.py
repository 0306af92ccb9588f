"""Write the tables in the docs from the last results: `python benchmarks/tables.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chart import chart

ROOT = Path(__file__).parent
PAGE = ROOT.parent / "docs" / "cost.md"
BEGIN, END = "<!-- made by benchmarks/tables.py -->\n", "<!-- end -->\n"


def capture_overhead(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [", ".join(f"{key} {value}" for key, value in machine.items()) + ".", ""]
    for size in result["sizes"]:
        lines += [
            f"**{size['size']}: d={size['d']}, batch {size['B']}, {size['T']} tokens**",
            "",
            "| way | to a plain step | quartiles | values |",
            "|---|---|---|---|",
        ]
        for row in size["rows"]:
            if "to_plain" not in row:
                lines.append(f"| {row['way']} | {row['values']} | | |")
                continue
            ratio = row["to_plain"]
            spread = f"{ratio['low']:.3f}, {ratio['high']:.3f}"
            lines.append(f"| {row['way']} | {ratio['median']:.3f}× | {spread} | {row['values']} |")
        head = size["headline"]
        lines += ["", f"`unsum.capture` over hooks by hand: {head['median']:.3f}×.", ""]
    return "\n".join(lines)


def norms(result: dict[str, Any]) -> str:
    machine = result["machine"]
    about = ", ".join(f"{key} {value}" for key, value in machine.items())
    lines = [about + (f", threads {result['threads']}." if result["device"] == "cpu" else ", bfloat16."), ""]
    for model in result["models"]:
        has_memory = any("memory" in row for row in model["rows"])
        head = "| way | to a plain step | quartiles | peak memory | norms |" if has_memory else ""
        lines += [f"**{model['model']}**", "", head or "| way | to a plain step | quartiles | norms |"]
        lines.append("|---|---|---|---|---|" if has_memory else "|---|---|---|---|")
        for row in model["rows"]:
            if "note" in row:
                lines.append(f"| {row['way']} | {row['note'].replace('|', '/')} | | |" + (" |" if has_memory else ""))
                continue
            ratio = row["to_plain"]
            spread = f"{ratio['low']:.2f}, {ratio['high']:.2f}"
            memory = f" {row['memory']:.2f}× |" if "memory" in row else " |" if has_memory else ""
            lines.append(f"| {row['way']} | {ratio['median']:.2f}× | {spread} |{memory} {row['norms']} |")
        lines.append("")
    return "\n".join(lines)


def growth(result: dict[str, Any]) -> str:
    about = ", ".join(f"{key} {value}" for key, value in (result["machine"] | result["model"]).items()) + "."
    device, lines = result["device"], [about, ""]
    for what in ("samples", "tokens"):
        lines += [
            f"![norms over a plain step, growing with {what}](growth/{device}_{what}.svg)",
            "",
            "| B | T | plain, µs per sample | with norms | to a plain step | quartiles |",
            "|---|---|---|---|---|---|",
        ]
        for row in result[what]:
            ratio, each = row["to_plain"], row["us_per_sample"]
            spread = f"{ratio['low']:.2f}, {ratio['high']:.2f}"
            times = f"{each['plain']:.0f} | {each['norms']:.0f} | {ratio['median']:.2f}×"
            lines.append(f"| {row['B']} | {row['T']} | {times} | {spread} |")
        lines.append("")
    return "\n".join(lines)


def charts(result: dict[str, Any]) -> dict[str, str]:
    """{file: SVG}: the pictures of growth."""
    found, device = {}, result["device"]
    for what, axis in (("samples", "B"), ("tokens", "T")):
        points = [(row[axis], row["to_plain"]["median"]) for row in result[what]]
        title = f"Norms over a plain step, {'CPU' if device == 'cpu' else 'GPU'}: growing with {axis}"
        found[f"{device}_{what}.svg"] = chart(title, axis, points, 1.5)
    return found


def quantities(result: dict[str, Any]) -> str:
    lines = [", ".join(f"{key} {value}" for key, value in result["machine"].items()) + ".", ""]
    for model in result["models"]:
        lines += [f"**{model['model']}**", "", "| way | to a plain step | quartiles | peak memory | checked |"]
        lines.append("|---|---|---|---|---|")
        for row in model["rows"]:
            ratio = row["to_plain"]
            spread = f"{ratio['low']:.2f}, {ratio['high']:.2f}"
            peak = f"{row['memory']:.2f}×" if "memory" in row else ""
            lines.append(f"| {row['way']} | {ratio['median']:.2f}× | {spread} | {peak} | {row['checked']} |")
        lines.append("")
    return "\n".join(lines)


TABLES = {
    "capture_overhead": capture_overhead,
    "norms_cpu": norms,
    "norms_cpu_two_threads": norms,
    "norms_cuda": norms,
    "quantities_cuda": quantities,
    "quantities_cpu": quantities,
    "growth_cpu": growth,
}


def main() -> None:
    page = PAGE.read_text()
    for name, make in TABLES.items():
        begin = BEGIN.replace("tables.py", f"tables.py: {name}")
        before, _, rest = page.partition(begin)
        after = rest.partition(END)[2]
        page = before + begin + make(json.loads((ROOT / "results" / f"{name}.json").read_text())) + "\n" + END + after
    PAGE.write_text(page)
    for name, svg in charts(json.loads((ROOT / "results" / "growth_cpu.json").read_text())).items():
        (PAGE.parent / "growth").mkdir(exist_ok=True)
        (PAGE.parent / "growth" / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
