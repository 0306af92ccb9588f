"""The drawings of draw.md and of the README, made by `unsum.draw` itself: `python docs/drawings.py`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import unsum

FOLDER = Path(__file__).parent / "drawings"


class MLP(nn.Module):
    """Two layers, as in the article."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 3, bias=False)
        self.fc2 = nn.Linear(3, 2, bias=False)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, d):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.proj((q @ k.mT).softmax(-1) @ v)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Twelve of them, between an embedding and a head that share their weight."""

    def __init__(self, words=50, d=16, layers=12):
        super().__init__()
        self.embed = nn.Embedding(words, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def seed() -> str:
    """The two-layer network after a backward that has left the graph alive."""
    torch.manual_seed(0)
    model, x, y = MLP().double(), torch.randn(5, 4).double(), torch.randn(5, 2).double()
    loss = (model(x) - y).square().sum()
    loss.backward(retain_graph=True)
    return unsum.draw(loss, model, {"x": x, "y": y}).svg


def gpt() -> str:
    """Twelve blocks, drawn once."""
    torch.manual_seed(0)
    model, ids = GPT(), torch.arange(12).view(2, 6)
    targets = torch.arange(12)
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets)
    return unsum.draw(loss, model, {"ids": ids, "targets": targets}).svg


def acts() -> str:
    """Where blocks act."""
    torch.manual_seed(0)
    model, x, y = MLP().double(), torch.randn(5, 4).double(), torch.randn(5, 2).double()
    with unsum.capture(model, "fc1:input", "fc1:grad_output") as got, unsum.gradients(model) as g:
        loss = (model(x) - y).square().sum()
        loss.backward()
    return unsum.draw(loss, model, {"x": x, "y": y}, show=[got, g]).svg


def trace() -> str:
    """Which hook fires when."""
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(5, 4)
    with unsum.capture(model, "*:input", "*:output", "*:grad_output", "*.weight:grad") as got:
        model(x).sum().backward()
    return got.trace().picture().svg


def draw() -> dict[str, str]:
    """Every drawing, by the name of its file."""
    return {f"{make.__name__}.svg": make() for make in (seed, gpt, acts, trace)}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in draw().items():
        (FOLDER / name).write_text(svg, encoding="utf-8")
