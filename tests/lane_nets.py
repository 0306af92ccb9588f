"""Models of many small layers of one shape, and a step with them: for tests of how meetings are served."""

import torch
from torch import nn

import unsum
from unsum.plan.memory import plans


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.twice = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(6))
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=k % 2 == 0) for k in range(6))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.twice(self.table(x))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(layer(norm(x)))
        return self.head(self.twice(x))


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, groups=1 + k % 2) for k in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(6))
        self.group, self.head = nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.relu(norm(layer(x)))
        return self.head(self.group(x).mean((2, 3)))


def batch(kind):
    return torch.randint(11, (3, 7)) if kind is Words else torch.randn(3, 4, 6, 5)


def loss(model, x):
    return model(x).square().flatten(1).sum(1)


def step(model, x, *reducers, **options):
    model.zero_grad()
    with unsum.gradients(model, *reducers, **options) as g:
        loss(model, x).sum().backward()
    return g


def stages(model):
    """How far the meetings have come."""
    places = [place for plan in plans(model) for found in plan.recordings.values() for place in found.values()]
    return [place.known.stage for place in places if hasattr(place, "known")]
