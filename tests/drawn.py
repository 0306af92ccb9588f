"""A picture of `unsum.draw`, read again from its SVG, and small networks that several tests draw."""

import re
import weakref
from xml.etree import ElementTree

import torch
import torch.nn.functional as F
from torch import nn

import unsum

SVG = "{http://www.w3.org/2000/svg}"


class Drawn:
    """A picture, read again from its text."""

    def __init__(self, picture):
        self.picture = picture
        self.root = ElementTree.fromstring(picture.svg)
        self.groups = list(self.root.iter(f"{SVG}g"))

    def all(self, **wanted):
        keys = {f"data-{k.replace('_', '-')}": v for k, v in wanted.items()}
        return [g for g in self.groups if all(g.get(k) == v for k, v in keys.items())]

    def tensors(self, role=None):
        found = [g for g in self.groups if g.get("class") == "tensor" and role in (None, g.get("data-role"))]
        return {g.get("data-name") or g.get("data-key"): g for g in found}

    def arrows(self, direction):
        """(tensor's name or shape, operation's name) of every arrow of this direction, sorted."""
        names = {g.get("data-key"): g.get("data-name") or g.get("data-shape") for g in self.groups if g.get("data-key")}
        return sorted(
            (names[g.get("data-tensor")], names[g.get("data-operation")]) for g in self.all(direction=direction)
        )

    def landing(self, name):
        """How gradients come back to a tensor: the kinds of the arrows that land on it."""
        key = self.tensors()[name].get("data-key")
        return [g.get("data-gradient") for g in self.all(direction="backward") if g.get("data-tensor") == key]

    def notes(self):
        return " ".join(" ".join("".join(g.itertext()).split()) for g in self.all(role="legend"))


class MLP(nn.Module):
    """The network of the article: two linear layers without bias."""

    def __init__(self, relu=False):
        super().__init__()
        self.fc1 = nn.Linear(4, 3, bias=False)
        self.fc2 = nn.Linear(3, 2, bias=False)
        self.relu = relu

    def forward(self, x):
        a = self.fc1(x)
        return self.fc2(F.relu(a) if self.relu else a)


def article(*, relu=False, **kwargs):
    torch.manual_seed(0)
    model, x, y = MLP(relu), torch.randn(5, 4, **kwargs), torch.randn(5, 2)
    return model, x, y, 0.5 * ((model(x) - y) ** 2).sum()


def draw(*args, **kwargs):
    return Drawn(unsum.draw(*args, **kwargs))


def in_graph(loss):
    """A weak reference to something that lives as long as the graph."""

    class Token:
        pass

    token = loss.grad_fn.metadata["token"] = Token()
    return weakref.ref(token)


def groups(drawn):
    return {g.get("data-name"): g for g in drawn.all(role="group")}


def downwards(drawn):
    """Every forward arrow ends below where it begins."""
    for group in drawn.all(direction="forward"):
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", group.findall(f"{SVG}path")[0].get("d"))]
        assert numbers[-1] > numbers[1]


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, layers, d=8):
        super().__init__()
        self.first = nn.Linear(4, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.head = nn.Linear(d, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def norms_at(drawn):
    """(operation's name, norm) of every gradient that comes back with a number."""
    names = {g.get("data-key"): g.get("data-name") for g in drawn.all(role="operation")}
    arrows = [g for g in drawn.all(direction="backward") if g.get("data-norm")]
    return sorted((names[g.get("data-operation")], float(g.get("data-norm"))) for g in arrows)
