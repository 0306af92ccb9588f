"""The page in which the graph folds, made small enough to be carried inside another page.

It holds a picture for each choice of open groups: up to 4 MB of text in which lines differ by their numbers alone.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from html import unescape

LETTERS = 750_000  # of the pictures that a report carries; `picture.save("graph.html")` has more of them
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_HOLE = "\x01"
_PICTURE = re.compile(r'<template data-picture="\d+">.*?</template>\n?', re.S)
_MOVES = re.compile(r'(<script type="application/json" id="moves">)(.*?)(</script>)', re.S)
_GROUP = re.compile(r'data-role="group" data-name="([^"]*)"[^>]*? data-folded="(\w+)"')


def packed(page: str) -> str:
    """The page in base64: deflated lines, each the number of its form and the numbers in it. `unpack` in page.js turns
    it back. A window of deflate is shorter than a picture: without the forms, it would not see the picture before."""
    forms: dict[str, int] = {}
    lines = []
    for line in page.replace(_HOLE, "").split("\n"):
        form = forms.setdefault(_NUMBER.sub(_HOLE, line), len(forms))
        lines.append(" ".join([str(form), *_NUMBER.findall(line)]))
    text = "\n".join([str(len(forms)), *forms, *lines])
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def shortened(page: str, letters: int = LETTERS) -> str:
    """The page with its first pictures only. A click that led to another one leads to where just that group is the
    other way round than at the beginning, and the page says so; or it says that there is no picture."""
    pictures, found = _PICTURE.findall(page), _MOVES.search(page)
    held = 0
    while held < len(pictures) and letters > 0:
        letters -= len(pictures[held])
        held += 1
    if found is None or held == len(pictures):
        return page
    for picture in pictures[held:]:
        page = page.replace(picture, "", 1)
    moves = json.loads(found[2])[:held]
    folded = [{unescape(name): is_so for name, is_so in _GROUP.findall(picture)} for picture in pictures[:held]]
    kept = [
        {name: to for name in moves[k] if (to := _target(moves, folded, k, name, held)) is not None}
        for k in range(held)
    ]
    text = json.dumps(kept, separators=(",", ":")).replace("<", "\\u003c")
    return _MOVES.sub(lambda match: match[1] + text + match[3], page)


def _target(moves: list[dict[str, int]], folded: list[dict[str, str]], k: int, name: str, held: int) -> int | None:
    """Where a click on a group leads; below zero (`~`) where other groups are as at the beginning."""
    to = moves[k][name]
    if (to if to >= 0 else ~to) < held:
        return to
    if name in folded[0] and folded[0][name] != folded[k].get(name):
        return ~0
    first = moves[0].get(name, held)
    return ~first if 0 <= first < held else None
