"""Clipping per sample: `.grad` is the sum of gradients that were computed one sample at a time and clipped then."""

import copy

import pytest
import torch
import torch.nn.functional as F
from reference import alone, per_sample_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

import unsum
from reads import close
from unsum.errors import OptionError, UnsumError, UnsupportedError

N, T, V = 5, 6, 11
HOWS = pytest.mark.parametrize("how", ["flat", "layer", "automatic"])


class GPT(nn.Module):
    """Embeddings, attention, layer norms; the head's weight may be that of the embedding."""

    def __init__(self, tied=False, checkpointed=None, dropout=0.0, width=8):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, width), nn.Parameter(torch.randn(T, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 16, dropout=dropout, batch_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, V)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x):
        h = self.tokens(x) + self.positions
        for block in self.blocks:
            h = block(h) if self.checkpointed is None else checkpoint(block, h, use_reentrant=self.checkpointed)
        return self.head(self.norm(h))


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 6).requires_grad_(False)
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.base(x) + self.b(self.a(x))))


def language(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")


def squares(model, x):
    return model(x).square().sum()


def tokens(n=N):
    return torch.randint(V, (n, T)), torch.randint(V, (n, T))


def rows(n=N):
    return (3 * torch.randn(n, 4),)


def mlp():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))


def convolutions():
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))


def images(n=N):
    return (torch.randn(n, 2, 6, 6),)


NETS = {
    "linear": (mlp, squares, rows),
    "convolution": (convolutions, squares, images),
    "transformer": (GPT, language, tokens),
    "tied": (lambda: GPT(tied=True), language, tokens),
    "checkpoint": (lambda: GPT(checkpointed=False), language, tokens),
    "reentrant checkpoint": (lambda: GPT(checkpointed=True), language, tokens),
    "adapter": (Adapted, squares, rows),
}


def wanted(each, how, limit):
    """{parameter: the sum of clipped gradients}, and the norms (n,), from {parameter: (n, *shape)}."""
    square = {name: g.double().flatten(1).square().sum(1) for name, g in each.items()}
    norms = sum(square.values()).sqrt()
    if how == "flat":
        weights = dict.fromkeys(each, (limit / norms).clamp(max=1))
    elif how == "automatic":
        weights = dict.fromkeys(each, limit / (norms + 0.01))
    else:
        layers = {}
        for name, own in square.items():
            module = name.rpartition(".")[0]
            layers[module] = layers.get(module, 0) + own
        own = {k: (limit / len(layers) ** 0.5 / v.sqrt()).clamp(max=1) for k, v in layers.items()}
        weights = {name: own[name.rpartition(".")[0]] for name in each}
    return {name: torch.tensordot(weights[name], g.double(), 1) for name, g in each.items()}, norms


def assert_clipped(model, norms, each, how, limit, tolerance=1e-5, before=None):
    sums, wanted_norms = wanted(each, how, limit)
    close(norms, wanted_norms, tolerance, float(wanted_norms.max()), "norms")
    for name, value in sums.items():
        parameter = model.get_parameter(name)
        assert parameter.grad.dtype == parameter.dtype and parameter.grad.shape == parameter.shape
        close(parameter.grad, value + (before[name] if before else 0), tolerance, limit * len(norms), name)


def step(model, loss, batch, **options):
    with unsum.clip_per_sample(model, **options) as clipped:
        loss(model, *batch).backward()
    return clipped


@HOWS
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("memory", [None, 0], ids=["gradients", "factors"])
def test_grad_is_the_sum_of_gradients_clipped_one_by_one(net, how, memory, monkeypatch):
    monkeypatch.setattr("unsum.reducers.holding.FAR", {"cpu": 1.0})
    torch.manual_seed(0)
    make, loss, batches = NETS[net]
    model = make()
    for n in (N, 3, N, N):
        batch = batches(n)
        model.zero_grad()
        plain = copy.deepcopy(model)
        plain.checkpointed = None  # torch does not differentiate a reentrant one by torch.autograd.grad
        each = per_sample_gradients(plain, loss, *batch)
        limit = float(wanted(each, "flat", 1.0)[1].median())
        clipped = step(model, loss, batch, max_norm=limit, how=how, memory=memory)
        assert_clipped(model, clipped.norms, each, how, limit)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad or parameter.grad is None, name


