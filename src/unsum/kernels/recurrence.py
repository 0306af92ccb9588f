"""One recurrent layer: the gradient at the gates, at every time, from what a layer was given and what it returned.

A layer's backward gives the gradients of its weights summed over time and samples. The gradient at the gates, before
that sum, is found by going through time once more. All matrix products but one are over all times at once, since the
states are known; the one that is left leads the gradient from each time to the time before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from unsum.seams.operators import onednn_product

Kind = Literal["relu", "tanh", "lstm", "gru"]

# Products of numbers, from which on oneDNN's call is worth its overhead, as measured: over all times, and at one time.
LARGE, LARGE_ONCE = 1 << 22, 1 << 20

_aten = torch.ops.aten


class AtGates(NamedTuple):
    """The gradient at the gates, (T, B, gates · H) each: of what the weight of the inputs brings to them, and of what
    the weight of the states brings. The two differ only where the latter is multiplied on its way (GRU)."""

    of_inputs: Tensor
    of_states: Tensor


class Kept(NamedTuple):
    """What an LSTM has left for its backward. It is believed if the gates lead to the states."""

    gates: Tensor  # (T, B, 4, H), in the order in which it went through time
    states: Tensor  # (T, B, H) that the layer has returned


@dataclass(frozen=True)
class Recurrence:
    """A layer that was run over time, with T times, B sequences and H hidden units."""

    inputs: Tensor  # (T, B, I)
    before: Tensor  # (T, B, H): the state that each time began with
    weights: tuple[Tensor, Tensor]  # of inputs and of states, (gates · H, I) and (gates · H, H)
    biases: tuple[Tensor, ...]  # (gates · H,) each
    is_reversed: bool = False  # whether it went from the last time to the first
    kept: Kept | None = None

    def sums(self) -> Tensor:
        """(T, B, gates · H): what goes into the gates."""
        of_inputs, of_states = self.parts()
        return of_inputs.add_(of_states)

    def parts(self) -> tuple[Tensor, Tensor]:
        """(T, B, gates · H) twice: what inputs and what states bring to the gates."""
        found = []
        for k, (given, weight) in enumerate(zip((self.inputs, self.before), self.weights, strict=True)):
            rows = product(given.flatten(0, 1), weight)
            found.append((rows.add_(self.biases[k]) if self.biases else rows).view(*given.shape[:2], -1))
        return found[0], found[1]

    def forwards(self, *along: Iterable[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """What there is of each time, in the order in which the layer went through them."""
        found = list(zip(*along, strict=True))
        return reversed(found) if self.is_reversed else iter(found)

    def backwards(self, *along: Iterable[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """The same, in the order of a backward."""
        found = list(zip(*along, strict=True))
        return iter(found) if self.is_reversed else reversed(found)

    def led_back(self, own: Tensor, before: Tensor) -> Tensor:
        """(B, H): the gradient of the state before a time, from the one at its gates and what arrives there besides."""
        weight = self.weights[1]
        found = onednn_product(own, weight.T) if own.numel() * weight.shape[1] >= LARGE_ONCE else None
        return torch.addmm(before, own, weight) if found is None else found.add_(before)

    def arriving(self, d_states: Tensor, d_last: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """The gradient of the state that a backward begins with, and what arrives at the state before each time, with
        None for the first time's: that of all states, (T, B, H), and of the last one are given."""
        begins, *rest = [each for (each,) in self.backwards(d_states.unbind())]
        return begins if d_last is None else begins + d_last, [*rest, None]


def begun(ended: Tensor, first: Tensor, *, is_reversed: bool) -> Tensor:
    """(T, B, H): what each time began with, if it `ended` with these, and the first time began with `first`. In memory
    it lies as they do: time by time, or sequence by sequence."""
    by_sequence = not ended.is_contiguous() and ended.transpose(0, 1).is_contiguous()
    if by_sequence:
        ended, first = ended.transpose(0, 1), first[:, None]
        return torch.cat((ended[:, 1:], first) if is_reversed else (first, ended[:, :-1]), 1).transpose(0, 1)
    return torch.cat((ended[1:], first[None]) if is_reversed else (first[None], ended[:-1]))


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight.T."""
    found = onednn_product(rows, weight) if rows.numel() * len(weight) > LARGE else None
    return rows @ weight.T if found is None else found


def lstm(layer: Recurrence, cell: Tensor, d_states: Tensor, d_last: Tensor | None, d_cell: Tensor | None) -> Tensor:
    """(T, B, 4H): the gradient at the gates of an LSTM that began with a `cell` (B, H), given the gradients of all
    states (T, B, H), of the last one and of the last cell."""
    gates, cells, earlier = _kept_gates(layer, cell) or opened(layer, cell)
    i, f, g, o = gates.unbind(2)
    # From here on the gates turn into derivatives: of the cell for i, f and g, of the state for o.
    through = _aten.tanh_backward(o, cells)  # the cell, by the state
    kept = f.clone()
    by_i = _aten.sigmoid_backward(g, i)
    _aten.tanh_backward.grad_input(i, g, grad_input=g)
    i.copy_(by_i)
    _aten.sigmoid_backward.grad_input(earlier, f, grad_input=f)
    _aten.sigmoid_backward.grad_input(cells, o, grad_input=o)
    # And now, time by time, into gradients. Views are made for all times at once: a time is a few small operations.
    d = torch.zeros_like(cell) if d_cell is None else d_cell.clone()
    by_gate, flat = d[:, None], gates.flatten(2)
    state, following = layer.arriving(d_states, d_last)
    times = layer.backwards(gates[:, :, :3].unbind(), o.unbind(), flat.unbind(), through.unbind(), kept.unbind())
    for (of_cell, of_state, own, to_cell, keep), before in zip(times, following, strict=True):
        d.addcmul_(state, to_cell)
        of_cell.mul_(by_gate)
        of_state.mul_(state)
        if before is not None:
            d.mul_(keep)
            state = layer.led_back(own, before)
    return flat


def opened(layer: Recurrence, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gates of an LSTM (T, B, 4, H), tanh of its cells after each time and the cells before it, (T, B, H)."""
    gates = layer.sums().unflatten(2, (4, -1))
    i, f, g, o = gates.unbind(2)
    for gate in (i, f, o):
        gate.sigmoid_()
    g.tanh_()
    return gates, *_cells(layer, gates, cell)


