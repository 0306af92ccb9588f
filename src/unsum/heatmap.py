"""`heatmap`: tokens coloured by a value, as HTML. The index's page draws its tokens with the same spans."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from unsum.destination import writable
from unsum.errors import OptionError
from unsum.notebook import element
from unsum.report.charts import brief
from unsum.report.frame import document, inlined, version


@dataclass(frozen=True)
class Token:
    """One token: what is shown of it, the space before it, and its value."""

    position: int
    string: str
    gap: str
    score: float | None  # None: the values of tokens are not known


def gaps(strings: Sequence[str]) -> list[str]:
    """What stands before each token. Strings of which none has a space at its end or beginning are words, not pieces
    of a text: there is a space between them.

    Examples:
        >>> gaps(["the", "cat"]), gaps(["the", " cat"])
        (['', ' '], ['', ''])
    """
    gap = "" if any(string != string.strip() for string in strings) else " "
    return ["", *[gap] * (len(strings) - 1)][: len(strings)]


def style() -> str:
    """The rules for tokens; each begins with the class of the element around them, and reaches nothing else."""
    return inlined("heatmap.css", "unsum")


def ends(tokens: Iterable[Token]) -> tuple[float, float]:
    """The lowest and the highest value, 0 between them; colours are scaled to the one further from 0.

    Examples:
        >>> ends([Token(0, "a", "", 0.5), Token(1, "b", "", 2.0)])
        (0.0, 2.0)
    """
    values = [t.score for t in tokens if t.score and math.isfinite(t.score)]
    return min([0.0, *values]), max([0.0, *values])


def legend(label: str, low: float, high: float) -> str:
    """The colours that are there and the values of the strongest: on both sides of 0 alike, or on one."""
    most = max(-low, high)
    if not most:
        return ""
    side = "" if low and high else "above" if high else "below"
    kind = f' class="{side}"' if side else ""
    first, last = signed(-most) if low else "0", signed(most) if high else "0"
    scale = f'{first} <span class="scale"><i{kind}></i> {last}</span>'  # not broken at the end of a line
    return f'<div class="legend-of">{escape(label)}: {scale}</div>'


def span(token: Token, most: float, *, is_found: bool = False) -> str:
    """One token with its colour; its position and value show under the pointer."""
    kinds, colour, said = ["t"], "", f"position {token.position}"
    if token.score is not None:
        said += f": {signed(token.score)}"
        share = abs(token.score) / most if most and math.isfinite(token.score) else 0.0
        if share >= 0.005:
            kinds.append("p" if token.score > 0 else "n")
            colour = f' style="--s:{share:.2f}"'
        elif not math.isfinite(token.score):
            kinds.append("odd")
    kinds += ["found"] if is_found else []
    if not token.string.strip():
        kinds.append("newline" if "\n" in token.string else "blank")
    return f'{escape(token.gap)}<span class="{" ".join(kinds)}"{colour} title="{said}">{escape(token.string)}</span>'


def signed(value: float) -> str:
    """A number in few characters, with its sign.

    Examples:
        >>> signed(0.5), signed(-2.0)
        ('+0.5', '−2')
    """
    return f"+{brief(value)}" if value > 0 else brief(value)


class Heatmap:
    """The result of `unsum.heatmap`: it shows itself in a notebook, and `.save("tokens.html")` writes a page.

    Examples:
        >>> heatmap(["a"], [1.0])
        <Heatmap: 1 token; it shows itself in a notebook, or .save('tokens.html')>
    """

    def __init__(self, rows: list[list[Token]], label: str) -> None:
        self._rows, self._label = rows, label

    @property
    def html(self) -> str:
        """One page that needs nothing else."""
        title = f"{self._label} by token"
        header = (
            f"<header><h1>{escape(title)}</h1>"
            '<p class="small">The number of a token shows under the pointer; negative ones have a dotted line.'
            f" unsum {version()}</p></header>"
        )
        return document(title, header, [f'<div class="unsum-tokens">{self._body()}</div>'], style=style())

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page as `.html`. Missing folders are made."""
        if (suffix := Path(path).suffix.lower()) not in (".html", ".htm") and not Path(path).is_dir():
            raise OptionError(f"{path}: a heat map of tokens is saved as .html, not {suffix or 'without a suffix'!r}")
        where = writable(path, example="tokens.html")
        where.write_text(self.html, encoding="utf-8", errors="replace")  # half of a surrogate pair becomes "?"
        return where

    def _body(self) -> str:
        low, high = ends(token for row in self._rows for token in row)
        most = max(-low, high)
        rows = "".join(
            f'<div class="tokens row" dir="auto">{"".join(span(token, most) for token in row)}</div>\n'
            for row in self._rows
        )
        return f"{legend(self._label, low, high)}{rows}"

    def _repr_html_(self) -> str:
        return element(self._body(), style=style(), kind="unsum-tokens notebook")

    def __repr__(self) -> str:
        count = sum(map(len, self._rows))
        tokens = f"{count} token{'' if count == 1 else 's'}"
        return f"<Heatmap: {tokens}; it shows itself in a notebook, or .save('tokens.html')>"


