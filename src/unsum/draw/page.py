"""One HTML page in which groups fold and unfold."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from unsum.draw.fold import Folding, Group
from unsum.draw.paint import paint

# What can be seen by clicks: each is a picture of its own on the page, and the page must still load.
_PICTURES, _LETTERS = 150, 4_000_000

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --faint: #5d6570; --line: #c3c9d1; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e8ecf1; --paper: #14181d; --faint: #a3acb7; --line: #4a535e; }} }}
body {{ margin: 0; background: var(--paper); color: var(--ink);
  font: 14px system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }}
main {{ padding: 8px 8px 64px; overflow-x: auto; }} main svg {{ display: block; margin: 0 auto; }}
[data-moves] {{ cursor: pointer; }}
#told {{ position: fixed; left: 0; right: 0; bottom: 0; padding: 10px 16px; min-height: 20px; background: var(--paper);
  border-top: 1px solid var(--line); color: var(--faint); }}
</style></head><body><main id="picture"></main><div id="told" aria-live="polite">{hint}</div>
{states}
<script type="application/json" id="moves">{moves}</script>
<script>
"use strict";
const place = document.getElementById("picture"), told = document.getElementById("told"), hint = told.textContent;
const moves = JSON.parse(document.getElementById("moves").textContent);
let shown = 0;
function show(number, name) {{
  shown = number;
  place.replaceChildren(document.querySelector(`template[data-picture="${{number}}"]`).content.cloneNode(true));
  const svg = place.querySelector("svg");
  const wide = svg.width.baseVal.value, tall = svg.height.baseVal.value;
  const fits = Math.min((innerWidth - 24) / wide, (innerHeight - told.offsetHeight - 16) / tall, 1);
  svg.style.maxWidth = "none";
  svg.style.width = Math.max(fits, 0.75) * wide + "px";  // scroll rather than shrink to nothing
  for (const group of place.querySelectorAll("[data-role=group]"))
    if (group.dataset.name in moves[number]) group.dataset.moves = "";
  const group = name === undefined ? null : place.querySelector(`[data-role=group][data-name="${{CSS.escape(name)}}"]`);
  if (group) {{ group.focus(); group.scrollIntoView({{ block: "nearest" }}); }}
}}
function toggle(group) {{
  const name = group.dataset.name, next = moves[shown][name];
  if (next === undefined) {{ told.textContent = {dead}; return; }}
  show(next < 0 ? ~next : next, name);
  if (next < 0) told.textContent = {closed};
}}
const near = (event, what) => event.target instanceof Element ? event.target.closest(what) : null;
place.addEventListener("click", event => {{ const g = near(event, "[data-role=group]"); if (g) toggle(g); }});
place.addEventListener("keydown", event => {{
  const g = near(event, "[data-role=group]");
  if (g && (event.key === "Enter" || event.key === " ")) {{ event.preventDefault(); toggle(g); }}
}});
for (const kind of ["focusin", "mouseover"]) place.addEventListener(kind, event => {{
  const labelled = near(event, "[aria-label]");
  told.textContent = labelled ? labelled.getAttribute("aria-label") : hint;
}});
show(0);
</script></body></html>
"""


_HINT = "Point at anything, or go to it with Tab, to read what it is. Enter or a click folds and unfolds a group."
_CLOSED = "Other groups were folded again: this page does not hold a picture of every choice of groups."
_DEAD = "This page holds no picture of this: the graph is too large. draw(..., fold=) opens what you name."

_Open = frozenset[str]


def page(folding: Folding, opened: _Open, title: str) -> str:
    """The picture as it is, and those to which clicks lead, as many as a page holds."""
    above = _above(folding.top, [])
    number: dict[_Open, int] = {}
    parts: list[str] = []
    letters = 0
    for state in _states(opened, above):
        if len(parts) >= _PICTURES or letters > _LETTERS:
            break
        picture = re.sub(r"\n+", "\n", paint(folding, state, title))
        number[state], letters = len(parts), letters + len(picture)
        parts.append(f'<template data-picture="{len(parts)}">{picture}</template>')
    moves = [_moves(state, opened, above, number) for state in number]
    text = json.dumps(moves, separators=(",", ":")).replace("<", "\\u003c")
    return _PAGE.format(
        title=escape(title), states="\n".join(parts), hint=_HINT, moves=text, dead=json.dumps(_DEAD),
        closed=json.dumps(_CLOSED),
    )  # fmt: skip


def _states(opened: _Open, above: Mapping[str, Sequence[str]]) -> Iterator[_Open]:
    """Which groups are open: first as it is, then each group by itself, then more and more of them together."""
    seen: set[_Open] = set()
    waiting = deque([opened, *(_alone(name, opened, above) for name in above)])
    while waiting:
        state = waiting.popleft()
        if state not in seen:
            seen.add(state)
            yield state
            waiting.extend(_toggled(name, state, above) for name in _visible(state, above))


def _visible(state: _Open, above: Mapping[str, Sequence[str]]) -> list[str]:
    return [name for name, around in above.items() if state.issuperset(around)]


def _toggled(name: str, state: _Open, above: Mapping[str, Sequence[str]]) -> _Open:
    if name not in state:
        return state | {name}
    return state - {name} - {inner for inner, around in above.items() if name in around}


def _alone(name: str, opened: _Open, above: Mapping[str, Sequence[str]]) -> _Open:
    """The other way round than at the beginning, and nothing else changed."""
    return _toggled(name, opened | frozenset(above[name]), above)


def _moves(
    state: _Open, opened: _Open, above: Mapping[str, Sequence[str]], number: Mapping[_Open, int]
) -> dict[str, int]:
    """Where a click on each group leads. Below zero: there, but other groups are as at the beginning."""
    found: dict[str, int] = {}
    for name in _visible(state, above):
        whole = _toggled(name, state, above)
        around = opened | frozenset(above[name])
        other = around - {name} if name in state else around | {name}
        if whole in number:
            found[name] = number[whole]
        elif other in number and other != state:
            found[name] = ~number[other]
    return found


def _above(group: Group, around: list[str]) -> dict[str, list[str]]:
    """For every group the names of those around it; outer ones first."""
    found: dict[str, list[str]] = {child.name: around for child in group.children}
    for child in group.children:
        found.update(_above(child, [*around, child.name]))
    return found
