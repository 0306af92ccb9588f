"""Write the tables in the docs from the last results: `python benchmarks/tables.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


TABLES = {"capture_overhead": capture_overhead, "norms_cpu": norms, "norms_cuda": norms}


def main() -> None:
    page = PAGE.read_text()
    for name, make in TABLES.items():
        begin = BEGIN.replace("tables.py", f"tables.py: {name}")
        before, _, rest = page.partition(begin)
        after = rest.partition(END)[2]
        page = before + begin + make(json.loads((ROOT / "results" / f"{name}.json").read_text())) + "\n" + END + after
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