def heatmap(
    tokens: Sequence[str] | Sequence[Sequence[str]], values: Tensor | Sequence[Any], *, label: str = "value"
) -> Heatmap:
    """Colour each token by a value: warm above 0, blue below. The result shows itself in a notebook.

    Args:
        tokens: The strings of one text, or a list of such lists, which share one scale. If no token begins or ends with
            a space, they count as words and get spaces between them; `[tokenizer.decode(i) for i in ids]` has spaces.
            Where tokenizers write a space as "Ġ" or "▁", a space is shown.
        values: One number for each token: (tokens,), or for several texts (texts, tokens), or a list for each. Values
            after the end of a shorter text (padding) are ignored.
        label: The name of the numbers.

    Examples:
        >>> import torch
        >>> shown = heatmap(["The", " cat", " sat"], torch.tensor([0.0, 1.5, -0.5]), label="gradient norm")
        >>> shown
        <Heatmap: 3 tokens; it shows itself in a notebook, or .save('tokens.html')>
        >>> "gradient norm: −1.5" in shown.html
        True
    """
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise OptionError(f"tokens: give a list of strings, not a {type(tokens).__name__}")
    given: Any = values.detach() if isinstance(values, Tensor) else values
    numbers = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(numbers, Sequence) or isinstance(numbers, str):
        raise OptionError(f"values: give one number for each token, not a {type(values).__name__}")
    if all(isinstance(token, str) for token in tokens):
        return Heatmap([_row(_readable(tokens), numbers, "")], label)
    if len(numbers) != len(tokens):
        raise OptionError(f"there are {len(tokens)} texts and values for {len(numbers)}")
    rows = zip(tokens, numbers, strict=True)
    return Heatmap([_row(_readable(strings), each, f"text {k}: ") for k, (strings, each) in enumerate(rows)], label)


_SPACES = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})  # what byte-level and SentencePiece tokenizers write


def _readable(tokens: Any) -> Any:
    """Tokens as `convert_ids_to_tokens` of transformers gives them, with spaces and line ends as they are read."""
    is_list = isinstance(tokens, Sequence) and not isinstance(tokens, str)
    if not is_list or not all(isinstance(token, str) for token in tokens):
        return tokens  # which is refused by who reads it
    return [token.translate(_SPACES) for token in tokens] if any(t[:1] in ("Ġ", "▁") for t in tokens) else tokens


def _row(strings: Any, values: Any, which: str) -> list[Token]:
    if isinstance(strings, str) or not isinstance(strings, Sequence) or not all(isinstance(s, str) for s in strings):
        raise OptionError(f"{which}tokens: give a list of strings for each text")
    values = values.detach().tolist() if isinstance(values, Tensor) else values
    is_padded = bool(which) and isinstance(values, Sequence) and len(values) > len(strings)
    if not isinstance(values, Sequence) or (len(values) != len(strings) and not is_padded):
        count = len(values) if isinstance(values, Sequence) else type(values).__name__
        raise OptionError(f"{which}there are {len(strings)} tokens and {count} values")
    try:
        numbers = [float(value) for value in values[: len(strings)]]
    except (TypeError, ValueError, RuntimeError):
        raise OptionError(f"{which}values: give one number for each token") from None
    return [Token(k, *each) for k, each in enumerate(zip(strings, gaps(strings), numbers, strict=True))]
