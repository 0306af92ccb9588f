"""Compiled models on a GPU, also with CUDA graphs: results are those of one sample at a time; graphs are replayed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reference import per_sample_gradients
from torch import nn
from torch.profiler import ProfilerActivity, profile

import unsum
from unsum.errors import UnsupportedError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
MODES = pytest.mark.parametrize("mode", [None, "reduce-overhead", "max-autotune"])
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
BOUND = 8.0


class Net(nn.Module):
    """Tokens through a lookup, two blocks with attention, and a layer with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        layer = lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(32, 50)

    def forward(self, x):
        h = self.tokens(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Broken(Net):
    """The same with a graph break in the middle."""

    def forward(self, x):
        h = self.blocks[0](self.tokens(x))
        torch._dynamo.graph_break()
        return self.head(self.blocks[1](h))


def loss(model, x):
    logits = model(x)
    return F.cross_entropy(logits.flatten(0, 1), x.flatten(), reduction="sum")


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def build(kind, mode):
    torch.manual_seed(0)
    model = kind().cuda()
    return model, torch.compile(model, mode=mode, fullgraph=kind is Net)


def batches(*sizes):
    for seed, n in enumerate(sizes):
        torch.manual_seed(seed)
        yield torch.randint(50, (n, 7), device="cuda")


def norms_of(each):
    return sum(value.flatten(1).square().sum(1) for value in each.values()).sqrt()


def close(found, wanted):
    """Relative to the largest number that is wanted."""
    scale = float(wanted.abs().max())
    torch.testing.assert_close(found.double() / scale, wanted / scale, **CLOSE)


def replays(step):
    """How many CUDA graphs a step launches."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if event.key == "cudaGraphLaunch")


def clip(norms):
    return (BOUND / norms).clamp(max=1)


@MODES
@pytest.mark.parametrize("kind", [Net, Broken], ids=["whole", "with a graph break"])
def test_norms_tokens_and_projections(kind, mode):
    model, compiled = build(kind, mode)
    for x in batches(*[4] * 9):
        each = per_sample_gradients(model, loss, x)
        model.zero_grad()
        with unsum.gradients(compiled, unsum.Norms(), unsum.Project(k=4), unsum.SecondMoment()) as g:
            loss(compiled, x).backward()
        close(g.norms(), norms_of(each))
        for name, value in g[unsum.SecondMoment].sum_squares().items():
            close(value, each[name].square().sum(0))
        with unsum.gradients(model, unsum.Project(k=4)) as wanted:
            loss(model, x).backward()
        close(g[unsum.Project].matrix(), wanted[unsum.Project].matrix().double())
        model.zero_grad()
        with unsum.gradients(compiled, unsum.Norms(), unsum.TokenNorms()) as tokens:
            loss(compiled, x).backward()
        close(tokens[unsum.Norms].norms(), norms_of(each))
        for name, p in model.named_parameters():
            close(p.grad, each[name].sum(0))


@MODES
@pytest.mark.parametrize("grad", [True, False], ids=["with .grad", "without"])
def test_clipped_sums(mode, grad):
    model, compiled = build(Net, mode)
    for x in batches(*[4] * 8):
        each = per_sample_gradients(model, loss, x)
        model.zero_grad()
        with unsum.gradients(compiled, unsum.WeightedSum(clip), grad=grad) as g:
            loss(compiled, x).backward()
        weights = clip(norms_of(each))
        assert (weights < 1).any()
        for name, value in g[unsum.WeightedSum].sum().items():
            close(value, torch.einsum("n,n...->...", weights, each[name]))
        for name, p in model.named_parameters():
            if grad:
                close(p.grad, each[name].sum(0))
            else:
                assert p.grad is None


@MODES
def test_training_with_clipping(mode):
    model, compiled = build(Net, mode)
    for x in batches(*[4] * 8):
        each = per_sample_gradients(model, loss, x)
        model.zero_grad()
        with unsum.clip_per_sample(compiled, max_norm=BOUND) as clipped:
            loss(compiled, x).backward()
        close(clipped.norms, norms_of(each))
        for name, p in model.named_parameters():
            close(p.grad, torch.einsum("n,n...->...", clip(norms_of(each)), each[name]))


@MODES
def test_factors_of_chosen_parameters(mode):
    model, compiled = build(Net, mode)
    kept = []
    for x in batches(*[4] * 8):
        each = per_sample_gradients(model, loss, x)
        with unsum.gradients(compiled, params="head.*") as g:
            loss(compiled, x).backward()
        kept.append((g, each))
    for g, each in kept[-3:]:  # also after later replays, which write to the same memory
        close(g["head.weight"].per_sample(), each["head.weight"])
        close(g["head.bias"].per_sample(), each["head.bias"])


@MODES
@pytest.mark.parametrize("kind", [Net, Broken], ids=["whole", "with a graph break"])
def test_captures(kind, mode):
    model, compiled = build(kind, mode)
    sites = ("blocks.0:output", "head:input", "head:grad_output", "blocks.1.linear1:grad_output")
    kept = []
    for x in batches(*[4] * 8):
        with unsum.capture(model, *sites) as wanted:
            loss(model, x).backward()
        with unsum.capture(compiled, *sites) as got:
            loss(compiled, x).backward()
        kept.append((got, wanted))
    for got, wanted in kept[-3:]:
        for site in sites:
            close(got[site], wanted[site].double())


@MODES
def test_other_batch_sizes(mode):
    model, compiled = build(Net, mode)
    for x in batches(4, 4, 4, 6, 6, 6, 3, 3, 3, 5, 5, 5, 4, 6):
        each = per_sample_gradients(model, loss, x)
        with unsum.gradients(compiled, unsum.Norms()) as g:
            loss(compiled, x).backward()
        close(g.norms(), norms_of(each))


def test_cuda_graphs_are_replayed():
    """A plain step replays one graph forward and one backward; a block keeps to that, and clipping ends one more."""
    model, compiled = build(Net, "reduce-overhead")
    x = next(iter(batches(4)))

    def norms():
        with unsum.gradients(compiled, unsum.Norms()):
            loss(compiled, x).backward()

    def clipped():
        with unsum.gradients(compiled, unsum.WeightedSum(clip), grad=False):
            loss(compiled, x).backward()

    def captured():
        with unsum.capture(compiled, "blocks.0:output", "head:grad_output"):
            loss(compiled, x).backward()

    def plain():
        loss(compiled, x).backward()

    launched = {}
    for step in (plain, norms, clipped, captured):
        for _ in range(8):
            model.zero_grad()
            step()
        launched[step.__name__] = replays(step)
    assert launched["plain"] >= 1
    assert launched["norms"] >= launched["plain"] and launched["captured"] >= launched["plain"]
    assert launched["clipped"] > launched["plain"]


def test_an_eager_step_inside_a_cuda_graph_is_refused():
    model = Net().cuda()
    x = next(iter(batches(4)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            loss(model, x).backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(UnsupportedError, match="CUDA graph"):
        with unsum.gradients(model, unsum.Norms()):
            loss(model, x).backward()
    with unsum.gradients(model, unsum.Norms()) as g:  # afterwards all is as it was
        loss(model, x).backward()
    close(g.norms(), norms_of(per_sample_gradients(model, loss, x)))
