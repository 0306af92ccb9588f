"""Compiling a model once more, by the user's own backend and options: with taps, or as it is taken down."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unsum import hooks
from unsum.compiled.pattern import Untappable
from unsum.compiled.trace import backend, hold

_numbers = itertools.count()
_local = threading.local()


def compiled_with_taps(module: nn.Module) -> Callable[..., Any]:
    """`run(model, given, args, kwargs)`: the model's output, and a tensor through which taps can be found."""

    def run(model: nn.Module, given: list[Tensor], args: Any, kwargs: Any) -> Any:
        held = hold(*given)
        return model(*args, **kwargs), held

    torch._dynamo.allow_in_graph(hold)
    context = _context(module)
    return _compile(run, backend(_backend(context)), context)


def reuses_memory(module: nn.Module) -> bool:
    """Whether what the compiled model returns is overwritten by its next run (CUDA graphs)."""
    own: dict[str, Any] = getattr(_backend(_context(module)), "config", None) or {}
    inductor: Any = sys.modules.get("torch._inductor.config")
    return bool(own.get("triton.cudagraphs") or (inductor is not None and inductor.triton.cudagraphs))


def _backend(context: Any) -> Any:
    inner = context.callback
    while hasattr(inner, "_torchdynamo_orig_backend"):
        inner = inner._torchdynamo_orig_backend
    return inner


def taken_down(module: nn.Module) -> Callable[..., Any]:
    """`run(model, args, kwargs)`: what torch would compile, run as it is."""

    def run(model: nn.Module, args: Any, kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return _compile(run, _as_it_is, _context(module))


def _as_it_is(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        watcher: TorchFunctionMode = _local.watcher
        hooks.watch(watcher)
        try:
            return graph.forward(*given)
        finally:
            hooks.unwatch(watcher)

    return run


@contextmanager
def rehearsing(watcher: TorchFunctionMode) -> Iterator[None]:
    """What is taken down is watched while it runs. (While it is taken down, nothing may watch.)"""
    _local.watcher = watcher
    try:
        yield
    finally:
        _local.watcher = None


def _compile(run: Callable[..., Any], by: Callable[..., Any], context: Any) -> Callable[..., Any]:
    run.__code__ = run.__code__.replace(co_name=f"unsum_{next(_numbers)}")  # torch limits compilations by code
    return torch.compile(run, backend=by, fullgraph=True, dynamic=context._dynamic)


def _context(module: nn.Module) -> Any:
    """Torch's own object with which the user has compiled: backend and options."""
    found = module.__dict__.get("dynamo_ctx")
    compiled: Any = module._compiled_call_impl
    if found is None and compiled is not None:
        cells = [cell.cell_contents for cell in compiled.__closure__ or () if _is_full(cell)]
        found = next((each for each in cells if hasattr(each, "callback") and hasattr(each, "_dynamic")), None)
    if found is None:
        raise Untappable("the options with which it was compiled are not known")
    return found


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
