"""Recurrent layers: each weight meets its data once for every time, an outer product with the gradient at the gates."""

from __future__ import annotations

import torch
from torch import Tensor

from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.graph.layout import Regular
from unsum.kernels import recurrence
from unsum.kernels.product import wide
from unsum.kernels.recurrence import Recurrence
from unsum.rules.registry import Call, rule

_LSTM = 2  # the mode of a layer that is one


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
        call.memo["layer"] = Recurrence(
            of("input"), of("result0"), of("hx_"), (of("weight0"), of("weight1")),
            (of("weight2"), of("weight3")) if call.saved("has_biases") else (), is_reversed=call.saved("reverse"),
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