def _cells(layer: Recurrence, gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Tanh of the cells after each time, and the cells before it, (T, B, H) each."""
    i, f, g, _ = gates.unbind(2)
    cells, first = torch.mul(i, g), cell
    for now, forget in layer.forwards(cells.unbind(), f.unbind()):
        cell = now.addcmul_(forget, cell)
    earlier = begun(cells, first, is_reversed=layer.is_reversed)
    return cells.tanh_(), earlier


OFF = 1e-4  # between states, or gates, that are the same but for rounding


def _kept_gates(layer: Recurrence, cell: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gates that were kept, and the cells that follow from them, as `opened` gives them. None if no gates were
    kept, or if they do not lead to the states that the layer returned."""
    if layer.kept is None:
        return None
    kept, states = layer.kept
    gates = kept.flip(0) if layer.is_reversed else kept.clone(memory_format=torch.contiguous_format)
    cells, earlier = _cells(layer, gates, cell)
    return (gates, cells, earlier) if are_close(gates[:, :, 3] * cells, states) else None


def are_close(found: Tensor, wanted: Tensor) -> bool:
    """Whether gates or states are the same but for rounding; False where there is a NaN."""
    return bool(torch.sub(found, wanted).abs_().max() <= OFF)


def gru(layer: Recurrence, d_states: Tensor, d_last: Tensor | None) -> AtGates:
    """The gradient at the gates of a GRU (reset, update, new), given those of all states (T, B, H) and of the last."""
    (r, z, n), (r_state, z_state, n_state) = (part.unflatten(2, (3, -1)).unbind(2) for part in layer.parts())
    r, z = (r + r_state).sigmoid_(), (z + z_state).sigmoid_()
    n = torch.addcmul(n, r, n_state).tanh_()
    # What one unit of a state's gradient brings to each gate: all at once, since the states are known.
    to_new = _aten.tanh_backward(1 - z, n)
    units = torch.stack([_aten.sigmoid_backward(to_new * n_state, r), _aten.sigmoid_backward(layer.before - n, z)], 2)
    of_inputs = torch.cat([units, to_new[:, :, None]], 2)
    of_states = torch.cat([units, (to_new * r)[:, :, None]], 2)
    state, following = layer.arriving(d_states, d_last)
    flat = of_states.flatten(2)
    times = layer.backwards(of_inputs.unbind(), of_states.unbind(), flat.unbind(), z.unbind())
    for (inputs, states, own, keep), before in zip(times, following, strict=True):
        each = state[:, None]
        inputs.mul_(each)
        states.mul_(each)
        if before is not None:
            state = layer.led_back(own, torch.addcmul(before, state, keep))
    return AtGates(of_inputs.flatten(2), flat)


def plain(layer: Recurrence, states: Tensor, d_states: Tensor, d_last: Tensor | None, *, relu: bool) -> Tensor:
    """(T, B, H): the gradient at the only gate, tanh or `relu`, of a layer that returned these states."""
    slopes = (states > 0).to(d_states.dtype) if relu else 1 - states.square()
    state, following = layer.arriving(d_states, d_last)
    for (own,), before in zip(layer.backwards(slopes.unbind()), following, strict=True):
        own.mul_(state)
        if before is not None:
            state = layer.led_back(own, before)
    return slopes


# ---- how the kernel for LSTMs divides its work ----------------------------------------------------------------------

BLOCKS = ((16, 16), (32, 16), (64, 16), (64, 32), (64, 64))  # sequences and units of one program


def block_of(batch: int, hidden: int, device: torch.device) -> tuple[int, int] | None:
    """How many sequences and units a program has, so that all programs run at once, one on each multiprocessor; None
    if they cannot. Where Triton is interpreted, there is one program."""
    if device.type != "cuda":
        return max(16, 1 << (batch - 1).bit_length()), max(16, 1 << (hidden - 1).bit_length())
    most = torch.cuda.get_device_properties(device).multi_processor_count
    for rows, units in BLOCKS:
        if (rows >= batch or rows == BLOCKS[-1][0]) and -(-batch // rows) * -(-hidden // units) <= most:
            return rows, units
    return None
