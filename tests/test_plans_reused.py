"""A graph is learnt once and its plan is used again, in batches of other sizes and orders, and is never stale."""

import contextlib
import gc

import pytest
import torch
from reference import norms_of_all, per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from nets import SEQUENCES, Adapted, D, Experts, N, T, mlp, scalar
from reads import assert_reads, assert_reducers
from unsum.errors import InteractionError, UnsupportedError
from unsum.graph import codes
from unsum.plan import structure


def test_a_layout_is_learnt_once(learnt):
    model = mlp()
    for step in range(4):
        x = torch.randn(N + step % 2, T, D, dtype=torch.float64)
        truth = per_sample_gradients(model, scalar, x)
        with unsum.gradients(model) as g:
            scalar(model, x).backward()
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)
    assert len(learnt) == 1  # whatever the size of the batch
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True)
    for p in model.parameters():
        p.requires_grad_()
    truth = per_sample_gradients(model, scalar, SEQUENCES)
    with unsum.gradients(model) as g:
        scalar(model, SEQUENCES).backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)
    model[0].weight.requires_grad_(False)
    with unsum.gradients(model) as g:
        scalar(model, SEQUENCES).backward()
    torch.testing.assert_close(g["0.bias"].per_sample(), truth["0.bias"])


class Shuffled(nn.Module):
    """Samples change places inside: by a permutation, by sorting, by a roll whose shift changes."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how, self.step = nn.Linear(D, D), nn.Linear(D, 3), how, 0

    def forward(self, x):
        self.step += 1
        h = torch.tanh(self.a(x))
        if self.how == "roll":
            return self.b(h.roll(self.step, 0)).roll(-self.step, 0)
        order = torch.randperm(len(x)) if self.how == "permuted" else x[:, 0, 0].argsort()
        if self.how == "one-hot":
            dispatch = F.one_hot(torch.randperm(len(x)), len(x)).to(h)
            return torch.einsum("nm,mtd->ntd", dispatch.T, self.b(torch.einsum("nm,mtd->ntd", dispatch, h)))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        if self.how == "gathered":
            index = order[:, None, None].expand_as(h)
            return self.b(h.gather(0, index))[back]
        return self.b(h[order])[back]


@pytest.mark.parametrize("how", ["roll", "permuted", "sorted", "gathered", "one-hot", "experts", "adapter"])
def test_a_plan_is_never_stale(how):
    torch.manual_seed(0)
    model = {"experts": Experts, "adapter": lambda: nn.Sequential(Adapted(), Adapted())}.get(
        how, lambda: Shuffled(how)
    )().double()
    for step in range(4):
        x = torch.randn(N, T, D, dtype=torch.float64)
        if isinstance(model, Shuffled):
            model.step = 0
        truth = per_sample_gradients(model, scalar, x)
        if isinstance(model, Shuffled):
            model.step = step
        with unsum.gradients(model) as g:
            scalar(model, x).backward()
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted, msg=f"{name}, step {step}")
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)


class Routed(nn.Module):
    """Tokens are sorted by what some number says of them, gated, and sent back, twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.gate = nn.ModuleList(nn.Linear(D, 1) for _ in range(2))
        self.keys = [0, 0]  # by which feature
        self.lost = False  # on the way back

    def forward(self, x):
        h = x.flatten(0, 1)
        for inner, gate, key in zip(self.inner, self.gate, self.keys, strict=True):
            order = x.flatten(0, 1)[:, key].argsort()
            weight = gate(h).flatten()[order].sigmoid()
            back = order if self.lost else order.argsort()
            h = h + (torch.tanh(inner(h[order])) * weight[:, None])[back]
        return h.view_as(x)


