"""The wall: only `unsum/seams` touches torch's insides. Run by `make check`; prints what stands elsewhere, and fails.

    python tests/wall.py [FOLDER]

An attribute that begins with an underscore and that nothing in unsum defines is torch's (or Triton's, or Python's); so
are imports of private modules and names, and private attributes that are named in a text (for `getattr`).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).parent.parent / "src" / "unsum"
SEAMS = "seams"
# Torch's, though something of unsum's has the same name.
FOREIGN = {"_version", "_base", "_is_view", "_backward_hooks", "_forward_hooks"}
TEXTS = (
    "torch._",
    "_saved_",
    "_raw_saved",
    "_backward_hooks",
    "_post_accumulate",
    "_input_metadata",
    "_sequence_nr",
    "_foreach",
)


def defined(tree: ast.AST) -> Iterator[str]:
    """The names that a file defines: functions, classes, variables, attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def touched(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """Where a file reaches into torch: lines, and what is there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = node.attr
            is_private = name.startswith("_") and not name.endswith("__") and not _is_self(node.value)
            if is_private and (name not in own or name in FOREIGN):
                yield node.lineno, name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            if "._" in str(node.module) or any(alias.name.startswith("_") for alias in node.names):
                yield node.lineno, f"from {node.module} import {', '.join(alias.name for alias in node.names)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(TEXTS):
            yield node.lineno, repr(node.value)


def breaches(home: Path) -> list[str]:
    """A line for each place outside the seams that touches torch's insides."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(home.rglob("*.py"))}
    own = {name for tree in trees.values() for name in defined(tree)}
    return [
        f"{path.relative_to(home)}:{line}: {what}"
        for path, tree in trees.items()
        if path.relative_to(home).parts[0] != SEAMS
        for line, what in sorted(touched(tree, own))
    ]


if __name__ == "__main__":
    found = breaches(Path(sys.argv[1]) if len(sys.argv) > 1 else HOME)
    if found:
        print("\n".join(found))
        sys.exit(f"{len(found)} places outside unsum/{SEAMS} touch torch's insides")
    print(f"only unsum/{SEAMS} touches torch's insides")
