"""Reducers say what they want: one that is written outside unsum is served by the same lanes as unsum's own.
And unsum's own, over micro-batches in any order, parameters that nothing reaches, and positions that a layer pools."""

import pytest
import torch
from reference import per_sample_gradients
from torch import nn

import unsum
from nets import in_float64
from unsum.errors import SamplesError
from unsum.reducers import SQ_NORMS, Reading

WIDTH, N, T = 6, 4, 5


class Squares(Reading):
    """The squared norms of every parameter, as they come."""

    wants, sums, power = SQ_NORMS, True, 2

    def reset(self):
        super().reset()
        self.came = []

    def read(self, factors):
        return factors.sq_norms()

    def receive(self, names, value):
        self.came.append((tuple(names), value))

    def by_parameter(self):
        parts = [
            zip(names, value.view(len(names), -1, value.shape[-1]).sum(1), strict=True) for names, value in self.came
        ]
        return {name: own for pairs in parts for name, own in pairs}


class Deltas(Reading):
    """The sum of each sample's gradient over the columns of a parameter: numbers that no reducer of unsum's reads."""

    wants, power = "rows", 1

    def reset(self):
        super().reset()
        self.found = {}

    def read(self, factors):
        return factors.per_sample().flatten(2).sum(2) if len(factors.shape) > 1 else factors.per_sample()

    def receive(self, names, value):
        self.found[names[0]] = value


def layers():
    torch.manual_seed(0)
    inner = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())]
    return nn.Sequential(*inner, nn.Linear(WIDTH, 3)).double()


def loss(model, x):
    return model(x).square().sum()


def test_squared_norms_for_a_reducer_of_ones_own(caplog):
    model = layers()
    caplog.set_level("INFO", logger="unsum")
    for _ in range(6):
        x = torch.randn(N, T, WIDTH, dtype=torch.float64)
        each = per_sample_gradients(model, loss, x)
        model.zero_grad()
        with unsum.gradients(model, own := Squares(), scaler=None) as g:
            loss(model, x).backward()
        found = g[own].by_parameter()
        assert found.keys() == each.keys()
        for name, values in each.items():
            torch.testing.assert_close(found[name], values.flatten(1).square().sum(1), msg=name)
            torch.testing.assert_close(model.get_parameter(name).grad, values.sum(0), msg=name)
    assert max(len(names) for names, _ in own.came) > 1  # layers of one shape came together


def test_other_numbers_for_a_reducer_of_ones_own():
    model = layers()
    for scale in (None, None, None, None, 8.0, 8.0):
        x = torch.randn(N, T, WIDTH, dtype=torch.float64)
        each = per_sample_gradients(model, loss, x)
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        with unsum.gradients(model, own := Deltas(), unsum.Norms(), scaler=scaler) as g:
            value = loss(model, x)
            (value if scaler is None else scaler.scale(value)).backward()
        for name, values in each.items():
            torch.testing.assert_close(g[own].found[name], values.flatten(2).sum(2) if values.dim() > 2 else values)


@pytest.mark.parametrize("parent", [unsum.Norms, unsum.TokenNorms, unsum.Project, unsum.WeightedSum])
def test_a_subclass_that_takes_in_its_own_way_is_given_every_parameter(parent):
    taken = []

    class Own(parent):
        def take(self, name, factors):
            taken.append(name)
            super().take(name, factors)

    assert Own.wants is None and Own.sums is False
    model = layers()
    for _ in range(5):
        taken.clear()
        reducer = Own(torch.ones(N)) if parent is unsum.WeightedSum else Own()
        with unsum.gradients(model, reducer):
            loss(model, torch.randn(N, T, WIDTH, dtype=torch.float64)).backward()
        assert sorted(taken) == sorted(name for name, _ in model.named_parameters())


