"""A hook of mkdocs (mkdocs.yml): pages that can be read at any width.

Pictures know how wide they are, so that on a phone they scroll instead of shrinking to nothing. What a program prints
wraps at the end of a line, unless it is aligned in columns. Tables of sentences become a card for each row there.
A number such as 2e-07 is not broken at its sign. A page that is alone in its section needs no list of pages beside it.
"""

from __future__ import annotations

import posixpath
import re
from html import escape, unescape
from pathlib import Path
from typing import Any

_IMAGE = re.compile(r'<img (?P<before>[^>]*)src="(?P<file>[\w./-]+\.svg)"')
_WIDE = re.compile(r'<svg [^>]*\bwidth="(\d+)"')
_PRINTED = re.compile(r'<div class="language-text(?P<more>[\w ]*) highlight">(?P<code><pre>.*?</pre>)</div>', re.S)
_TAG = re.compile(r"<[^>]+>")
_TABLE = re.compile(r"<table>\n<thead>\n<tr>(?P<head>.*?)</tr>\n</thead>\n<tbody>(?P<body>.*?)</tbody>", re.S)
_CELL = re.compile(r"<t[dh](?P<style>[^>]*)>(?P<inside>.*?)</t[dh]>", re.S)
_SMALL = re.compile(r"(?<![\w.])\d(?:\.\d+)?e-\d+")
_SENTENCES = 60  # letters of a row, on average: less are names and numbers


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Wide pages: those that are alone in their section."""
    if page.parent is None:
        page.meta["hide"] = ["navigation"]
    return markdown


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """The page's own HTML, before the theme puts its frame around it."""
    folder = posixpath.dirname(page.file.src_uri)

    def picture(match: re.Match[str]) -> str:
        path = Path(config["docs_dir"]) / posixpath.normpath(posixpath.join(folder, match["file"]))
        wide = _WIDE.search(path.read_text(encoding="utf-8"))
        style = f'class="picture" style="--wide: {wide[1]}px" ' if wide else ""
        return f'<img {style}{match["before"]}src="{match["file"]}"'

    html = _IMAGE.sub(picture, html)
    html = _PRINTED.sub(_wrapped, html)
    return _TABLE.sub(_cards, html)


def _text(html: str) -> str:
    return unescape(_TAG.sub("", html))


def _wrapped(match: re.Match[str]) -> str:
    kind = "" if is_aligned(_text(match["code"])) else " wraps"
    return f'<div class="language-text{match["more"]}{kind} highlight">{match["code"]}</div>'


def is_aligned(printed: str) -> bool:
    """Whether two lines have something after a gap, in the same column.

    Examples:
        >>> is_aligned("name   norm\\nfc1     2.5"), is_aligned("no site 'x'\\n  near: 'y'  # or another")
        (True, False)
    """
    seen: set[int] = set()
    for line in printed.splitlines():
        ends = {gap.end() for gap in re.finditer(r"(?<=\S) {2,}(?=\S)", line)}
        ends |= {match.end() for match in re.finditer(r"(?<=\S) {2,}\S+", line)}  # numbers end at one column
        if seen & ends:
            return True
        seen |= ends
    return False


def _cards(match: re.Match[str]) -> str:
    names = [_text(cell["inside"]) for cell in _CELL.finditer(match["head"])]
    rows = re.findall(r"<tr>.*?</tr>", match["body"], re.S)
    cells = [_text(cell["inside"]) for cell in _CELL.finditer(match["body"])]
    has_figures = 3 * sum(cell[:1].isdigit() for cell in cells) > len(cells)
    body = _SMALL.sub(r'<span class="number">\g<0></span>', match["body"])
    if len(names) < 3 or has_figures or sum(map(len, cells)) < _SENTENCES * len(rows):
        return match[0].replace(match["body"], body)
    labelled = "".join(_labelled(row, names) for row in re.findall(r"<tr>.*?</tr>", body, re.S))
    return match[0].replace("<table>", '<table data-cards="">').replace(match["body"], labelled)


def _labelled(row: str, names: list[str]) -> str:
    cells = [
        f'<td{cell["style"]} data-label="{escape(name)}"><div>{cell["inside"]}</div></td>'
        if cell["inside"]
        else "<td></td>"
        for name, cell in zip(names, _CELL.finditer(row), strict=True)
    ]
    return f"<tr>{''.join(cells)}</tr>\n"
