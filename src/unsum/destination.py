"""Where a file is written: looked at before the work, not after it."""

from __future__ import annotations

import os
from pathlib import Path

from unsum.errors import OptionError


def writable(path: str | os.PathLike[str], *, example: str = "report.html") -> Path:
    """The path, if a file can be written there; folders that are missing are made.

    Examples:
        >>> import tempfile
        >>> writable(tempfile.mkdtemp() + "/new/graph.svg").name
        'graph.svg'
    """
    where = Path(path)
    if where.is_dir():
        raise OptionError(f"{where} is a folder; name the file, such as {where / example}")
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"cannot make the folder {where.parent}: {_why(error)}; choose another path") from None
    if where.exists() and not where.is_file():
        return where  # a terminal or a pipe: opened once, by who writes
    is_new = not where.exists()
    try:
        # Rights alone do not tell: some places refuse even those who have them.
        with where.open("ab"):
            pass
        if is_new:
            where.unlink(missing_ok=True)  # another process may have done so
    except OSError as error:
        raise OptionError(f"cannot write {where}: {_why(error)}; choose another path") from None
    return where


def _why(error: OSError) -> str:
    return error.strerror or type(error).__name__
