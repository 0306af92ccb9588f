"""A network of two layers whose values are captured, and its batch."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x, mask=None):
        h = torch.tanh(self.fc1(x))
        return self.fc2(h if mask is None else h * mask)


def two_layers():
    """The network, always the same."""
    torch.manual_seed(0)
    return Net()


X = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(1))
