"""Several recurrent layers that ran as one operation (cuDNN), each in one or two directions: the gradient at the gates
of all of them. What lower layers returned is not saved in a form that can be read, so they are run again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unsum.kernels import fused, recurrence
from unsum.kernels.product import wide
from unsum.kernels.recurrence import AtGates, Kind, Recurrence, product

_RUNS = {"relu": torch.rnn_relu, "tanh": torch.rnn_tanh, "gru": torch.gru}


@dataclass(frozen=True)
class Stack:
    """Layers over T times and B sequences, with H hidden units in each of D directions. No dropout between them. All
    that is found has the dtype of the layers."""

    kind: Kind
    inputs: Tensor  # (T, B, I)
    outputs: Tensor  # (T, B, D · H): what the last layer returned
    states: Tensor  # (layers · D, B, H): what they began with
    cells: Tensor | None  # of an LSTM, likewise
    weights: Sequence[tuple[Tensor, ...]]  # for each layer and direction: of inputs, of states, and biases if any
    directions: int

    def at_gates(
        self, d_outputs: Tensor, d_states: Tensor | None, d_cells: Tensor | None
    ) -> list[tuple[Recurrence, AtGates]]:
        """For each layer and direction, in the order of the weights: the layer and the gradient at its gates, given
        those of the outputs, of the last states and of the last cells."""
        returned = self._returned()
        found: list[tuple[Recurrence, AtGates]] = []
        above = d_outputs
        for layer in reversed(range(len(self.weights) // self.directions)):
            here = [self._one(layer, k, returned, above, d_states, d_cells) for k in range(self.directions)]
            if layer:
                each = [product(gates.of_inputs.flatten(0, 1), one.weights[0].T) for one, gates in here]
                above = torch.stack(each).sum(0).view_as(returned[layer])
            found = here + found
        return found

    def _one(
        self, layer: int, direction: int, returned: Sequence[Tensor], above: Tensor,
        d_states: Tensor | None, d_cells: Tensor | None,
    ) -> tuple[Recurrence, AtGates]:  # fmt: skip
        at = layer * self.directions + direction
        first, second, *biases = self.weights[at]
        own = lambda tensor: tensor.chunk(self.directions, 2)[direction]
        states, is_reversed = own(returned[layer + 1]), direction == 1
        before = recurrence.begun(states, self.states[at], is_reversed=is_reversed)
        one = Recurrence(returned[layer], before, (first, second), tuple(biases), is_reversed)
        last, cell = (None if each is None else each[at] for each in (d_states, d_cells))
        return one, self._at_gates(one, at, states, own(above), last, cell)

    def _at_gates(
        self, one: Recurrence, at: int, states: Tensor, d_states: Tensor, d_last: Tensor | None, d_cell: Tensor | None
    ) -> AtGates:
        if self.cells is not None:
            cell = self.cells[at]
            none = torch.zeros_like(cell)
            bias = one.biases[0] + one.biases[1] if one.biases else one.weights[0].new_zeros(len(one.weights[0]))
            gates = fused.lstm_gates(
                one.inputs, one.before, *one.weights, bias, cell, d_states, none if d_last is None else d_last,
                none if d_cell is None else d_cell, one.is_reversed,
            )  # fmt: skip
            return AtGates(gates, gates)
        dtype = d_states.dtype
        up = lambda tensor: tensor.to(wide(dtype))
        exact = Recurrence(
            up(one.inputs), up(one.before), (up(one.weights[0]), up(one.weights[1])), tuple(map(up, one.biases)),
            one.is_reversed,
        )  # fmt: skip
        last = None if d_last is None else up(d_last)
        if self.kind == "gru":
            found = recurrence.gru(exact, up(d_states), last)
            return AtGates(found.of_inputs.to(dtype), found.of_states.to(dtype))
        gate = recurrence.plain(exact, up(states), up(d_states), last, relu=self.kind == "relu").to(dtype)
        return AtGates(gate, gate)

    def _returned(self) -> list[Tensor]:
        """What each layer was given, and what the last returned."""
        found = [self.inputs]
        for layer in range(len(self.weights) // self.directions - 1):
            found.append(self._run(found[-1], layer))
        return [*found, self.outputs]

    def _run(self, given: Tensor, layer: int) -> Tensor:
        """What a layer returns, by torch's own operation."""
        here = slice(layer * self.directions, (layer + 1) * self.directions)
        weights = [each for one in self.weights[here] for each in one]
        has_biases = len(self.weights[0]) > 2
        options = (weights, has_biases, 1, 0.0, False, self.directions == 2, False)
        with warnings.catch_warnings():  # weights of one layer do not lie in one piece: that is known
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            if self.cells is not None:
                return torch.lstm(given, (self.states[here], self.cells[here]), *options)[0]
            return _RUNS[self.kind](given, self.states[here], *options)[0]
