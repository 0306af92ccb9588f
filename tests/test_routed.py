"""Rows that are sent to one of several matrices: experts. Against gradients computed one sample at a time in float64,
in batches that route otherwise than the one that was learnt; without waiting for the device more than once a step."""

import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from reference import each_of, per_sample_gradients
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import unsum
from reads import assert_reads, assert_reducers
from unsum.errors import InteractionError, SamplesError
from unsum.factors import routed
from unsum.factors.routed import Routed
from unsum.factors.total import dot, sq_norms, total
from unsum.graph.layout import Mapped
from unsum.graph.positions import Positions, positions

N, T, D, H, E, K = 4, 6, 8, 16, 5, 2

block = sys.modules["unsum.step.planner"]
needs_grouped = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm")


@pytest.fixture
def sweeps(monkeypatch):
    """How often a graph was learnt."""
    swept, learn = Counter(), block.learn
    monkeypatch.setattr(block, "learn", lambda *given, **options: swept.update(["sweep"]) or learn(*given, **options))
    return lambda: swept["sweep"]


# ---- factors --------------------------------------------------------------------------------------------------------


def made(seed, *, turned=False, nobodys=True):
    """Rows in no order: of four samples, of which one never comes to matrix 0 and one comes to none; matrix 3 gets
    nothing; some rows are nobody's, and some met none, with NaN in them."""
    generator = torch.Generator().manual_seed(seed)
    rows, n, i, o = 30, 4, 3, 5
    draw = lambda high, *shape: torch.randint(high, shape, generator=generator)
    sample, matrix = draw(n, rows), draw(3, rows)
    sample[sample == 2] = 1
    matrix[(sample == 0) & (matrix == 0)] = 1
    if nobodys:
        sample[::7], matrix[3::9] = -1, 4
    a, delta = (torch.randn(rows, k, generator=generator, dtype=torch.float64) for k in (i, o))
    a[matrix == 4] = delta[matrix == 4] = torch.nan
    by = Positions(Mapped(sample), n, 1)
    shape = (4, i, o) if turned else (4, o, i)
    kind = Routed(a, delta, sample, matrix, n, 4, shape, turned=turned)
    assert torch.equal(kind.index, by.index(a.device)) and torch.equal(kind.lengths, by.lengths)
    dense = torch.zeros(n, *shape, dtype=torch.float64)
    for r in range(rows):
        if sample[r] >= 0 and matrix[r] < 4:
            each = torch.outer(delta[r], a[r])
            dense[sample[r], matrix[r]] += each.T if turned else each
    return kind, dense


@pytest.mark.parametrize("turned", [False, True])
def test_reads_of_routed_rows(turned):
    kind, dense = made(0, turned=turned)
    w = torch.linspace(-1, 2, 4).double()
    same = lambda ours, wanted: torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    same(kind.per_sample(), dense)
    same(kind.sum(), dense.sum(0))
    same(kind.weighted_sum(w), torch.tensordot(w, dense, 1))
    same(kind.tokens().sum(1), dense)
    same(kind.token_sq_norms(), kind.tokens().flatten(2).square().sum(2))
    same(kind.dot(kind), dense.flatten(1) @ dense.flatten(1).T)
    same(kind.times(3.0).per_sample(), 3 * dense)
    same(kind.outer().per_sample(), dense)
    left, right = torch.randn(2, 4).double(), torch.randn(15, 2).double()
    same(kind.project(left, right), left @ dense.flatten(2) @ right)
    for found in (kind.sq_norms(), *(kind.sq_norms_by(way) for way in ("gram", "product", "padded"))):
        same(found, dense.flatten(1).square().sum(1))


