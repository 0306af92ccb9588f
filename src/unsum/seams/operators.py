"""Operators below autograd: their schemas, stand-ins for tensors while torch compiles, and how a kernel is launched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = [
    "OpOverload",
    "TorchDispatchMode",
    "current_stream",
    "hint",
    "is_stand_in",
    "launcher",
    "onednn_gates",
    "onednn_lstm",
    "onednn_product",
    "python_operator",
    "runs_between_cuda_graphs",
    "schema_of",
    "settled",
    "without_modes",
]

_is_in_dynamo = torch.compiler.is_dynamo_compiling

schema_of: Callable[[Any], Any] = attrgetter("_schema")  # name and arguments of an operator


def is_stand_in(tensor: Tensor) -> bool:
    """Whether there are no numbers behind a tensor: torch writes down what is to be compiled."""
    return _is_in_dynamo() or isinstance(tensor, FakeTensor | FunctionalTensor) or torch._is_functional_tensor(tensor)


def hint(value: Any) -> Any:
    """The number that a symbol stands for while torch writes down; nothing is made to depend on it."""
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value


def settled(value: Any) -> Any:
    """A size. One that torch has rounded (`t // 2`) while it writes down becomes a number, and what is compiled holds
    for that number alone; sums and products of sizes stay symbols."""
    if not isinstance(value, torch.SymInt):
        return value
    told = value.node.expr
    return value if told.is_polynomial(*told.free_symbols) else int(value)


def current_stream(device: int) -> int:
    """The address of the CUDA stream of the moment."""
    return torch._C._cuda_getCurrentRawStream(device)  # type: ignore[no-any-return, attr-defined]


def launcher(made: Any) -> tuple[Callable[..., None], Any, Any]:
    """What launches a compiled Triton kernel: run, the function, and what run is told of it."""
    made._init_handles()
    return made.run, made.function, made.packed_metadata


def python_operator(
    name: str, function: Callable[..., Tensor], schema: str, stand_in: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """An operator that calls a Python function wherever a compiled model comes to it. Inductor ends the CUDA graph
    before it, and begins another one after it (`runs_between_cuda_graphs`)."""
    tags = () if _UNSAFE is None else (_UNSAFE,)
    made = torch.library.custom_op(name, function, mutates_args=(), schema=schema, tags=tags)
    made.register_fake(stand_in)
    return made


_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)


def runs_between_cuda_graphs(options: Mapping[str, Any]) -> bool:
    """Whether inductor, with the user's options, cuts CUDA graphs where such an operator is."""
    inductor: Any = sys.modules.get("torch._inductor.config")
    usual = getattr(inductor, "graph_partition", False)
    return _UNSAFE is not None and bool(options.get("graph_partition", usual))


_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def onednn_product(rows: Tensor, weight: Tensor) -> Tensor | None:
    """rows @ weight.T, (m, k) and (o, k), by the library that torch's recurrent layers use on a CPU; None where there
    is none. torch's own product of float32 takes MKL, which is less than half as fast on processors of other makers."""
    if _linear is None or rows.dtype != torch.float32 or rows.device.type != "cpu":
        return None
    return _linear(rows, weight, None, "none", [], "")  # type: ignore[no-any-return]


_LINE, _CRITICAL = 16, 256  # numbers of float32: rows begin with a cache line, and their size is no multiple of 256


def onednn_gates(workspace: Tensor, times: int, batch: int, units: int) -> Tensor | None:
    """(T, B, 4, H): where oneDNN keeps the gates of an LSTM for its backward (input, forget, cell, output), in the
    order in which it went through time; None where that cannot be. oneDNN lays its workspace out so today, and promises
    it nowhere: whoever reads it has to see that it is so."""
    width = -(-4 * units // _LINE) * _LINE
    width += _LINE if width % _CRITICAL == 0 else 0
    is_read = workspace.dtype == torch.uint8 and workspace.is_contiguous() and not is_stand_in(workspace)
    if not is_read or workspace.numel() < 4 * times * batch * width or workspace.data_ptr() % 64:
        return None
    numbers = workspace[: 4 * times * batch * width].view(torch.float32)
    return numbers.as_strided((times, batch, 4, units), (batch * width, width, units, 1))


_rnn: Any = getattr(torch.ops.aten, "mkldnn_rnn_layer", None)
_LSTM = 2  # among torch's recurrent layers


def onednn_lstm(
    inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], state: Tensor, cell: Tensor,
    *, is_reversed: bool,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """The states (T, B, H) of an LSTM, and the workspace that oneDNN leaves for its backward; None where there is no
    oneDNN."""
    if _rnn is None:
        return None
    units = state.shape[1]
    with torch.enable_grad():  # or nothing is left
        states, _, _, workspace = _rnn(
            inputs, *weights, *biases, state, cell, is_reversed, [], _LSTM, units, 1, True, False, False, True
        )
    return None if workspace is None else (states, workspace)
