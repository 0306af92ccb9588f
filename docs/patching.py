"""The picture of recipes.md: activation patching on the page's GPT-2, with its numbers rounded.

The page trains that model, so the last digits differ between machines; whole numbers do not (`docs/drawn.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any


def draw(page: Mapping[str, Any]) -> str:
    """The SVG, from what the page has computed."""
    sweep = page["sweep"]
    rounded = replace(sweep, values=sweep.values.round(), clean=round(sweep.clean), corrupt=round(sweep.corrupt))
    return rounded.picture(tokens=["so", "the", "capital", "of", "japan", "is"]).svg
