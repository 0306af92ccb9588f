"""What all commands of the command line have in common: their options, their exit codes, how results are printed."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any, TextIO

from unsum.errors import OptionError
from unsum.report.charts import plain
from unsum.target import split

CODES = """exit codes:
  0  done
  1  unsum raised an error, or your own code failed: one line on standard error says why
  2  the command line is wrong
  3  check: something differs, or samples interact; report --strict: there are flags, or the check is red"""

TARGET = "module:function or file.py:function that returns (model, loss_fn, batch)"


def command(
    commands: Any, name: str, about: str, example: str, run: Callable[..., Any], target: str | None
) -> argparse.ArgumentParser:
    """Add a command; its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=f"example: {example}\n\n{CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    if target is not None:
        parser.add_argument("target", type=target_name, help=target)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--traceback", action="store_true", help="if something fails, show the whole traceback")
    parser.set_defaults(run=run)
    return parser


def target_name(text: str) -> str:
    """A target as it is written, if it names a function."""
    try:
        split(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def count(text: str) -> int:
    """How many: 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, 1 or more")
    return int(text)


def aside() -> contextlib.redirect_stdout[TextIO]:
    """What the user's own code prints goes to standard error: standard output is for the result."""
    return contextlib.redirect_stdout(sys.stderr)


def written(arguments: argparse.Namespace, summary: Any, text: str) -> None:
    """Print the result: as JSON if that was asked for."""
    print(as_json(summary) if arguments.json else text)


def as_json(value: Any) -> str:
    """One line; numbers that are not finite are the strings "NaN", "Infinity", "-Infinity"."""
    return json.dumps(plain(value, 9), allow_nan=False)
