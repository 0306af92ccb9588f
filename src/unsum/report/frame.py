"""What all pages have in common: the document with its style inside, sections, parts that scroll."""

from __future__ import annotations

from html import escape
from importlib import resources


def document(title: str, header: str, sections: str, *, style: str = "", scripts: str = "") -> str:
    """A whole page that loads nothing: the pages' common style, then `style`."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{inlined('page.css')}{style}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#main">To the findings</a>\n{header}\n<main id="main">\n'
        f"{sections}</main>\n{scripts}</body>\n</html>\n"
    )


def inlined(name: str, package: str = "unsum.report") -> str:
    """The text of a file that lies beside the code."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def version() -> str:
    """The version of unsum, for the pages' headings."""
    from unsum import __version__

    return __version__


def section(key: str, title: str, body: str, *, lead: str = "", is_open: bool = True) -> str:
    """A part of the page that opens and closes."""
    lead = f'<p class="lead">{lead}</p>' if lead else ""
    return (
        f'<details class="section" id="{key}"{" open" if is_open else ""}><summary><h2>{escape(title)}</h2></summary>'
        f"{lead}{body}</details>\n"
    )


def scrolled(inside: str, label: str) -> str:
    """A part that is wider than a phone: it scrolls alone, and not the page."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{inside}</div>'
