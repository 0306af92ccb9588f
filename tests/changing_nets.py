"""Small networks, the two kinds of block, and modules whose behaviour changes from step to step."""

import pytest
import torch
from reference import per_sample_gradients
from torch import nn

from one_by_one import norms_of, squares, step
from small_nets import D

WAYS = pytest.mark.parametrize("kind", ["kept", "norms"])


def both(model, run, each, **options):
    """Kept and by norms, twice."""
    for kind in ("kept", "norms") * 2:
        step(model, run, each, kind, **options)


class Last(nn.Module):
    """A recurrent network's outputs alone."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(D, 4, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


def token_norms(model, x):
    """(n, t): the norm of the gradient of each token's loss, of a model that treats tokens alike."""
    each = per_sample_gradients(model, squares, x.flatten(0, 1))
    return norms_of(each).view(x.shape[:2])


class Moody(nn.Module):
    """What is done to hidden activations is decided step by step."""

    def __init__(self, mood=None):
        super().__init__()
        self.a, self.b = nn.Linear(D, 6), nn.Linear(6, 4)
        self.mood = mood

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.b(h if self.mood is None else self.mood(h))


def centred(h):
    return h - h.mean(0)


def moody(mood=None):
    torch.manual_seed(0)
    return Moody(mood).double()


# Where the packed documents of each step begin and end.
ENDS = [[0, 1], [0, 3, 4, 10], [0, 3, 4, 10], [0, 5, 7, 10], [0, 2, 4, 6, 8, 10], [0, 4, 4, 9], [0, 7], [0, 1, 2, 3]]
