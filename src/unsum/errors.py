"""Every error that unsum raises on purpose.

UnsumError
├── SiteError            a place that is not there, was never reached, or was changed underneath
│   └── UnknownSite      … asked of what was captured (also a KeyError)
├── OptionError          an option that makes no sense (also a ValueError)
│   └── NotInstalled     … a package that an option needs is absent (also an ImportError)
├── VerbError            a verb that does not fit the tensor it meets (also a ValueError)
├── SamplesError         which samples a position belongs to cannot be known
├── InteractionError     samples interact, so that a gradient per sample is not what it seems
└── UnsupportedError     something that unsum refuses by name rather than get it wrong

A message says what, where, which choices there are, and what to do.

Examples:
    >>> import torch, unsum
    >>> try:
    ...     with unsum.capture(torch.nn.Linear(3, 2), "fc:output"):
    ...         pass
    ... except unsum.errors.SiteError as error:
    ...     print(error)
    no site 'fc:output' in Linear.
      list them: unsum.sites(model); a tensor named with unsum.mark: capture(None, ...)
"""


class UnsumError(Exception):
    """The root of everything that unsum raises on purpose."""


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
    """Which samples a position belongs to cannot be known."""


class InteractionError(UnsumError):
    """Samples interact, so that a gradient per sample is not what it seems."""


class UnsupportedError(UnsumError):
    """Something that unsum refuses by name rather than get it wrong."""