@HOWS
def test_micro_batches_add_to_what_was_there_in_the_order_of_their_forwards(how):
    torch.manual_seed(0)
    model, first, second = mlp(), *rows(), *rows(3)
    each = per_sample_gradients(model, squares, torch.cat([first, second]))
    before = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = before[name].clone()
    with unsum.clip_per_sample(model, max_norm=0.5, how=how) as clipped:
        outputs = [model(first), model(second)]
        for output in reversed(outputs):
            output.square().sum().backward()
    assert clipped.samples == N + 3
    assert_clipped(model, clipped.norms, each, how, 0.5, before=before)


def test_open_and_close_do_what_with_does():
    torch.manual_seed(0)
    model, batch = mlp(), rows()
    block = unsum.clip_per_sample(model, max_norm=0.5)
    clipped = block.open()
    squares(model, *batch).backward()
    block.close()
    assert_clipped(model, clipped.norms, per_sample_gradients(model, squares, *batch), "flat", 0.5)
    model.zero_grad()
    with block as again:
        squares(model, *rows(2)).backward()
    assert len(again.norms) == 2 and len(clipped.norms) == N  # each has its own


def test_a_mean_loss_is_clipped_by_each_samples_own():
    torch.manual_seed(0)
    model, (x,) = mlp(), rows()
    with unsum.clip_per_sample(model, max_norm=0.5, loss_reduction="mean") as clipped:
        model(x).square().sum(1).mean().backward()
    assert_clipped(model, clipped.norms, per_sample_gradients(model, squares, x), "flat", 0.5)


@HOWS
def test_autocast(how):
    torch.manual_seed(0)
    model, batch = GPT(), tokens()
    each = per_sample_gradients(model, language, *batch)
    with unsum.clip_per_sample(model, max_norm=1.0, how=how) as clipped:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch[0])
        F.cross_entropy(out.float().flatten(0, 1), batch[1].flatten(), reduction="sum").backward()
    assert_clipped(model, clipped.norms, each, how, 1.0, tolerance=0.05)


def test_a_grad_scaler_leaves_grad_scaled_and_norms_not():
    torch.manual_seed(0)
    model, batch = mlp(), rows()
    each = per_sample_gradients(model, squares, *batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = copy.deepcopy(model)
    with unsum.clip_per_sample(model, max_norm=0.5, scaler=scaler) as clipped:
        scaler.scale(squares(model, *batch)).backward()
    sums, norms = wanted(each, "flat", 0.5)
    close(clipped.norms, norms, 1e-5, float(norms.max()), "norms")
    close(model[0].weight.grad, 1024 * sums["0.weight"], 1e-5, 1024.0, "scaled")
    scaler.step(optimizer)
    scaler.update()
    for name, value in sums.items():
        close((before.get_parameter(name) - model.get_parameter(name)).detach(), value, 1e-5, 1.0, name)


def test_what_belongs_to_nobody_is_added_as_it_is():
    torch.manual_seed(0)
    model, batch = mlp(), rows()
    each = per_sample_gradients(model, squares, *batch)
    with unsum.clip_per_sample(model, max_norm=0.5) as clipped:
        (squares(model, *batch) + 50 * model[0].weight.square().sum()).backward()
    before = {name: torch.zeros(()) for name in each} | {"0.weight": 100 * model[0].weight.detach()}
    assert_clipped(model, clipped.norms, each, "flat", 0.5, before=before)


def test_positions_that_are_said_to_be_nobodys_are_refused():
    model, x = mlp(), torch.randn(2, 3, 4)
    ids = torch.tensor([[0, 0, 1], [1, -1, -1]])
    with pytest.raises(UnsupportedError, match="no sample"):
        step(model, squares, (x,), samples=ids, verify=False)
    assert model[0].weight.grad is None


def test_only_chosen_parameters_get_a_gradient_and_count():
    torch.manual_seed(0)
    model, batch = mlp(), rows()
    each = {k: v for k, v in per_sample_gradients(model, squares, *batch).items() if k.startswith("5.")}
    clipped = step(model, squares, batch, max_norm=0.5, params="5.*")
    assert_clipped(model, clipped.norms, each, "flat", 0.5)
    assert model[0].weight.grad is None


def test_a_parameter_that_nothing_reached_gets_nothing():
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "unused": nn.Linear(4, 2)})
    with unsum.clip_per_sample(model):
        model["used"](torch.randn(3, 4)).square().sum().backward()
    assert model["unused"].weight.grad is None and model["used"].weight.grad is not None


def test_groups_of_rows_are_clipped_as_one():
    torch.manual_seed(0)
    model, (x,) = mlp(), rows()
    users = torch.tensor([7, 7, 3, 7, 3])
    each = alone(model, lambda m: (m(x[users == user].double()).square().sum() for user in (3, 7)))
    clipped = step(model, squares, (x,), max_norm=0.5, samples=users)
    assert_clipped(model, clipped.norms, each, "flat", 0.5)


