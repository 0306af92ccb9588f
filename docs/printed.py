"""Write what a page's programs print under them: `python docs/printed.py docs/edit.md ...`.

A ```text block directly under a ```python block is what that block prints. Tests compare the two (conftest.py); a line
of ... stands for anything. This script runs the programs of the pages and fills the ```text blocks in, except those
with a line of ...; it changes nothing else.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\n+^```text\n(?P<printed>.*?)^```$)?", re.M | re.S)


def filled(page: str, name: str) -> str:
    """The page with what its programs print today."""
    names: dict[str, object] = {"__name__": "page"}
    pieces, at = [], 0
    for block in BLOCK.finditer(page):
        out = io.StringIO()
        if page[: block.start()].rstrip().endswith("<!-- skip: next -->"):
            continue
        line = page[: block.start("code")].count("\n")
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * line + block["code"], name, "exec"), names)
        if block["printed"] is not None and "\n...\n" not in "\n" + block["printed"]:
            pieces += [page[at : block.start("printed")], out.getvalue()]
            at = block.end("printed")
    return "".join([*pieces, page[at:]])


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        before = path.read_text(encoding="utf-8")
        after = filled(before, path.name)
        path.write_text(after, encoding="utf-8")
        sys.stdout.write(f"{path}: {'changed' if after != before else 'as it was'}\n")
