"""Nodes with several results (pieces of a tensor, sequences and states, variances and means): where one result goes on
with the rows of other samples from some step on, samples interact, and the step is refused."""

import pytest
import torch
from reference import each_of, per_sample_gradients
from torch import nn

import unsum
from unsum.errors import InteractionError, SamplesError

N, T, D = 3, 4, 6
PARTS = {  # (n, t, d) -> two tensors with rows of the samples, which come from one node
    "split": lambda m, h: h.split(D // 2, -1),
    "chunk": lambda m, h: h.chunk(2, -1),
    "split with sizes": lambda m, h: h.split([D // 2, D // 2], -1),
    "unbind": lambda m, h: h.view(N, T, 2, D // 2).unbind(2),
    "variance and mean": lambda m, h: torch.var_mean(h, -1, keepdim=True),
    "smallest and largest": lambda m, h: torch.aminmax(h, dim=-1, keepdim=True),
    "eigenvalues and vectors": lambda m, h: torch.linalg.eigh(torch.eye(D).to(h) * h[:, :1] + h.mT @ h),
    "sequence and state": lambda m, h: (lambda y, states: (y, states[0][0][:, None]))(*m.lstm(h)),
    "sequence and cell": lambda m, h: (lambda y, states: (y, states[1][0][:, None]))(*m.lstm(h)),
}


class Parted(nn.Module):
    """Two results of a node, one of them in another order of the samples."""

    def __init__(self, how):
        super().__init__()
        self.how, self.first, self.lstm = how, nn.Linear(D, D), nn.LSTM(D, D, batch_first=True)

    def forward(self, x, turn):
        one, other = PARTS[self.how](self, self.first(x).tanh())
        return one.sin().flatten(1).sum(1) * turn(other).flatten(1).cos().sum(1)


TURNS = {
    "roll": (lambda other: other.roll(N, 0), lambda other: other.roll(1, 0)),
    "index": (lambda other: other[torch.arange(N)], lambda other: other[torch.tensor([1, 2, 0])]),
}


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("how", PARTS)
def test_a_result_with_the_rows_of_other_samples_is_refused(how, turn):
    torch.manual_seed(0)
    dtype = torch.float32 if "sequence" in how else torch.float64
    model, (still, moved) = Parted(how).to(dtype), TURNS[turn]
    for _ in range(3):
        x = torch.randn(N, T, D, dtype=dtype)
        truth = each_of(model, model(x, still))
        with unsum.gradients(model, unsum.Norms()) as g:
            model(x, still).sum().backward()
        squares = sum(each.flatten(1).square().sum(1) for each in truth.values())
        torch.testing.assert_close(g[unsum.Norms].sq_norms(), squares, rtol=1e-3, atol=1e-4, check_dtype=False)
    model.zero_grad()
    with pytest.raises((InteractionError, SamplesError)), unsum.gradients(model, unsum.Norms()):
        model(torch.randn(N, T, D, dtype=dtype), moved).sum().backward()
    assert all(p.grad is None for p in model.parameters())


class Ragged(nn.Module):
    """Samples of unequal lengths, joined for a layer and taken apart again."""

    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.how = nn.Linear(D, D), nn.Linear(D, D), how

    def forward(self, x, lengths):
        h = self.first(x)
        rows = torch.cat([row[:length] for row, length in zip(h, lengths, strict=True)])
        parts = self.second(rows).tanh().split(lengths)
        return {
            "stacked sums": lambda: torch.stack([part.sum(0) for part in parts]).square().sum(1),
            "joined sums": lambda: torch.cat([part.sum(0, keepdim=True) for part in parts]).square().sum(1),
            "losses": lambda: torch.stack([part.square().sum() for part in parts]),
        }[self.how]()


@pytest.mark.parametrize("how", ["stacked sums", "joined sums", "losses"])
def test_pieces_of_unequal_lengths_are_their_samples(how, caplog):
    torch.manual_seed(0)
    model = Ragged(how).double()
    for _ in range(5):
        x, lengths = torch.randn(N, T, D, dtype=torch.float64), torch.randint(1, T + 1, (N,))
        truth = per_sample_gradients(model, lambda m, x, lengths: m(x, lengths.tolist()).sum(), x, lengths)
        with unsum.gradients(model) as g:
            model(x, lengths.tolist()).sum().backward()
        for name, each in truth.items():
            torch.testing.assert_close(g[name].per_sample(), each)
    assert "the table" not in caplog.text  # it says where the pieces' samples are
