"""`warn`: a warning that points at the line of the user's program."""

from __future__ import annotations

import inspect
import os
import warnings

import torch

_OURS = tuple(os.path.dirname(os.path.abspath(str(package))) + os.sep for package in (__file__, torch.__file__))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the nearest caller outside of unsum and torch. Where there is none, as at the end of a program, at the
    caller of this function."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and os.path.abspath(frame.f_code.co_filename).startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=2 if frame is None else level)
