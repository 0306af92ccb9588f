"""What all pages have in common: the document with its style inside, the contents bar, sections, captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources


@dataclass(frozen=True)
class Section:
    """A part of a page that the contents bar leads to."""

    key: str  # its id
    name: str  # in the contents bar
    html: str


def document(
    title: str, header: str, sections: Sequence[Section | str | None], *, style: str = "", scripts: str = ""
) -> str:
    """A whole page that loads nothing: the pages' common style, then `style`. Three sections or more have a contents
    bar above them."""
    parts = [part for part in sections if part]
    inside = "".join(part if isinstance(part, str) else part.html for part in parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{inlined('page.css')}{style}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#main">To the content</a>\n{header}\n{_contents(parts)}<main id="main">\n'
        f"{inside}</main>\n{scripts}</body>\n</html>\n"
    )


def _contents(parts: Sequence[Section | str]) -> str:
    """Links to the sections, in one line that scrolls by itself where it is too long."""
    found = [part for part in parts if isinstance(part, Section)]
    links = "".join(f'<a href="#{part.key}">{escape(part.name)}</a>' for part in found)
    return f'<nav class="contents" aria-label="Contents">{links}</nav>\n' if len(found) > 2 else ""


def inlined(name: str, package: str = "unsum.report") -> str:
    """The text of a file that lies beside the code."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def version() -> str:
    """The version of unsum, for the pages' headings."""
    from unsum import __version__

    return __version__


def section(key: str, title: str, body: str, *, lead: str = "", name: str = "", is_open: bool = True) -> Section:
    """A part of the page that opens and closes; `name` is shorter than the title, for the contents bar."""
    lead = lead if lead.startswith("<p") or not lead else f'<p class="lead">{lead}</p>'
    html = (
        f'<details class="section" id="{key}"{" open" if is_open else ""}><summary><h2>{escape(title)}</h2></summary>'
        f"{lead}{body}</details>\n"
    )
    return Section(key, name or title, html)


def caption(what: str, read: str = "", unusual: str = "") -> str:
    """What a section shows, how to read it, and what would be unusual. All three are HTML."""
    parts = [f"<b>How to read it:</b> {read}"] * bool(read) + [f"<b>Unusual:</b> {unusual}"] * bool(unusual)
    return f'<p class="lead">{what}</p>' + "".join(f'<p class="lead how">{part}</p>' for part in parts)


def scrolled(inside: str, label: str) -> str:
    """A part that is wider than a phone: it scrolls alone, and not the page."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{inside}</div>'
