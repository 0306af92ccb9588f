"""Small networks, batches and losses for the tests of curvature and influence. All in float64."""

import torch
from torch import nn
from torch.nn import functional as F

V, D, T = 11, 4, 5  # ids, width, positions


class Batches:
    """Batches that can be read again and again; it is no list, so what it gives are batches."""

    def __init__(self, *batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class Examples(torch.utils.data.Dataset):
    """The rows of a batch, as a data set."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, i):
        return tuple(tensor[i] for tensor in self.tensors)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def numbers(seed, *shape):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def ids(seed, *shape, high=V):
    return torch.randint(0, high, shape, generator=generator(seed))


def made(build, seed=0):
    torch.manual_seed(seed)
    return build().double()


# ---- losses: (n,) ---------------------------------------------------------------------------------------------------


def forward(model, batch):
    return model(batch[0])


def squared(model, batch):
    """½|y − f|² for each sample."""
    return (batch[1] - model(batch[0])).square().flatten(1).sum(1) / 2


def classified(model, batch):
    """Cross-entropy, summed over the positions whose label is not -100."""
    logits = model(batch[0])
    losses = F.cross_entropy(logits.flatten(0, -2), batch[1].flatten(), reduction="none", ignore_index=-100)
    return losses.reshape(len(logits), -1).sum(1)


# ---- networks -------------------------------------------------------------------------------------------------------


def mlp():
    return made(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)))


def linear_net(bias=True):
    """Deep and linear."""
    return made(lambda: nn.Sequential(nn.Linear(4, 3, bias), nn.Linear(3, 5, bias), nn.Linear(5, 2, bias)))


class Averaged(nn.Module):
    """A linear network on every position, then the mean over positions: the setting of K-FAC-reduce."""

    def __init__(self):
        super().__init__()
        self.below, self.above = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), nn.Linear(3, 2)

    def forward(self, x):
        return self.above(self.below(x).mean(1))


def conv_net():
    """A stride, a padding, and windows that overlap."""
    return made(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
    )


class Twice(nn.Module):
    """One layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.fc(torch.tanh(self.fc(x)))))


class Tied(nn.Module):
    """The head has the embedding's weight, and a bias of its own."""

    def __init__(self):
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.tokens(ids))))


class Transformer(nn.Module):
    """Causal attention by scaled_dot_product_attention, layer norms; tied or not."""

    def __init__(self, tied=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(T, D)
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 6), nn.Linear(6, D)
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        n, t = ids.shape
        x = self.tokens(ids) + self.places(torch.arange(t).expand(n, t))
        q, k, v = (part.view(n, t, 2, D // 2).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, D))
        return self.head(x + self.down(torch.tanh(self.up(x))))


class Experts(nn.Module):
    """Every position goes to one of three layers; the last of them gets nothing."""

    def __init__(self, bias=True):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 2), nn.ModuleList(nn.Linear(D, D, bias) for _ in range(3))

    def forward(self, x):
        rows = x.reshape(-1, D)
        weights = self.gate(rows).softmax(-1)
        chosen, out = weights.argmax(-1), torch.zeros_like(rows)
        for e in range(2):
            here = (chosen == e).nonzero()[:, 0]
            out = out.index_add(0, here, self.experts[e](rows[here]) * weights[here, e, None])
        return out.view_as(x)


class Fused(nn.Module):
    """As `Experts`, their weights in one parameter: each expert has a slice of it."""

    def __init__(self, experts):
        super().__init__()
        self.gate = experts.gate
        self.up = nn.Parameter(torch.stack([expert.weight.detach() for expert in experts.experts]))

    def forward(self, x):
        rows = x.reshape(-1, D)
        weights = self.gate(rows).softmax(-1)
        chosen, out = weights.argmax(-1), torch.zeros_like(rows)
        for e in range(2):
            here = (chosen == e).nonzero()[:, 0]
            out = out.index_add(0, here, F.linear(rows[here], self.up[e]) * weights[here, e, None])
        return out.view_as(x)


class Mixed(nn.Module):
    """A layer, a layer norm, and a scale that is a parameter alone."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 3), nn.LayerNorm(3)
        self.scale, self.head = nn.Parameter(torch.rand(3) + 0.5), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.fc(x))) * self.scale)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(D, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.head = nn.MultiheadAttention(D, 2, batch_first=True), nn.Linear(D, 3)

    def forward(self, x):
        return self.head(self.attn(x, x, x, need_weights=False)[0])


# ---- networks with data: (model, loss_fn, list of batches) ----------------------------------------------------------


def _vectors(model):
    return model, classified, [(numbers(s, n, 4), ids(s, n, high=3)) for s, n in ((1, 6), (2, 4))]


def _sequences(model, classes):
    return model, classified, [(numbers(s, n, T, D), ids(s, n, T, high=classes)) for s, n in ((1, 4), (2, 3))]


def _tokens(model):
    return model, classified, [(ids(s, n, T), ids(s + 10, n, T)) for s, n in ((1, 4), (2, 3))]


def _images(model):
    return model, classified, [(numbers(s, n, 2, 4, 4), ids(s, n, high=3)) for s, n in ((1, 6), (2, 4))]


# Every layer is a module that is called, so that the dense K-FAC of brute_curvature.py covers it.
LAYERED = {
    "mlp": lambda: _vectors(mlp()),
    "mlp on sequences": lambda: _sequences(mlp(), 3),
    "convolution": lambda: _images(conv_net()),
    "embedding": lambda: _tokens(made(lambda: nn.Sequential(nn.Embedding(V, D), nn.Tanh(), nn.Linear(D, V)))),
    "layer norm and scale": lambda: _vectors(made(Mixed)),
    "called twice": lambda: _vectors(made(Twice)),
    "transformer": lambda: _tokens(made(Transformer)),
    "experts": lambda: _sequences(made(Experts), D),
}

# The same, and networks with parameters that no module call shows: tied, fused, recurrent.
ALL = LAYERED | {
    "tied": lambda: _tokens(made(Tied)),
    "tied transformer": lambda: _tokens(made(lambda: Transformer(tied=True))),
    "recurrent": lambda: _sequences(made(Recurrent), 3),
    "multi-head attention": lambda: _sequences(made(Attention), 3),
    "fused experts": lambda: _sequences(made(lambda: Fused(Experts())), D),
}
