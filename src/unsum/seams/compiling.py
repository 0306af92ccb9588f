"""Compiled modules: with what the user has compiled them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

dynamic_of: Callable[[Any], bool | None] = attrgetter("_dynamic")  # whether sizes may change


def allow_in_graph(function: Callable[..., Any]) -> None:
    """Torch writes down a call of this function as it is, and does not look inside."""
    torch._dynamo.allow_in_graph(function)


def uses_cuda_graphs() -> bool:
    """Whether torch's own backend is set to record CUDA graphs."""
    inductor: Any = sys.modules.get("torch._inductor.config")
    return inductor is not None and bool(inductor.triton.cudagraphs)


def flattened(arguments: Any) -> tuple[list[Any], str]:
    """All values in nested arguments, as torch's compiler finds them, and how they are nested."""
    values, nesting = pytree.tree_flatten(arguments)
    return values, str(nesting)


def backend_of(context: Any) -> Any:
    """The backend with which the user has compiled."""
    inner = context.callback
    while hasattr(inner, "_torchdynamo_orig_backend"):
        inner = inner._torchdynamo_orig_backend
    return inner


def compiler_of(module: nn.Module) -> Any | None:
    """Torch's own object with which the user has compiled a module: backend and options; None if it is not found."""
    found = module.__dict__.get("dynamo_ctx")
    compiled: Any = module._compiled_call_impl
    if found is None and compiled is not None:
        cells = [cell.cell_contents for cell in compiled.__closure__ or () if _is_full(cell)]
        found = next((each for each in cells if hasattr(each, "callback") and hasattr(each, "_dynamic")), None)
    return found


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
