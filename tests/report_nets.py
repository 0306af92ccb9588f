"""Small networks, losses and batches that reports are made of, and what a page carries."""

import json
import re

import torch
from torch import nn
from torch.nn import functional as F


def squares(model, batch):
    x, y = batch
    return (model(x) - y).square().sum(1)


def data_of(path):
    """What the page carries as JSON."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.S)
    return json.loads(found[1])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(n=12):
    torch.manual_seed(1)
    return torch.randn(n, 6), torch.randn(n, 2)


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(F.gelu(self.mix(x + x.cumsum(1))))


def next_token(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").sum(1)


IDS = torch.randint(11, (5, 7), generator=torch.Generator().manual_seed(3))


def kinds(made):
    return {flag.kind for flag in made.flags}
