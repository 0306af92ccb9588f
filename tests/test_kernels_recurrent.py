"""The kernel for LSTMs and its twin against autograd in float64, which differentiates every gate at every time."""

import pytest
import torch
from torch.nn import functional as F

from kernel_inputs import in_all, made, ways

SHAPES = {  # times, sequences, inputs, hidden units
    "one number": (1, 1, 1, 1),
    "a short sequence": (3, 5, 20, 33),
    "more units than a program takes": (4, 3, 8, 200),
}


def at_gates(x, before, of_inputs, of_states, bias, cell, d_states, d_last, d_cell, reverse):
    """The gradient at the gates: of zeros that are added to what goes into them. States are those of the layer."""
    given = [t.double() for t in (x, before, of_inputs, of_states, bias, cell)]
    x, before, of_inputs, of_states, bias, cell = given
    added = torch.zeros(*x.shape[:2], len(bias), dtype=torch.float64, device=x.device, requires_grad=True)
    state, states = before[-1 if reverse else 0], []
    for t in reversed(range(len(x))) if reverse else range(len(x)):
        sums = F.linear(x[t], of_inputs, bias) + F.linear(state, of_states) + added[t]
        i, f, g, o = sums.chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        state = o.sigmoid() * cell.tanh()
        states.append(state)
    states = torch.stack(states[::-1] if reverse else states)
    grads = d_states.double(), d_last.double(), d_cell.double()
    return torch.autograd.grad([states, state, cell], added, grads)[0], states.detach()


@in_all
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("lie", ["time by time", "sequence by sequence", "one of each"])
@pytest.mark.parametrize("name", SHAPES)
def test_lstm_gates(name, lie, reverse, dtype):
    times, batch, width, hidden = SHAPES[name]
    weights = [0.3 * made(4 * hidden, width), 0.3 * made(4 * hidden, hidden), made(4 * hidden)]
    x, first, cell = made(times, batch, width), 0.5 * made(batch, hidden), made(batch, hidden, seed=1)
    grads = [made(times, batch, hidden), made(batch, hidden, seed=2), made(batch, hidden, seed=3)]
    x, first, cell, *rest = (t.to(dtype) for t in (x, first, cell, *weights, *grads))
    weights, grads = rest[:3], rest[3:]
    begins = first.expand(times, batch, hidden)  # of these only the first is read; the others follow from it
    wanted, states = at_gates(x, begins, *weights, cell, *grads, reverse)
    before = torch.cat([states[1:], first[None]] if reverse else [first[None], states[:-1]]).to(dtype)
    turned = lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1)
    x, before = (x, before) if lie == "time by time" else (turned(x), turned(before))
    grads[0] = turned(grads[0]) if lie == "sequence by sequence" else grads[0]
    for way in ways("lstm_gates"):
        found = way(x, before, *weights, cell, *grads, reverse)
        assert found.dtype == dtype and found.shape == wanted.shape
        # Numbers are rounded at every time, and states were before: errors add up along time.
        loose = 1e-5 if dtype == torch.float32 else 3e-2
        assert float((found.double() - wanted).norm()) <= loose * float(wanted.norm())


@in_all
def test_what_is_given_stays_as_it_was(dtype):
    given = [made(*shape, dtype=dtype) for shape in [(3, 2, 4), (3, 2, 8), (32, 4), (32, 8), (32,), (2, 8)]]
    given += [made(*shape, dtype=dtype) for shape in [(3, 2, 8), (2, 8), (2, 8)]]
    before = [t.clone() for t in given]
    for way in ways("lstm_gates"):
        way(*given, False)
        assert all(torch.equal(one, other) for one, other in zip(given, before, strict=True))
