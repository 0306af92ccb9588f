"""The tables of a report, as HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from unsum.check import Checked
from unsum.report.charts import brief
from unsum.report.data import BySample, Layer
from unsum.report.measure import Stats

LISTED = 256  # samples that have a row

_GROUP = ("range", "mean", "std", "zeros", "norm")


def layers_table(layers: Sequence[Layer], root: str) -> str:
    """One row for each layer: what came out, which gradient came back, and the parameters."""
    groups = (
        '<tr><td colspan="2"></td><th colspan="5" scope="colgroup" class="activation">Activation</th>'
        '<th colspan="5" scope="colgroup" class="gradient">Gradient at the output</th>'
        '<th colspan="2" scope="colgroup" class="parameter">Parameters</th></tr>'
    )
    heads = _head("layer", "text") + _head("flags", "text")
    names = (*_GROUP, *_GROUP, "norm", "gradient")
    heads += "".join(_head(name, "range" if name == "range" else "number") for name in names)
    rows = "".join(_layer(k, layer, root) for k, layer in enumerate(layers))
    return (
        '<table class="sortable" id="layer-table"><caption class="unseen">Statistics of each layer, in the order of '
        f"the calls</caption><thead>{groups}<tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _head(name: str, kind: str) -> str:
    return f'<th scope="col" data-kind="{kind}"><button type="button">{escape(name)}</button></th>'


def _layer(k: int, layer: Layer, root: str) -> str:
    shape = "×".join(map(str, layer.activation.shape)) or "scalar"
    name = layer.name or root
    chips = "".join(chip(flag) for flag in layer.flags)
    return (
        f'<tr id="layer-{k}" data-flags="{" ".join(layer.flags)}" data-leaf="{int(layer.is_leaf)}">'
        f'<th scope="row" data-value="{k}"><span class="name">{_breakable(name)}</span>'
        f'<span class="kind">{escape(layer.kind)} · {shape}</span></th>'
        f'<td data-value="{len(layer.flags)}">{chips}</td>'
        f"{_cells(layer.activation, 'activation')}{_cells(layer.gradient, 'gradient')}"
        f"{_number(layer.weight_norm)}{_number(layer.weight_gradient_norm)}</tr>"
    )


def _breakable(name: str) -> str:
    """A dotted name that may be broken after a dot."""
    return escape(name).replace(".", ".<wbr>")


def chip(kind: str) -> str:
    """A flag."""
    return f'<span class="chip {escape(kind)}">{escape(kind)}</span>'


def _cells(stats: Stats | None, kind: str) -> str:
    if stats is None:
        return '<td class="none" colspan="5" data-value="">no gradient came back</td>'
    size = max(abs(stats.min), abs(stats.max)) if not math.isnan(stats.min) else math.nan
    extremes = f"{brief(stats.min)} … {brief(stats.max)}"
    tip = of = ""
    if not stats.is_finite:
        counts = f"{stats.nan:,} NaN" * bool(stats.nan), f"{stats.inf:,} ∞" * bool(stats.inf)
        some = ", ".join(filter(None, counts))
        tip, of = f' data-tip="{some} left out"', "of finite values"
        extremes = some if math.isnan(stats.min) else f"{some}<br>finite: {extremes}"
    return (
        f'<td data-value="{size:.6g}"{tip} data-drawn="{kind}">'
        f'<span class="range">{extremes}</span></td>'
        f"{_number(stats.mean, of)}{_number(stats.std, of)}"
        f'<td class="number" data-value="{stats.zeros:.6g}">{stats.zeros:.0%}</td>{_number(stats.norm)}'
    )


def _number(value: float | None, of: str = "") -> str:
    """A cell with a number; `of` says that it is one of a part of the values."""
    part = f' data-tip="{of}"' if of else ""
    said = (
        f'{brief(value)}<span class="of">{of}</span>' if of and value is not None and value == value else brief(value)
    )
    return f'<td class="number"{part} data-value="{"" if value is None else f"{value:.6g}"}">{said}</td>'


def samples_table(each: BySample, losses: Sequence[float], labels: Sequence[str] | None = None) -> str:
    """The samples with the largest norms first; a button in each row picks it."""
    order = each.norms.nan_to_num(math.inf).argsort(descending=True).tolist()
    middle = float(each.norms[each.norms.isfinite()].median()) if bool(each.norms.isfinite().any()) else math.nan
    far = set(each.outliers)
    rows = []
    for k in order[:LISTED]:
        norm = float(each.norms[k])
        times = norm / middle if middle else math.nan
        rows.append(
            f'<tr data-sample="{k}"><th scope="row" data-value="{k}"><button type="button" class="pick" '
            f'data-sample="{k}" aria-label="Pick sample {each.ids[k]}">{each.ids[k]}</button></th>'
            f"{_number(losses[k])}{_number(norm)}{_number(times)}"
            f'<td data-value="{int(k in far)}">{chip("outlier") if k in far else ""}</td>'
            f"{_label(labels[k]) if labels else ''}</tr>"
        )
    heads = _head("sample", "number") + "".join(_head(h, "number") for h in ("loss", "gradient norm", "× median"))
    heads += _head("flag", "text") + (_head("label", "text") if labels else "")
    return (
        '<table class="sortable" id="sample-table"><caption class="unseen">Loss and gradient norm of each sample'
        f"</caption><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _label(text: str) -> str:
    return f'<td data-value="{escape(text)}"><bdi>{escape(text)}</bdi></td>'


def losses_table(losses: Sequence[float]) -> str:
    """The losses alone, the largest first: what is known of samples whose gradients are not."""
    order = sorted(range(len(losses)), key=lambda k: -losses[k] if math.isfinite(losses[k]) else -math.inf)
    rows = "".join(f'<tr><th scope="row" data-value="{k}">{k}</th>{_number(losses[k])}</tr>' for k in order[:LISTED])
    heads = _head("sample", "number") + _head("loss", "number")
    return (
        '<table class="sortable" id="sample-table"><caption class="unseen">Loss of each sample</caption><thead><tr>'
        f"{heads}</tr></thead><tbody>{rows}</tbody></table>"
    )


def coverage_table(rows: Sequence[Sequence[str]]) -> str:
    """Where each parameter met data."""
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in rows[0])
    lines = []
    for row in rows[1:]:
        first = f'<th scope="row">{_breakable(row[0])}</th>'
        lines.append(f"<tr>{first}{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>")
    return (
        '<table id="coverage-table"><caption class="unseen">Where each parameter met data, and how its gradients were '
        f"obtained</caption><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def check_table(checked: Checked) -> str:
    """How far each parameter's per-sample gradients are from plain autograd's."""
    rows = []
    for row in sorted(checked.rows, key=lambda row: -row.error):
        word = "ok" if row.error <= checked.tolerance else "wrong"
        rows.append(
            f'<tr><th scope="row" data-value="{escape(row.name)}">{_breakable(row.name)}</th>{_number(row.error)}'
            f'<td data-value="{word}"><span class="chip {word}">{word}</span></td></tr>'
        )
    heads = _head("parameter", "text") + _head("error", "number") + _head("verdict", "text")
    return (
        '<table class="sortable" id="check-table"><caption class="unseen">Per-sample gradients against plain autograd'
        f"</caption><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
