"""The strings of hits' tokens: from a function of users', or from the text; else the numbers of positions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unsum.errors import OptionError
from unsum.heatmap import Token, gaps

if TYPE_CHECKING:
    from unsum.index.hits import Hits

Words = Callable[[Any], Sequence[str]]
"""A function from an example to the strings of its tokens."""

_WORD = re.compile(r"(\s*)(\S+)")


@dataclass(frozen=True)
class Hit:
    """One hit of a query, as `Hits.rows` tells it, and its tokens."""

    row: dict[str, Any]
    tokens: list[Token]
    has_strings: bool  # else what is shown of a token is the number of its position


def headings(queries: Any, count: int) -> list[str]:
    """The heading of each query: its text, or its number.

    Examples:
        >>> headings(None, 2), headings(["who?"], 1)
        (['query 0', 'query 1'], ['who?'])
    """
    if queries is None:
        return [f"query {number}" for number in range(count)]
    is_list = isinstance(queries, Sequence) and not isinstance(queries, str | bytes)
    if not is_list or not all(isinstance(query, str) for query in queries):
        raise OptionError(f"queries= takes a list of one string for each query; got {_kind(queries)}")
    if len(queries) != count:
        raise OptionError(f"queries= has {len(queries)} strings, and there are {count} queries")
    return list(queries)


def with_tokens(hits: Hits, words: Words | None) -> list[list[Hit]]:
    """[query][rank]: what is shown of each hit."""
    if words is not None and not callable(words):
        raise OptionError(f"words= takes a function from an example to a list of strings; got {_kind(words)}")
    if words is not None and hits.examples is None:
        raise OptionError("words= is a function of examples, and the hits have none: unsum.index.open(path, data)")
    found: list[list[dict[str, Any]]] = [[] for _ in hits.ids]
    for row in hits.rows():
        found[row["query"]].append(row)
    if words is not None:
        assert hits.examples is not None
        return [
            [_told(row, words, example) for row, example in zip(rows, examples, strict=True)]
            for rows, examples in zip(found, hits.examples, strict=True)
        ]
    # That one text has as many words as tokens may be chance; that all have is not.
    is_split = hits.tokens is not None and all(_fits(row) for rows in found for row in rows)
    return [[_split(row) if is_split else _numbered(row) for row in rows] for rows in found]


def _told(row: dict[str, Any], words: Words, example: Any) -> Hit:
    """The strings that users' function gives. Scores after an example's end are 0: they may be without a string."""
    strings, where = words(example), f"words=: for hit {row['rank']} of query {row['query']} (example {row['example']})"
    if isinstance(strings, str) or not isinstance(strings, Sequence):
        raise OptionError(f"{where} it gave a {_kind(strings)}; a list of strings is needed, one for each token")
    if not all(isinstance(string, str) for string in strings):
        wrong = next(string for string in strings if not isinstance(string, str))
        raise OptionError(f"{where} it gave a list with a {_kind(wrong)}; a list of strings is needed")
    scores = row.get("tokens")
    if scores is not None and (len(strings) > len(scores) or any(scores[len(strings) :])):
        raise OptionError(f"{where} it gave {len(strings)} strings, and there are {len(scores)} tokens")
    if row.get("position", -1) >= len(strings):
        raise OptionError(f"{where} it gave {len(strings)} strings, and the token is at position {row['position']}")
    if scores is None and "position" not in row and row.get("text"):
        return Hit(row, [], has_strings=False)  # nothing is to be said of tokens
    return Hit(row, _tokens(scores, strings, gaps(strings)), has_strings=True)


def _fits(row: dict[str, Any]) -> bool:
    return "text" in row and len(_WORD.findall(row["text"])) == len(row["tokens"])


def _split(row: dict[str, Any]) -> Hit:
    pairs = _WORD.findall(row["text"])
    return Hit(row, _tokens(row["tokens"], [word for _, word in pairs], [gap for gap, _ in pairs]), has_strings=True)


def _numbered(row: dict[str, Any]) -> Hit:
    scores = row.get("tokens", ())
    strings = [str(position) for position in range(len(scores))]
    return Hit(row, _tokens(scores, strings, [" "] * len(strings)), has_strings=False)


def _tokens(scores: Sequence[float] | None, strings: Sequence[str], gaps: Sequence[str]) -> list[Token]:
    return [
        Token(position, string, gap, None if scores is None else scores[position])
        for position, (string, gap) in enumerate(zip(strings, gaps, strict=False))
    ]


def _kind(value: object) -> str:
    return type(value).__name__
