"""How results show themselves in a notebook: HTML in one element, whose style rules reach nothing else there.

Notebooks have themes of their own, light or dark whatever the system says: the rules use the notebook's own colours,
and greys that can be read on both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from pathlib import Path

ROWS = 100  # of a table, before the rest is only counted
LARGEST = 3_000_000  # letters of a page that is shown whole: it is stored in the notebook's file, too

_STYLE = """
.unsum-notebook { font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; max-width: 100%; }
.unsum-notebook .title { font-weight: 650; overflow-wrap: anywhere; }
.unsum-notebook .note { opacity: .75; font-size: .87em; margin: .2em 0; overflow-wrap: anywhere; white-space: pre-line; }
.unsum-notebook .scroll { overflow-x: auto; max-width: 100%; }
.unsum-notebook table { border-collapse: collapse; border: 0; margin: .4em 0; font-size: .92em; font-variant-numeric: tabular-nums; }
.unsum-notebook :is(th, td) { padding: .2em .8em .2em 0; border: 0; border-bottom: 1px solid rgba(128, 128, 128, .3); background: none; text-align: left; vertical-align: top; }
.unsum-notebook th { font-weight: 500; opacity: .75; white-space: nowrap; }
.unsum-notebook td.name { font-family: ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.unsum-notebook .right { text-align: right; white-space: nowrap; }
.unsum-notebook td.across { font-style: italic; opacity: .75; }
.unsum-notebook b.good { color: #1c8a66; }
.unsum-notebook b.bad { color: #d8432a; }
.unsum-notebook summary { cursor: pointer; opacity: .75; font-size: .87em; }
.unsum-notebook pre { font-size: .85em; overflow-x: auto; background: none; }
.unsum-notebook iframe { display: block; width: 100%; height: 46rem; max-height: 85vh; margin: .4em 0; border: 1px solid rgba(128, 128, 128, .3); border-radius: 6px; }
"""  # noqa: E501


def element(body: str, *, style: str = _STYLE, kind: str = "unsum-notebook") -> str:
    """One element with its style inside. Every rule of the style begins with the element's class."""
    return f'<div class="{kind}"><style>{style}</style>{body}</div>'


def table(
    heading: Sequence[str], rows: Sequence[Sequence[str] | str], *, right: Collection[int] = (), names: int = 1
) -> str:
    """A table as HTML. A row that is a string goes across all columns; `right` has the columns of numbers; the first
    `names` columns hold names from code.

    Examples:
        >>> table(["layer", "norm"], [("fc", "1.5")], right=[1]).count("<td")
        2
    """
    head = "".join(f"<th{' class=right' if k in right else ''}>{escape(cell)}</th>" for k, cell in enumerate(heading))
    lines = []
    for row in rows[:ROWS]:
        if isinstance(row, str):
            lines.append(f'<tr><td class="across" colspan="{len(heading)}">{escape(row)}</td></tr>')
        else:
            kinds = ["right" if k in right else "name" if k < names else "cell" for k in range(len(row))]
            cells = [f"<td class={kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)]
            lines.append(f"<tr>{''.join(cells)}</tr>")
    if len(rows) > ROWS:
        lines.append(f'<tr><td class="across" colspan="{len(heading)}">and {len(rows) - ROWS:,} more rows</td></tr>')
    inside = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table>{inside}</table></div>'


def framed(page: str, title: str) -> str:
    """A whole page in a frame of its own, where the notebook's style does not reach it, nor its own the notebook."""
    return f'<iframe title="{escape(title)}" srcdoc="{escape(page)}" loading="lazy"></iframe>'


class ShownPage(type(Path())):  # type: ignore[misc]
    """The path of a page that was written; a notebook shows the page."""

    def _repr_html_(self) -> str:
        try:
            page = self.read_text(encoding="utf-8")
        except (OSError, ValueError):
            page = ""
        told = f'<div class="note">{escape(str(self))}</div>'
        return element(told + (framed(page, self.name) if 0 < len(page) <= LARGEST else ""))


class Table(str):
    """A text that is a table: it prints as it is, without quotes, and is an HTML table in a notebook.

    Examples:
        >>> Table("a  b", ["a", "b"], [])
        a  b
    """

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str

    def __new__(
        cls, text: str, heading: Sequence[str] = (), rows: Sequence[Sequence[str]] = (), note: str = ""
    ) -> Table:  # a copy is made of the text alone, and then has the rest from its state
        made = super().__new__(cls, text)
        made.heading, made.rows, made.note = heading, rows, note
        return made

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        note = f'<div class="note">{escape(self.note)}</div>' if self.note else ""
        return element(table(self.heading, self.rows) + note)
