"""The page: sections one after another, the data as JSON, style and script inside."""

from __future__ import annotations

import json
import math
from collections import Counter
from html import escape

import torch
from torch import nn

from unsum.check import interaction_told
from unsum.report import captions
from unsum.report.charts import bars, brief, plain
from unsum.report.data import BySample, Flag, Report
from unsum.report.depth import depth_chart
from unsum.report.embed import embedded
from unsum.report.flags import RULES
from unsum.report.folding import packed, shortened
from unsum.report.frame import Section, document, inlined, scrolled, section, version
from unsum.report.measure import DRAWN
from unsum.report.tables import LISTED, check_table, chip, coverage_table, layers_table, losses_table, samples_table

_TITLES = {
    "nan": "Not finite",
    "unreached": "Parameters that the loss does not reach",
    "exploding": "Exploding gradients",
    "vanishing": "Vanishing gradients",
    "silent": "Gradients that are zero",
    "dead": "Dead units",
    "interacting": "Samples interact",
    "check": "The check is red",
    "outlier": "Samples that stand out",
}


def write(made: Report, model: nn.Module) -> None:
    """Write the page to where the report says."""
    made.path.write_text(page(made, model), encoding="utf-8")


def page(made: Report, model: nn.Module) -> str:
    """The whole page."""
    sections = [
        _samples(made), _tokens(made), _findings(made), _similarity(made), _depth(made), _layers(made), _picture(made),
        _coverage(made), _check(made), _rules(),
    ]  # fmt: skip
    data = json.dumps(plain(embedded(made)), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A text may hold what ends a script; in JSON `<` can be written otherwise.
    scripts = (
        f'<script type="application/json" id="data">{data.replace("<", chr(92) + "u003c")}</script>\n'
        f"<script>\n{inlined('page.js')}</script>\n"
    )
    style = inlined("curves.css")
    return document(f"{made.title}: report", _header(made, model), sections, style=style, scripts=scripts)


def _header(made: Report, model: nn.Module) -> str:
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    losses = made.losses.double()
    facts = {
        "samples": f"{len(losses):,}",
        "parameters": f"{parameters:,}" if trained == parameters else f"{trained:,} of {parameters:,} train",
        "layers": f"{len(made.layers):,}",
        "mean loss": brief(float(losses.mean())),
    }
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    return (
        f'<header><h1>{escape(made.title)}</h1><p class="small">One forward and one backward of a batch: what flows '
        f"through the layers, and the gradient of each sample.</p><dl>{items}</dl>{_verdict(made)}"
        f'<p class="small">unsum {version()}, torch {torch.__version__}, model in '
        f"{'training' if model.training else 'evaluation'} mode</p></header>"
    )


def _verdict(made: Report) -> str:
    """How many flags of each kind there are, in one line."""
    counts = Counter(flag.kind for flag in made.flags)
    if not counts:
        return '<p class="verdict calm">Nothing stands out in this batch.</p>'
    told = " ".join(
        f'<span class="chip {kind}">{title}: {counts[kind]:,}</span>'
        for kind, title in _TITLES.items()
        if kind in counts
    )
    return f'<p class="verdict"><a href="#findings">Findings</a>: {told}</p>'


def _absent(made: Report, name: str) -> str:
    """Why a part is not there."""
    return f'<p class="absent">Not here: {escape(made.missing.get(name, "nothing was found"))}</p>'


def _findings(made: Report) -> Section:
    by_kind: dict[str, list[Flag]] = {}
    for flag in made.flags:
        by_kind.setdefault(flag.kind, []).append(flag)
    if not by_kind:
        calm = '<p class="calm">Nothing stands out in this batch.</p>'
        return section("findings", "Findings: what to look at", calm, name="Findings")
    at = {layer.name: k for k, layer in enumerate(made.layers)}
    items = []
    for kind, title in _TITLES.items():
        flags = by_kind.get(kind)
        if flags:
            lines = "".join(f"<li>{_where(flag, at)} <span>{escape(flag.text)}</span></li>" for flag in flags[:200])
            more = f'<li class="small">and {len(flags) - 200:,} more</li>' if len(flags) > 200 else ""
            is_open = " open" if len(flags) <= 4 or kind == "nan" else ""
            items.append(
                f'<details class="finding"{is_open}><summary>{chip(kind)}<b>{title}</b><span class="count">{len(flags)}'
                f'</span></summary><ul>{lines}{more}</ul><p class="small">{escape(RULES[kind])}</p></details>'
            )
    return section("findings", "Findings: what to look at", "".join(items), lead=captions.FINDINGS, name="Findings")


def _where(flag: Flag, at: dict[str, int]) -> str:
    layer, _, _ = flag.where.rpartition(":")
    name = f"<code>{escape(flag.where)}</code>"
    return f'<a href="#layer-{at[layer]}">{name}</a>' if ":" in flag.where and layer in at else name


def _picture(made: Report) -> Section:
    # Also as a page of its own within this one, almost the same that `picture.save("graph.html")` writes; page.js
    # unpacks it when it is first asked for.
    body = (
        f'<figure class="scroll" tabindex="0" role="region" aria-label="Picture of the graph">{made.picture}</figure>'
        '<details class="folding"><summary>Fold and unfold its modules</summary><iframe title="Picture that folds">'
        f'</iframe></details><script type="text/plain" id="folding">{packed(shortened(made.foldable))}</script>'
    )
    body = body if made.picture else _absent(made, "picture")
    return section("picture", "The graph", body, lead=captions.PICTURE, name="Graph")


def _depth(made: Report) -> Section | None:
    chart = depth_chart(made.layers)
    if not chart:
        return None
    return section("depth", "Gradient norm by depth", chart, lead=captions.DEPTH, name="Depth")


def _layers(made: Report) -> Section:
    kinds = dict.fromkeys(flag for layer in made.layers for flag in layer.flags)
    choices = "".join(f'<option value="{kind}">{kind}</option>' for kind in kinds)
    tools = (
        '<div class="tools"><label>Filter <input type="search" id="layer-filter" placeholder="name or kind"></label>'
        '<label>Flag <select id="flag-filter"><option value="">all</option><option value="*">any flag</option>'
        f'{choices}</select></label><label class="box"><input type="checkbox" id="leaf-filter"> innermost modules '
        "only</label>"
        '<output id="layer-count" aria-live="polite"></output></div>'
    )
    table = scrolled(layers_table(made.layers, type_name(made)), "Statistics of each layer")
    note = _absent(made, "gradients") if "gradients" in made.missing else ""
    return section("layers", "Layers", tools + note + table, lead=captions.LAYERS)


def type_name(made: Report) -> str:
    """What the model itself is called in the table."""
    root = next((layer.kind for layer in made.layers if layer.name == ""), made.title)
    return f"{root} (the model)"


def _samples(made: Report) -> Section:
    each = made.samples
    if each is None:
        losses = scrolled(losses_table(made.losses.double().tolist()), "Loss of each sample")
        return section("samples", "Samples", _absent(made, "per-sample gradients") + losses)
    picker = (
        '<div class="tools"><label>Sample <select id="picker"><option value="">none picked</option></select></label>'
        '<button type="button" id="before" aria-label="Previous sample">←</button>'
        '<button type="button" id="after" aria-label="Next sample">→</button></div>'
        '<div id="picked" aria-live="polite"></div>'
    )
    top, drawn = bars(each.norms, set(each.outliers), each.limit, each.ids)
    limit = brief(each.limit)
    dashed = f"; dashed line: {limit}, above it a sample stands out" if math.isfinite(each.limit) else ""
    scale = f"gradient norm, from 0 to {brief(top)}{dashed}"
    scale = scale if bool(each.norms.isfinite().any()) else "no gradient norm is finite"
    chart = (
        f'<div class="chart"><span class="axis">{scale}</span>{drawn}'
        f'<span class="axis">sample {each.ids[0]}</span><span class="axis end">{each.ids[-1]}</span></div>'
    )
    note = f"<p class=small>The {LISTED} largest of {len(each.ids):,}.</p>" if len(each.ids) > LISTED else ""
    table = scrolled(
        samples_table(each, made.losses.double().tolist(), made.labels), "Loss and gradient norm of each sample"
    )
    body = _interacting(each) + chart + picker + note + table
    return section("samples", "Samples", body, lead=captions.SAMPLES)


def _interacting(each: BySample) -> str:
    if each.interacting is None:
        return ""
    told = interaction_told(each.interacting.rstrip("."))
    why = escape(told[:1].upper() + told[1:])
    share = "the derivative of the part of the loss that enters at its own outputs"
    return f'<p class="absent">{why}. What is shown is each sample\'s share: {share}.</p>'


def _tokens(made: Report) -> Section | None:
    each = made.samples
    if each is None or each.tokens is None:
        return None
    names = ", ".join(each.left_out[:6])
    left = (
        f" These parameters are left out, because their gradient cannot be divided among the tokens: {names}."
        if names
        else ""
    )
    if len(each.left_out) > 6:
        left = left[:-1] + f" and {len(each.left_out) - 6} more."
    body = (
        '<div class="tools"><label>Colours <select id="token-scale"><option value="all">over all samples</option>'
        '<option value="each">within each sample</option></select></label>'
        '<span class="legend warm"><span id="token-least"></span><i></i><span id="token-most"></span></span>'
        '<output id="token-note"></output></div><div id="token-map"></div>'
    )
    return section("tokens", "Tokens", body, lead=captions.tokens(_on(made), escape(left)))


def _on(made: Report) -> str:
    """Which token has a position's colour."""
    if made.text is None:
        return " The numbers are positions."
    if not made.ahead:
        return " A position's colour is on the token that is read there."
    far = "the next one" if made.ahead == 1 else f"{made.ahead} further on"
    return f" A position's colour is on the token that is predicted there, {far}, and not on the one that is read."


def _similarity(made: Report) -> Section | None:
    each = made.samples
    if each is None or each.similarity is None or len(each.ids) < 2:
        return None
    shown = len(each.similarity.rows)
    how = escape(each.similarity.how[:1].upper() + each.similarity.how[1:])
    some = f" {shown} of {len(each.ids):,} samples, evenly over the batch and with its outliers."
    note = f'<p class="small">{how}.{some * (shown < len(each.ids))}</p>'
    body = (
        '<div class="tools"><label class="box"><input type="checkbox" id="alike"> alike samples side by side</label>'
        '<span class="legend"><span>−1</span><i></i><span>1</span></span></div>'
        '<div class="matrix"><canvas id="matrix" tabindex="0" role="img" aria-describedby="cell" aria-label="Cosine '
        f'similarity of the gradients of {shown} samples; arrow keys move, Enter picks"></canvas>'
        '<output id="cell" aria-live="polite"></output></div>'
    )
    return section("similarity", "Similarity of samples", body + note, lead=captions.SIMILARITY, name="Similarity")


def _coverage(made: Report) -> Section:
    each = made.samples
    if each is None:
        return section("coverage", "Coverage", _absent(made, "per-sample gradients"), is_open=False)
    table = scrolled(coverage_table(each.coverage), "Where each parameter met data")
    ruled = f'<p class="small">{escape(each.ruled[:1].upper() + each.ruled[1:])}.</p>'
    return section("coverage", "Coverage", ruled + table, lead=captions.COVERAGE, is_open=False)


def _check(made: Report) -> Section:
    checked = made.check
    if checked is None:
        return section("check", "Check", _absent(made, "check"), is_open=False)
    verdict = (
        "every per-sample gradient is that of plain autograd" if checked.ok else "not everything is as it should be"
    )
    told = f"<p>{chip('ok' if checked.ok else 'wrong')} {verdict} (tolerance {brief(checked.tolerance)}).</p>"
    why = interaction_told(checked.interacting) if checked.interacting else ""
    note = f'<p class="absent">{escape(why[:1].upper() + why[1:])}</p>' if why else ""
    table = scrolled(check_table(checked), "Per-sample gradients against plain autograd")
    return section("check", "Check", told + note + table, lead=captions.CHECK, is_open=not checked.ok)


def _rules() -> Section:
    items = "".join(f"<div><dt>{chip(kind)}</dt><dd>{escape(rule)}</dd></div>" for kind, rule in RULES.items())
    more = (
        "<p>Statistics are over finite values, but for norms, which are NaN where a value is not finite; the standard "
        "deviation is that of the whole tensor (no correction). The "
        "losses were summed before the backward, so that a sample's gradient is that of its own loss. A histogram "
        f"counts {DRAWN:,} values at most, taken evenly.</p>"
    )
    body = f'<dl class="rules">{items}</dl>{more}'
    return section("rules", "Flags: what they mean", body, name="Flags", is_open=False)
