"""Random small networks: linear, convolution, attention, indexing, in-place and view operations, random layouts and
sample maps, against one sample at a time."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum

T, D = 3, 4


class Step(nn.Module):
    """One operation on (n, T, D), with parameters of its own."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.w, self.b = nn.Parameter(torch.randn(D, D) / 2), nn.Parameter(torch.randn(D))
        self.p = nn.Parameter(torch.randn(1, T, D))
        self.conv, self.norm = nn.Conv1d(D, D, 3, padding=1, padding_mode="circular"), nn.LayerNorm(D)
        self.attn = nn.MultiheadAttention(D, 2, batch_first=True)
        self.table = nn.Embedding(5, D)

    def forward(self, x):
        return getattr(self, self.kind)(x)

    def linear(self, x):
        return torch.tanh(F.linear(x, self.w, self.b))

    def by_einsum(self, x):
        return torch.einsum("nti,oi->nto", x, self.w)

    def by_hand(self, x):
        return (x.reshape(-1, D) @ self.w.T).view(x.shape) * self.b

    def per_sample_weights(self, x):
        made = torch.tanh(x.mean(1) @ self.w)[:, :, None] * self.b
        return torch.bmm(x, made)

    def convolution(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)

    def normed(self, x):
        return self.norm(x) + self.p

    def attention(self, x):
        return x + self.attn(x, x, x)[0]

    def in_place(self, x):
        y = x * self.b
        y[:, 0] += self.b
        y.transpose(0, 1)[::2].mul_(2)
        return F.relu_(y)

    def gathered(self, x):
        order = x.sum(-1).argsort(1)
        return x.gather(1, order[..., None].expand_as(x)) * self.p

    def looked_up(self, x):
        return x + self.table(x.sum(-1).abs().long() % 5)

    def routed(self, x):
        flat = x.reshape(-1, D)
        rows = (flat.sum(1) > 0).nonzero()[:, 0]
        return flat.index_add(0, rows, flat[rows] @ self.w).view(x.shape)

    def twice(self, x):
        return F.linear(torch.tanh(F.linear(x, self.w)), self.w, self.b)

    def reparametrised(self, x):
        return F.linear(x, self.w / self.w.norm(dim=1, keepdim=True) * self.b[:, None])


KINDS = [k for k, v in vars(Step).items() if not k.startswith("_") and callable(v) and k != "forward"]
LAYOUTS = {
    "as it is": (None, lambda x: x, lambda y: y),
    "time first": (unsum.dim(1), lambda x: x.transpose(0, 1), lambda y: y.transpose(0, 1)),
}


class Net(nn.Module):
    def __init__(self, kinds, enter, leave):
        super().__init__()
        self.steps = nn.ModuleList(Step(kind) for kind in kinds)
        self.enter, self.leave = enter, leave

    def forward(self, x):
        x = self.leave(x)
        for step in self.steps:
            x = step(x)
        return self.enter(x)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from(list(LAYOUTS)),
    st.sampled_from(["sum", "mean", "some tokens", "weighted"]),
    st.integers(0, 2**16),
)
def test_every_sample_of_a_random_network(kinds, n, layout, loss, seed):
    torch.manual_seed(seed)
    samples, enter, leave = LAYOUTS[layout]
    model = Net(kinds, enter, leave).double()
    x = torch.randn(n, T, D, dtype=torch.float64)
    weights = torch.rand(T, 1, dtype=torch.float64)

    def run(m, x):
        out = leave(m(enter(x)))
        if loss == "some tokens":
            return out[:, 1:].square().sum()
        return (out.square() * weights).sum() if loss == "weighted" else out.square().sum()

    truth = per_sample_gradients(model, run, x)
    scale = 1 / n if loss == "mean" else 1.0
    with unsum.gradients(model, samples=samples) as g:
        (run(model, x) * scale).backward()
    largest = sum(t.flatten(1).square().sum(1) for t in truth.values()).max().sqrt() + 1e-12
    for name, wanted in truth.items():
        assert (g[name].per_sample() - wanted * scale).norm() <= 1e-9 * largest, name
        assert (g[name].shared() == 0).all(), name
