"""One HTML page in which groups fold and unfold."""

from __future__ import annotations

import re
from html import escape

from unsum.draw.fold import Folding, Group
from unsum.draw.paint import paint

_MOST = 40  # groups that can be opened by a click: each is a picture of its own on the page

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
[data-role=group] {{ cursor: pointer; }}
#told {{ position: fixed; left: 0; right: 0; bottom: 0; padding: 10px 16px; min-height: 20px; background: var(--paper);
  border-top: 1px solid var(--line); color: var(--faint); }}
</style></head><body><main id="picture"></main><div id="told" aria-live="polite">{hint}</div>
{states}
<script>
"use strict";
const place = document.getElementById("picture"), told = document.getElementById("told"), hint = told.textContent;
const state = name => document.querySelector(`template[data-open="${{CSS.escape(name)}}"]`);
function show(template, name) {{
  place.replaceChildren(template.content.cloneNode(true));
  place.dataset.shown = template.dataset.open;
  const group = name === undefined ? null : place.querySelector(`[data-role=group][data-name="${{CSS.escape(name)}}"]`);
  if (group) {{ group.focus(); group.scrollIntoView({{ block: "nearest" }}); }}
}}
function toggle(group) {{
  const name = group.dataset.name, open = group.dataset.folded === "false";
  const next = state((open ? "-" : "+") + name);
  if (next) show(next, name);
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
show(state(""));
</script></body></html>
"""


def page(folding: Folding, opened: frozenset[str], title: str) -> str:
    """The picture as it is, and one for every group that is opened or folded."""
    states = {"": opened}
    above = _above(folding.top, [])
    for name, around in list(above.items())[:_MOST]:
        inside = {other for other, groups in above.items() if name in groups}
        if name in opened:
            states[f"-{name}"] = opened - inside - {name}
            states[f"+{name}"] = opened
        else:
            states[f"+{name}"] = opened | set(around) | {name}
            states[f"-{name}"] = (opened | set(around)) - {name}
    pictures: dict[frozenset[str], str] = {}
    parts = []
    for name, names in states.items():
        if names not in pictures:
            pictures[names] = re.sub(r"\n+", "\n", paint(folding, names, title))
        parts.append(f'<template data-open="{escape(name)}">{pictures[names]}</template>')
    hint = "Point at anything, or go to it with Tab, to read what it is. Enter or a click folds and unfolds a group."
    return _PAGE.format(title=escape(title), states="\n".join(parts), hint=hint)


def _above(group: Group, around: list[str]) -> dict[str, list[str]]:
    """For every group the names of those around it; outer ones first."""
    found: dict[str, list[str]] = {child.name: around for child in group.children}
    for child in group.children:
        found.update(_above(child, [*around, child.name]))
    return found
