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
        later = f"; measured {model['date']}" if "date" in model else ""  # than the others
        lines += [f"**{model['model']}**{later}", "", head or "| way | to a plain step | quartiles | norms |"]
        lines.append("|---|---|---|---|---|" if has_memory else "|---|---|---|---|")
        for row in model["rows"]:
            if "note" in row:
                lines.append(f"| {row['way']} | {row['note'].replace('|', '/')} | | |" + (" |" if has_memory else ""))
                continue
            ratio = row["to_plain"]
            spread = f"{ratio['low']:.2f}, {ratio['high']:.2f}"
            heap = f" ({row['with_heap']:.2f}×)" if "with_heap" in row else ""
            memory = f" {row['memory']:.2f}×{heap} |" if "memory" in row else " |" if has_memory else ""
            lines.append(f"| {row['way']} | {ratio['median']:.2f}× | {spread} |{memory} {row['norms']} |")
        lines.append("")
    return "\n".join(lines)


def growth(result: dict[str, Any]) -> str:
    about = ", ".join(f"{key} {value}" for key, value in (result["machine"] | result["model"]).items())
    device, lines = result["device"], [about + (", bfloat16." if result["device"] == "cuda" else "."), ""]
    for what in ("samples", "tokens"):
        rows = result[what]
        more = [key for key in ("memory", "norms") if any(key in row for row in rows)]
        titles = {"memory": "peak memory", "norms": "norms"}
        if len(measured(rows)) > 1:
            lines += [f"![norms over a plain step, growing with {what}](growth/{device}_{what}.svg)", ""]
        head = ["B", "T", "plain, µs per sample", "with norms", "to a plain step", "quartiles", *map(titles.get, more)]
        lines += ["| " + " | ".join(map(str, head)) + " |", "|---" * len(head) + "|"]
        for row in rows:
            if "note" in row:
                lines.append(f"| {row['B']} | {row['T']} | {row['note'].replace('|', '/')} |" + " |" * (len(head) - 3))
                continue
            ratio, each = row["to_plain"], row["us_per_sample"]
            spread = f"{ratio['low']:.2f}, {ratio['high']:.2f}"
            times = f"{each['plain']:.0f} | {each['norms']:.0f} | {ratio['median']:.2f}×"
            last = [f"{row[key]:.2f}×" if key == "memory" else row[key] for key in more]
            lines.append(f"| {row['B']} | {row['T']} | {times} | " + " | ".join([spread, *last]) + " |")
        lines.append("")
    return "\n".join(lines)


def measured(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "to_plain" in row]


def charts(result: dict[str, Any]) -> dict[str, str]:
    """{file: SVG}: the pictures of growth."""
    found, device = {}, result["device"]
    where = "CPU" if device == "cpu" else result["machine"].get("gpu", "GPU")
    for what, axis in (("samples", "B"), ("tokens", "T")):
        points = [(row[axis], row["to_plain"]["median"]) for row in measured(result[what])]
        if len(points) > 1:  # a line
            title = f"Norms over a plain step, {where}: growing with {axis}"
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


def compiled(result: dict[str, Any]) -> str:
    lines = [", ".join(f"{key} {value}" for key, value in result["machine"].items()) + ".", ""]
    for model in result["models"]:
        lines += [f"**{model['model']}**; norms off by {model['norms_off_by']:.0e}", ""]
        lines += [
            "| way | to the compiled plain step | quartiles | to the eager one | peak memory |",
            "|---|---|---|---|---|",
        ]
        for row in model["rows"]:
            ratio, eager = row["to_compiled"], row["to_eager"]["median"]
            spread = f"{ratio['low']:.2f}, {ratio['high']:.2f}"
            peak = f"{row['memory']:.2f}×" if "memory" in row else ""
            lines.append(f"| {row['way']} | {ratio['median']:.2f}× | {spread} | {eager:.2f}× | {peak} |")
        lines.append("")
    return "\n".join(lines)