@HOWS
@pytest.mark.parametrize("net", ["linear", "convolution", "transformer", "tied", "checkpoint", "adapter"])
@pytest.mark.parametrize("warm", [False, True])
def test_an_empty_batch_brings_nothing(net, warm, how):
    torch.manual_seed(0)
    make, loss, batches = NETS[net]
    model = make()
    for n in (N, 0, N, 1, N, 0, N) if warm else ():
        step(model, loss, batches(n), how=how)
    model.zero_grad()
    clipped = step(model, loss, batches(0), how=how)
    assert clipped.norms.shape == (0,) and clipped.samples == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    batch = batches(N)
    clipped = step(model, loss, batch, how=how)
    assert_clipped(model, clipped.norms, per_sample_gradients(model, loss, *batch), how, 1.0)


def test_a_backward_that_fails_leaves_grad_as_it_was():
    torch.manual_seed(0)
    model, batch = mlp(), rows()
    step(model, squares, batch)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}

    def fail(grad):
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        with unsum.clip_per_sample(model) as clipped:
            h = model[:2](*batch)
            h.register_hook(fail)
            model[2:](h).square().sum().backward()
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())
    assert clipped.samples == 0


# ---- beside others --------------------------------------------------------------------------------------------------


def test_equal_to_opacus():
    pytest.importorskip("opacus")
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    torch.manual_seed(0)
    for net in ("linear", "convolution"):
        make, loss, batches = NETS[net]
        model, batch, limit = make(), batches(), 0.5
        wrapped = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
        inner = torch.optim.SGD(wrapped.parameters(), lr=1.0)
        optimizer = DPOptimizer(
            inner, noise_multiplier=0.0, max_grad_norm=limit, expected_batch_size=1, loss_reduction="sum"
        )
        loss(wrapped, *batch).backward()
        optimizer.pre_step()
        step(model, loss, batch, max_norm=limit)
        for (name, ours), theirs in zip(model.named_parameters(), wrapped.parameters(), strict=True):
            close(ours.grad, theirs.grad, 1e-4, limit * N, f"{net} {name}")


def test_a_compiled_model_runs_eagerly_and_is_right():
    torch.manual_seed(0)
    model, batch = mlp(), rows()
    compiled = torch.compile(model, backend="eager")
    for _ in range(4):
        model.zero_grad()
        with unsum.clip_per_sample(compiled, max_norm=0.5) as clipped:
            squares(compiled, *batch).backward()
        assert_clipped(model, clipped.norms, per_sample_gradients(model, squares, *batch), "flat", 0.5)


@pytest.mark.parametrize("inside", [False, True])
def test_other_blocks_may_be_open_beside_it(inside):
    torch.manual_seed(0)
    model, batch = mlp(), rows()
    each = per_sample_gradients(model, squares, *batch)
    for _ in range(3):
        model.zero_grad()
        blocks = [unsum.clip_per_sample(model, max_norm=0.5), unsum.gradients(model, unsum.Norms()), unsum.watch(model)]
        found = [block.open() for block in (blocks if inside else reversed(blocks))]
        squares(model, *batch).backward()
        for block in blocks if not inside else reversed(blocks):
            block.close()
        clipped, g = (found[0], found[1]) if inside else (found[2], found[1])
        assert_clipped(model, clipped.norms, each, "flat", 0.5)
        close(g.norms(), clipped.norms, 1e-5, float(clipped.norms.max()), "norms")


def test_a_sparse_embedding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, 3, sparse=True), nn.Linear(3, 2))
    ids = torch.randint(V, (N, T))
    each = per_sample_gradients(model, squares, ids)
    clipped = step(model, squares, (ids,), max_norm=0.5)
    assert_clipped(model, clipped.norms, each, "flat", 0.5)


def test_options_that_make_no_sense():
    model = mlp()
    for options in (
        {"max_norm": 0}, {"max_norm": -1.0}, {"max_norm": float("inf")}, {"max_norm": "1"}, {"how": "global"},
        {"verify": "always"}, {"loss_reduction": "sum"}, {"memory": -1}, {"params": "nothing.*"},
    ):  # fmt: skip
        with pytest.raises(OptionError):
            unsum.clip_per_sample(model, **options)
    block = unsum.clip_per_sample(model)
    with pytest.raises(UnsumError), block, block:
        pass
    with pytest.raises(UnsumError, match="samples"):
        with unsum.clip_per_sample(model) as clipped:
            clipped.norms
