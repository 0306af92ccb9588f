"""A hook of mkdocs (mkdocs.yml): every notebook in docs/ becomes a page, with the outputs that are stored in it.

The page is Markdown like any other page: code, tables, dark mode and narrow screens are the theme's own, and it loads
nothing from elsewhere. The notebook itself is copied beside its page. Pages link to a notebook by its file,
`tutorials/debug.ipynb`, which works on GitHub too; on the site the link leads to the page.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(\]\([\w./-]+)\.ipynb(#[\w-]+)?\)")
_PLACE = '<div class="notebook-output" style="--wide: {}px" data-search-exclude>{}</div>'
_WIDE = re.compile(r'<svg [^>]*\bwidth="(\d+)"')
_DARK = "@media (prefers-color-scheme: dark) {", '[data-md-color-scheme="slate"] {'  # the page's own switch decides
_FILE = '<p class="notebook-file"><a href="{0}" download>Download this page as a notebook ({0})</a></p>'


def on_files(files: Any, config: Any) -> Any:
    """Add a page for every notebook."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = json.loads(Path(file.abs_src_path).read_text(encoding="utf-8"))
        name = file.src_uri.removesuffix(".ipynb")
        files.append(File.generated(config, f"{name}.md", content=page(notebook, Path(file.src_uri).name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to notebooks lead to their pages."""
    return _LINK.sub(r"\1.md\2)", markdown)


def page(notebook: dict[str, Any], name: str) -> str:
    """The notebook as Markdown; the way to its file stands under the title and the line below it."""
    pieces: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            pieces.append(source)
        else:
            pieces += [_fenced(source, "python"), *map(_shown, cell["outputs"])]
    return "\n\n".join([pieces[0], _FILE.format(name), *pieces[1:]]) + "\n"


def _shown(output: dict[str, Any]) -> str:
    """One output: a picture or a part of a page as it is, everything else as text."""
    data = output.get("data", {})
    for kind in ("image/svg+xml", "text/html"):
        if kind in data:
            html = _one_block("".join(data[kind]).replace(*_DARK))
            wide = _WIDE.search(html)
            return _PLACE.format(wide[1] if wide else 0, html)
    return _fenced("".join(output["text"] if "text" in output else data["text/plain"]), "{ .text .printed }")


def _one_block(html: str) -> str:
    """HTML without blank lines, at which Markdown would end the block."""
    return "\n".join(line for line in html.splitlines() if line.strip())


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"
