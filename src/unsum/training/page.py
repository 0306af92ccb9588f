"""A page on a watched run: one file that loads nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median

from unsum.destination import writable
from unsum.errors import OptionError
from unsum.report.charts import brief
from unsum.report.frame import document, inlined, scrolled, section, version
from unsum.training import summary
from unsum.training.curves import Chart, Values, layer_map
from unsum.training.record import Layer, Record

POINTS, COLUMNS, ROWS = 400, 100, 200  # drawn of a curve and of a map; rows of the table of outliers
_RULE = (
    "A sample stands out if its norm is above 3 times the median norm of its step (of the last 32 samples where a step "
    "has fewer), and above that median by 5 (threshold=) standard deviations of the norms' logarithms, estimated by "
    "their median distance over the last 512 samples (window=). A norm that is not finite always stands out."
)


def write(records: Sequence[Record], path: str | os.PathLike[str], *, title: str = "Training run") -> Path:
    """Write the page; missing folders are made."""
    if not records:
        raise OptionError("watch: no record yet, so there is nothing to show; watch a step first")
    where = writable(path, example="run.html")
    where.write_text(page(records, title), encoding="utf-8")
    return where


def page(records: Sequence[Record], title: str) -> str:
    """The whole page."""
    groups = summary.thinned(len(records), POINTS)
    sections = [
        _nonfinite(records), _refused(records), _norms(records, groups), _loss(records, groups),
        _noise(records, groups), _outliers(records), _maps(records), _layers(records),
    ]  # fmt: skip
    style = inlined("run.css", "unsum.training")
    return document(title, _header(records, title), "".join(sections), style=style)


def _header(records: Sequence[Record], title: str) -> str:
    spreads = [each for each in map(summary.spread, records) if each is not None]
    noise = summary.finite([record.noise_scale for record in records])
    loss = summary.finite([record.loss for record in records])
    facts = {
        "steps watched": f"{len(records):,}",
        "samples": f"{sum(len(record.ids) for record in records):,}",
        "last loss": brief(loss[-1] if loss else None),
        "median gradient norm": brief(median(each.middle for each in spreads) if spreads else None),
        "gradient noise scale": brief(median(noise) if noise and median(noise) > 0 else None),
        "times a sample stood out": f"{sum(len(record.outliers) for record in records):,}",
    }
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    told = escape(summary.sentence(records, brief))
    return (
        f'<header><h1>{escape(title)}</h1><p class="summary">{told}</p><dl>{items}</dl>'
        f'<p class="small">unsum {version()}</p></header>'
    )


def _nonfinite(records: Sequence[Record]) -> str:
    first = summary.first_nonfinite(records)
    if first is None or first.nonfinite is None:
        return ""
    where = first.nonfinite
    what = {"nan": "NaN", "inf": "infinite"}.get(where.value, where.value)
    facts = {
        "step": f"{first.step:,}", "value": what, "site": where.site, "sample": where.sample,
        "position in the sample": where.position, "parameter": where.parameter, "micro-batch": where.microbatch,
        "rank": where.rank,
    }  # fmt: skip
    items = "".join(
        f"<div><dt>{name}</dt><dd><code>{escape(str(value))}</code></dd></div>"
        for name, value in facts.items()
        if value is not None
    )
    count = sum(record.nonfinite is not None for record in records)
    also = f" {count:,} of {len(records):,} watched steps have such a value." if count > 1 else ""
    return (
        '<section class="alarm" id="nonfinite"><h2>A value is not finite</h2>'
        f"<p>The first value that is NaN or infinite, in the order of the forward and then of the backward.{also}</p>"
        f"<dl>{items}</dl></section>\n"
    )


def _refused(records: Sequence[Record]) -> str:
    reasons: dict[str, list[int]] = {}
    for record in records:
        if record.refused is not None:
            reasons.setdefault(record.refused, []).append(record.step)
    return "".join(
        f'<p class="absent"><b>No norms in {len(steps):,} step{"s" * (len(steps) > 1)}, first in step {steps[0]:,}.'
        f"</b>\n{escape(why)}</p>\n"
        for why, steps in reasons.items()
    )


def _steps(records: Sequence[Record], groups: Sequence[range]) -> list[int]:
    return [records[group[len(group) // 2]].step for group in groups]


def _bad(records: Sequence[Record]) -> list[int]:
    return [record.step for record in records if record.nonfinite is not None]


def _span(records: Sequence[Record]) -> tuple[int, int]:
    return records[0].step, records[-1].step


def _of(groups: Sequence[range]) -> str:
    """How many steps a point stands for."""
    size = len(groups[0])
    return f" Each point stands for {size} watched steps." if size > 1 else ""


def _norms(records: Sequence[Record], groups: Sequence[range]) -> str:
    spreads = [summary.spread(record) for record in records]
    if not any(spreads):
        return ""
    low, middle, high = (
        summary.grouped([None if each is None else getattr(each, key) for each in spreads], groups, median)
        for key in ("low", "middle", "high")
    )
    largest = summary.grouped([None if each is None else each.largest for each in spreads], groups, max)
    far = summary.outliers(records)[:ROWS]
    marks = [(each.step, each.norm, str(each.id), _hover(each)) for each in far]
    lines: list[tuple[str, str, Values]] = [("largest", "largest", largest), ("middle", "median", middle)]
    chart = Chart(
        _span(records), _steps(records, groups), "Gradient norms of samples over the steps: median, quartiles, largest",
        lines, band=("middle half of the samples", low, high), marks=marks, bad=_bad(records),
    )  # fmt: skip
    lead = (
        "The gradient norm of each sample: how strongly that sample alone pulls at all parameters. A sample far above "
        f"the others is often mislabelled, damaged or rare.{_of(groups)}"
    )
    return section("norms", "Gradient norms of samples", chart.html(), lead=lead)


def _hover(each: summary.Outlier) -> str:
    return f"sample {each.id}, step {each.step:,}: norm {brief(each.norm)}. {each.text[:250]}".strip()


def _loss(records: Sequence[Record], groups: Sequence[range]) -> str:
    loss = [record.loss for record in records]
    if not any(value is not None for value in loss):
        return ""
    lines: list[tuple[str, str, Values]] = [("middle", "", summary.grouped(loss, groups, median))]
    chart = Chart(_span(records), _steps(records, groups), "Loss over the steps", lines, bad=_bad(records))
    lead = (
        "What was differentiated in each step, summed over its micro-batches: a sum or a mean over the samples, as the "
        f"training code has it.{_of(groups)}"
    )
    return section("loss", "Loss", chart.html(), lead=lead)


def _noise(records: Sequence[Record], groups: Sequence[range]) -> str:
    noise = [record.noise_scale for record in records]
    positive = [value if value is not None and 0 < value < math.inf else None for value in noise]
    if not any(value is not None for value in noise):
        return ""
    # The median is over all estimates: leaving out the negative ones would bias it.
    reach = max(2, len(records) // 40)
    smooth = [value if value is not None and value > 0 else None for value in summary.smoothed(noise, reach)]
    sizes = [len(record.ids) for record in records if record.ids]
    n = round(median(sizes)) if sizes else 0
    lines: list[tuple[str, str, Values]] = [
        ("faint", "one step's estimate", summary.grouped(positive, groups, median)),
        ("middle", f"median of {2 * reach + 1} steps", summary.grouped(smooth, groups, median)),
    ]
    chart = Chart(
        _span(records), _steps(records, groups), "Gradient noise scale over the steps", lines,
        level=(f"samples in a step: {n:,}", float(n)) if n else None,
    )  # fmt: skip
    known = [value for value in noise if value is not None]
    lost = sum(value <= 0 or value == math.inf for value in known)
    note = (
        f" {lost:,} of {len(known):,} estimates are negative or infinite and not drawn: in these steps the mean "
        "gradient is lost in the noise."
        if lost
        else ""
    )
    lead = (
        "How much samples' gradients disagree, in samples: tr Σ / |G|². A batch much smaller than this gives noisy "
        f"steps; one much larger gains little (McCandlish et al., 2018).{note}"
    )
    return section("noise", "Gradient noise scale", chart.html(), lead=lead)


def _outliers(records: Sequence[Record]) -> str:
    if all(record.norms is None for record in records):
        return ""
    found = summary.outliers(records)
    if not found:
        return section("outliers", "Samples that stand out", '<p class="calm">None.</p>', lead=_RULE)
    has_texts = any(each.text for each in found)
    heads = "".join(f'<th scope="col" class="{kind}">{name}</th>' for name, kind in (
        ("sample", ""), ("step", "number"), ("norm", "number"), ("times the median", "number"),
        *([("text", "text")] if has_texts else []),
    ))  # fmt: skip
    rows = "".join(
        f'<tr><th scope="row">{escape(str(each.id))}</th><td class="number">{each.step:,}</td>'
        f'<td class="number">{brief(each.norm)}</td>'
        f'<td class="number">{"–" if math.isnan(each.ratio) else brief(each.ratio)}</td>'
        + (f'<td class="text">{escape(each.text[:2000])}</td>' if has_texts else "")
        + "</tr>"
        for each in found[:ROWS]
    )
    note = f'<p class="small">The {ROWS} of {len(found):,} that stand out most.</p>' if len(found) > ROWS else ""
    table = f'<table id="outlier-table"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    return section(
        "outliers", "Samples that stand out", note + scrolled(table, "Samples that stand out"), lead=escape(_RULE)
    )


def _maps(records: Sequence[Record]) -> str:
    """Layers by steps: gradient norms, and, where there was an optimizer, sizes of updates."""
    names = summary.layer_names(records)
    norm = "norm" if summary.has(records, "norm") else "grad"
    what = {
        "norm": ("Gradient norms of layers", "The root mean square, over samples, of each layer's gradient norms."),
        "grad": ("Gradient norms of layers", "The norm of each layer's gradient."),
        "update": (
            "Updates of layers",
            "How far the optimizer moved each layer's parameters in a step, over their norm. About 0.001 is common; "
            "much more is often unstable, much less hardly learns.",
        ),
    }
    groups = summary.thinned(len(records), COLUMNS)
    size = (
        f" A column is the largest of {len(groups[0])} watched steps." if len(groups[0]) > 1 else " A column is a step."
    )
    made = ""
    for key in (norm, "update"):
        if names and summary.has(records, key):
            title, lead = what[key]
            rows = [_largest(summary.layer_series(records, name, key), groups) for name in names]
            drawn = layer_map(names, rows, records[0].step, records[-1].step, f"{title} over the steps")
            lead += f"{size} From the first layer, at the top, to the last."
            made += section(f"map-{key}", title, drawn, lead=lead)
    return made


def _largest(values: Values, groups: Sequence[range]) -> list[float | None]:
    """The largest of each group; NaN where one is not finite."""
    found: list[float | None] = []
    for group in groups:
        known = [value for value in (values[k] for k in group) if value is not None]
        bad = any(not math.isfinite(value) for value in known)
        found.append(math.nan if bad else max(known, default=None))
    return found


def _layers(records: Sequence[Record]) -> str:
    last = next((record for record in reversed(records) if record.layers), None)
    if last is None:
        return ""
    columns = {
        "norm": "gradient norm", "largest": "largest sample's", "grad": "norm of the step's gradient",
        "weight": "weight norm", "update": "update / weight", "output": "output (RMS)",
        "grad_output": "gradient at the output (RMS)",
    }  # fmt: skip
    shown = [key for key in columns if summary.has([last], key)]
    heads = '<th scope="col">layer</th>' + "".join(
        f'<th scope="col" class="number">{columns[key]}</th>' for key in shown
    )
    rows = "".join(_row(name, layer, shown) for name, layer in last.layers.items())
    table = f'<table id="layer-table"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    lead = (
        f"Every layer with parameters of its own, in step {last.step:,}. Gradient norm: root mean square over samples. "
        "RMS: root mean square over all numbers."
    )
    return section(
        "layers", "Layers in the last step", scrolled(table, "Layers in the last step"), lead=lead, is_open=False
    )


def _row(name: str, layer: Layer, shown: Sequence[str]) -> str:
    cells = "".join(f'<td class="number">{brief(getattr(layer, key))}</td>' for key in shown)
    label = escape(name or "(the model)").replace(".", ".<wbr>")
    return f'<tr><th scope="row"><span class="name">{label}</span></th>{cells}</tr>'
