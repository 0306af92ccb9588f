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


def main() -> None:
    result = json.loads((ROOT / "results" / "capture_overhead.json").read_text())
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + capture_overhead(result) + "\n" + END + after)


if __name__ == "__main__":
    main()