def test_a_subclass_that_takes_nothing_otherwise_is_served_as_its_parent():
    class Named(unsum.Norms):
        def largest(self):
            return int(self.norms().argmax())

    assert Named.wants == SQ_NORMS and Named.sums
    model, x = layers(), torch.randn(N, T, WIDTH, dtype=torch.float64)
    with unsum.gradients(model, Named()) as g:
        loss(model, x).backward()
    each = torch.cat([v.flatten(1) for v in per_sample_gradients(model, loss, x).values()], 1)
    assert g[Named].largest() == int(each.norm(dim=1).argmax())


@pytest.mark.parametrize("method", ["take", "read"])
def test_a_class_beside_the_reducer_may_take_in_its_own_way(method):
    class Weights:
        def take(self, name, factors):
            if not name.endswith("bias"):
                super().take(name, factors)

    class Doubled:
        def read(self, factors):
            return 4 * super().read(factors)

    class Mixed(Weights if method == "take" else Doubled, unsum.Norms):
        pass

    model = layers()
    for _ in range(5):
        x = torch.randn(N, T, WIDTH, dtype=torch.float64)
        each = per_sample_gradients(model, loss, x)
        with unsum.gradients(model, Mixed()) as g:
            loss(model, x).backward()
        own = {name: values for name, values in each.items() if method == "read" or not name.endswith("bias")}
        norms = torch.cat([values.flatten(1) for values in own.values()], 1).norm(dim=1)
        torch.testing.assert_close(g[Mixed].norms(), norms if method == "take" else 2 * norms)


def test_a_backward_that_fails_is_taken_back_also_where_numbers_are_added_in_place():
    class Total(Reading):
        wants, power = "total", 2

        def reset(self):
            super().reset()
            self.total, self.names = torch.zeros((), dtype=torch.float64), set()

        def read(self, factors):
            return factors.sq_norms()

        def receive(self, names, value):
            self.total += value.sum()
            self.names.update(names)

    model, x = layers(), torch.randn(N, T, WIDTH, dtype=torch.float64)
    found = {}
    for fails in (False, True, False):
        with unsum.gradients(model, Total()) as g:
            if fails:
                handle = model[4].register_full_backward_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    loss(model, x.clone().requires_grad_()).backward()
                handle.remove()
                assert float(g[Total].total) == 0 and not g[Total].names
            loss(model, x).backward()
        found.setdefault(fails, []).append(float(g[Total].total))
    assert found[True][0] == pytest.approx(found[False][0]) == pytest.approx(found[False][1])


@in_float64()
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


@in_float64()
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


@in_float64()
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


class Crossed(nn.Module):
    """Layers that are called in another order than that in which they are registered, with a tied weight."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.middle = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle.weight = self.last.weight

    def forward(self, x):
        return self.last(self.middle(self.scale(self.first(x)).tanh()).tanh())


@pytest.mark.parametrize("engine", ["auto", "graph"])
def test_results_by_parameter_come_in_the_models_order(engine):
    torch.manual_seed(0)
    model, x = Crossed(), torch.randn(N, T, WIDTH)
    reads = {
        unsum.Norms(): lambda r: r.by_parameter(),
        unsum.Project(k=2): lambda r: r.by_parameter(),
        unsum.WeightedSum(torch.ones(2 * N)): lambda r: r.sum(),
        unsum.WeightedSum(lambda norms: 1 / norms): lambda r: r.sum(),
        unsum.SecondMoment(): lambda r: r.sum_squares(),
        unsum.Kronecker(): lambda r: r.factors(),
    }
    for _ in range(3):  # learnt, remembered, and remembered once more
        with unsum.gradients(model, *reads, engine=engine, keep=True) as g:
            for _ in range(2):
                model(x).square().sum().backward()
    names = [name for name, _ in model.named_parameters()]
    assert list(g.sum()) == list(g) == names
    for reducer, read in reads.items():
        found = list(read(reducer))
        assert found == [name for name in names if name in found], type(reducer).__name__
        assert len(found) == len(names) or isinstance(reducer, unsum.Kronecker)
        if getattr(reducer, "clips", False) and engine == "auto":
            assert list(reducer.chosen) == names
