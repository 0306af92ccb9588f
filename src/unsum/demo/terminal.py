"""What the demo prints: headings, short lines, the code that ran, and words with a colour for each."""

from __future__ import annotations

import ast
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TextIO

_WIDTH = 92
_WARM, _COOL = (224, 217, 210, 203), (189, 153, 117, 75)  # of the 256 colours, from weak to strong


class Page:
    """Prints, or is silent; with colours where the reader can see them."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._quiet = quiet
        self._stream = sys.stdout if stream is None else stream
        self._colour = has_colour(self._stream)
        self._headings = 0

    def heading(self, text: str) -> None:
        """The next step begins."""
        self._headings += 1
        title = f"── {self._headings}. {text} "
        self.line(f"\n{self._styled(title + '─' * (_WIDTH - len(title)), '1')}\n")

    def say(self, text: str) -> None:
        """A paragraph."""
        self.line(textwrap.fill(" ".join(text.split()), _WIDTH))

    def line(self, text: str = "") -> None:
        """One line, as it is."""
        if not self._quiet:
            print(text, file=self._stream, flush=True)

    def code(self, function: Callable[..., Any]) -> None:
        """The lines that are about to run, dimmed: taken from the function itself, so that they cannot differ."""
        for line in _source(function):
            self.line("  " + self._styled(line, "2"))
        self.line()

    def words(self, words: Sequence[str], weights: Sequence[float], strongest: float) -> str:
        """The words, each on a ground as strong as its weight, or, without colours, with the weight beside it."""
        return " ".join(
            self._word(word, weight, weight / strongest) for word, weight in zip(words, weights, strict=True)
        )

    def _word(self, word: str, weight: float, share: float) -> str:
        if not self._colour:
            return f"{word}[{weight:.2g}]" if abs(share) >= 0.25 else word
        if abs(share) < 0.1:
            return word
        shade = (_WARM if share > 0 else _COOL)[min(3, int(abs(share) * 4))]
        return f"\x1b[30;48;5;{shade}m{word}\x1b[0m"

    def _styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self._colour else text


def has_colour(stream: TextIO) -> bool:
    """Whether colours are wanted there: `NO_COLOR` and `FORCE_COLOR` decide, or else whether it is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def _source(function: Callable[..., Any]) -> list[str]:
    """The lines of a function without its docstring; none where the source is not at hand."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except OSError:
        return []
    body = ast.parse(text).body[0]
    assert isinstance(body, ast.FunctionDef)
    docstring = body.body[0]
    lines = text.rstrip().splitlines()
    return lines[: docstring.lineno - 1] + lines[docstring.end_lineno or docstring.lineno :]
