"""A page on a watched run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from unsum.training.record import Record


def write(records: Sequence[Record], path: str | os.PathLike[str]) -> Path:
    """Write the page."""
    raise NotImplementedError
