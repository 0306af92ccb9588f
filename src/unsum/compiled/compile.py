"""Compiling a model once more, by the user's own backend and options: with taps, or as it is taken down."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unsum import seams
from unsum.compiled import traced_sites
from unsum.compiled.instrument import backend, hold
from unsum.compiled.outlets import as_they_are, parts_backend
from unsum.compiled.pattern import Untappable
from unsum.compiled.raw_inputs import Lines, lines_of
from unsum.seams.compiling import (
    allow_in_graph,
    apart,
    backend_of,
    call_uncompiled,
    compiler_of,
    dynamic_of,
    records_cuda_graphs,
    uses_cuda_graphs,
)
from unsum.seams.modes import WatchingMode
from unsum.seams.operators import runs_between_cuda_graphs

_numbers = itertools.count()
_local = threading.local()


def compiled_with_taps(module: nn.Module) -> Callable[..., Any]:
    """`run(model, given, args, kwargs)`: the model's output, and a tensor through which taps can be found."""

    def run(model: nn.Module, given: list[Tensor], args: Any, kwargs: Any) -> Any:
        held = hold(*given)
        return model(*args, **kwargs), held

    allow_in_graph(hold)
    context = _context_of(module)
    return _compile(run, backend(backend_of(context)), context)


def reuses_memory(module: nn.Module) -> bool:
    """Whether what the compiled model returns is overwritten by its next run (CUDA graphs)."""
    chosen = backend_of(_context_of(module))
    return records_cuda_graphs(chosen) or bool(_options_of(chosen).get("triton.cudagraphs") or uses_cuda_graphs())


def calls_python(module: nn.Module) -> bool:
    """Whether Python can run in the middle of the compiled model's backward: not inside a CUDA graph, only between."""
    if not reuses_memory(module):
        return True
    chosen = backend_of(_context_of(module))
    return not records_cuda_graphs(chosen) and runs_between_cuda_graphs(_options_of(chosen))


def _options_of(chosen: Any) -> dict[str, Any]:
    """The user's options for torch's own backend."""
    return getattr(chosen, "config", None) or {}


def taken_down(module: nn.Module) -> Callable[..., Any]:
    """`run(model, args, kwargs)`: what torch would compile, run as it is."""
    return _compile(_called(), _as_it_is, _context_of(module))


def _as_it_is(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    done = lines_of(graph)

    def run(*given: Any) -> Any:
        watcher: WatchingMode = _local.watcher
        _local.seen.append(done)
        seams.watch(watcher)
        try:
            return graph.forward(*given)
        finally:
            seams.unwatch(watcher)

    return run


@contextmanager
def rehearsing(watcher: WatchingMode) -> Iterator[list[Lines]]:
    """What is taken down is watched while it runs. (While it is taken down, nothing may watch.) Yields what was done to
    the inputs of each graph that ran."""
    _local.watcher, _local.seen = watcher, []
    try:
        yield _local.seen
    finally:
        _local.watcher = _local.seen = None


def compiled_in_parts(module: nn.Module) -> Callable[..., Any]:
    """`run(model, args, kwargs)`: the model's output, each part that torch compiles with taps of its own."""
    context = _context_of(module)
    return _compile(_called_by_itself(), parts_backend(backend_of(context)), context, in_parts=True)


def taken_down_in_parts(module: nn.Module) -> Callable[..., Any]:
    """`run(model, args, kwargs)`: the parts that torch would compile, run as they are."""
    return _compile(_called_by_itself(), as_they_are, _context_of(module), in_parts=True)


def compiled_with_sites(module: nn.Module, *, in_parts: bool) -> Callable[..., Any]:
    """`run(model, args, kwargs)`: the model's output; hooks of `traced_sites` are compiled with it."""
    context = _context_of(module)
    return _compile(_called_by_itself(), traced_sites.backend(backend_of(context)), context, in_parts=in_parts)


def is_static(module: nn.Module) -> bool:
    """Whether torch compiles it for each size anew."""
    return dynamic_of(_context_of(module)) is False


def _called() -> Callable[..., Any]:
    def run(model: nn.Module, args: Any, kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return run


def _called_by_itself() -> Callable[..., Any]:
    """After a graph break, torch would go on with what the user has compiled."""

    def run(model: nn.Module, args: Any, kwargs: Any) -> Any:
        return call_uncompiled(model, args, kwargs)

    return run


def _compile(
    run: Callable[..., Any], by: Callable[..., Any], context: Any, *, in_parts: bool = False
) -> Callable[..., Any]:
    run.__code__ = run.__code__.replace(co_name=f"unsum_{next(_numbers)}")  # torch limits compilations by code
    options = apart() if in_parts else {"fullgraph": True}
    return torch.compile(run, backend=by, dynamic=dynamic_of(context), **options)


def _context_of(module: nn.Module) -> Any:
    found = compiler_of(module)
    if found is None:
        raise Untappable("the options with which it was compiled are not known")
    return found
