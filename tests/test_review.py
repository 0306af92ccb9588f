"""Programs that once broke gradients by sample, each with plain autograd as the truth."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import unsum
from unsum.errors import InteractionError, OptionError, SamplesError

N = 4


@pytest.fixture(autouse=True)
def in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def truth_of(model, losses):
    grads = [
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True) for loss in losses
    ]
    return {
        name: torch.stack([torch.zeros_like(p) if row[k] is None else row[k] for row in grads])
        for k, (name, p) in enumerate(model.named_parameters())
    }


def compare(model, call, **options):
    with unsum.gradients(model, **options) as g:
        losses = call().flatten(1).square().sum(1)
        losses.sum().backward(retain_graph=True)
    for name, wanted in truth_of(model, losses).items():
        torch.testing.assert_close(g[name].per_sample(), wanted, msg=name)


def test_a_hook_that_steps_when_a_gradient_is_there():
    """The optimizer in the backward: the weight may not change before its node has run."""

    def train(watched):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 5, 8)

        def step(p):
            p.data.add_(p.grad, alpha=-0.01)
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(4):
            if watched:
                with unsum.gradients(model, unsum.Norms()):
                    model(x).square().sum().backward()
            else:
                model(x).square().sum().backward()
        return model[0].weight.detach()

    torch.testing.assert_close(train(True), train(False))


def test_hooks_on_several_gradients_together():
    model, x, heard = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 5, 8), []
    torch.autograd.graph.register_multi_grad_hook([model[0].weight, model[1].weight], lambda g: heard.append(len(g)))
    for _ in range(4):
        with unsum.gradients(model, unsum.Norms()):
            model(x).square().sum().backward()
    assert heard == [2] * 4


class Joined(nn.Module):
    """Two branches, in one of which samples change places; a mask or a weight decides."""

    def __init__(self, join):
        super().__init__()
        self.a, self.b, self.join = nn.Linear(3, 3), nn.Linear(3, 2), join

    def forward(self, x, k):
        h = self.join(self.a(x), k)
        return self.join(self.b(torch.tanh(h)), k)


JOINS = {
    "where": lambda h, k: torch.where(k, h, h.flip(0)),
    "weights": lambda h, k: k.double() * h + (1 - k.double()) * h.flip(0),
    "rolls": lambda h, k: sum(h.roll(j, 0).masked_fill(k if j else ~k, 0) for j in (0, 2)),
    "stacked": lambda h, k: (torch.stack([h, h.flip(0)]) * torch.stack([k, ~k])).sum(0),
}


@pytest.mark.parametrize("name", JOINS)
def test_zeros_that_keep_samples_apart_are_not_remembered(name):
    model, x = Joined(JOINS[name]), torch.randn(N, 3)
    for k in (True, True, False, True):
        compare(model, lambda: model(x, torch.full((N, 1), k)))  # noqa: B023


def test_a_matrix_without_gradient_that_mixes_samples():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(3, 3)

        def forward(self, x, adjacency):
            return torch.tanh(adjacency @ self.q(x))

    model, x = Graph(), torch.randn(N, 3)
    for adjacency in (torch.eye(N), torch.eye(N), torch.eye(N)[[1, 0, 3, 2]]):
        compare(model, lambda: model(x, adjacency), interacting="exact")  # noqa: B023
    with pytest.raises(InteractionError):
        with unsum.gradients(model):
            model(x, torch.ones(N, N) / N).square().sum().backward()


def test_micro_batches_in_any_order_with_reducers():
    model = nn.Linear(3, 1, bias=False)
    small, large = torch.ones(1, 3), torch.full((2, 3), 5.0)
    with unsum.gradients(model, unsum.Norms(), unsum.Project(k=1), keep=True) as g:
        a, b = model(small).sum(), model(large).sum()
        b.backward()
        a.backward()
    torch.testing.assert_close(g[unsum.Norms].norms(), g.norms())
    torch.testing.assert_close(g[unsum.Project].matrix(), torch.cat([g["weight"].project(1)], 1))
    weighted = unsum.WeightedSum(torch.tensor([1.0, 0.0, 0.0]))
    with unsum.gradients(model, weighted):
        a, b = model(small).sum(), model(large).sum()
        a.backward(retain_graph=True)
        b.backward()
        a.backward()
    torch.testing.assert_close(weighted.sum()["weight"], torch.full((1, 3), 2.0))
    with pytest.raises(SamplesError, match="order"):
        with unsum.gradients(model, weighted):
            a, b = model(small).sum(), model(large).sum()
            b.backward()
            a.backward()


def test_what_nothing_reaches_is_there_with_zeros():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.b, self.c = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

        def forward(self, x, first):
            return (self.b if first else self.c)(x)

    model, x, found = Either(), torch.randn(3, 2), []
    for first in (True, False):
        reducers = unsum.Project(k=2), unsum.Norms(), unsum.SecondMoment(), unsum.WeightedSum(torch.ones(3))
        with unsum.gradients(model, *reducers) as g:
            model(x, first).square().sum().backward()
        found.append(g[unsum.Project].matrix())
        for names in (g[unsum.Norms].by_parameter(), g[unsum.SecondMoment].sum_squares(), g[unsum.WeightedSum].sum()):
            assert set(names) == {"b.weight", "c.weight"}
    assert found[0].shape == (3, 8) and not (found[0] @ found[1].T).any()


def test_lengths_and_documents_without_a_position():
    model = nn.Linear(3, 2)
    with unsum.gradients(model, samples=torch.tensor([[0, 0, 1, -1], [2, 2, 2, 1]])) as g:
        model(torch.randn(2, 4, 3)).sum().backward()
    assert g["weight"].lengths.tolist() == [2, 2, 3]
    with unsum.gradients(model, samples=unsum.packed(torch.tensor([0, 3, 3, 4, 7]))) as g:
        model(torch.randn(1, 7, 3)).square().sum().backward()
    assert g.ids.tolist() == [0, 1, 2, 3] and (g.norms() > 0).tolist() == [True, False, True, True]
    with pytest.raises(SamplesError, match=r"positions of shape \(6,\); the model was last given \(1, 7, 3\)"):
        with unsum.gradients(model, samples=unsum.packed(torch.tensor([0, 3, 6]))):
            model(torch.randn(1, 7, 3)).square().sum().backward()


def test_factors_of_a_tensor_that_was_changed_since():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with unsum.gradients(model) as g:
        model(x).sum().backward()
    before = g.norms()
    x.zero_()
    with pytest.raises(SamplesError, match="changed in place"):
        g.norms()
    assert (before > 0).all()


def test_a_custom_function_in_place_on_a_view():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            ctx.save_for_backward(x.clone())
            return x.mul_(x)

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return Square.apply(self.layer(x))

    model, x = Net(), torch.randn(4, 5, 6)
    compare(model, lambda: model(x))


def test_gradients_that_come_from_us_are_laid_out_as_torchs():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)).to(
        memory_format=torch.channels_last
    )
    plain, x = copy.deepcopy(model), torch.randn(4, 3, 9, 9)
    for _ in range(3):
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms()):
            model(x).square().sum().backward()
    plain(x).square().sum().backward()
    for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, wanted.grad)
        assert ours.grad.stride() == ours.stride() and not ours.grad._is_view()


def test_a_gradient_that_is_rounding_alone_is_no_gradient():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            attend = nn.functional.scaled_dot_product_attention
            mixed = attend(self.q(x)[:, None], self.k(x)[:, None], self.v(x)[:, None], is_causal=True)[:, 0]
            return mixed[torch.arange(len(x)), torch.zeros(len(x), dtype=torch.long)]

    for seed in range(20):
        torch.manual_seed(seed)
        model, x = First(), torch.randn(5, 7, 6)
        compare(model, lambda: model(x))  # noqa: B023


def test_small_things():
    table = nn.Embedding(5, 3)
    with unsum.gradients(table) as g:
        table(torch.randint(0, 5, (4, 2)).T).sum().backward()
    assert g["weight"].per_token().shape == (2, 4, 5, 3)
    frozen = nn.Linear(3, 2).requires_grad_(False)
    with unsum.gradients(frozen) as g:
        frozen(torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert g.norms().tolist() == [0] * 4
    model = nn.Linear(3, 2)
    with pytest.raises(SamplesError, match="no samples"):
        unsum.check(model, lambda m, x: m(x).sum(1), torch.randn(0, 3))
    for params in (["0.*"], "zzz"):
        with pytest.raises(OptionError, match="params"):
            with unsum.gradients(model, params=params):
                pass
    with unsum.gradients(model, loss_reduction="mean") as g:
        (model(torch.randn(5, 3)).square().sum(1).mean() + model.weight.square().sum()).backward()
    torch.testing.assert_close(g["weight"].shared(), 2 * model.weight.detach())


def test_token_norms_are_those_of_the_inputs_positions():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = nn.functional.adaptive_avg_pool1d(self.a(x).mT, 3).mT
            return self.c(torch.tanh(self.b(h)))

    model = Pooled()
    with unsum.gradients(model, unsum.TokenNorms()) as g:
        model(torch.randn(4, 7, 6)).square().sum().backward()
    assert g[unsum.TokenNorms].norms().shape == (4, 7)
    assert "a.weight" not in g[unsum.TokenNorms].left_out and "b.weight" in g[unsum.TokenNorms].left_out


MOVES = {
    "indexed": lambda h, order: h[order],
    "selected": lambda h, order: h.index_select(0, order),
    "gathered": lambda h, order: h.gather(0, order[:, None].expand_as(h)),
    "scattered": lambda h, order: torch.zeros_like(h).scatter(0, order[:, None].expand_as(h), h),
}


@pytest.mark.parametrize("name", MOVES)
def test_numbers_that_move_samples_are_part_of_what_is_remembered(name):
    """They say nothing at first: every sample stays where it is."""
    model, x, move = Joined(MOVES[name]), torch.randn(N, 3), MOVES[name]
    still, turned = torch.arange(N), torch.tensor([2, 0, 3, 1])
    for order in (still, still, still, turned, still):
        back = order.argsort()

        def call(order=order, back=back):
            h = move(model.a(x), order)
            return move(model.b(torch.tanh(h)), back)

        model.forward = lambda *_, call=call: call()
        compare(model, lambda: model(x))


def test_a_penalty_is_not_lost_where_we_supply_the_gradient():
    model, x = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 3)), torch.randn(N, 5, 8)
    plain = copy.deepcopy(model)
    for _ in range(4):
        losses = []
        for net in (model, plain):
            net.zero_grad()
            with unsum.gradients(net, *([unsum.Norms()] if net is model else [])):
                loss = net(x).square().sum() + sum(p.square().sum() for p in net[2].parameters())
                loss.backward()
            losses.append(loss)
        for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, wanted.grad)


# ---- plans and recordings -------------------------------------------------------------------------------------------


class Viewed(nn.Module):
    """A weight that is seen as another matrix, turned, and seen as a third."""

    def __init__(self):
        super().__init__()
        self.inner, self.p = nn.Linear(4, 6), nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        return torch.tanh(self.inner(x) @ self.p.view(2, 12).t().reshape(6, 4))


def test_a_view_of_a_weight_is_not_turned_as_the_weight_is():
    model = Viewed()
    for _ in range(6):
        x = torch.randn(N, 5, 4)
        compare(model, lambda x=x: model(x))
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms()):
            losses = model(x).flatten(1).square().sum(1)
            losses.sum().backward(retain_graph=True)
        torch.testing.assert_close(model.p.grad, truth_of(model, losses)["p"].sum(0))


def test_a_plan_that_was_refused_is_not_remembered(monkeypatch):
    """What the first batch refuses, later ones refuse."""
    from unsum.step.arrived import Arrived

    model, x, asked = nn.Linear(3, 2), torch.randn(N, 3), []

    def refuse(self, found):
        asked.append(None)
        raise SamplesError("on purpose")

    monkeypatch.setattr(Arrived, "check", refuse)
    for _ in range(5):
        with pytest.raises(SamplesError, match="on purpose"), unsum.gradients(model, unsum.Norms()):
            model(x).square().sum().backward()
    assert len(asked) == 5
    monkeypatch.undo()
    compare(model, lambda: model(x))


def test_a_first_backward_that_fails_proves_no_plan(monkeypatch):
    from unsum.step.arrived import Arrived

    model, x, checks = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(N, 3), []
    check = Arrived.check
    monkeypatch.setattr(Arrived, "check", lambda self, found: checks.append(None) or check(self, found))
    for fails in (True, True, False, False):

        def hook(grad, fails=fails):
            if fails:
                raise RuntimeError("on purpose")

        expected = pytest.raises(RuntimeError, match="on purpose") if fails else contextlib.nullcontext()
        with expected, unsum.gradients(model, unsum.Norms()):
            hidden = model[0](x)
            hidden.register_hook(hook)
            model[2](model[1](hidden)).square().sum().backward()
    assert len(checks) == 1  # of the first that came to its end


class Scaled(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.p = nn.Parameter(torch.randn(size))

    def forward(self, x):
        return torch.tanh(x * self.p)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("model", "change", "shape"),
    [
        (Scaled(4), lambda m: setattr(m, "p", nn.Parameter(torch.randn(1))), (4,)),
        (Scaled(1), lambda m: setattr(m, "p", nn.Parameter(torch.randn(4))), (4,)),
        (
            nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.Flatten(), nn.Linear(16, 2)),
            lambda m: m.__setitem__(0, nn.Conv2d(1, 4, 2, stride=2)),
            (1, 5, 5),
        ),
        (
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)),
            lambda m: setattr(m[0], "bias", nn.Parameter(torch.randn(1))),
            (4,),
        ),
    ],
    ids=["fewer", "more", "a kernel", "a bias"],
)
def test_a_parameter_of_the_same_name_and_another_shape(model, change, shape, grad):
    model = copy.deepcopy(model).double()
    for k in range(8):
        if k == 4:
            change(model)
        x = torch.randn(N, *shape)
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms(), grad=grad) as g:
            losses = model(x).flatten(1).square().sum(1)
            losses.sum().backward(retain_graph=True)
        norms = g[unsum.Norms].by_parameter()
        for name, wanted in truth_of(model, losses).items():
            torch.testing.assert_close(norms[name], wanted.flatten(1).square().sum(1), msg=name)


def test_a_sum_over_samples_is_not_taken_for_parts_of_norms():
    """A bias whose gradients are too many to wait for others."""
    model = nn.Sequential(nn.Linear(16, 3072), nn.ReLU(), nn.Linear(3072, 4)).float()
    for _ in range(7):
        x = torch.randn(32, 16, dtype=torch.float32)
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms()) as g:
            losses = model(x).square().sum(1)
            losses.sum().backward(retain_graph=True)
        truth = truth_of(model, losses)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, truth[name].sum(0), rtol=1e-4, atol=1e-5)
            norms = g[unsum.Norms].by_parameter()[name]
            torch.testing.assert_close(norms, truth[name].flatten(1).square().sum(1), rtol=1e-4, atol=1e-6)


def test_a_checkpoint_that_is_switched_on_in_a_loop_works_after_one_refusal():
    from torch.utils.checkpoint import checkpoint

    inner = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    class Model(nn.Module):
        checkpointed = False

        def __init__(self):
            super().__init__()
            self.inner, self.last = inner, nn.Linear(4, 2)

        def forward(self, x):
            x = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
            return self.last(x)

    model, failed = Model(), 0
    for k in range(8):
        model.checkpointed = k > 3
        x = torch.randn(N, 4)
        try:
            with unsum.gradients(model, unsum.Norms()) as g:
                losses = model(x).square().sum(1)
                losses.sum().backward()
        except torch.utils.checkpoint.CheckpointError:
            failed += 1
            continue
        truth = truth_of(model, model(x).square().sum(1))
        wanted = sum(each.flatten(1).square().sum(1) for each in truth.values())
        torch.testing.assert_close(g[unsum.Norms].sq_norms(), wanted)
    assert failed <= 1
