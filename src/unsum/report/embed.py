"""The data that a page carries as JSON, thinned out where there is much."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any
from unicodedata import category

from unsum.report.data import BySample, Layer, Report
from unsum.report.measure import Stats
from unsum.report.tables import LISTED

TOKENS = 20_000  # that are coloured, over all samples
_JOINERS = "\u200c\u200d"  # of letters and emoji: they do show, in what they join
PARTS = 5  # parameters named for each sample


def embedded(made: Report) -> dict[str, Any]:
    """Everything that the script needs, and programs that read the page."""
    each = made.samples
    return {
        "title": made.title,
        "flags": [asdict(flag) for flag in made.flags],
        "missing": made.missing,
        "layers": [_layer(layer) for layer in made.layers],
        "losses": made.losses,
        "samples": None if each is None else {**_samples(each), "labels": made.labels},
        "similarity": None if each is None or each.similarity is None else _similarity(each),
        "tokens": None if each is None or each.tokens is None else _tokens(each, made.text, made.ahead),
        "check": None if made.check is None else {"ok": made.check.ok, "interacting": made.check.interacting},
    }


def _layer(layer: Layer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "type": layer.kind,
        "flags": layer.flags,
        "activation": _stats(layer.activation),
        "gradient": _stats(layer.gradient),
        "weight_norm": layer.weight_norm,
        "weight_gradient_norm": layer.weight_gradient_norm,
    }


def _stats(stats: Stats | None) -> dict[str, Any] | None:
    if stats is None:
        return None
    return {name: value for name, value in vars(stats).items() if name not in ("idle", "is_data")}


def _samples(each: BySample) -> dict[str, Any]:
    names = list(each.by_parameter)
    listed = each.norms.nan_to_num(math.inf).argsort(descending=True)[:LISTED].tolist()
    parts: dict[int, list[list[float]]] = {}
    for k in {*listed, *(each.similarity.rows if each.similarity else ())}:
        norms = [(float(each.by_parameter[name][k]), i) for i, name in enumerate(names)]
        parts[k] = [[i, norm] for norm, i in sorted(norms, reverse=True)[:PARTS]]
    return {
        "ids": each.ids,
        "norms": each.norms,
        "outliers": each.outliers,
        "limit": each.limit,
        "parameters": names,
        "parts": parts,
        "interacting": each.interacting,
    }


def _similarity(each: BySample) -> dict[str, Any]:
    assert each.similarity is not None
    cosines = [[round(value, 4) for value in row] for row in each.similarity.cosines.tolist()]
    return {"rows": each.similarity.rows, "cosines": cosines, "how": each.similarity.how}


def _tokens(each: BySample, text: list[list[str]] | None, ahead: int) -> dict[str, Any]:
    """As many samples as there is room for, outliers first; long ones cut."""
    assert each.tokens is not None
    n, t = each.tokens.shape
    positions = min(t, TOKENS)
    far = set(each.outliers)
    order = [*each.outliers, *(k for k in range(n) if k not in far)]
    rows = sorted(order[: max(1, TOKENS // positions)])
    end = (
        positions + ahead if positions < t else None
    )  # a text may go on after the last position: targets are often longer
    words = None if text is None else [[_shown(token) for token in text[k][:end]] for k in rows]
    return {
        "rows": rows,
        "norms": each.tokens[rows, :positions].tolist(),
        "text": words,
        "ahead": 0 if text is None else ahead,
        "apart": text is not None and _are_words(text),
        "left": n - len(rows),
        "cut": t - positions,
    }


def _are_words(text: list[list[str]]) -> bool:
    """Whether tokens are whole words, which need a space between them, and not pieces that bring their own."""
    tokens = {token for row in text for token in row}
    return any(len(token) > 1 for token in tokens) and not any(c.isspace() for token in tokens for c in token)


def _shown(token: str) -> str:
    """A token as it can be seen: line ends, tabs and what has no look of its own have signs.

    Examples:
        >>> _shown("a\\n"), _shown("\\u202e")
        ('a⏎', '⟨202E⟩')
    """
    token = token.replace("\n", "⏎").replace("\t", "⇥")
    return "".join(f"⟨{ord(c):04X}⟩" if category(c) in ("Cc", "Cf") and c not in _JOINERS else c for c in token)
