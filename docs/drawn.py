"""Pictures that the pages' own code draws: `picture = unsum.draw(...)` in a block, and the image after it in the text.
A picture of something else is drawn from the page's variables, by `draw` in the file of its name (`taught.py`).

`python docs/drawn.py` draws them again into `docs/drawn/`; a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGES = (
    DOCS / "hooks.md",
    DOCS / "draw.md",
    DOCS / "influence.md",
    DOCS / "recipes.md",
    DOCS / "index.md",
    DOCS.parent / "README.md",
)
_SKIPPED = re.compile(r"^<!-- skip: next -->\s*^```python\n.*?^```$", re.M | re.S)  # as in the tests
_BLOCK_OR_IMAGE = re.compile(r"^```python\n(?P<code>.*?)^```$|\]\((?:docs/)?drawn/(?P<name>\w+\.svg)\)", re.M | re.S)


def _other(name: str) -> Callable[[dict[str, Any]], str] | None:
    """What draws a picture that is none of unsum's own."""
    path = (DOCS / name).with_suffix(".py")
    if not path.exists():
        return None
    made: dict[str, Any] = {"__name__": path.stem}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), made)
    return made["draw"]


def draw(page: Path) -> dict[str, str]:
    """{file name: SVG}: the page is run from its top, and each image shows what `picture` was when it came."""
    found: dict[str, str] = {}
    names: dict[str, object] = {"__name__": page.stem, "print": lambda *_: None}
    for match in _BLOCK_OR_IMAGE.finditer(_SKIPPED.sub("", page.read_text(encoding="utf-8"))):
        if match["name"]:
            other = _other(match["name"])
            found[match["name"]] = other(names) if other else names["picture"].svg  # type: ignore[attr-defined]
        else:
            exec(match["code"], names)
    return found


def main() -> None:
    """Draw the pictures of all pages again."""
    folder = DOCS / "drawn"
    folder.mkdir(exist_ok=True)
    for page in PAGES:
        for name, svg in draw(page).items():
            (folder / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
