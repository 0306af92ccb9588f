"""Hits as HTML: a page that loads nothing, and a fragment for notebooks."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsum.destination import writable
from unsum.heatmap import Token, ends, legend, signed, span, style
from unsum.index.words import Hit, Words, headings, with_tokens
from unsum.notebook import element
from unsum.report.charts import brief
from unsum.report.frame import document, inlined, section, version

if TYPE_CHECKING:
    from unsum.index.hits import Hits

Asked = list[tuple[str, list[Hit]]]
"""Of each query, its heading and its hits."""

_TOKENS, _LETTERS = 80, 480  # of a text that is not folded
_WINDOW, _OPENING = 40, 240  # tokens and letters that are seen of one that is
_TITLE, _NAME = 110, 24  # letters of a query that are its heading, and that the contents bar has
_OPEN = 20  # queries whose sections are open
_CLASS = "unsum-hits unsum-tokens"  # of what the rules of both style sheets reach
_COMPACT = 3, 10  # queries, and hits of each, that `Hits` shows of itself in a notebook


def write(hits: Hits, path: str | os.PathLike[str], words: Words | None, queries: Sequence[str] | None) -> Path:
    """Write the page; missing folders are made."""
    asked = _asked(hits, words, queries)
    where = writable(path, example="hits.html")
    where.write_text(_page(hits, asked), encoding="utf-8", errors="replace")  # half of a surrogate pair becomes "?"
    return where


class Shown:
    """Hits that show themselves in a notebook. What `hits.show` gives."""

    def __init__(self, hits: Hits, words: Words | None, queries: Sequence[str] | None) -> None:
        self._hits, self._asked = hits, _asked(hits, words, queries)

    def __repr__(self) -> str:
        return f'hits of {_count(len(self._asked), "query", "queries")}, shown in a notebook; hits.report("hits.html")'

    def _repr_html_(self) -> str:
        return _fragment(self._hits, self._asked)


def compact(hits: Hits) -> str:
    """The first hits of the first queries, one line of text for each, for a notebook."""
    queries, k = hits.ids.shape
    first = _first(hits, *_COMPACT)
    left = [_count(queries - _COMPACT[0], "more query", "more queries")] if queries > _COMPACT[0] else []
    left += [f"{k - _COMPACT[1]} more hits for each"] if k > _COMPACT[1] else []
    note = f"Not shown: {' and '.join(left)}. " if left else ""
    return _fragment(first, _asked(first, None, None), note=f"{note}In full: hits.show(), hits.report('hits.html')")


def _asked(hits: Hits, words: Words | None, queries: Sequence[str] | None) -> Asked:
    names = headings(queries, len(hits.ids))
    if hits.are_norms and queries is None:
        names = ["largest first"]
    return list(zip(names, with_tokens(hits, words), strict=True))


def _first(hits: Hits, queries: int, k: int) -> Hits:
    changes: dict[str, Any] = {}
    for name in ("ids", "scores", "errors", "positions"):
        value = getattr(hits, name)
        changes[name] = None if value is None else value[:queries, :k]
    for name in ("tokens", "names", "texts", "examples"):
        value = getattr(hits, name)
        changes[name] = None if value is None else [row[:k] for row in value[:queries]]
    return replace(hits, **changes)


def _page(hits: Hits, asked: Asked) -> str:
    title = _title(hits)
    header = f'<header class="{_CLASS}"><h1>{title}</h1>{_caption(hits)}<p class="small">unsum {version()}</p></header>'
    sections = [
        section(
            f"query-{number}", _cut(name, _TITLE), f'<div class="{_CLASS}">{_whole(name)}{_list(found)}</div>',
            name=_cut(name, _NAME), is_open=number < _OPEN,
        )
        for number, (name, found) in enumerate(asked)
    ]  # fmt: skip
    return document(title, header, sections, style=_style())


def _style() -> str:
    return style() + inlined("page.css", "unsum.index")


def _title(hits: Hits) -> str:
    queries, k = hits.ids.shape
    what = _count(k, "training example") if hits.positions is None else _count(k, "token") + " of training examples"
    if hits.are_norms:
        return f"{what} that {'stands' if k == 1 else 'stand'} out"
    return f"The {what} with the highest scores for {'the query' if queries == 1 else f'each of {queries:,} queries'}"


def _fragment(hits: Hits, asked: Asked, note: str = "") -> str:
    """All of it in one element, whose rules begin with its class: they reach nothing else in the notebook."""
    parts = "".join(
        f'<div class="query"><div class="title">{escape(_cut(name, _TITLE))}</div>{_whole(name)}{_list(found)}</div>'
        for name, found in asked
    )
    kind, note = (" compact", f'<div class="note">{escape(note)}</div>') if note else ("", "")
    return element(f"{_caption(hits)}{parts}{note}", style=_style(), kind=f"{_CLASS} notebook{kind}")


def _caption(hits: Hits) -> str:
    """How to read it, in plain words."""
    what = "example" if hits.positions is None else "token"
    if hits.are_norms:
        said = [
            f"<b>Score</b>: the norm of the {what}'s gradient, as the index has it. Listed are {what}s whose norm is "
            "far above that of most: they are often mislabelled, damaged or rare."
        ]
    else:
        said = [
            f"<b>Each heading</b> is a query. Below it are the training {what}s with the highest scores, best first.",
            f"<b>Score</b>, positive: training on the {what} lowers the query's loss, to first order; negative: it "
            "raises the loss.",
            f"<b>Bars</b> begin at 0{_sides(hits)}. Each query has its own scale.",
        ]
    if hits.errors is not None:
        said.append(
            "<b>±</b>: one standard error of the score, which the index estimates: it stores random projections of "
            "gradients. Two scores that differ by less than that are as good as equal."
        )
    if hits.tokens is not None:
        said.append(
            '<b>Tokens</b> are coloured by their part in the score: one that <span class="t p" style="--s:.7">adds to '
            'it</span>, one that <span class="t n" style="--s:.7">takes from it</span> (dotted line). The number shows '
            "under the pointer."
        )
    return f'<div class="caption">{"".join(f"<div>{line}</div>" for line in said)}</div>'


def _sides(hits: Hits) -> str:
    """What the colours of bars mean, where there are two."""
    if not (hits.scores < 0).any():
        return ""
    return (
        ': <span class="key p">positive</span> to the right, <span class="key n">negative, striped,</span> to the left'
    )


def _list(found: list[Hit]) -> str:
    if not found:
        return '<div class="note">None.</div>'
    reached = [end for hit in found for end in _interval(hit) if math.isfinite(end)]
    low, high = min([0.0, *reached]), max([0.0, *reached])
    least, most = ends(token for hit in found for token in hit.tokens)
    items = "".join(_item(hit, low, high, max(-least, most)) for hit in found)
    scale = legend("a token's part in the score", least, most)
    return f'{scale}<div class="list" role="list">{items}</div>'


def _item(hit: Hit, low: float, high: float, most: float) -> str:
    row = hit.row
    told = [f'example <span class="number">{row["example"]}</span>']
    told += [f'position <span class="number">{row["position"]}</span>'] if "position" in row else []
    told += [f'<bdi class="id">{escape(row["id"])}</bdi>'] if "id" in row else []
    score = f'<span class="score" title="{row["score"]!r}">{signed(row["score"])}</span>'
    error = f' <span class="error">± {brief(row["error"])}</span>' if "error" in row else ""
    return (
        f'<div class="hit" role="listitem"><div class="rank">{row["rank"]}</div><div class="scored">'
        f"{score}{error}{_bar(hit, low, high)}</div>"
        f'<div class="told">{" · ".join(told)}</div><div class="text">{_text(hit, most)}</div></div>\n'
    )


def _bar(hit: Hit, low: float, high: float) -> str:
    """From 0 to the score, in per cent of the query's range, with a line for the error."""
    score, wide = hit.row["score"], high - low
    if not math.isfinite(score) or not wide > 0:
        return ""

    def span(kind: str, one: float, other: float) -> str:
        left = 100 * (min(one, other) - low) / wide
        return f'<i class="{kind}" style="left:{left:.4g}%;width:{100 * abs(other - one) / wide:.4g}%"></i>'

    error = span("whisker", *_interval(hit)) if hit.row.get("error") else ""
    return f'<div class="bar">{span("p" if score >= 0 else "n", 0.0, score)}{span("zero", 0.0, 0.0)}{error}</div>'


