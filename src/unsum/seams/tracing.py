"""Where a hook would be baked into a trace, or into a CUDA graph."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from unsum.errors import UnsupportedError

_is_in_dynamo = torch.compiler.is_dynamo_compiling
_jit_state = torch._C._get_tracing_state
# To ask for functorch's own stack makes one, which every backward of this thread would then copy for every node.
_is_in_functorch = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
)
_guards: Any = getattr(torch._guards, "_TLS", None)  # what `TracingContext` asks, in a tenth of the time
_fx: Any = importlib.import_module("torch.fx._symbolic_trace")


def _context() -> Any:
    """What torch knows of the compilation or export that this thread is in."""
    return torch._guards.TracingContext.try_get()


def is_traced() -> bool:
    """Whether a hook would be baked into a trace now, or would see tensors that mean nothing afterwards."""
    return (
        _is_in_dynamo()  # first: torch may be reading these lines
        or _is_in_functorch()
        or _jit_state() is not None
        or (_context() is not None if _guards is None else _guards.__dict__.get("tracing_context") is not None)
        or (_fx._is_fx_tracing_flag and _fx.is_fx_symbolic_tracing())
        or is_capturing()
    )


def is_capturing() -> bool:
    """Whether what runs now is captured into a CUDA graph. One look at a flag where CUDA was never used."""
    return bool(torch.cuda._initialized) and torch.cuda.is_current_stream_capturing()


def refuse_capturing(name: str) -> None:
    """Raise where what runs now is captured into a CUDA graph: hooks run then, and not when the graph is replayed."""
    if is_capturing():
        raise UnsupportedError(
            f"{name}: open while a CUDA graph is captured. Its replays run kernels alone and no Python: later steps "
            "would be neither seen nor changed.",
            write=(
                "with unsum.gradients(model) as g: loss_fn(model(x), y).backward()  # a step outside torch.cuda.graph",
                'model = torch.compile(model, mode="reduce-overhead")  # CUDA graphs that unsum knows of',
            ),
        )


def refuse_tracing(name: str) -> None:
    """Raise where a hook would be baked into a trace, or would see tensors that mean nothing afterwards."""
    if not is_traced():
        return
    if not _is_in_dynamo():
        refuse_capturing(name)
    what = None
    if not _is_in_dynamo() and _is_in_functorch():
        what = "a torch.func transform (vmap, grad, jvp, ...)"
    elif _jit_state() is not None:
        what = "torch.jit.trace"
    elif _is_in_dynamo() or _context() is not None:
        what = "a model that is being compiled or exported"
    elif _fx.is_fx_symbolic_tracing():
        what = "torch.fx tracing"
    if what is not None:
        raise UnsupportedError(
            f"{name}: called inside {what}, where what flows cannot be captured or edited.\n"
            "  leave the transform outside the block, or call the model itself inside it"
        )
