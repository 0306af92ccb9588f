"""Modules that several tests use."""

import torch
from torch import nn


class Using(nn.Module):
    """One parameter, used by a function."""

    def __init__(self, shape, use):
        super().__init__()
        self.p, self.use = nn.Parameter(torch.randn(shape)), use

    def forward(self, x):
        return self.use(x, self.p)
