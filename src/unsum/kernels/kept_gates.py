"""The gates of an LSTM on a CPU, read where oneDNN keeps them for its own backward: cheaper than to compute them again.
oneDNN does not promise where that is. So before any gates are read, a layer of the same sizes is run on random numbers,
and its gates are computed and compared."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from unsum.kernels.recurrence import Kept, Recurrence, are_close, begun, opened
from unsum.seams.operators import onednn_gates, onednn_lstm

_TIMES, _INPUTS = 3, 2  # of the layer that is run to see


def kept_gates(workspace: Tensor, states: Tensor, *, is_reversed: bool) -> Kept | None:
    """What oneDNN has kept of an LSTM that has returned these states (T, B, H); None if it cannot be read. In float32
    alone: gates in another dtype are less precise than what is computed."""
    if states.dtype != torch.float32 or not states.numel():
        return None
    gates = onednn_gates(workspace, *states.shape)
    if gates is None or not _are_there(*states.shape[1:], is_reversed):
        return None
    return Kept(gates, states)


@lru_cache(maxsize=1024)
def _are_there(batch: int, units: int, is_reversed: bool) -> bool:
    """Whether oneDNN keeps the gates of a layer of these sizes where `onednn_gates` looks."""
    generator = torch.Generator("cpu").manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")
    x, first, cell = draw(_TIMES, batch, _INPUTS), draw(batch, units), draw(batch, units)
    weights, biases = (
        (draw(4 * units, _INPUTS), draw(4 * units, units) / units**0.5),
        (draw(4 * units), draw(4 * units)),
    )
    found = onednn_lstm(x, weights, biases, first, cell, is_reversed=is_reversed)
    if found is None:
        return False
    states, workspace = found
    gates = onednn_gates(workspace, *states.shape)
    layer = Recurrence(x, begun(states, first, is_reversed=is_reversed), weights, biases, is_reversed)
    wanted, _, _ = opened(layer, cell)
    return gates is not None and are_close(gates, wanted.flip(0) if is_reversed else wanted)
