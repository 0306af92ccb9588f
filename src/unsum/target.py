"""What a command line names: `module:function` or `file.py:function`, which returns (model, loss_fn, batch)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from unsum.errors import OptionError

Made = tuple[nn.Module, Callable[[Any, Any], Tensor], Any]


class TargetError(OptionError):
    """The user's own code has failed; the cause is chained."""


def everything(target: str) -> Made:
    """(model, loss_fn, batch)."""
    made = call(target)
    if not isinstance(made, tuple | list) or len(made) != 3:
        raise OptionError(f"{target} must return (model, loss_fn, batch), got {_kind(made)}")
    model, loss_fn, batch = made
    if not isinstance(model, nn.Module):
        raise OptionError(f"{target} must return (model, loss_fn, batch); its first is {_kind(model)}, no nn.Module")
    if not callable(loss_fn):
        raise OptionError(f"{target} must return (model, loss_fn, batch); its second is {_kind(loss_fn)}, no function")
    return model, loss_fn, batch


def task(target: str | Callable[[], Any]) -> tuple[nn.Module, Any, Any, dict[str, Any]]:
    """(model, loss_fn, data, options) for `unsum.index.build`, from a function or the name of one; options, a dict, may
    be missing."""
    made = call(target) if isinstance(target, str) else target()
    is_one = isinstance(made, tuple | list) and len(made) in (3, 4) and (len(made) == 3 or _is_options(made[3]))
    if not is_one:
        name = target if isinstance(target, str) else getattr(target, "__name__", "the function")
        raise OptionError(
            f"{name} must return (model, loss_fn, data), or (model, loss_fn, data, options) with a dict of options"
        )
    model, loss_fn, data, options = (*made, {})[:4]
    return model, loss_fn, data, dict(options)


def _is_options(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def model_of(target: str) -> nn.Module:
    """The model alone, out of whatever the target returns."""
    made = call(target)
    for candidate in made if isinstance(made, tuple | list) else (made,):
        if isinstance(candidate, nn.Module):
            return candidate
    raise OptionError(f"{target} returned {_kind(made)}, not an nn.Module or a tuple with one")


def call(target: str) -> Any:
    """What the function that `target` names returns."""
    where, name = split(target)
    function = getattr(_module(where), name, None)
    if isinstance(function, nn.Module):
        return function
    if not callable(function):
        raise OptionError(f"{where} has no function {name!r}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise OptionError(f"{target} must be callable without arguments: {error}") from None
    except ValueError:
        pass  # a built-in without a signature
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise TargetError(f"{target} raised {told(error)}") from error


def split(target: str) -> tuple[str, str]:
    """The module or file, and the function.

    Examples:
        >>> split("train.py:setup")
        ('train.py', 'setup')
    """
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise OptionError(f"{target!r} names no function: write module:function or file.py:function")
    return where, name


def told(error: BaseException) -> str:
    """An error of the user's code in one line, with the line of the file where it came from."""
    if isinstance(error, SyntaxError) and error.filename:  # raised by who reads the file, about a line of the file
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}, line {error.lineno})"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    text = " ".join(str(error).split()) or "no message"
    if trace is None:
        return f"{type(error).__name__}: {text}"
    return f"{type(error).__name__}: {text} ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"


def _module(where: str) -> ModuleType:
    try:
        if not where.endswith(".py"):
            if "" not in sys.path:
                sys.path.insert(0, "")
            return importlib.import_module(where)
        if not Path(where).is_file():
            raise OptionError(f"cannot load {where}: there is no such file")
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(Path(where).resolve().parent))  # as python file.py would
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.pop(0)
        return module
    except OptionError:
        raise
    except ImportError as error:
        raise TargetError(f"cannot load {where}: {' '.join(str(error).split())}") from error
    except (Exception, SystemExit) as error:
        raise TargetError(f"cannot load {where}: it raised {told(error)}") from error


def _kind(value: object) -> str:
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
