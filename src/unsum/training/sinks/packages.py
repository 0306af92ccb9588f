"""Packages that a sink needs: imported when the sink is made, with a message where one is absent."""

from __future__ import annotations

import importlib
from typing import Any

from unsum.errors import NotInstalled


def package(name: str, install: str) -> Any:
    """A module of a package that may be absent.

    Examples:
        >>> package("json", "json").dumps(1)
        '1'
        >>> package("no_such_logger", "no-such-logger")
        Traceback (most recent call last):
        ...
        unsum.errors.NotInstalled: this sink needs no_such_logger, which is not installed: pip install no-such-logger
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or name).partition(".")[0]
        top = name.partition(".")[0]
        why = "which is not installed" if missing == top else f"which cannot be imported ({error})"
        raise NotInstalled(f"this sink needs {top}, {why}: pip install {install}") from error
