"""Weighted sums: whatever is held until the weights are known, the sum is that of gradients one sample at a time."""

import pytest
import torch
import torch.nn.functional as F
from reference import per_sample_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

import unsum
from reads import close
from unsum.errors import OptionError, SamplesError
from unsum.reducers import holding
from unsum.reducers.holding import FACTORS, GRADIENTS, Size, Sizes, choose

N, T, V = 4, 6, 11


@pytest.fixture(autouse=True)
def _gradients_are_worth_holding(monkeypatch):
    """On a processor only long sequences are: here everything is small."""
    monkeypatch.setattr("unsum.reducers.holding.FAR", {"cpu": 1.0})


class GPT(nn.Module):
    def __init__(self, tied=False, checkpointed=None, width=8):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, width), nn.Parameter(torch.randn(T, width))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, V, bias=not tied)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.tokens.weight

    def part(self, h):
        for layer in self.layers:
            h = h + torch.tanh(layer(h)) * h.mean(1, keepdim=True)
        return h

    def forward(self, x):
        h = self.tokens(x) + self.positions
        if self.checkpointed is None:
            h = self.part(h)
        else:
            h = checkpoint(self.part, h, use_reentrant=self.checkpointed)
        return self.head(self.norm(h))


class CNN(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(2, 4, 3, padding=1), norm, nn.Conv2d(4, 4, 3, stride=2, groups=2)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        h = torch.relu(self.norm(self.a(x)))
        return self.out(self.b(h).mean((2, 3)))


class Shared(nn.Module):
    """One layer twice, and a penalty-like use of nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.a(torch.tanh(self.a(x)))))


class NoRule(nn.Module):
    """A parameter in an operation that no rule knows."""

    def __init__(self):
        super().__init__()
        self.a, self.p = nn.Linear(5, 5), nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        return torch.cdist(self.a(x)[:, None], self.p[None].expand(len(x), -1, -1))[:, 0]


class Turned(nn.Module):
    """A weight whose columns are the outputs, as in GPT-2."""

    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x):
        return torch.addmm(self.b, x.flatten(0, 1), self.w).view(*x.shape[:2], 5)


class Sums(nn.Module):
    """Two outputs, of which one goes into the other."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return h, self.b(h)


def test_weights_by_group_come_from_a_function():
    with pytest.raises(OptionError, match="groups"):
        unsum.WeightedSum(torch.ones(3), groups={"a": 0})
    model, given = nn.Linear(3, 2), unsum.WeightedSum(torch.ones(4))
    with unsum.gradients(model, given):
        model(torch.randn(4, 3)).sum().backward()
    with pytest.raises(SamplesError, match="no norms"):
        given.norms()


def tokens():
    return torch.randint(V, (N, T)), torch.randint(V, (N, T))


def language(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")


def squares(model, x):
    return model(x).square().sum()


def images():
    return (torch.randn(N, 2, 8, 8),)


NETS = {
    "gpt": (GPT, tokens, language),
    "gpt, wide": (lambda: GPT(width=3), tokens, language),
    "gpt, tied": (lambda: GPT(tied=True), tokens, language),
    "gpt, checkpoint": (lambda: GPT(checkpointed=False), tokens, language),
    "gpt, reentrant": (lambda: GPT(checkpointed=True), tokens, language),
    "cnn, group norm": (lambda: CNN(nn.GroupNorm(2, 4)), images, squares),
    "cnn, batch norm": (lambda: CNN(nn.BatchNorm2d(4)).eval(), images, squares),
    "shared": (Shared, lambda: (torch.randn(N, 5),), squares),
    "no rule": (NoRule, lambda: (torch.randn(N, 5),), squares),
    "turned": (Turned, lambda: (torch.randn(N, 9, 3),), squares),
    "two outputs": (Sums, lambda: (torch.randn(N, 5),), lambda m, x: sum(o.square().sum() for o in m(x))),
    "lstm": (lambda: nn.LSTM(5, 4, batch_first=True), lambda: (torch.randn(N, 3, 5),), lambda m, x: m(x)[0].sum()),
    "sparse": (lambda: nn.Sequential(nn.Embedding(V, 4, sparse=True), nn.Linear(4, V)), tokens, language),
}
BUDGETS = {"none": 0, "little": 700, "default": None, "endless": 1 << 40}


def clip(norms):
    return (norms.median() / norms).clamp_max(1) + 0.1


def truth_of(net):
    torch.manual_seed(3)
    make, data, loss = NETS[net]
    model, batch = make().double(), [t.double() if t.is_floating_point() else t for t in data()]
    kept = model.__dict__.pop("checkpointed", None)
    model.checkpointed = None  # torch.autograd.grad refuses reentrant ones
    each = per_sample_gradients(model, loss, *batch)
    model.checkpointed = kept
    return model, batch, loss, each


def clipped(each, function=clip):
    norms = torch.cat([v.flatten(1) for v in each.values()], 1).norm(dim=1)
    return {name: torch.tensordot(function(norms), v, 1) for name, v in each.items()}


def assert_sums(found, wanted, tolerance=1e-9):
    assert set(found) == set(wanted)
    scale = max(float(v.norm()) for v in wanted.values())
    for name, value in wanted.items():
        assert found[name].shape == value.shape
        close(found[name], value, tolerance, scale, name)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("net", NETS)
def test_the_sum_is_the_same_whatever_is_held(net, budget):
    model, batch, loss, each = truth_of(net)
    wanted = clipped(each)
    for grad in (True, False, True):  # the first learns, later ones remember
        model.zero_grad()
        with unsum.gradients(model, unsum.WeightedSum(clip, memory=BUDGETS[budget]), grad=grad) as g:
            value = loss(model, *batch)
            value.backward()
        assert_sums(g[unsum.WeightedSum].sum(), wanted)
        for name, parameter in model.named_parameters():
            if not grad:
                assert parameter.grad is None
            else:
                stored = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                torch.testing.assert_close(stored, each[name].sum(0))
        with pytest.raises(RuntimeError, match="second time|freed"):
            torch.autograd.backward(value)  # the graph is freed, as the user asked
    chosen = g[unsum.WeightedSum].chosen
    if net == "cnn, group norm" and budget == "none":
        assert FACTORS in chosen.values()
    if net == "turned" and budget == "endless":
        assert set(chosen.values()) == {GRADIENTS}
    if net == "gpt, wide" and budget == "endless":
        assert {chosen["layers.0.weight"], chosen["norm.bias"]} == {GRADIENTS}
        assert chosen["tokens.weight"] == FACTORS


@pytest.mark.parametrize("budget", ["none", "endless"])
@pytest.mark.parametrize("net", ["gpt", "gpt, tied", "cnn, group norm", "shared", "sparse"])
def test_low_precision_and_scalers(net, budget):
    model, batch, loss, each = truth_of(net)
    wanted = clipped(each)
    model, batch = model.float(), [t.float() if t.is_floating_point() else t for t in batch]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        sums = unsum.WeightedSum(clip, memory=BUDGETS[budget])
        with unsum.gradients(model, unsum.Norms(), sums, scaler=scaler) as g:
            scaler.scale(loss(model, *batch)).backward()
        assert_sums(sums.sum(), wanted, 1e-5)
        assert all(value.dtype == torch.float32 for value in sums.sum().values())
        with unsum.gradients(model, unsum.WeightedSum(clip, memory=BUDGETS[budget]), loss_reduction="mean") as g:
            (loss(model, *batch) / N).backward()
        assert_sums(g[unsum.WeightedSum].sum(), wanted, 1e-5)


@pytest.mark.parametrize("budget", BUDGETS)
def test_packed_samples_and_nobodys_positions(budget):
    torch.manual_seed(0)
    model, x = GPT().double(), torch.randint(V, (1, T))
    weigh = torch.randn(1, T, V).double()
    for samples, own in (
        (unsum.packed(torch.tensor([0, 2, T])), [[0, 1], [2, 3, 4, 5]]),
        (torch.tensor([[0, 0, -1, 1, 1, -1]]), [[0, 1], [3, 4]]),
    ):
        truth = []
        for positions in own:  # each sample's part of the loss, where samples do not interact
            part = torch.zeros(1, T, 1).double()
            part[:, positions] = 1
            loss = (model.head(model.norm(model.tokens(x) + model.positions)) * weigh * part).square().sum()
            truth.append(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))
        each = {n: torch.stack([t[k] for t in truth]) for k, (n, _) in enumerate(model.named_parameters())}
        model.part = lambda h: h
        for _ in range(2):
            with unsum.gradients(model, unsum.WeightedSum(clip, memory=BUDGETS[budget]), samples=samples) as g:
                (model(x) * weigh).square().sum().backward()
            assert_sums(g[unsum.WeightedSum].sum(), clipped(each))


@pytest.mark.parametrize("budget", BUDGETS)
def test_penalties_and_losses_with_parameters_are_not_included(budget):
    torch.manual_seed(0)
    model, x = Shared().double(), torch.randn(N, 5).double()
    each = per_sample_gradients(model, squares, x)
    for _ in range(2):
        with unsum.gradients(model, unsum.WeightedSum(clip, memory=BUDGETS[budget])) as g:
            (squares(model, x) + 3 * model.a.weight.square().sum()).backward()
        assert_sums(g[unsum.WeightedSum].sum(), clipped(each))


@pytest.mark.parametrize("budget", BUDGETS)
def test_micro_batches_have_weights_of_their_own(budget):
    torch.manual_seed(0)
    model = GPT().double()
    batches = [tokens() for _ in range(3)]
    wanted = {name: 0 for name, _ in model.named_parameters()}
    for batch in batches:
        part = clipped(per_sample_gradients(model, language, *batch))
        wanted = {name: wanted[name] + part[name] for name in wanted}
    for _ in range(2):
        with unsum.gradients(model, unsum.WeightedSum(clip, memory=BUDGETS[budget])) as g:
            for batch in batches:
                language(model, *batch).backward()
        assert_sums(g[unsum.WeightedSum].sum(), wanted)


def test_two_sums_with_weights_of_their_own_and_other_reducers_beside():
    model, batch, loss, each = truth_of("gpt")
    halved = lambda norms: 0.5 * torch.ones_like(norms)
    for _ in range(2):
        sums = [unsum.WeightedSum(clip, memory=0), unsum.WeightedSum(halved, memory=0), unsum.WeightedSum(clip)]
        norms, moments, tokens_ = unsum.Norms(), unsum.SecondMoment(), unsum.TokenNorms()
        with unsum.gradients(model, norms, *sums, moments, tokens_) as g:
            loss(model, *batch).backward()
        assert_sums(sums[0].sum(), clipped(each))
        assert_sums(sums[1].sum(), clipped(each, halved))
        assert_sums(sums[2].sum(), clipped(each))
        flat = torch.cat([v.flatten(1) for v in each.values()], 1)
        torch.testing.assert_close(g[norms].norms(), flat.norm(dim=1))
        torch.testing.assert_close(g[moments].sum_squares()["head.weight"], each["head.weight"].square().sum(0))
        assert g[tokens_].norms().shape == (N, T)


def test_a_graph_that_is_retained_can_be_walked_again():
    model, batch, loss, each = truth_of("gpt")
    with unsum.gradients(model, unsum.WeightedSum(clip, memory=0)) as g:
        value = loss(model, *batch)
        value.backward(retain_graph=True)
    assert_sums(g[unsum.WeightedSum].sum(), clipped(each))
    model.zero_grad()
    value.backward()
    torch.testing.assert_close(model.head.weight.grad, each["head.weight"].sum(0))


@pytest.mark.parametrize("how", ["inputs", "autograd.grad"])
def test_a_backward_that_asks_for_some_parameters(how):
    model, batch, loss, each = truth_of("gpt")
    asked = [model.head.weight, model.layers[0].bias]
    part = {name: each[name] for name in ("head.weight", "layers.0.bias")}
    for _ in range(2):
        with unsum.gradients(model, unsum.WeightedSum(clip, memory=0)) as g:
            if how == "inputs":
                loss(model, *batch).backward(inputs=asked)
            else:
                torch.autograd.grad(loss(model, *batch), asked)
        found = g[unsum.WeightedSum].sum()
        assert_sums({name: found.pop(name) for name in part}, clipped(part))
        assert not any(value.any() for value in found.values())


def test_edits_and_captures_beside_act_once():
    model, batch, loss, _ = truth_of("gpt")
    found = {}
    for memory in (0, 1 << 40):
        for _ in range(2):
            with unsum.edit(model, {"norm:grad_output": unsum.clip(-0.1, 0.1)}):
                with unsum.capture(model, "norm:grad_output") as got:
                    with unsum.gradients(model, unsum.WeightedSum(clip, memory=memory)) as g:
                        loss(model, *batch).backward()
        assert len(got.calls("norm:grad_output")) == 1
        found[memory] = g[unsum.WeightedSum].sum()
    assert_sums(found[0], found[1 << 40])


def test_two_backwards_hold_nothing():
    """What docs/gradients.md says to do where not even factors fit."""
    model, batch, _, each = truth_of("gpt")
    with unsum.gradients(model, unsum.Norms(), grad=False) as g:
        x, y = batch
        losses = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none").sum(1)
        losses.sum().backward(retain_graph=True)
    (losses * clip(g[unsum.Norms].norms())).sum().backward()
    assert_sums({name: p.grad for name, p in model.named_parameters()}, clipped(each))


# ---- the decision -----------------------------------------------------------------------------------------------


def test_the_budget_is_kept_and_spent_where_it_saves_most():
    sizes = Sizes(
        {
            "long": Size(gradients=100, factors=300, saved=1000.0, formed=True),
            "short": Size(gradients=100, factors=60, saved=10.0, formed=True),
            "table": Size(gradients=10_000, factors=50, saved=0.0, formed=False),
            "bias": Size(gradients=5, factors=100, saved=50.0, formed=True),
        }
    )
    decided = lambda budget: choose(sizes, budget)
    assert decided(1000) == {"long": GRADIENTS, "short": GRADIENTS, "table": FACTORS, "bias": GRADIENTS}
    assert decided(255) == decided(1000)
    assert decided(254) == decided(1000) | {"short": FACTORS}
    assert decided(0) == decided(254)  # as little as can be
    assert (sizes["long"] + sizes["table"]).factors == 350


def test_free_memory_is_looked_at_once_a_second_where_there_is_room(monkeypatch):
    free, clock, looks = [1e12], [100.0], []
    monkeypatch.setattr(holding, "_looks", {})
    monkeypatch.setattr(holding, "_free", lambda device: looks.append(device) or free[0])
    monkeypatch.setattr(holding, "monotonic", lambda: clock[0])
    asked = lambda wanted: holding.free_memory([torch.device("cpu")], wanted)
    assert asked(1e9) == asked(2e9) == 5e11 and len(looks) == 1
    free[0] = 1e9
    assert asked(2e11) == 5e8 and len(looks) == 2  # so much was not free by far
    assert asked(1e8) == asked(1e8) == 5e8 and len(looks) == 4  # nor is little, where little is free
    free[0] = 1e12
    assert asked(1e3) == 5e8 and len(looks) == 4
    clock[0] += 2
    assert asked(1e3) == 5e11 and len(looks) == 5
    assert holding.free_memory([torch.device("cpu")]) == 5e11 and len(looks) == 6  # for nothing that is known


def test_clipping_asks_for_what_it_would_hold(monkeypatch):
    model, batch, loss, _ = truth_of("gpt")
    asked = []
    monkeypatch.setattr("unsum.reducers.weighted.free_memory", lambda devices, wanted: asked.append(wanted) or 1e12)
    for _ in range(2):
        with unsum.gradients(model, unsum.WeightedSum(clip)):
            loss(model, *batch).backward()
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    assert asked[0] == asked[1] and own < asked[0] < 1e4 * own


def test_the_decision_is_told(caplog):
    model, batch, loss, _ = truth_of("gpt")
    caplog.set_level("INFO", logger="unsum")
    with unsum.gradients(model, unsum.WeightedSum(clip, memory=0)) as g:
        loss(model, *batch).backward()
    assert set(g[unsum.WeightedSum].chosen) == {name for name, _ in model.named_parameters()}
    assert "WeightedSum holds" in caplog.text and FACTORS in caplog.text


@pytest.mark.parametrize("memory", [-1, "1 GB", True, float("nan")])
def test_bad_budgets(memory):
    with pytest.raises(OptionError, match="memory"):
        unsum.WeightedSum(clip, memory=memory)
