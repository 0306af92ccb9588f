"""Every error that unsum raises on purpose, and its warning.

UnsumError
├── SiteError            a place that is not there, was never reached, or was changed underneath
│   └── UnknownSite      … asked of what was captured (also a KeyError)
├── OptionError          an option that makes no sense (also a ValueError)
│   └── NotInstalled     … a package that an option needs is absent (also an ImportError)
├── VerbError            a verb that does not fit the tensor it meets (also a ValueError)
├── SamplesError         per-sample gradients cannot be computed, or not in this way
│   ├── UnknownSamples   which sample a row belongs to cannot be told
│   ├── BadSamples       samples= or mark_samples got something that names no samples (also an OptionError)
│   ├── WrongCount       more or fewer losses, weights or rows than samples (also a ValueError)
│   ├── WrongShape       a tensor that does not have the shape of its parameter or output (also a ValueError)
│   ├── EmptyData        data without a single sample (also a ValueError)
│   ├── NoGradient       losses that do not depend on any parameter that is trained
│   ├── NoBackward       no backward ran inside the block, or one ran outside that belongs inside
│   ├── BackwardOrder    a second backward, or one in another order than a reducer can use
│   ├── NotAvailable     a read that these gradients do not have: positions, outer products, what was not kept
│   └── NotFinite        a loss or a gradient that is NaN or infinite
├── InteractionError     samples interact, so that a per-sample gradient is not what it seems
└── UnsupportedError     something that unsum refuses by name rather than get it wrong

UnreadEdit               a warning: nothing that the model returned, and no loss, depends on an edited value

A message says what happened, where (`at:`), and what to write instead (`write:`, `or:`), as code to paste.

Examples:
    >>> import torch, unsum
    >>> try:
    ...     with unsum.gradients(torch.nn.Linear(3, 2)) as g:
    ...         pass
    ...     g.norms()
    ... except unsum.errors.NoBackward as error:
    ...     print(error)
    no backward ran inside the block, so there are no samples.
      write: with unsum.gradients(model) as g: loss_fn(model(x), y).backward()
"""

from __future__ import annotations

from collections.abc import Sequence


class UnsumError(Exception):
    """The root of everything that unsum raises on purpose.

    Args:
        what: What happened, in a sentence or two.
        at: Where: parameter, module, operation, shapes.
        write: What to write instead: a line of code, or several to choose from.
    """

    def __init__(self, what: str = "", *, at: str = "", write: str | Sequence[str] = ()) -> None:
        lines = [what, *([f"  at: {at}"] if at else [])]
        codes = [write] if isinstance(write, str) else write
        lines += [f"  {'write' if k == 0 else '   or'}: {code}" for k, code in enumerate(codes)]
        self.args = ("\n".join(lines),)  # no super().__init__: torch.export reads these lines, and cannot follow it


class SiteError(UnsumError):
    """A place that is not there, was never reached, or was changed underneath."""


class UnknownSite(SiteError, KeyError):
    """A site that was asked of a capture which does not hold it."""

    # KeyError shows the repr of its argument, which would put the whole message on one line.
    __str__ = Exception.__str__


class OptionError(UnsumError, ValueError):
    """An option that makes no sense."""


class NotInstalled(OptionError, ImportError):
    """A package that an option needs is absent; the message says how to install it."""


class VerbError(UnsumError, ValueError):
    """A verb that does not fit the tensor it meets; inside an edit, a SiteError that names the site."""


class SamplesError(UnsumError):
    """Per-sample gradients cannot be computed, or not in this way. Each cause has a class of its own below this one."""


class UnknownSamples(SamplesError):
    """Which sample a row, a position or a part of a gradient belongs to cannot be told."""


class BadSamples(SamplesError, OptionError):
    """`samples=`, `unsum.dim`, `unsum.packed` or `unsum.mark_samples` got something that names no samples."""


class WrongCount(SamplesError, ValueError):
    """There are more or fewer losses, weights or rows than samples."""


class WrongShape(SamplesError, ValueError):
    """A tensor does not have the shape of the parameter, or of the outputs, that it is for."""


class EmptyData(SamplesError, ValueError):
    """The data, or the batch, has no samples."""


class NoGradient(SamplesError):
    """The losses do not depend on any parameter that is trained."""


class NoBackward(SamplesError):
    """No backward ran inside the block, or one ran outside of it that belongs inside."""


class BackwardOrder(SamplesError):
    """A second backward through the same samples, or one in another order than a reducer can use."""


class NotAvailable(SamplesError):
    """A read that these gradients do not have: they have no positions, are no outer products, or were not kept."""


class NotFinite(SamplesError):
    """A loss or a gradient is NaN or infinite."""


class InteractionError(UnsumError):
    """Samples interact, so that a per-sample gradient is not what it seems."""


class UnsupportedError(UnsumError):
    """Something that unsum refuses by name rather than get it wrong."""


class UnreadEdit(UserWarning):
    """A value was edited, and neither what the model returned nor a loss depends on it: the edit had no effect."""
