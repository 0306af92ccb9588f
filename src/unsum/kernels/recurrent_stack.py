"""Several recurrent layers that ran as one operation (cuDNN), each in one or two directions: the gradient at the gates
of all of them. What lower layers returned is not saved in a form that can be read, so they are run again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unsum.kernels.product import wide
from unsum.kernels.recurrence import AtGates, Kind, Recurrence, at_gates, product

_RUNS = {"relu": torch.rnn_relu, "tanh": torch.rnn_tanh, "gru": torch.gru}


@dataclass(frozen=True)
class Stack:
    """Layers over T times and B sequences, with H hidden units in each of D directions. No dropout between them."""

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
        above = self._wide(d_outputs)
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
        first, second, *biases = map(self._wide, self.weights[at])
        own = lambda tensor: self._wide(tensor.chunk(self.directions, 2)[direction])
        one = Recurrence(
            self._wide(returned[layer]), own(returned[layer + 1]), self._wide(self.states[at]), (first, second),
            tuple(biases), is_reversed=direction == 1,
        )  # fmt: skip
        cell, d_last, d_cell = (
            None if each is None else self._wide(each[at]) for each in (self.cells, d_states, d_cells)
        )
        return one, at_gates(self.kind, one, cell, own(above).contiguous(), d_last, d_cell)

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

    @staticmethod
    def _wide(tensor: Tensor) -> Tensor:
        return tensor.to(wide(tensor.dtype))
