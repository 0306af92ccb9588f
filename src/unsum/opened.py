"""`Opened`: what users hold of a block. It is opened by `with`, or by `open()` and closed by `close()`."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from unsum.errors import OptionError, UnsumError

Found = TypeVar("Found", covariant=True)


class _Block(Protocol[Found]):
    def __enter__(self) -> Found: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None: ...


class Opened(Generic[Found]):
    """A block of `unsum.capture`, `unsum.edit` or `unsum.gradients`: `with block as found:`. If a step begins and ends
    in two different functions (callbacks of a trainer), call `found = block.open()` and `block.close()` instead.

    `close` may be called twice. An open block to which no reference is left is closed, with a warning.

    Examples:
        >>> import torch, unsum
        >>> model = torch.nn.Linear(3, 2)
        >>> block = unsum.gradients(model, unsum.Norms())
        >>> g = block.open()
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> block.close()
        >>> g.norms().shape
        torch.Size([4])
    """

    def __init__(
        self,
        block: _Block[Found],
        name: str,
        *,
        only_with: str | None = None,
        warns_unopened: bool = False,
        warns_unheld: bool = True,
    ) -> None:
        self._block, self._name = block, name
        self._warns_unopened = warns_unopened  # where a forgotten `with` would have no effect, silently
        self._warns_unheld = warns_unheld  # False: who opens it cannot close it after an error, as in a callback
        self._only_with = only_with  # why the block cannot be opened without `with`
        self._error: BaseException | None = None  # what was being handled when it was opened
        self._finalizer: weakref.finalize[Any, Any] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the block is open."""
        return self._finalizer is not None

    def open(self) -> Found:
        """Open the block, and return what `with block as` gives."""
        if self._only_with is not None:
            raise OptionError(f"{self._name}: {self._only_with}")
        return self.__enter__()

    def close(self) -> None:
        """Close the block; nothing happens if it is closed already. While another exception propagates (in a
        `finally`), `close` raises none of its own."""
        error = self.raised()
        self.__exit__(None if error is None else type(error), error, None)

    def raised(self) -> BaseException | None:
        """The exception that is under way, if it was raised since the block was opened."""
        error = sys.exc_info()[1]
        return None if error is self._error else error

    def __enter__(self) -> Found:
        self._warns_unopened = False
        found = self._block.__enter__()
        self._error = sys.exc_info()[1]
        self._finalizer = weakref.finalize(self, _close_unheld, self._block, self._name, self._warns_unheld)
        self._finalizer.atexit = False  # a process that ends needs no block closed
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._finalizer is None:
            return None
        self._finalizer.detach()
        self._finalizer = self._error = None
        return self._block.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<{self._name}, {'open' if self.is_open else 'closed'}>"

    def __del__(self) -> None:
        if getattr(self, "_warns_unopened", False):
            warnings.warn(
                f"{self._name}(...) was never opened, and changed nothing.\n  write: with {self._name}(...): model(x)",
                stacklevel=2,
            )

    def __reduce__(self) -> str:
        raise TypeError(f"{self._name}: a block belongs to this process, and cannot be copied or pickled; make another")


def _close_unheld(block: _Block[Any], name: str, warns: bool) -> None:
    """Close a block that nobody holds any more."""
    with contextlib.suppress(UnsumError):  # that a site never fired, say: there is nobody to tell
        block.__exit__(None, None, None)
    if not warns:
        return
    warnings.warn(
        f"{name}: no reference to the open block was left, so it was closed.\n"
        f"  keep a reference and close it: block = {name}(...); found = block.open(); ...; block.close()",
        stacklevel=2,
    )
