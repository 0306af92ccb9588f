"""Small networks and batches that several tests use, and the gradients that their samples have alone."""

import contextlib

import torch
from reference import each_of, per_sample_gradients
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import unsum

N, T, D = 4, 6, 8
SEQUENCES = torch.randn(N, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
FLAT = SEQUENCES[:, 0]
IMAGES = torch.randn(N, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(0, 20, (N, T), generator=torch.Generator().manual_seed(2))


def mlp():
    """Two layers in float64, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 3)).double()


class TiedEmbedding(nn.Module):
    """Tokens and positions; the head has the tokens' weight."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, D, padding_idx=0), nn.Embedding(T, D)
        self.head = nn.Linear(D, 20)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))


class Experts(nn.Module):
    """Routing: a weight that data has chosen; an expert may get no token at all."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 5), nn.ModuleList(nn.Linear(D, D) for _ in range(5))

    def forward(self, x):
        flat = x.reshape(-1, D)
        weights = self.gate(flat).softmax(-1)
        chosen, out = weights.argmax(-1), torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows = (chosen == e).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, e, None])
        return out.view_as(x)


class InPlace(nn.Module):
    """A class token, and changes in place."""

    def __init__(self):
        super().__init__()
        self.fc, self.gain, self.cls = nn.Linear(D, D), nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(1, 1, D))

    def forward(self, x):
        h = torch.cat([self.cls.expand(len(x), -1, -1), self.fc(x)], 1)
        h[:, 0] += 1
        h.mul_(self.gain)
        return F.relu_(h)


class Squared(torch.autograd.Function):
    """Squares times a weight and a factor, with a backward of its own."""

    @staticmethod
    def forward(ctx, x, w, factor):
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x**2 * w * factor

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return 2 * x * w * ctx.factor * grad, (x**2 * ctx.factor * grad).sum((0, 1)), None


class Custom(nn.Module):
    """A parameter that only a custom function uses."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return Squared.apply(x, self.w, 3.0)


class Spectral(nn.Module):
    """Complex gradients for real parameters."""

    def __init__(self):
        super().__init__()
        self.filter, self.phase = nn.Parameter(torch.randn(D // 2 + 1)), nn.Parameter(torch.randn(T, 1))

    def forward(self, x):
        waves = torch.fft.rfft(x) * torch.polar(self.filter.abs() + 1, self.filter)
        return torch.fft.irfft(waves, n=D) * self.phase


class Hypernetwork(nn.Module):
    """A weight that another layer makes."""

    def __init__(self):
        super().__init__()
        self.code, self.maker = nn.Parameter(torch.randn(3)), nn.Linear(3, D * D)

    def forward(self, x):
        return torch.tanh(x @ self.maker(self.code).view(D, D))


class Recurrent(nn.Module):
    """The outputs of a recurrent layer, without its states."""

    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(D, 5, 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.rnn(x)[0]


class Attention(nn.Module):
    """Causal attention of a sequence to itself."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x):
        mask = torch.ones(T, T, dtype=torch.bool).triu(1)
        return self.attn(x, x, x, attn_mask=mask)[0]


NETS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)), SEQUENCES),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, groups=2, dilation=2), nn.ConvTranspose2d(4, 2, 3, 2), nn.Flatten(), nn.Linear(162, 3)
        ),
        IMAGES,
    ),
    "batch norm in eval mode": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), IMAGES),
    "tied embedding, positions": (TiedEmbedding, IDS),
    "sparse embedding": (lambda: nn.Sequential(nn.Embedding(20, D, sparse=True), nn.Linear(D, 2)), IDS),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(20, D), nn.Linear(D, 2)), IDS),
    "lstm": (lambda: Recurrent(nn.LSTM), SEQUENCES),
    "gru": (lambda: Recurrent(nn.GRU), SEQUENCES),
    "causal attention": (Attention, SEQUENCES),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True), SEQUENCES),
    "experts": (Experts, SEQUENCES),
    "in place, class token": (InPlace, SEQUENCES),
    "custom function": (Custom, SEQUENCES),
    "complex": (Spectral, SEQUENCES),
    "hypernetwork": (Hypernetwork, SEQUENCES),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(D, 3))), SEQUENCES),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(D, 3))).eval(), SEQUENCES),
}  # fmt: skip


class Centred(nn.Module):
    """Samples interact: their mean is taken away."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(D, D)

    def forward(self, x):
        h = self.fc(x)
        return torch.tanh(h - h.mean(0))


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, whose second matrix begins at zero."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(D, D), nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def scalar(model, x):
    """A loss: squares of all outputs."""
    out = model(x)
    return out.reshape(len(out), -1).square().sum() / N


def made(make, x):
    """A function that makes the same model in float64 again and again, with its batch: what `laws` takes."""

    def again():
        torch.manual_seed(0)
        return make().double(), x

    return again


def deep(layer, between=nn.Tanh, depth=3):
    """A function that makes several layers of one shape, one after the other."""
    return lambda: nn.Sequential(*(part for _ in range(depth) for part in (layer(), between())))


def truth_of(model, x, run=scalar):
    """{parameter: (n, *shape)}: each sample of `x` run alone; `run(model, x)` is a scalar."""
    return per_sample_gradients(model, run, x)


def compare(model, call, **options):
    """One block over the squares of what `call()` returns, against plain autograd, loss by loss."""
    with unsum.gradients(model, **options) as g:
        losses = call().flatten(1).square().sum(1)
        losses.sum().backward(retain_graph=True)
    for name, wanted in each_of(model, losses).items():
        torch.testing.assert_close(g[name].per_sample(), wanted, msg=name)


@contextlib.contextmanager
def in_float64():
    """Around a test: new tensors and modules are in float64, and random numbers start from a seed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