def shapes(result: dict[str, Any]) -> str:
    about = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    lines = [about + (f", threads {result['threads']}." if result["device"] == "cpu" else ", bfloat16."), ""]
    for model in result["models"]:
        head = ["batch", "plain, ms", "with norms", "to a plain step", "quartiles", "batches", "norms"]
        lines += [f"**{model['model']}**", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for row in model["rows"]:
            ratio = row["to_plain"]
            spread = f"{ratio['low']:.2f}, {ratio['high']:.2f}"
            times = f"{row['plain_ms']:.1f} | {row['ms']:.1f} | {ratio['median']:.2f}×"
            lines.append(f"| {row['way']} | {times} | {spread} | {row['repetitions']} | {row['norms']} |")
        lines.append("")
    return "\n".join(lines)


def coverage(result: dict[str, Any]) -> str:
    """Where values had to decide, by architecture and kind of node."""
    rows = [row for row in result["rows"] if row["asked"] or row["swept"]]
    share = f"torch {result['torch']}: {len(rows)} of {len(result['rows'])} architectures."
    lines = [share, "", "| architecture | nodes with samples | where values decide |", "|---|---|---|"]
    for row in rows:
        kinds = ", ".join(f"{kind} ×{count}" for kind, count in row["asked"].items())
        lines.append(f"| {row['name']} | {row['nodes']} | {'everywhere' if row['swept'] else kinds} |")
    return "\n".join(lines) + "\n"


def summary(result: dict[str, Any]) -> str:
    """All quantities and models, beside what was aimed for: a row with a model's name, then its quantities."""
    lines = [", ".join(f"{key} {value}" for key, value in result["machine"].items()) + ".", ""]
    lines += ["| quantity | ratio | quartiles | peak memory | aim |", "|---|---|---|---|---|"]
    above = None
    for row in result["rows"]:
        name = row["model"] + ("" if row["over"] == "plain" else f", over {row['over']}")
        name += ", other libraries" if row["part"] == "peers" else ""
        name += "" if row.get("date", result["machine"]["date"]) == result["machine"]["date"] else f", {row['date']}"
        if name != above:
            lines.append(f"| **{name}** | | | | |")
            above = name
        memory = "" if row["memory"] is None else f"{row['memory']:.2f}×"
        aim = "" if row["aim"] is None else f"{row['aim']:.2f}×" + ("" if row["median"] <= row["aim"] else ", missed")
        cells = [row["what"], f"{row['median']:.2f}×", f"{row['low']:.2f}, {row['high']:.2f}", memory, aim]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def kernels(result: dict[str, Any]) -> str:
    """Where the time of a step goes: what the GPU does, and how long Python takes."""
    lines = [", ".join(f"{key} {value}" for key, value in result["machine"].items()) + ".", ""]
    lines += [
        "| way | step, ms | Python, ms | kernels, ms | launches | over plain | adds |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = {row["model"]: row for row in result["rows"] if row["way"] == "plain"}
    for row in result["rows"]:
        if row["way"] == "plain":
            lines.append(f"| **{row['model']}** | | | | | | |")
        more = row.get("beyond_plain", {})
        added = ", ".join(f"{kind} {ms:+.2f} ms" for kind, ms in more.items() if ms > 0.05)
        over = row["kernels_ms"] / plain[row["model"]]["kernels_ms"]
        cells = [row["way"], f"{row['wall_ms']:.1f}", f"{row['returns_after_ms']:.1f}", f"{row['kernels_ms']:.2f}",
                 f"{row['launches']}", f"{over:.2f}×", added]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


TABLES = {
    "capture_overhead": capture_overhead,
    "norms_cpu": norms,
    "norms_cpu_two_threads": norms,
    "norms_cuda": norms,
    "quantities_cuda": quantities,
    "quantities_cpu": quantities,
    "compiled_cuda": compiled,
    "growth_cpu": growth,
    "growth_cuda": growth,
    "shapes_cpu": shapes,
    "shapes_cuda": shapes,
    "coverage": coverage,
    "summary_cpu": summary,
    "summary_cuda": summary,
    "kernels_cuda": kernels,
}


def results() -> dict[str, dict[str, Any]]:
    """{table: what was measured}, of those that were."""
    paths = {name: ROOT / "results" / f"{name}.json" for name in TABLES}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def filled(page: str, found: dict[str, dict[str, Any]]) -> str:
    """A page with each table between its marks; where nothing was measured, nothing stands between them."""
    for name, make in TABLES.items():
        begin = BEGIN.replace("tables.py", f"tables.py: {name}")
        before, mark, rest = page.partition(begin)
        if not mark:
            raise SystemExit(f"no place for {name}: the page has no line {begin.strip()}")
        table = make(found[name]) + "\n" if name in found else ""
        page = before + begin + table + END + rest.partition(END)[2]
    return page


def main() -> None:
    found = results()
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    (PAGE.parent / "growth").mkdir(exist_ok=True)
    for name in ("growth_cpu", "growth_cuda"):
        for file, svg in (charts(found[name]) if name in found else {}).items():
            (PAGE.parent / "growth" / file).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