WEIGHTS = {  # parts of one parameter: graphs of one structure, whose nodes have saved other numbers in each step
    "one of several": lambda w, step: w[step % 4],
    "along another dimension": lambda w, step: w.select(step % 3, 1),
    "unbound along another dimension": lambda w, step: w.unbind(step % 3)[step % 4],
    "turned, or not": lambda w, step: w[step % 4].transpose(0, step % 2),
    "others that are turned": lambda w, step: w.transpose(1, 1 + step % 2)[step % 4],
    "every second row": lambda w, step: w.flatten(0, 1)[: (4, 7)[step % 2] : 1 + step % 2],
    "every second number": lambda w, step: w.flatten()[: (4, 7)[step % 2] : 1 + step % 2].diag(),
}


class OfOneParameter(nn.Module):
    """Uses parts of one parameter, by the step."""

    def __init__(self, part):
        super().__init__()
        self.inner, self.weights, self.part, self.step = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4, 4)), part, 0

    def forward(self, x):
        h = torch.tanh(self.inner(x)) @ self.part(self.weights, self.step)
        return torch.tanh(h) * self.part(self.weights, self.step + 1).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("part", WEIGHTS)
def test_the_way_to_a_parameter_is_that_of_the_step(part, dtype):
    """The way from a meeting to the parameter is of a structure that is known, and leads elsewhere."""
    torch.manual_seed(0)
    model, precise = OfOneParameter(WEIGHTS[part]).to(dtype), 1e-9 if dtype == torch.float64 else 1e-4
    for step in range(6):
        model.step, x = step, torch.randn(5 + step % 2, 4, dtype=dtype)
        truth = per_sample_gradients(model, scalar, x)
        assert_reducers(model, lambda m, x=x: scalar(m, x), truth, precise)
        with unsum.gradients(model) as g:
            scalar(model, x).backward()
        assert_reads(g, truth, precise)
        norms = torch.cat([each.flatten(1) for each in truth.values()], 1).norm(dim=1)
        model.zero_grad()
        with unsum.clip_per_sample(model, max_norm=float(norms.median()), verify=False):
            scalar(model, x).backward()
        for name, each in truth.items():
            wanted = torch.tensordot((norms.median() / norms).clamp_max(1), each, 1)
            torch.testing.assert_close(model.get_parameter(name).grad.double(), wanted, rtol=precise, atol=precise * 10)


def test_rows_that_go_elsewhere_in_every_batch_need_no_new_plan(learnt):
    model = Routed().double()
    for step in range(5):
        x = torch.randn(N, T, D, dtype=torch.float64)
        model.keys = [0, min(step, 2)]  # the two ways were the same when the plan was made
        truth = per_sample_gradients(model, scalar, x)
        for reducers in ((), (unsum.Norms(),)):
            with unsum.gradients(model, *reducers) as g:
                scalar(model, x).backward()
            for name, wanted in truth.items():
                if reducers:
                    squares = g[unsum.Norms].by_parameter()[name]
                    torch.testing.assert_close(squares, wanted.flatten(1).square().sum(1), msg=f"{name}, step {step}")
                else:
                    torch.testing.assert_close(g[name].per_sample(), wanted, msg=f"{name}, step {step}")
    assert len(learnt) == 1
    model.lost = True
    with pytest.raises(InteractionError):
        with unsum.gradients(model):
            scalar(model, torch.randn(N, T, D, dtype=torch.float64)).backward()


class Moved(torch.autograd.Function):
    """Rows in another order. Only values show whose they are afterwards."""

    @staticmethod
    def forward(ctx, x, order):
        ctx.save_for_backward(order)
        return x[order]

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.saved_tensors[0].argsort()], None


