"""Recurrent layers: each weight meets its data once for every time, an outer product with the gradient at the gates."""

from __future__ import annotations

import torch
from torch import Tensor

from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.graph.layout import Regular
from unsum.kernels import recurrence
from unsum.kernels.kept_gates import kept_gates
from unsum.kernels.product import wide
from unsum.kernels.recurrence import AtGates, Kind, Recurrence
from unsum.kernels.recurrent_stack import Stack
from unsum.rules.registry import Call, rule

_MODES: tuple[Kind, ...] = ("relu", "tanh", "lstm", "gru")  # by the numbers that torch gives them
_LSTM = _MODES.index("lstm")


@rule("MkldnnRnnLayerBackward0", 1, several=True)
def of_inputs(call: Call) -> Outer | None:
    """The weight of the inputs."""
    gates = _gates(call)
    return None if gates is None else Outer(call.take(_layer(call).inputs), call.take(gates), call.shape)


@rule("MkldnnRnnLayerBackward0", 2, several=True)
def of_states(call: Call) -> Outer | None:
    """The weight of the states, each of which begins the time after it."""
    gates = _gates(call)
    return None if gates is None else Outer(call.take(_layer(call).before), call.take(gates), call.shape)


@rule("MkldnnRnnLayerBackward0", 3, several=True)
def input_bias(call: Call) -> Scale | None:
    """Both biases are added at every time."""
    gates = _gates(call)
    return None if gates is None else Scale(call.take(gates), None, call.shape)


rule("MkldnnRnnLayerBackward0", 4, several=True)(input_bias)


def _layer(call: Call) -> Recurrence:
    if "layer" not in call.memo:
        dtype = wide(call.delta.dtype)
        of = lambda name: call.saved(name).to(dtype)
        is_reversed, states = call.saved("reverse"), call.saved("result0")
        call.memo["layer"] = Recurrence(
            of("input"), recurrence.begun(states.to(dtype), of("hx_"), is_reversed=is_reversed),
            (of("weight0"), of("weight1")), (of("weight2"), of("weight3")) if call.saved("has_biases") else (),
            is_reversed, kept_gates(call.saved("result3"), states, is_reversed=is_reversed),
        )  # fmt: skip
    return call.memo["layer"]  # type: ignore[no-any-return]


def _gates(call: Call) -> Tensor | None:
    """(T, B, 4H): the gradient at the gates, found once for all weights. None for what is no LSTM, and where samples
    do not lie along the sequences of a batch: along time they interact."""
    layout = call.by.layout
    if call.saved("mode") != _LSTM or not (call.by.n == 1 or (isinstance(layout, Regular) and layout.dim == 1)):
        return None
    if "gates" not in call.memo:
        dtype = wide(call.delta.dtype)
        last, cell = (None if grad is None else grad.detach().to(dtype) for grad in call.others)
        with torch.no_grad():
            call.memo["gates"] = recurrence.lstm(
                _layer(call), call.saved("cx_").to(dtype), call.delta.detach().to(dtype), last, cell
            )
    return call.memo["gates"]  # type: ignore[no-any-return]


# ---- cuDNN: all layers and directions are one node ------------------------------------------------------------------

MOST_WEIGHTS = 128  # of one node: 16 layers in both directions, with biases


def _cudnn_weight(edge: int) -> None:
    """The rule for a weight or bias of cuDNN's node. Its edges: the input, the weights, the first states and cells."""

    @rule("CudnnRnnBackward0", edge, several=True)
    def cudnn_weight(call: Call) -> Outer | Scale | None:
        found = _of_stack(call)
        if found is None:
            return None
        weights = call.saved("weight")
        if edge > len(weights) or weights[edge - 1].shape != call.shape:
            return None  # the first states
        at, which = divmod(edge - 1, call.saved("weight_stride0"))
        layer, gates = found[at]
        turned = lambda tensor: call.take(tensor.transpose(0, 1) if call.saved("batch_first") else tensor)
        delta = turned(gates.of_inputs if which % 2 == 0 else gates.of_states)
        if which > 1:
            return Scale(delta, None, call.shape)
        return Outer(turned(layer.inputs if which == 0 else layer.before), delta, call.shape)


for _edge in range(1, MOST_WEIGHTS + 1):
    _cudnn_weight(_edge)


def _of_stack(call: Call) -> list[tuple[Recurrence, AtGates]] | None:
    """The layers of cuDNN's node, and the gradients at their gates, found once for all weights. None where samples do
    not lie along the sequences of a batch, and for what cannot be read from the node: packed sequences, projections,
    and which numbers dropout has left between layers."""
    layout, batch = call.by.layout, 0 if call.saved("batch_first") else 1
    is_along = call.by.n == 1 or (isinstance(layout, Regular) and layout.dim == batch)
    drops = call.saved("dropout") > 0 and call.saved("train") and call.saved("num_layers") > 1
    if not is_along or drops or call.saved("batch_sizes") or call.saved("proj_size"):
        return None
    if "stack" not in call.memo:
        weights, each = [w.detach() for w in call.saved("weight")], call.saved("weight_stride0")
        turned = lambda tensor: tensor.detach().transpose(0, batch ^ 1)
        kind = _MODES[call.saved("mode")]
        stack = Stack(
            kind, turned(call.saved("input")), turned(call.saved("result0")), call.saved("hx"),
            call.saved("cx") if kind == "lstm" else None,
            [tuple(weights[k : k + each]) for k in range(0, len(weights), each)],
            2 if call.saved("bidirectional") else 1,
        )  # fmt: skip
        last, cell = (None if grad is None else grad.detach() for grad in call.others[:2])
        with torch.no_grad():
            call.memo["stack"] = stack.at_gates(turned(call.delta), last, cell if kind == "lstm" else None)
    return call.memo["stack"]  # type: ignore[no-any-return]
