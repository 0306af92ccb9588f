"""The tables of index.py, from its results; and a model of cost from the constants that it measured."""

from __future__ import annotations

from typing import Any

TOKENS = (10**6, 10**9, 10**12)


def spread(ratio: dict[str, float]) -> str:
    return f"{ratio['low']:.2f}, {ratio['high']:.2f}"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def where(report: dict[str, Any]) -> str:
    machine = report["machine"]
    told = f"Measured on {machine.get('gpu', machine['cpu'])}, torch {machine['torch']}, {machine['date']}"
    return told + ("; few repetitions (`--quick`)." if report["quick"] else ".")


def build(report: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for found in report["build"]:
        threads = f", {found['threads']} thread{'s' if found['threads'] > 1 else ''}" if found["threads"] else ""
        linear = f", {found['width_linear']:,} of linear weights" if found["width_linear"] else ""
        lines += [
            f"**{found['shape']}{threads}** ({found['model']}; {found['width']:,} numbers a row{linear}; rows are off "
            f"by {found['off']:.0e} from projected gradients of plain autograd)", "",
        ]  # fmt: skip
        has_processor = any("processor" in row for row in found["rows"])
        head = ["way", "to a plain step", "quartiles", *(["processor time"] if has_processor else []), "tokens/s"]
        rows = []
        for row in found["rows"]:
            if "note" in row:
                rows.append([row["way"], row["note"].replace("|", "/"), *[""] * (len(head) - 2)])
                continue
            cells = [row["way"], f"{row['to_plain']['median']:.2f}×", spread(row["to_plain"])]
            cells += [f"{row['processor']['median']:.2f}×"] if has_processor else []
            rows.append([*cells, f"{row['tokens_per_second']:,.0f}"])
        lines += table(head, rows)
    return lines


def large(report: dict[str, Any]) -> list[str]:
    rows = []
    for found in report["large"]:
        memory = ", ".join(f"{value:.0f}" for value in found["megabytes"].values())
        query = next(row["seconds"] for row in found["asked"][-1]["rows"] if row["way"] == "1 query")
        rows.append([
            found["dtype"], f"{found['seconds']:.0f}", f"{found['examples_per_second']:,.0f}", memory,
            f"{found['bytes_per_example']:,.0f}", f"{query:.3f}",
        ])  # fmt: skip
    first = report["large"][0] if report["large"] else {"examples": 0, "width": 0}
    head = ["dtype", "seconds", "examples/s", "MB of memory at 10 %, 50 %, 100 %", "bytes an example", "one query, s"]
    return [f"**{first['examples']:,} examples, {first['width']:,} numbers a row**", "", *table(head, rows)]


def asked(report: dict[str, Any]) -> list[str]:
    rows = []
    for found in report["large"]:
        for some in found["asked"]:
            for row in some["rows"]:
                ratio = row["of_plain"]
                cells = [found["dtype"], str(some["threads"] or ""), row["way"], f"{row['gb_per_second']:.2f}"]
                rows.append([*cells, f"{ratio['median']:.0%}", f"{ratio['low']:.0%}, {ratio['high']:.0%}"])
    return table(["dtype", "threads", "way", "GB/s", "of a plain read", "quartiles"], rows)


def recalled(report: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for found in report["recall"]:
        if "note" in found:
            lines += [f"**{found['problem']}**: {found['note']}", ""]
            continue
        lines += [
            f"**{found['about']}**: {found['parameters']:,} parameters, {found['examples']:,} examples, "
            f"{found['queries']} queries; by chance {found['by_chance']:.1%} are in the first 10.", "",
        ]  # fmt: skip
        rows = []
        for row in found["rows"]:
            shares = [f"{row[key]:.2f}" for key in ("top10", "top100", "reranked")]
            rows.append([str(row["project"]), str(row["sketches"]), row["score"], f"{row['bytes']:,}", *shares])
        lines += table(["project", "sketches", "score", "bytes", "in 10", "in 100", "in 10, rerank=100"], rows)
    return lines


# ---- computed -------------------------------------------------------------------------------------------------------


def constants(report: dict[str, Any]) -> dict[str, float] | None:
    """What the model of cost is made of: of the shape that was measured last, and the best scan of float16."""
    if not report["build"] or not report["large"]:
        return None
    found = report["build"][-1]
    row = next(row for row in found["rows"] if row["way"] == "rows, written")
    half = next(each for each in report["large"] if each["dtype"] == "float16")
    speed = max(row["gb_per_second"] for some in half["asked"] for row in some["rows"] if row["way"] == "1 query")
    return {
        "tokens_per_second": row["tokens_per_second"], "length": found["length"], "width": found["width"],
        "bytes_per_example": 2 * found["width"] + 4, "gb_per_second": speed,
    }  # fmt: skip


def costs(known: dict[str, float]) -> list[dict[str, float]]:
    """Storage, time and a query's time for data sets up to 10¹² tokens, on one machine like the one that was measured:
    examples · (2 K + 4) bytes, tokens / (tokens a second), bytes / (bytes a second)."""
    found = []
    for tokens in TOKENS:
        examples = tokens / known["length"]
        size = examples * known["bytes_per_example"]
        times = {"build_seconds": tokens / known["tokens_per_second"]}
        times["query_seconds"] = size / (known["gb_per_second"] * 1e9)
        found.append({"tokens": tokens, "examples": examples, "bytes": size, **times})
    return found


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} PB"


def span(seconds: float) -> str:
    for unit, length in (("s", 60.0), ("min", 60.0), ("h", 24.0), ("days", 365.0)):
        if seconds < length:
            return f"{seconds:.3g} {unit}"
        seconds /= length
    return f"{seconds:,.3g} years"


def computed(report: dict[str, Any]) -> list[str]:
    known = constants(report)
    if known is None:
        return []
    lines = [
        f"Computed, not measured, from what was measured on one machine: {known['tokens_per_second']:,.0f} tokens/s "
        f"({report['build'][-1]['shape']}), {known['bytes_per_example']:,} bytes for an example of {known['length']} "
        f"tokens, {known['gb_per_second']:.2f} GB/s for a query.", "",
    ]  # fmt: skip
    rows = [
        [f"{row['tokens']:.0e}".replace("e+", "e"), size(row["bytes"]), span(row["build_seconds"]),
         span(row["query_seconds"])]
        for row in costs(known)
    ]  # fmt: skip
    return lines + table(["tokens", "storage", "build", "one query"], rows)


PARTS = {"build": build, "large": large, "asked": asked, "recall": recalled, "computed": computed}


def tables(reports: list[dict[str, Any]], part: str) -> str:
    """One part of all reports, each with its machine."""
    lines: list[str] = []
    for report in reports:
        made = PARTS[part](report)
        if made:
            lines += [*made, where(report), ""]
    return "\n".join(lines).rstrip("\n")
