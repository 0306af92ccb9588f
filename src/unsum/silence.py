"""The error at the end of a block for sites that were asked for and never fired."""

from __future__ import annotations

import difflib

from unsum.errors import SiteError
from unsum.flow import Flow


def complain(flow: Flow, fired: set[int], what: str) -> None:
    """Raise for every request that no place has answered, saying why. `what` should have been done with it."""
    lines = [_line(flow, number) for number in range(len(flow.asked)) if number not in fired]
    if lines:
        raise SiteError("\n".join([*lines, f'  missing="ignore" accepts sites that are never {what}']))


def _line(flow: Flow, number: int) -> str:
    site, places = flow.asked[number], list(flow.places[number].values())
    if not places:
        marked = [f"{name}:{site.kind}" for name in flow.marked]
        near = difflib.get_close_matches(str(site), marked, 3, 0.3)
        return f"{site}: no tensor was marked with this name in this block" + (
            f"; near: {', '.join(map(repr, near))}" if near else ""
        )
    why = flow.why_silent(places[0], site)
    if len(places) == 1:
        return f"{site}: never fired: {why}"
    return f"{site}: none of the {len(places)} sites that it names ever fired; {places[0].name}: {why}"
