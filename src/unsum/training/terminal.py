"""A watched run as text for a terminal: sparklines, outliers, layers. Needs no other package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from unsum.report.charts import brief
from unsum.report.curves import finite
from unsum.training import summary
from unsum.training.record import Record

_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.:-=+*#"
_LISTED = 10


def sparkline(values: Sequence[float | None], width: int = 40, marks: str = _BLOCKS) -> str:
    """Numbers as small bars; a gap where there is none, `!` where one is not finite. Spikes are kept: each bar is the
    largest of its group.

    Examples:
        >>> sparkline([1.0, 2.0, None, float("nan"), 8.0])
        '▁▂ !█'
    """
    groups = summary.thinned(len(values), width)
    tops = summary.grouped(values, groups, max)
    known = [top for top in tops if top is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    found = ""
    for group, top in zip(groups, tops, strict=True):
        is_bad = any(value is not None and not math.isfinite(value) for value in (values[k] for k in group))
        if is_bad or top is None:
            found += "!" if is_bad else " "
        else:
            found += marks[round((top - low) / (high - low) * (len(marks) - 1)) if high > low else 0]
    return found


def text(records: Sequence[Record], *, width: int = 100, blocks: bool = True, colour: bool = False) -> str:
    """The whole run."""
    lines = [summary.sentence(records, brief)]
    marks = _BLOCKS if blocks else _ASCII
    bad = summary.first_nonfinite(records)
    if bad is not None:
        told = f"First value that is not finite: step {bad.step}, {bad.nonfinite}"
        parameter = bad.nonfinite.parameter if bad.nonfinite is not None else None
        told += f", parameter {parameter}" if parameter else ""
        lines += ["", f"\x1b[1;31m{told}\x1b[0m" if colour else told]
    lines += ["", *_curves(records, max(20, min(60, width - 50)), marks)]
    lines += ["", *_outliers(records, width)]
    lines += ["", *_layers(records, width, marks)] if summary.layer_names(records) else []
    refused = next((record for record in records if record.refused is not None), None)
    if refused is not None and refused.refused is not None:
        lines += ["", f"no norms in step {refused.step}: {refused.refused.splitlines()[0]}"]
    found = "\n".join(line.rstrip() for line in lines)
    return found if blocks else _plain(found)


def _plain(line: str) -> str:
    """Without letters that a terminal's encoding may not have."""
    for letter, other in {"−": "-", "×": "x", "…": "...", "∞": "inf", "–": "-", "→": "->"}.items():
        line = line.replace(letter, other)
    return line.encode("ascii", "replace").decode()


def _curves(records: Sequence[Record], width: int, marks: str) -> list[str]:
    spreads = [summary.spread(record) for record in records]
    rows: dict[str, list[float | None]] = {
        "loss": [record.loss for record in records],
        "norm, median": [None if each is None else each.middle for each in spreads],
        "norm, largest": [None if each is None else each.largest for each in spreads],
        "noise scale": [record.noise_scale for record in records],
    }
    found = [f"{'':15}{'first':>9} {'last':>9} {'largest':>9}"]
    for name, values in rows.items():
        known = finite(values)
        if known:
            last = summary.last_loss(records) if name == "loss" else known[-1]
            numbers = " ".join(f"{brief(value):>9}" for value in (known[0], last, max(known)))
            found.append(f"{name:15}{numbers}  {sparkline(values, width, marks)}")
    return found


def _outliers(records: Sequence[Record], width: int) -> list[str]:
    found = summary.outliers(records)
    if not found:
        return ["No sample stands out."]
    rows = "; numbered by row in the step, no ids were given" if summary.are_rows(records) else ""
    more = f" (the {_LISTED} that stand out most)" if len(found) > _LISTED else ""
    lines = [
        f"Samples that stand out: {len(found):,}{more}{rows}",
        f"  {'step':>8}  {'norm':>9}  {'× median':>9}  sample",
    ]
    for each in found[:_LISTED]:
        ratio = "" if math.isnan(each.ratio) else brief(each.ratio)
        line = f"  {each.step:>8}  {brief(each.norm):>9}  {ratio:>9}  {each.id}"
        shown = " ".join(each.text.split())
        line += f"  {shown}" if shown else ""
        lines.append(line if len(line) <= width else line[: width - 1] + "…")
    return lines


def _layers(records: Sequence[Record], width: int, marks: str) -> list[str]:
    """The layers with the largest updates, or, without an optimizer, with the largest gradients: by their medians."""
    key, head = "norm", "gradient norm"
    if summary.has(records, "update"):
        key, head = "update", "update / weight"
    elif not summary.has(records, "norm"):
        key, head = "grad", "gradient norm"
    names = summary.layer_names(records)
    rows: list[tuple[float, str, list[float | None]]] = []
    for name in names:
        values = summary.layer_series(records, name, key)
        known = finite(values)
        rows.append((median(known) if known else -math.inf, name or "(the model)", values))
    rows.sort(key=lambda row: -row[0])
    room = max(12, min(max(len(name) for _, name, _ in rows[:_LISTED]), width - 65))
    what = f"Layers: {len(rows)}" + (f"; the {_LISTED} with the largest {head}" if len(rows) > _LISTED else "")
    lines = [what, f"  {'':{room}}  {'median':>9} {'last':>9}  {head} over time"]
    for middle, name, values in rows[:_LISTED]:
        known = finite(values)
        last = known[-1] if known else None
        shown = name if len(name) <= room else "…" + name[-room + 1 :]
        numbers = f"{brief(middle if known else None):>9} {brief(last):>9}"
        lines.append(f"  {shown:{room}}  {numbers}  {sparkline(values, 30, marks)}")
    return lines


def as_data(records: Sequence[Record]) -> dict[str, Any]:
    """The same as plain data, for programs."""
    loss = ends(records, "loss")
    spreads = [each for each in map(summary.spread, records) if each is not None]
    bad = summary.first_nonfinite(records)
    return {
        "records": len(records),
        "steps": [records[0].step, records[-1].step],
        "loss": loss,
        "noise_scale": ends(records, "noise_scale"),
        "norm": {
            "median": median(each.middle for each in spreads) if spreads else None,
            "largest": max(each.largest for each in spreads) if spreads else None,
        },
        "outliers": [vars(each) for each in summary.outliers(records)],
        "nonfinite": None if bad is None or bad.nonfinite is None else {"step": bad.step, **vars(bad.nonfinite)},
        "layers": {name: vars(layer) for name, layer in records[-1].layers.items()},
        "refused": sum(record.refused is not None for record in records),
    }


def ends(records: Sequence[Record], key: str) -> dict[str, float | None]:
    """The first and the last number of a field."""
    known = [value for record in records if (value := getattr(record, key)) is not None]
    return {"first": known[0] if known else None, "last": known[-1] if known else None}