def _interval(hit: Hit) -> tuple[float, float]:
    """The score with its error to both sides."""
    score, error = hit.row["score"], hit.row.get("error", 0.0)
    return (score - error, score + error) if math.isfinite(error) else (score, score)


def _text(hit: Hit, most: float) -> str:
    """The tokens as a heat map, or else the text; what is long is folded, with a part of it to be seen."""
    made, text = "", hit.row.get("text", "")
    if text and not (hit.has_strings and hit.tokens):
        whole = f'<div class="plain" dir="auto">{escape(text)}</div>'
        made += (
            whole if len(text) <= _LETTERS else _folded(escape(_cut(text, _OPENING)), whole, f"{len(text):,} letters")
        )
    if hit.tokens:
        kind = "tokens" if hit.has_strings else "tokens cells"
        whole = f'<div class="{kind}" dir="auto">{_spans(hit, hit.tokens, most)}</div>'
        letters = sum(len(token.string) for token in hit.tokens)
        if len(hit.tokens) <= _TOKENS and (letters <= 2 * _LETTERS or not hit.has_strings):
            return made + whole
        seen = _window(hit)
        before, after = ("… " if seen[0].position else ""), (" …" if seen[-1] is not hit.tokens[-1] else "")
        part = f'<span class="{kind}">{before}{_spans(hit, seen, most)}{after}</span>'
        made += _folded(part, whole, f"{len(hit.tokens):,} tokens")
    return made


def _folded(part: str, whole: str, size: str) -> str:
    return (
        f'<details><summary><span class="part" dir="auto">{part}</span> <span class="more">all {size}</span></summary>'
        f"{whole}</details>"
    )


def _window(hit: Hit) -> list[Token]:
    """The tokens that follow each other and have most of the score; or those around the one that was found."""
    tokens = hit.tokens
    if "position" in hit.row:
        first = max(0, hit.row["position"] - _WINDOW // 2)
        return tokens[first : first + _WINDOW]
    sums = [0.0]
    for token in tokens:
        weight = abs(token.score or 0.0)
        sums.append(sums[-1] + (weight if math.isfinite(weight) else 0.0))
    starts = range(max(1, len(tokens) - _WINDOW + 1))
    first = max(starts, key=lambda k: sums[min(k + _WINDOW, len(tokens))] - sums[k])
    return tokens[first : first + _WINDOW]


def _spans(hit: Hit, tokens: Sequence[Token], most: float) -> str:
    return "".join(span(token, most, is_found=token.position == hit.row.get("position")) for token in tokens)


def _whole(name: str) -> str:
    """The text of a query that its heading has only the beginning of."""
    if len(name) <= _TITLE:
        return ""
    whole = f'<div class="plain" dir="auto">{escape(name)}</div>'
    return f'<details class="asked"><summary>the whole query</summary>{whole}</details>'


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1].rstrip() + "…"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
