"""A picture: shows itself in a notebook, and can be saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unsum.destination import writable
from unsum.errors import OptionError

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>:root {{ color-scheme: light dark; }} body {{ margin: 0; padding: 16px; background: Canvas; }}
main {{ overflow-x: auto; }} main > svg {{ max-width: none !important; }}</style></head>
<body><main>{svg}</main></body></html>
"""


class Picture:
    """An SVG. `picture.svg` is its text, `picture.save("x.svg")` or `.save("x.html")` writes it.

    Examples:
        >>> Picture("<svg/>", "nothing")
        <Picture: nothing>
    """

    def __init__(self, svg: str, title: str, page: Callable[[], str] | None = None) -> None:
        self.svg = svg
        self._title = title
        self._page = page

    @property
    def html(self) -> str:
        """One page that needs nothing else."""
        return _PAGE.format(title=self._title, svg=self.svg) if self._page is None else self._page()

    def save(self, path: str | Path) -> Path:
        """Write the picture as `.svg`, or as an `.html` page in which groups fold. Missing folders are made."""
        where = place(path)
        where.write_text(self.svg if where.suffix.lower() == ".svg" else self.html, encoding="utf-8")
        return where

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return f'<div style="overflow:auto">{self.svg}</div>'

    def __repr__(self) -> str:
        return f"<Picture: {self._title}>"


def place(path: str | Path) -> Path:
    """Where a picture goes, if one can be written there."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".svg", ".html", ".htm") and not Path(path).is_dir():
        raise OptionError(f"{path}: a picture is saved as .svg or .html, not {suffix or 'without a suffix'!r}")
    return writable(path, example="graph.svg")