class Between(nn.Module):
    """Layers of one shape, and a norm layer, between a change of places and its undoing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.LayerNorm(4)

    def forward(self, x, order):
        order = order.flatten()
        rows = Moved.apply(self.layers[0](x).flatten(0, 1), order)
        for layer in self.layers[1:]:
            rows = rows + torch.tanh(layer(rows))
        return Moved.apply(self.norm(rows), order.argsort()).view(x.shape)


@pytest.mark.parametrize("clips", [False, True], ids=["norms", "clipping"])
def test_what_was_kept_for_rows_in_one_order_does_not_serve_another(clips):
    torch.manual_seed(0)
    model, places = Between().double(), torch.arange(6)
    in_turn = places.view(2, 3).t().flatten()  # the samples take turns
    for step in range(18):
        x = torch.randn(2, 3, 4, dtype=torch.float64)
        order = (places, in_turn, torch.randperm(6))[step // 6].view(2, 3)
        truth = per_sample_gradients(model, lambda m, x: m(x, places[:3]).pow(3).sum(), x)
        norms = norms_of_all(truth)
        clip = unsum.WeightedSum(lambda norms: 1 / norms)
        with unsum.gradients(model, clip if clips else unsum.Norms()) as g:
            model(x, order).pow(3).sum().backward()
        if not clips:
            torch.testing.assert_close(g[unsum.Norms].norms(), norms)
        for name, value in clip.sum().items() if clips else ():
            torch.testing.assert_close(value, torch.einsum("n...,n->...", truth[name], 1 / norms))


def test_one_sample_at_a_time_is_learnt_once(learnt):
    model = mlp()
    for k in range(N):
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms()) as g:
            scalar(model, SEQUENCES[k : k + 1]).backward()
        wanted = sum(p.grad.square().sum() for p in model.parameters())
        torch.testing.assert_close(g[unsum.Norms].sq_norms(), wanted[None])
    assert len(learnt) == 1


def test_rows_in_bfloat16_whose_smallest_numbers_are_blurred():
    owner = torch.tensor([[3, 3, 3, 3, -2, 3, 3, 3], [1, -2, -2, -2, -2, 1, 1, 1], [0, 1, -2, 0, 0, 0, 0, 0]])
    assert codes._by_rows(owner).tolist() == [[3] * 8, owner[1].tolist(), owner[2].tolist()]


def test_another_loss_after_a_forward_that_is_known():
    model = mlp()
    truth = per_sample_gradients(model, lambda m, x: m(x).abs().sum(), SEQUENCES)
    for _ in range(3):
        with unsum.gradients(model):
            scalar(model, SEQUENCES).backward()
    for _ in range(3):
        with unsum.gradients(model) as g:
            model(SEQUENCES).abs().sum().backward()
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)


def test_an_interaction_is_found_after_plans_were_made():
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(T), nn.Linear(D, 3)).double().eval()
    for _ in range(2):
        with unsum.gradients(model):
            scalar(model, SEQUENCES).backward()
    model.train()
    with pytest.raises(InteractionError):
        with unsum.gradients(model):
            scalar(model, SEQUENCES).backward()


def test_memory_is_flat_over_many_steps_of_two_layouts():
    model = mlp()
    live = []
    for step in range(200):
        with unsum.gradients(model, unsum.Norms()):
            scalar(model, SEQUENCES[: 2 + step % 2]).backward()
        if step in (20, 199):
            gc.collect()
            live.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    assert live[1] <= live[0]


COLUMNS = {  # (rows, 8) -> (rows, 6), by rules that take samples apart where they lie along columns or groups
    "W @ h.T": lambda m, h: (m.w @ h.T).T,
    "linear(W, h)": lambda m, h: F.linear(m.w, h).T,
    "addmm": lambda m, h: torch.addmm(m.b[:, None], m.w, h.T).T,
    "bmm": lambda m, h: torch.bmm(h[None], m.w.T[None])[0],
    "groups": lambda m, h: torch.bmm(h[None], m.v)[0],
    "baddbmm": lambda m, h: torch.baddbmm(m.c, h[None], m.v)[0],
}


class Padded(nn.Module):
    """Only some positions of each sample go through a matrix."""

    def __init__(self, how):
        super().__init__()
        self.up, self.how = nn.Linear(6, 8), how
        self.w, self.b, self.v, self.c = (nn.Parameter(torch.randn(s)) for s in ((6, 8), (6,), (1, 8, 6), (1, 1, 6)))

    def forward(self, x, mask):
        h = self.up(x).tanh().masked_select(mask[..., None]).view(-1, 8)
        return torch.zeros_like(x).masked_scatter(mask[..., None], COLUMNS[self.how](self, h))


def padded_step(model, step):
    """The batch, and its per-sample gradients: from the third step on some positions are padding."""
    x, mask = torch.randn(3, 12, 6, dtype=torch.float64), torch.ones(3, 12, dtype=torch.bool)
    if step >= 2:
        mask = torch.rand(3, 12) < 0.5
    return x, mask, per_sample_gradients(model, lambda m, x, mask: m(x, mask).square().sum(), x, mask)


@pytest.mark.parametrize("how", COLUMNS)
def test_a_rule_that_does_not_speak_for_where_samples_lie_now(how, learnt):
    torch.manual_seed(0)
    model = Padded(how).double()
    for step in range(6):
        x, mask, truth = padded_step(model, step)
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms()) as g:
            model(x, mask).square().sum().backward()
        norms = sum(each.flatten(1).square().sum(1) for each in truth.values())
        torch.testing.assert_close(g[unsum.Norms].sq_norms(), norms)
        for name, each in truth.items():
            if each.any():
                torch.testing.assert_close(model.get_parameter(name).grad, each.sum(0))
        clip = unsum.WeightedSum(lambda norms: 1 / norms)
        with unsum.gradients(model, clip, grad=False):
            model(x, mask).square().sum().backward()
        for name, value in clip.sum().items():
            torch.testing.assert_close(value, torch.einsum("n...,n->...", truth[name], norms.rsqrt()))
    assert len(learnt) <= 3  # judged again where samples lay in another way, and then no more


def test_a_rule_that_brings_nothing_is_an_error(monkeypatch):
    """A planted fault: it is not asked whether rules speak for where samples lie now."""
    monkeypatch.setattr(structure, "_refuse_other_ways", lambda *given: None)
    torch.manual_seed(0)
    model = Padded("W @ h.T").double()
    for step in range(3):
        x, mask, _ = padded_step(model, step)
        with contextlib.nullcontext() if step < 2 else pytest.raises(UnsupportedError, match="lost"):
            with unsum.gradients(model, unsum.Norms()):
                model(x, mask).square().sum().backward()


@pytest.mark.parametrize("params", ["2.*", "*"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_dimension_of_the_samples_is_that_of_the_block(compiled, params):
    """Both dimensions have as many rows, and nothing that a chosen layer has saved is a row of the input."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    called = torch.compile(model, backend="aot_eager") if compiled else model
    for k in (1, 1, 1, 1, 0, None, 0, 1, 0):
        x, options = torch.randn(4, 4, 4, dtype=torch.float64), {} if k is None else {"samples": unsum.dim(k)}
        truth = per_sample_gradients(model, scalar, x.transpose(0, k or 0))
        with unsum.gradients(called, unsum.Norms(), params=params, **options) as g:
            scalar(called, x).backward()
        chosen = [each for name, each in truth.items() if params == "*" or name.startswith("2.")]
        torch.testing.assert_close(g[unsum.Norms].sq_norms(), sum(e.flatten(1).square().sum(1) for e in chosen))


@pytest.mark.parametrize("part", ["along another dimension", "every second row"])
def test_gradients_that_get_lost_on_their_way_to_a_parameter_are_an_error(part, monkeypatch):
    """A planted fault: it is not asked whether factors come to their parameters."""
    monkeypatch.setattr(structure, "_reach", lambda *given: True)
    torch.manual_seed(0)
    model, caught = OfOneParameter(WEIGHTS[part]).double(), 0
    for step in range(6):
        model.step, x = step, torch.randn(5, 4, dtype=torch.float64)
        truth = per_sample_gradients(model, scalar, x)
        try:
            with unsum.gradients(model) as g:
                scalar(model, x).backward()
        except UnsupportedError as error:
            assert "lost" in str(error)  # noqa: PT017
            caught += 1
        else:
            assert_reads(g, truth, 1e-9)
    assert caught
