"""Integrations with other libraries: `unsum.integrations.transformers`, `.lightning` and `.ray`.

Each is imported at its first use; if its library is missing, the error says what to install.

Examples:
    >>> import unsum
    >>> callback = unsum.integrations.transformers.Watch(every=10)  # for Trainer(..., callbacks=[callback])
    >>> callback
    Watch: no training step yet
"""

from __future__ import annotations

import importlib
from types import ModuleType

_KNOWN = ("transformers", "lightning", "ray")


def __getattr__(name: str) -> ModuleType:
    if name in _KNOWN:
        return importlib.import_module(f"unsum.integrations.{name}")
    raise AttributeError(f"module 'unsum.integrations' has no attribute {name!r}; there are: {', '.join(_KNOWN)}")
