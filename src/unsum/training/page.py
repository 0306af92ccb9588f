"""A page on a watched run: one file that loads nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from html import escape
from statistics import median

from unsum.destination import writable
from unsum.errors import OptionError
from unsum.notebook import ShownPage
from unsum.report.charts import brief
from unsum.report.curves import Chart, Values, finite
from unsum.report.frame import Section, caption, document, inlined, scrolled, section, version
from unsum.training import summary
from unsum.training.layer_map import layer_map
from unsum.training.record import Layer, Record

POINTS, COLUMNS, ROWS = 400, 100, 200  # drawn of a curve and of a map; rows of the table of outliers
_RULE = (
    '<p class="small">The rule: a norm above 3 times the median norm of its step (of the last 32 samples where a step '
    "has fewer), and far above it compared with how much norms vary: 5 (threshold=) standard deviations of their "
    "logarithms, estimated from the last 512 samples (window=). A norm that is not finite always counts.</p>"
)


def write(records: Sequence[Record], path: str | os.PathLike[str], *, title: str = "Training run") -> ShownPage:
    """Write the page; missing folders are made."""
    if not records:
        raise OptionError("watch: no record yet, so there is nothing to show; watch a step first")
    where = writable(path, example="run.html")
    where.write_text(page(records, title), encoding="utf-8")
    return ShownPage(where)


def page(records: Sequence[Record], title: str) -> str:
    """The whole page."""
    groups = summary.thinned(len(records), POINTS)
    sections = [
        _nonfinite(records), _refused(records), _norms(records, groups), _loss(records, groups),
        _noise(records, groups), _outliers(records), *_maps(records), _layers(records),
    ]  # fmt: skip
    style = inlined("curves.css") + inlined("run.css", "unsum.training")
    return document(title, _header(records, title), sections, style=style)


def _header(records: Sequence[Record], title: str) -> str:
    spreads = [each for each in map(summary.spread, records) if each is not None]
    noise = finite([record.noise_scale for record in records])
    facts = {
        "steps watched": f"{len(records):,}",
        "samples": f"{sum(len(record.ids) for record in records):,}",
        "last loss": brief(summary.last_loss(records)),
        **_trained(records[-1]),
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


def _trained(record: Record) -> dict[str, str]:
    if record.parameters is None or record.trainable is None:  # of an older file
        return {}
    return {"parameters that train": f"{record.trainable:,} of {record.parameters:,}"}


def _nonfinite(records: Sequence[Record]) -> Section | None:
    first = summary.first_nonfinite(records)
    if first is None or first.nonfinite is None:
        return None
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
    html = (
        '<section class="alarm" id="nonfinite"><h2>A value is not finite</h2>'
        f"<p>The first value that is NaN or infinite, in the order of the forward and then of the backward.{also}</p>"
        f"<dl>{items}</dl></section>\n"
    )
    return Section("nonfinite", "Not finite", html)


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


def _norms(records: Sequence[Record], groups: Sequence[range]) -> Section | None:
    spreads = [summary.spread(record) for record in records]
    if not any(spreads):
        return None
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
    lead = caption(
        "How strongly each sample of a step pulls at the parameters: the norm of its gradient, before the gradients of "
        "the step are summed.",
        "the line is the median sample of each step, the band the middle half of the samples, the grey line the "
        f"largest.{_of(groups)}",
        "a dot far above the band: a sample that is often mislabelled, damaged or rare. A band that keeps rising: "
        "training becomes unstable.",
    )
    return section("norms", "Gradient norms of samples", chart.html(), lead=lead, name="Samples")


def _hover(each: summary.Outlier) -> str:
    return f"sample {each.id}, step {each.step:,}: norm {brief(each.norm)}. {each.text[:250]}".strip()


def _loss(records: Sequence[Record], groups: Sequence[range]) -> Section | None:
    loss = [record.loss for record in records]
    if not any(value is not None for value in loss):
        return None
    lines: list[tuple[str, str, Values]] = [("middle", "", summary.grouped(loss, groups, median))]
    chart = Chart(_span(records), _steps(records, groups), "Loss over the steps", lines, bad=_bad(records))
    lead = caption(
        "The loss of each step, as the training code has it (a sum or a mean over the samples), summed over "
        f"micro-batches.{_of(groups)}",
        unusual="a jump that does not come back within a few steps. Above, the samples of that step tell whether a few "
        "caused it.",
    )
    return section("loss", "Loss", chart.html(), lead=lead)


def _noise(records: Sequence[Record], groups: Sequence[range]) -> Section | None:
    noise = [record.noise_scale for record in records]
    positive = [value if value is not None and 0 < value < math.inf else None for value in noise]
    if not any(value is not None for value in noise):
        return None
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
        f'<p class="small">{lost:,} of {len(known):,} estimates are negative or infinite and not drawn: in these steps '
        "the noise is larger than the mean gradient, so the estimate has no meaning.</p>"
        if lost
        else ""
    )
    lead = caption(
        "How much the gradients of samples disagree, as a number of samples: the variance between samples, divided by "
        "the squared norm of their mean (tr Σ / |G|², McCandlish et al., 2018).",
        "compare it with the dashed line, the number of samples in a step. A batch much smaller than the noise scale "
        "gives noisy steps; one much larger gains little. It usually grows as the loss falls.",
    )
    return section("noise", "Gradient noise scale", chart.html() + note, lead=lead, name="Noise scale")


def _outliers_lead(records: Sequence[Record]) -> str:
    by_rows = summary.are_rows(records)
    again = "the same sample again and again: look at its label and its content first."
    return (
        caption(
            "Samples whose gradients are far larger than those of the other samples in their step."
            + (" Samples are numbered by their row in the step; no ids were given." if by_rows else ""),
            "“times the median” compares a sample with the median sample of its step; the furthest come first.",
            "" if by_rows else again,
        )
        + _RULE
    )


def _outliers(records: Sequence[Record]) -> Section | None:
    if all(record.norms is None for record in records):
        return None
    found, lead = summary.outliers(records), _outliers_lead(records)
    if not found:
        calm = '<p class="calm">None.</p>'
        return section("outliers", "Samples that stand out", calm, lead=lead, name="Outliers")
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
    body = note + scrolled(table, "Samples that stand out")
    return section("outliers", "Samples that stand out", body, lead=lead, name="Outliers")


_MAPS = {
    "norm": (
        "Gradient norms of layers", "Layers",
        "How large each layer's gradient was in each step: the root mean square, over samples, of its norms.",
        "a layer whose colour fades while the others stay (it stops learning), or becomes stronger from one step to "
        "the next (it grows out of control).",
    ),
    "grad": (
        "Gradient norms of layers", "Layers", "The norm of each layer's gradient in each step.",
        "a layer whose colour fades while the others stay (it stops learning), or becomes stronger from one step to "
        "the next (it grows out of control).",
    ),
    "update": (
        "Updates of layers", "Updates",
        "How far the optimizer moved each layer's parameters in a step, divided by their norm.",
        "about 0.001 is common. Much more is often unstable; much less hardly learns.",
    ),
}  # fmt: skip


def _maps(records: Sequence[Record]) -> list[Section]:
    """Layers by steps: gradient norms, and, where there was an optimizer, sizes of updates."""
    names = summary.layer_names(records)
    norm = "norm" if summary.has(records, "norm") else "grad"
    groups = summary.thinned(len(records), COLUMNS)
    size = len(groups[0])
    column = f"the largest of {size} watched steps" if size > 1 else "a step"
    made = []
    for key in (norm, "update"):
        if names and summary.has(records, key):
            title, name, what, unusual = _MAPS[key]
            rows = [_largest(summary.layer_series(records, each, key), groups) for each in names]
            drawn = layer_map(names, rows, records[0].step, records[-1].step, f"{title} over the steps")
            read = (
                f"a row is a layer, the first one at the top; a column is {column}; the stronger the colour, the "
                "larger. The number on the right is that of the last step."
            )
            made.append(section(f"map-{key}", title, drawn, lead=caption(what, read, unusual), name=name))
    return made


def _largest(values: Values, groups: Sequence[range]) -> list[float | None]:
    """The largest of each group; NaN where one is not finite."""
    found: list[float | None] = []
    for group in groups:
        known = [value for value in (values[k] for k in group) if value is not None]
        bad = any(not math.isfinite(value) for value in known)
        found.append(math.nan if bad else max(known, default=None))
    return found


def _layers(records: Sequence[Record]) -> Section | None:
    last = next((record for record in reversed(records) if record.layers), None)
    if last is None:
        return None
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
    lead = caption(
        f"Every layer with parameters of its own, in step {last.step:,}.",
        "“gradient norm” is the root mean square over samples, RMS that over all numbers of a tensor.",
    )
    table = scrolled(table, "Layers in the last step")
    return section("layers", "Layers in the last step", table, lead=lead, name="Last step", is_open=False)


def _row(name: str, layer: Layer, shown: Sequence[str]) -> str:
    cells = "".join(f'<td class="number">{brief(getattr(layer, key))}</td>' for key in shown)
    label = escape(name or "(the model)").replace(".", ".<wbr>")
    return f'<tr><th scope="row"><span class="name">{label}</span></th>{cells}</tr>'
