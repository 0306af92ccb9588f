"""Graphs of one structure in which numbers that nodes have saved are others from some step on: where samples stay apart
the results are right, and where they no longer do the step is refused."""

import contextlib

import pytest
import torch
from reference import each_of
from torch import nn

import unsum
from unsum.errors import InteractionError, SamplesError

N = 4


class Changing(nn.Module):
    """A layer, an operation with numbers that may change, and another layer."""

    def __init__(self, operation):
        super().__init__()
        self.first, self.last, self.operation = nn.Linear(3, 3), nn.Linear(3, 2), operation

    def forward(self, x, *numbers):
        return self.last(self.operation(self.first(x).tanh(), *numbers))


def at_an_offset(h, offset):
    return torch.cat([h, h.new_zeros(1, 3)]).as_strided((N, 3), (3, 1), offset)


def as_it_lies_in_memory(h, *dims):
    return h.permute(dims).as_strided((3, 3, 3), (9, 3, 1))


def put_at(h, *indices):
    rows, columns = torch.arange(3).view(3, 1).expand(3, 3), torch.arange(3).view(1, 3).expand(3, 3)
    given = [{"r": rows, "c": columns}.get(each) for each in indices]
    return torch.ops.aten.index_put(h.new_zeros(3, 3, 3, 3), given, h)


CASES = {  # the shape of the input, the operation, numbers at first, other numbers, and whether samples are apart then
    "as_strided at another offset": ((N, 3), at_an_offset, (0,), (3,), False),
    "as_strided of what lies otherwise": ((3, 3, 3), as_it_lies_in_memory, (0, 2, 1), (0, 1, 2), True),
    "as_strided of what lies in another order": ((3, 3, 3), as_it_lies_in_memory, (0, 2, 1), (1, 0, 2), True),
    "index_put at dimensions that are apart": ((3, 3, 3, 3), put_at, (None, "r", "c"), (None, "c", None, "r"), False),
    "a roll": ((N, 3), lambda h, shift: h.roll(shift, 0), (N,), (1,), False),
    "a roll that stays": ((N, 3), lambda h, shift: h.roll(shift, 0), (N,), (2 * N,), True),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_that_are_others_from_some_step_on(case):
    shape, operation, before, after, stay_apart = CASES[case]
    torch.manual_seed(0)
    model = Changing(operation).double()
    for step in range(6):
        numbers = before if step < 3 else after
        x = torch.randn(shape, dtype=torch.float64)
        losses = model(x, *numbers).pow(3).flatten(1).sum(1)
        truth = each_of(model, losses.unbind())
        if step < 3 or stay_apart:
            with unsum.gradients(model, unsum.Norms(), samples=unsum.dim(0)) as g:
                model(x, *numbers).pow(3).sum().backward()
            squares = sum(each.flatten(1).square().sum(1) for each in truth.values())
            torch.testing.assert_close(g[unsum.Norms].sq_norms(), squares)
            continue
        with pytest.raises((InteractionError, SamplesError)), unsum.gradients(model, samples=unsum.dim(0)):
            model(x, *numbers).pow(3).sum().backward()


class Moving(nn.Module):
    """Rows of the raw input move before the first layer, in some steps."""

    def __init__(self, move):
        super().__init__()
        self.layer, self.move, self.moves = nn.Linear(3, 3), move, False

    def forward(self, x):
        return self.layer(self.move(x) if self.moves else x).tanh()


@pytest.mark.parametrize("move", [lambda x: x.flip(0), lambda x: x[torch.tensor([2, 0, 3, 1])]], ids=["flip", "index"])
def test_rows_of_raw_inputs_that_move_are_refused_also_where_their_dimension_was_said(move):
    torch.manual_seed(0)
    model = Moving(move).double()
    for step in range(5):
        x, model.moves = torch.randn(N, 3, dtype=torch.float64), step > 2
        with contextlib.nullcontext() if step < 3 else pytest.raises(SamplesError):
            with unsum.gradients(model, unsum.Norms(), samples=unsum.dim(0)):
                model(x).square().sum().backward()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_samples_along_the_length_of_a_convolution_interact_whatever_its_groups(groups):
    model, x = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1, groups=groups), nn.Tanh()), torch.randn(1, 4, 4)
    with pytest.raises(InteractionError), unsum.gradients(model, unsum.Norms(), samples=unsum.dim(2)):
        model(x).square().sum().backward()