def test_routed_rows_of_several_uses():
    (one, first), (other, second), (third, last) = made(0), made(1), made(2, nobodys=False)
    parts, dense = [one, other, third], first + second + last
    full = replace(one, held=one.index[:, :0])  # of no position
    assert full.plus(other).held is None and full.plus(full, full).held.shape == (4, 0)
    assert [type(part) for part in total(parts)] == [Routed]
    torch.testing.assert_close(sq_norms(parts), dense.flatten(1).square().sum(1))
    torch.testing.assert_close(total(parts)[0].per_sample(), dense)
    torch.testing.assert_close(total(parts)[0].sum(), dense.sum(0))
    torch.testing.assert_close(dot(parts, parts), dense.flatten(1) @ dense.flatten(1).T)


def test_a_tile_of_a_segment_product(monkeypatch):
    from unsum.kernels import segments

    monkeypatch.setattr(segments, "ALIGNED", 2)
    monkeypatch.setitem(segments.TILE, "cpu", 1)
    kind, dense = made(0)
    torch.testing.assert_close(kind.sq_norms_by("product"), dense.flatten(1).square().sum(1))


# ---- models ---------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Each token goes to K experts, chosen by the caller: (tokens, K)."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, H, D) / 3), nn.Parameter(torch.randn(E, D, H) / 3)
        self.scale = nn.Parameter(torch.randn(H))

    def forward(self, x, chosen, scores):
        flat = x.reshape(-1, D)
        if x.dtype == torch.float64:  # in no order and without a product for all
            h = torch.einsum("rd,rkhd->rkh", flat, self.up[chosen])
            h = torch.einsum("rkh,rkdh->rkd", torch.tanh(h) * self.scale, self.down[chosen])
            return (h * scores[..., None]).sum(1).view_as(x)
        expert, order = torch.sort(chosen.flatten(), stable=True)
        ends = torch.searchsorted(expert, torch.arange(E), right=True).int()
        h = torch.tanh(F.grouped_mm(flat[order // K], self.up.mT, offs=ends)) * self.scale
        h = F.grouped_mm(h, self.down.mT, offs=ends) * scores.flatten()[order, None]
        return h[order.argsort()].view(-1, K, D).sum(1).view_as(x)


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.inner, self.gate = nn.Linear(D, D), nn.Linear(D, K)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x, chosen):
        scores = self.gate(x).flatten(0, 1).softmax(-1)
        for layer in self.layers:
            x = x + layer(torch.tanh(self.inner(x)), chosen, scores)
        return x


def loss_of(model, x, chosen):
    return model(x, chosen).square().sum()


def truth_of(model, x, chosen):
    """In float64, one sample at a time."""
    precise = type(model)(len(model.layers)).double()
    precise.load_state_dict(model.state_dict())
    each = {name: [] for name, _ in model.named_parameters()}
    for row, choice in zip(x.double(), chosen.reshape(len(x), -1, K), strict=True):
        grads = torch.autograd.grad(loss_of(precise, row[None], choice), list(precise.parameters()))
        for name, grad in zip(each, grads, strict=True):
            each[name].append(grad)
    return {name: torch.stack(grads) for name, grads in each.items()}


def routings():
    generator = torch.Generator().manual_seed(0)
    scattered = lambda: torch.rand(N * T, E, generator=generator).argsort(1)[:, :K]
    away = scattered()
    away[:T] = torch.where(away[:T] == 0, E - 1, away[:T])
    return {
        "learnt": scattered(),
        "otherwise": scattered(),
        "an expert that gets nothing": scattered() % (E - 1),
        "all at one expert": torch.zeros(N * T, K, dtype=torch.long),
        "a sample that never comes to an expert": away,
        "each sample at an expert of its own": torch.arange(N).repeat_interleave(T)[:, None].expand(-1, K).clone(),
        "the same expert twice": scattered()[:, :1].expand(-1, K).clone(),
        "once more": scattered(),
    }


@needs_grouped
@pytest.mark.parametrize("way", ["gram", "product", "padded"])
def test_batches_that_route_otherwise(way, sweeps, monkeypatch):
    """One sweep, and every batch after it is right."""
    monkeypatch.setattr(routed.costs, "cheaper", lambda *args, **options: way)
    torch.manual_seed(0)
    model = Net(2)
    for name, chosen in routings().items():
        x = torch.randn(N, T, D)
        truth = truth_of(model, x, chosen)
        with unsum.gradients(model) as g:
            loss_of(model, x, chosen).backward()
        assert_reads(g, truth, 1e-5)
        assert_reducers(model, lambda m, x=x, chosen=chosen: loss_of(m, x, chosen), truth, 1e-5)
        assert sweeps() == 1, name
        assert "batched.grouped_mm" in g.coverage() and "replay " not in g.coverage()
        with torch.no_grad():
            for p in model.parameters():
                p += 0.02 * torch.randn_like(p)


@needs_grouped
def test_positions_of_routed_parameters_are_those_of_the_tokens():
    torch.manual_seed(0)
    model, x = Net(1), torch.randn(N, T, D)
    for chosen in list(routings().values())[:2]:
        with unsum.gradients(model) as g:
            loss_of(model, x, chosen).backward()
        factors = g["layers.0.up"]
        assert factors.lengths.tolist() == [T * K] * N
        torch.testing.assert_close(factors.per_token().sum(1), factors.per_sample())
        torch.testing.assert_close(factors.token_sq_norms(), factors.per_token().flatten(2).square().sum(2))
        here = factors.per_token().flatten(3).abs().sum(3) > 0  # (n, t, experts)
        assert torch.equal(here, F.one_hot(chosen.reshape(N, T * K), E) > 0)


class OneExpert(nn.Module):
    """Tokens whose first number is positive go to an expert."""

    def __init__(self):
        super().__init__()
        self.first, self.expert = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        h = torch.tanh(self.first(x)).flatten(0, 1)
        chosen = (x.flatten(0, 1)[:, 0] > 0).nonzero()[:, 0]
        return torch.zeros_like(h).index_add(0, chosen, self.expert(h[chosen])).view_as(x)


def test_rows_that_an_expert_got_are_no_positions_of_the_input():
    """All tokens of one sample, and some of another: as many as there are positions."""
    torch.manual_seed(0)
    model, x = OneExpert().double(), torch.randn(2, 4, 3, dtype=torch.float64)
    for signs in ([1, 1, 1, 1, -1, 1, -1, 1], [1, 1, 1, 1, 1, 1, 1, 1], [-1, 1, 1, 1, 1, 1, -1, -1]):
        x[..., 0] = x[..., 0].abs() * torch.tensor(signs).view(2, 4)
        with unsum.gradients(model, unsum.TokenNorms()) as g:
            model(x).square().sum().backward()
        found = g[unsum.TokenNorms]
        assert set(found.left_out) in (set(), {"expert.weight", "expert.bias"})
        each = each_of(model, (model(token[None, None]).square().sum() for token in x.flatten(0, 1)))
        squares = sum(rows.flatten(1).square().sum(1) for name, rows in each.items() if name not in found.left_out)
        torch.testing.assert_close(found.sq_norms(), squares.view(2, 4))
        assert found.left_out or min(signs) > 0


@needs_grouped
def test_rows_of_experts_that_are_nobodys():
    torch.manual_seed(0)
    model, chosen, ids = Net(1), routings()["learnt"], torch.tensor([5, -1, 2, 5])
    x = torch.randn(N, T, D)
    truth = truth_of(model, x, chosen)
    with unsum.gradients(model, samples=ids) as g:
        loss_of(model, x, chosen).backward()
    close = lambda ours, wanted: torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-5)
    for name, each in truth.items():
        close(g[name].per_sample(), torch.stack([each[2], each[0] + each[3]]))
        close(g[name].shared(), each[1])


class Loop(nn.Module):
    """The experts one after the other, each with the tokens that chose it, as most models write it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, H, D) / 3), nn.Parameter(torch.randn(E, H, D) / 3)
        self.bias = nn.Parameter(torch.randn(E, H))

    def forward(self, x, chosen):
        flat = x.reshape(-1, D)
        out = torch.zeros_like(flat)
        for expert in range(E):
            token, _ = torch.where(chosen.view(-1, K) == expert)
            if len(token):
                h = torch.tanh(F.linear(flat[token], self.up[expert], self.bias[expert]))
                out = out.index_add(0, token, h @ self.down[expert])
        return out.view_as(x)


@pytest.mark.parametrize("routing", list(routings()))
def test_experts_in_a_loop(routing):
    torch.manual_seed(0)
    model, chosen = Loop().double(), routings()[routing]
    weights = torch.arange(1.0, N + 1).double()
    for step in range(3):
        x = torch.randn(N, T, D, dtype=torch.float64)
        alone = (loss_of(model, x[k : k + 1], c) for k, c in enumerate(chosen.view(N, T, K)))
        wanted = each_of(model, alone)
        with unsum.gradients(model) as g:
            loss_of(model, x, chosen).backward()
        for name, truth in wanted.items():
            torch.testing.assert_close(g[name].per_sample(), truth)
            torch.testing.assert_close(g[name].sq_norms(), truth.flatten(1).square().sum(1))
        with unsum.gradients(model, unsum.Norms(), unsum.WeightedSum(weights)) as g:
            loss_of(model, x, chosen).backward()
        squares = sum(truth.flatten(1).square().sum(1) for truth in wanted.values())
        torch.testing.assert_close(g[unsum.Norms].sq_norms(), squares)
        for name, found in g[unsum.WeightedSum].sum().items():
            torch.testing.assert_close(
                found, torch.einsum("n,n...->...", torch.arange(1.0, N + 1).double(), wanted[name])
            )
        chosen = chosen.roll(step + 1, 0)


def test_experts_in_a_loop_with_groups_and_rows_of_nobody():
    torch.manual_seed(0)
    model, chosen = Loop().double(), routings()["otherwise"]
    x, ids = torch.randn(N, T, D, dtype=torch.float64), torch.tensor([5, -1, 2, 5])
    wanted = each_of(model, (loss_of(model, x[k : k + 1], c) for k, c in enumerate(chosen.view(N, T, K))))
    with unsum.gradients(model, samples=ids) as g:
        loss_of(model, x, chosen).backward()
    for name, truth in wanted.items():
        torch.testing.assert_close(g[name].per_sample(), torch.stack([truth[2], truth[0] + truth[3]]))
        torch.testing.assert_close(g[name].shared(), truth[1])


CHOSEN = {  # ways to one (H, D) matrix of a parameter (E, H, D), or of its transposed one (E, D, H)
    "indexed": lambda w, wt, e: w[e],
    "from the end": lambda w, wt, e: w[e - E],
    "unbound": lambda w, wt, e: w.unbind(0)[e],
    "transposed": lambda w, wt, e: wt[e].T,
    "all transposed": lambda w, wt, e: wt.mT[e],
    "cast": lambda w, wt, e: w.float()[e].double(),
    "unbound, then cast": lambda w, wt, e: wt.unbind(0)[e].float().double().T,
}


class Among(nn.Module):
    """One matrix for all tokens, another for those that chose it, by indices or for the whole of a batch."""

    def __init__(self, way):
        super().__init__()
        self.w, self.wt = nn.Parameter(torch.randn(E, H, D) / 3), nn.Parameter(torch.randn(E, D, H) / 3)
        self.way = way

    def forward(self, x, chosen):
        flat = x.reshape(-1, D)
        out = flat @ self.way(self.w, self.wt, 3).T @ self.way(self.w, self.wt, 3)
        for expert in range(2):
            (token,) = torch.where(chosen.view(-1, K)[:, 0] == expert)
            h = torch.tanh(F.linear(flat[token], self.way(self.w, self.wt, expert)))
            out = out.index_add(0, token, h @ self.way(self.w, self.wt, expert + 1))
        return out.view_as(x)


@pytest.mark.parametrize("way", CHOSEN.values(), ids=CHOSEN)
def test_one_of_several_matrices_however_it_is_chosen(way):
    torch.manual_seed(0)
    model, chosen = Among(way).double(), routings()["otherwise"]
    for step in range(5):
        x = torch.randn(N, T, D, dtype=torch.float64)
        alone = (loss_of(model, x[k : k + 1], c) for k, c in enumerate(chosen.view(N, T, K)))
        wanted = {name: truth for name, truth in each_of(model, alone).items() if truth.any()}
        with unsum.gradients(model) as g:
            loss_of(model, x, chosen).backward()
        assert_reads(g, wanted, 1e-6)
        chosen = chosen.roll(step + 1, 0)
    x = torch.randn(N, T, D, dtype=torch.float64)
    alone = (loss_of(model, x[k : k + 1], c) for k, c in enumerate(chosen.view(N, T, K)))
    assert_reducers(model, lambda model: loss_of(model, x, chosen), each_of(model, alone), 1e-6)


class Twice(nn.Module):
    """Tokens are shuffled, and shuffled again; then each is taken twice, in its place. Some indices count from the
    end."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(D, D) for _ in range(3))
        self.heads = nn.Parameter(torch.randn(D // 2))

    def forward(self, x, order, again):
        rows = len(order)
        h = torch.tanh(self.a(x.flatten(0, 1)[order]))
        h = torch.tanh(self.b(h[again - rows]))
        h = (h.view(-1, 2, D // 2) * self.heads).flatten(1)
        back = order[again].argsort().repeat_interleave(2)
        return self.c(h[back]).view(*x.shape[:2], 2, D).sum(2)


def test_moves_of_moves(sweeps):
    torch.manual_seed(0)
    model = Twice().double()
    for _ in range(4):
        x, order, again = torch.randn(N, T, D).double(), torch.randperm(N * T), torch.randperm(N * T)
        with unsum.gradients(model) as g:
            model(x, order, again).square().sum().backward()
        losses = model(x, order, again).square().sum((1, 2))
        for name, p in model.named_parameters():
            wanted = torch.stack([torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in losses])
            torch.testing.assert_close(g[name].per_sample(), wanted)
            torch.testing.assert_close(g[name].sq_norms(), wanted.flatten(1).square().sum(1))
    assert sweeps() == 1


class Returned(nn.Module):
    """Tokens are shuffled, and come back by indices of the caller's. Without a layer before, nothing but those indices
    tells whose the rows are."""

    def __init__(self, *, deep):
        super().__init__()
        self.a, self.b = nn.Linear(D, D) if deep else nn.Identity(), nn.Linear(D, D)

    def forward(self, x, order, back):
        h = torch.tanh(self.a(x).flatten(0, 1)[order])
        return torch.tanh(self.b(h))[back].view_as(x)


def returns():
    order = torch.randperm(N * T, generator=torch.Generator().manual_seed(0))
    back = order.argsort()
    twice, swapped, crossed = back.clone(), back.clone(), back.clone()
    twice[0] = twice[1]  # one row is taken twice by its own sample, and another never
    swapped[[0, -1]] = swapped[[-1, 0]]  # two samples get each other's rows
    crossed[0] = crossed[-1]  # two samples get the same row
    return {"as learnt": (order, back), "a row twice": (order, twice), "swapped": (order, swapped),
            "crossed": (order, crossed)}  # fmt: skip


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("case", list(returns()))
def test_rows_that_do_not_come_back_as_they_did(case, deep, sweeps):
    """Then the batch is learnt again: what was remembered would be wrong."""
    torch.manual_seed(0)
    model, first = Returned(deep=deep).double(), torch.randperm(N * T)
    for order, back in ((first, first.argsort()), returns()[case]):
        x = torch.randn(N, T, D).double()
        losses = model(x, order, back).square().sum((1, 2))
        truth = {
            name: torch.stack([torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in losses])
            for name, p in model.named_parameters()
        }
        try:
            with unsum.gradients(model) as g:
                model(x, order, back).square().sum().backward()
        except (InteractionError, SamplesError):
            assert case in ("swapped", "crossed")
            continue
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)
    assert sweeps() == (1 if case == "as learnt" else 2)


# ---- waiting for the device -----------------------------------------------------------------------------------------


class Looks(TorchDispatchMode):
    """Counts what makes a processor wait for a GPU."""

    ops = torch.ops.aten
    waiting = (ops._local_scalar_dense, ops.nonzero, ops.equal, ops.masked_select, ops.bincount, ops._unique2,
               ops.repeat_interleave, ops.is_nonzero)  # fmt: skip

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = [i for i in args[1] if i is not None and i.dtype == torch.bool] if func is self.ops.index.Tensor else []
        if func.overloadpacket in self.waiting or masks:
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


@needs_grouped
@pytest.mark.parametrize("layers", [1, 4])
def test_a_step_looks_at_the_device_once_however_many_layers(layers, monkeypatch):
    torch.manual_seed(0)
    model, (*first, last) = Net(layers), list(routings().values())[:4]

    def step(chosen):
        with unsum.gradients(model, unsum.Norms()):
            loss_of(model, torch.randn(N, T, D), chosen).backward()

    monkeypatch.setattr(routed.costs, "cheaper", lambda *args, **options: "gram")
    for chosen in (*first, *first):  # learnt, written down and compared by then
        step(chosen)
    with Looks() as plain:
        loss_of(model, torch.randn(N, T, D), last).backward()
    for name in ("tolist", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda self: pytest.fail("a copy to the processor"))
    with Looks() as looks:
        step(last)
    assert (looks.found - plain.found).total() == 1


def test_rows_are_held_by_row():
    owner = torch.arange(6).view(2, 3, 1, 1).expand(2, 3, 4, 5).int()
    layout = Mapped(owner).narrowed()
    assert layout.map.shape == (2, 3) and layout.behind == (4, 5) and layout.shape == (2, 3, 4, 5)
    torch.testing.assert_close(layout.owner(), owner)
    x = torch.randn(2, 3, 4, 5)
    for features in (0, 1, 2):
        by = positions(layout, 6, features)
        torch.testing.assert_close(by.of(x), x.reshape(6, -1, *x.shape[4 - features :]))
        assert by.lengths.tolist() == [x[0, 0].numel() // by.of(x)[0, 0].numel()] * 6
    assert positions(layout, 6, 3) is None
    torch.testing.assert_close(layout.only(x, 4)[1, 1], x[1, 1])
    assert int((layout.only(x, 4) != 0).sum()) == 20


def test_clipping_where_an_expert_gets_no_rows():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            make = lambda: nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4, bias=False))
            self.experts = nn.ModuleList(make() for _ in range(2))

        def forward(self, x):  # all tokens of a sample to one expert
            which = (x[:, 0, 0] > 0).long()[:, None].expand(x.shape[:2]).reshape(-1)
            h = x.reshape(-1, 4)
            out = torch.zeros_like(h)
            for k, expert in enumerate(self.experts):
                rows = torch.where(which == k)[0]
                out = out.index_add(0, rows, expert(h[rows]))
            return out.view(x.shape)

    torch.manual_seed(0)
    model = Experts().double()
    for signs in ((1, 1), (-1, -1), (1, -1), (-1, -1)):
        x = torch.randn(2, 5, 4, dtype=torch.float64)
        x[:, 0, 0] = x[:, 0, 0].abs() * torch.tensor(signs)
        truth = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in truth.values()]).norm(dim=0)
        model.zero_grad()
        with unsum.clip_per_sample(model, max_norm=1.0) as clipped:
            model(x).square().sum().backward()
        torch.testing.assert_close(clipped.norms, norms)
        weights = (1 / norms).clamp(max=1)
        for name, p in model.named_parameters():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(grad, torch.einsum("n,n...->...", weights, truth[name]))
