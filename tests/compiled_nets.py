"""Networks that tests compile, their batches, and blocks that ask for norms of compiled models."""

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

import unsum


class Attention(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.gate = nn.Parameter(torch.randn(8))
        self.head = nn.Linear(8, 11, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        h = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(h + self.gate * self.out(mixed.transpose(1, 2).flatten(2)))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, groups=2),
            nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )  # fmt: skip
        self.layers[4].running_var.mul_(1.7)
        self.layers[4].running_mean.add_(0.3)
        self.layers[4].eval()

    def forward(self, x):
        return self.layers(x)


class Checkpointed(Attention):
    def forward(self, ids):
        h = self.tokens(ids)
        part = lambda h: F.gelu(self.out(self.norm(h)))
        return self.head(h + torch.utils.checkpoint.checkpoint(part, h, use_reentrant=False))


class Choosing(nn.Module):
    """An attribute says which of two layers is called."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.active = self.a

    def forward(self, x):
        return self.out(self.active(x).tanh())


def ids(n, seed=0):
    return torch.randint(11, (n, 6), generator=torch.Generator().manual_seed(seed))


def images(n, seed=0):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(n, seed=0):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss(model, x):
    out = model(x)
    return (out.flatten(1).logsumexp(1) + out.flatten(1).square().sum(1)).sum()


MODELS = {
    "attention": (Attention, ids),
    "tied": (lambda: Attention(tied=True), ids),
    "images": (Images, images),
    "checkpointed": (Checkpointed, ids),
    "choosing": (Choosing, rows),
}


def build(name, backend="aot_eager", **options):
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make().double()
    return model, torch.compile(model, backend=backend, fullgraph=True, **options), batch


def norms_of(model, compiled, x, **options):
    model.zero_grad()
    with unsum.gradients(compiled, unsum.Norms(), **options) as g:
        loss(compiled, x).backward()
    return g[unsum.Norms]


def assert_norms(norms, truth):
    found = norms.by_parameter()
    assert found.keys() == truth.keys()
    for name, each in truth.items():
        torch.testing.assert_close(found[name], each.flatten(1).square().sum(1), rtol=1e-8, atol=1e-12)
