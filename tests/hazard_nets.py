"""Small modules with which the obvious hook would be silent or wrong, and a comparison of what was captured."""

import torch
from torch import nn


def close(a, b):
    torch.testing.assert_close(a.double(), b.double(), atol=1e-6, rtol=1e-5)


class Block(nn.Module):
    """A layer, and something done to its output."""

    def __init__(self, after, layer=None):
        super().__init__()
        self.fc = layer or nn.Linear(4, 4)
        self.after = after

    def forward(self, x):
        return self.after(self.fc(x))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.same = nn.Linear(4, 4), nn.Identity()

    def forward(self, x):
        x = x * 2
        return x + self.fc(x) * 3 + self.same(x) * 5
