"""Models with graph breaks: each part that torch compiles runs compiled with taps of its own, and what comes of all is
what one sample at a time gives."""

import gc

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from compiled_nets import assert_norms, loss, norms_of


def ids(n, t=6, seed=0):
    return torch.randint(11, (n, t), generator=torch.Generator().manual_seed(seed))


@torch._dynamo.disable
def outside(h):
    return (h * 1.5).sin()


@torch._dynamo.disable
def printed(h):
    print("outside")
    return h


BREAKS = {
    "graph_break": lambda h: (torch._dynamo.graph_break(), h)[1],
    "print": lambda h: (print("inside"), h)[1],
    "if": lambda h: h * 2 if h.square().sum() > 1e9 else h,
    "disabled": printed,
    "computed outside": outside,
}


class Broken(nn.Module):
    """A graph break in the middle; a parameter that nothing uses."""

    def __init__(self, how="graph_break"):
        super().__init__()
        self.tokens, self.norm, self.up = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 12)
        self.gate, self.down, self.head = nn.Parameter(torch.randn(8)), nn.Linear(12, 8), nn.Linear(8, 11)
        self.unused = nn.Linear(2, 2)
        self.between = BREAKS[how]

    def forward(self, ids):
        h = self.norm(self.tokens(ids))
        h = self.between(h)
        return self.head(h + self.gate * self.down(F.gelu(self.up(h))))


def build(make, **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().double()
    return model, torch.compile(model, **{"backend": "aot_eager", **options})


def assert_all(model, compiled, x, **options):
    truth = per_sample_gradients(model, loss, x)
    assert_norms(norms_of(model, compiled, x, **options), truth)
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(grad, truth[name].sum(0), rtol=1e-8, atol=1e-10)


def in_parts(compiled_calls):
    return [int(each.getMessage().split("in ")[-1].split()[0]) for each in compiled_calls]


@pytest.mark.parametrize("how", BREAKS)
def test_ways_to_break_a_graph(how, compiled_calls):
    model, compiled = build(lambda: Broken(how))
    for k in range(5):
        assert_all(model, compiled, ids(4, seed=k))
    assert in_parts(compiled_calls) == [3 if how == "if" else 2] * 3


@pytest.mark.parametrize("make", [Broken, lambda: Loop()], ids=["parts", "a loop"])
def test_a_module_that_compiled_itself(make, compiled_calls):
    plain, _ = build(make)
    model, _ = build(make)
    model.compile(backend="aot_eager")
    for k in range(4):
        truth = per_sample_gradients(plain, loss, ids(4, seed=k))
        assert_norms(norms_of(model, model, ids(4, seed=k)), truth)
    assert len(compiled_calls) == 2


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_several_shapes(dynamic, compiled_calls):
    model, compiled = build(Broken, dynamic=dynamic)
    shapes = [(4, 6), (3, 6), (5, 4)]
    for k, (n, t) in enumerate([*(shape for shape in shapes for _ in range(3)), *shapes, *reversed(shapes)]):
        before = len(compiled_calls)
        assert_all(model, compiled, ids(n, t, seed=k))
        assert k < 9 or len(compiled_calls) == before + 1
    if dynamic is not False:
        before = len(compiled_calls)
        assert_all(model, compiled, ids(7, 6))  # a size that was never seen
        assert len(compiled_calls) == before + 1


def test_as_many_samples_as_positions(compiled_calls):
    """Which size is which cannot be told while they are equal; later it can."""
    model, compiled = build(Broken, dynamic=True)
    shapes = [(6, 6)] * 4 + [(4, 6)] * 3 + [(6, 6), (6, 4), (6, 4), (6, 4), (4, 6), (6, 6)]
    for k, (n, t) in enumerate(shapes):
        tokens = unsum.TokenNorms()
        x = ids(n, t, seed=k)
        assert_all(model, compiled, x)
        with unsum.gradients(compiled, tokens):
            loss(compiled, x).backward()
        with unsum.gradients(model, wanted := unsum.TokenNorms()):
            loss(model, x).backward()
        torch.testing.assert_close(tokens.norms(), wanted.norms(), rtol=1e-8, atol=1e-10)
    assert len(compiled_calls) >= 8


@pytest.mark.parametrize("grad", [True, False], ids=["with .grad", "without"])
def test_all_reducers_at_once(grad, compiled_calls):
    model, compiled = build(Broken)
    for k, n in enumerate((4, 4, 4, 4, 3, 3, 3)):
        x, w = ids(n, seed=k), torch.rand(n, dtype=torch.float64)
        made = {}
        for which in (compiled, model):
            model.zero_grad()
            norms, weighted, moment = unsum.Norms(), unsum.WeightedSum(w), unsum.SecondMoment()
            made[which] = unsum.TokenNorms(), unsum.Project(k=2)
            with unsum.gradients(which, norms, weighted, moment, *made[which], grad=grad):
                loss(which, x).backward()
            truth = per_sample_gradients(model, loss, x)
            assert_norms(norms, truth)
            for name, value in weighted.sum().items():
                wanted = torch.einsum("n,n...->...", w, truth[name])
                torch.testing.assert_close(value, wanted, rtol=1e-8, atol=1e-10)
                squares = moment.sum_squares()[name]
                torch.testing.assert_close(squares, truth[name].square().sum(0), rtol=1e-8, atol=1e-10)
            if not grad:
                assert all(parameter.grad is None for parameter in model.parameters())
        (tokens, project), (tokens_eager, project_eager) = made.values()
        torch.testing.assert_close(tokens.norms(), tokens_eager.norms(), rtol=1e-8, atol=1e-10)
        assert sorted(tokens.left_out) == sorted(tokens_eager.left_out)
        torch.testing.assert_close(project.matrix(), project_eager.matrix(), rtol=1e-8, atol=1e-10)
    assert len(compiled_calls) >= 4


def test_micro_batches_and_chosen_parameters(compiled_calls):
    model, compiled = build(Broken)
    for k in range(4):
        first, second = ids(3, seed=2 * k), ids(3, seed=2 * k + 1)
        norms, weighted = unsum.Norms(), unsum.WeightedSum(w := torch.rand(6, dtype=torch.float64))
        with unsum.gradients(compiled, norms, weighted, params="*.weight"):
            if k < 2:
                loss(compiled, first).backward()
                loss(compiled, second).backward()
            else:  # both forwards come first
                losses = loss(compiled, first), loss(compiled, second)
                losses[0].backward()
                losses[1].backward()
        truth = per_sample_gradients(model, loss, torch.cat([first, second]))
        assert_norms(norms, {name: each for name, each in truth.items() if name.endswith("weight")})
        for name, value in weighted.sum().items():
            torch.testing.assert_close(value, torch.einsum("n,n...->...", w, truth[name]), rtol=1e-8, atol=1e-10)
    assert len(compiled_calls) >= 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, h):
        mixed = self.up(self.norm(h))
        torch._dynamo.graph_break()
        return h + self.down(F.gelu(mixed))


class Blocks(nn.Module):
    """Blocks that are alike: torch compiles the first and uses it for all."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.one, self.two, self.three = Block(), Block(), Block()

    def forward(self, ids):
        h = self.one(self.tokens(ids))
        h = self.two(h)
        h = self.three(h)
        return self.head(h)


@pytest.mark.parametrize("reducer", [unsum.Norms, lambda: unsum.Project(k=2)], ids=["norms", "projections"])
def test_blocks_that_are_alike_share_what_is_compiled(reducer, compiled_calls):
    model, compiled = build(Blocks)
    for k, n in enumerate((4, 4, 4, 4, 3, 3, 3)):
        x, found = ids(n, seed=k), {}
        if reducer is unsum.Norms:
            assert_all(model, compiled, x)
            continue
        for which in (compiled, model):
            with unsum.gradients(which, made := reducer()):
                loss(which, x).backward()
            found[which] = made.matrix()
        torch.testing.assert_close(found[compiled], found[model], rtol=1e-8, atol=1e-10)
    assert len(compiled_calls) >= 3 and set(in_parts(compiled_calls)) == {8}


class Beside(Broken):
    """A layer outside all compiled parts."""

    def forward(self, ids):
        h = self.norm(self.tokens(ids))
        return self.head(self.down(self.apart(h)))

    @torch._dynamo.disable
    def apart(self, h):
        return self.up(h)


class Loop(nn.Module):
    """Torch compiles no loop that has a break inside: the embedding and the head are outside all compiled parts."""

    def __init__(self, tied=False):
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(11, 8), nn.ModuleList([Block() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        h = self.tokens(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


OUTSIDE = {"a layer": Beside, "a loop": Loop, "a loop, tied": lambda: Loop(tied=True)}


@pytest.mark.parametrize("grad", [True, False], ids=["with .grad", "without"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_layers_outside_all_parts(name, grad, compiled_calls):
    model, compiled = build(OUTSIDE[name])
    for k, n in enumerate((4, 4, 4, 4, 3, 3, 3, 4, 3)):
        x, w = ids(n, seed=k), torch.rand(n, dtype=torch.float64)
        truth, made = per_sample_gradients(model, loss, x), {}
        for which in (compiled, model):
            model.zero_grad()
            norms, weighted = unsum.Norms(), unsum.WeightedSum(w)
            made[which] = unsum.TokenNorms(), unsum.Project(k=2)
            with unsum.gradients(which, norms, weighted, *made[which], grad=grad, loss_reduction="mean"):
                (loss(which, x) / n).backward()
            assert_norms(norms, truth)
            for key, value in weighted.sum().items():
                wanted = torch.einsum("n,n...->...", w, truth[key])
                torch.testing.assert_close(value, wanted, rtol=1e-8, atol=1e-10)
                found = model.get_parameter(key).grad
                assert grad or found is None
                if found is not None:
                    torch.testing.assert_close(found, truth[key].mean(0), rtol=1e-8, atol=1e-10)
        (tokens, project), (tokens_eager, project_eager) = made.values()
        torch.testing.assert_close(tokens.norms(), tokens_eager.norms(), rtol=1e-8, atol=1e-10)
        assert sorted(tokens.left_out) == sorted(tokens_eager.left_out)
        torch.testing.assert_close(project.matrix(), project_eager.matrix(), rtol=1e-8, atol=1e-10)
    assert len(compiled_calls) >= 5


@pytest.mark.parametrize("make", [Broken, Loop], ids=["parts", "a loop"])
def test_nothing_piles_up_over_many_steps_of_one_block(make, compiled_calls):
    model, compiled = build(make)
    live = []
    with unsum.gradients(compiled, unsum.Project(k=2), grad=False):
        for k in range(30):
            loss(compiled, ids(4, seed=k)).backward()
            if k in (9, 29):
                gc.collect()
                live.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
    held = sum(1 for _ in model.parameters()) + 6  # of each batch, what was asked for, and whose views these are
    assert live[1] - live[0] <= 20 * held + 20 and len(compiled_calls) == 28


class Pooled(nn.Module):
    """A part whose parameters have no positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.body, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, ids):
        h = self.body(self.tokens(ids)).tanh().mean(1)
        torch._dynamo.graph_break()
        return self.head(h)


def test_tokens_of_a_part_without_positions(compiled_calls):
    model, compiled = build(Pooled)
    for k in range(4):
        found, wanted = unsum.TokenNorms(), unsum.TokenNorms()
        for which, reducer in ((compiled, found), (model, wanted)):
            with unsum.gradients(which, reducer):
                loss(which, ids(4, seed=k)).backward()
        torch.testing.assert_close(found.norms(), wanted.norms(), rtol=1e-8, atol=1e-10)
        assert sorted(found.left_out) == sorted(wanted.left_out) == ["head.bias", "head.weight"]
    assert len(compiled_calls) == 2


class Turns(nn.Module):
    """Another way in other batches; it counts its calls, in a buffer and beside it."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.count = 0

    @torch._dynamo.disable
    def tick(self):
        self.count += 1

    def forward(self, x):
        self.calls += 1
        h = self.first(x).tanh()
        self.tick()
        if x.sum() > 0:
            return self.last(self.left(h))
        return self.last(self.right(h).sin())


def test_a_way_that_was_not_learnt_is_taken_from_the_start(compiled_calls):
    model, compiled = build(Turns)
    seen = []
    for k, sign in enumerate([1, 1, 1, 1, -1, -1, -1, 1, -1, 1, -1]):
        x = sign * torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        truth = per_sample_gradients(model, loss, x)
        before = len(compiled_calls)
        model.zero_grad()
        with unsum.gradients(compiled, unsum.Norms()) as g:
            loss(compiled, x).backward()
        assert_norms(g[unsum.Norms], truth)
        assert (model.calls, model.count) == (k + 1, k + 1)
        seen.append(len(compiled_calls) > before)
    assert seen[2:4] == [True, True] and not seen[4] and seen[7:] == [True] * 4


class Writing(Turns):
    """It changes its input in place before it turns; it may fail by itself."""

    def forward(self, x):
        turns, fails = x.sum() > 0, x.sum() > 100
        x.mul_(2)
        h = self.first(x).tanh()
        self.tick()
        if fails:
            raise ValueError("of the model")
        return self.last(self.left(h) if turns else self.right(h))


def test_what_cannot_be_taken_again_is_an_error_and_then_runs_eagerly(compiled_calls):
    model, compiled = build(Writing)
    values = lambda k: torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    for k in range(4):
        truth = per_sample_gradients(model, loss, values(k))
        assert_norms(norms_of(model, compiled, values(k)), truth)
    assert len(compiled_calls) == 2
    model.zero_grad()
    with pytest.raises(unsum.errors.UnsupportedError, match="changed its inputs in place"):
        norms_of(model, compiled, -values(4))
    assert all(parameter.grad is None for parameter in model.parameters())
    truth = per_sample_gradients(model, loss, -values(4))
    assert_norms(norms_of(model, compiled, -values(4)), truth)
    assert model.count == 5 and len(compiled_calls) == 2


def test_an_error_of_the_model_is_its_own(compiled_calls):
    model, compiled = build(Writing)
    for _ in range(3):
        norms_of(model, compiled, torch.ones(5, 4, dtype=torch.float64))
    assert len(compiled_calls) == 1
    x = torch.full((5, 4), 10.0, dtype=torch.float64)
    with pytest.raises(ValueError, match="of the model"):
        norms_of(model, compiled, x)
    torch.testing.assert_close(x, torch.full_like(x, 20.0))  # it ran once


class Rolls(nn.Module):
    """Between its parts samples change places, or not."""

    def __init__(self):
        super().__init__()
        self.shift, self.first, self.last = 0, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.rolled(self.first(x).tanh()))

    @torch._dynamo.disable
    def rolled(self, h):
        return h.roll(self.shift, 0)


def test_what_moves_samples_between_parts_is_not_overlooked(compiled_calls):
    model, compiled = build(Rolls)
    x = torch.randn(4, 4, dtype=torch.float64)
    for shift in (0, 0, 0, 1, 0):
        model.shift = shift
        if shift:  # sample n of the output is another sample's input
            with pytest.raises(unsum.errors.SamplesError, match="samples of the loss"):
                norms_of(model, compiled, x)
        else:
            assert_all(model, compiled, x)
    assert compiled_calls


@pytest.mark.slow
def test_inductor(compiled_calls):
    model, compiled = build(Blocks, backend="inductor")
    model.float()
    for k, n in enumerate((4, 4, 4, 5, 5, 6)):
        x = ids(n, seed=k)
        truth = per_sample_gradients(model, loss, x)
        found = norms_of(model, compiled, x).by_parameter()
        for key, each in truth.items():
            torch.testing.assert_close(found[key].double(), each.flatten(1).square().sum(1), rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(model.get_parameter(key).grad.double(), each.sum(0), rtol=1e-3, atol=1e-3)
    assert len(compiled_calls) >= 2


# ---- what runs eagerly, and says so ---------------------------------------------------------------------------------


class Tied(Broken):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight


class Handed(Broken):
    """A weight that is computed before the break and used after it."""

    def forward(self, ids):
        weight, h = self.up.weight.T, self.tokens(ids)
        torch._dynamo.graph_break()
        return self.head(self.down(h @ weight))


class Viewed(Broken):
    """The same, where nobody sees how the weight is made."""

    def forward(self, ids):
        weight, h = self.turned(), self.tokens(ids)
        return self.head(self.down(F.linear(h, weight.t())))

    @torch._dynamo.disable
    def turned(self):
        return self.up.weight.t()


class Half(Broken):
    """A weight that is used in a part and outside of all parts."""

    def forward(self, ids):
        h = self.apart(self.norm(self.tokens(ids)))
        return self.head(self.down(self.up(h)))

    @torch._dynamo.disable
    def apart(self, h):
        return h + self.head(h) @ self.head.weight


class Nested(Broken):
    """Something inside is compiled by itself."""

    def forward(self, ids):
        h = self.norm(self.tokens(ids))
        return self.head(self.down(self.apart(h)))

    @torch._dynamo.disable(recursive=False)
    def apart(self, h):
        return COMPILED(self.up(h))


COMPILED = torch.compile(lambda h: h.sin() * 2, backend="aot_eager")


class Writes(Broken):
    """A part changes in place what another has computed."""

    def forward(self, ids):
        h = self.tokens(ids) * 1.0
        torch._dynamo.graph_break()
        h.mul_(2)
        return self.head(h)


EAGER = {
    Tied: "tokens.weight meets data in two compiled parts",
    Handed: "a weight that is computed in one compiled part is used in another",
    Viewed: "a weight that is computed in one compiled part is used in another",
    Nested: "compiled by itself",
    Half: "meets data in a compiled part, and outside of it",
    Writes: "changes in place",
}


@pytest.mark.parametrize("make", EAGER, ids=lambda make: make.__name__)
def test_what_one_part_alone_does_not_know_runs_eagerly(make, compiled_calls, caplog):
    model, compiled = build(make)
    for k in range(4):
        assert_all(model, compiled, ids(4, seed=k))
    said = " ".join(record.getMessage() for record in caplog.records)
    assert not compiled_calls and EAGER[make] in said and "eagerly" in said


class Whole(unsum.Norms):
    """A reducer whose tap is not said to add up over parts."""

    def tap(self, parameters):
        tap = super().tap(parameters)
        tap.by_parts = False
        return tap


def test_a_reducer_that_reads_a_model_as_a_whole_runs_eagerly(compiled_calls, caplog):
    model, compiled = build(Broken)
    for k in range(4):
        with unsum.gradients(compiled, norms := Whole()):
            loss(compiled, ids(4, seed=k)).backward()
        assert_norms(norms, per_sample_gradients(model, loss, ids(4, seed=k)))
    assert not compiled_calls and "Whole reads a model as a whole" in caplog.text


class TwoOutputs(Broken):
    def forward(self, ids):
        h = self.norm(self.tokens(ids))
        torch._dynamo.graph_break()
        return h, self.head(h)


def test_a_loss_of_other_parts_is_refused_and_then_runs_eagerly(compiled_calls):
    model, compiled = build(TwoOutputs)
    both = lambda model, x: sum(out.square().sum() for out in model(x))
    first = lambda model, x: model(x)[0].square().sum()
    for k in range(3):
        with unsum.gradients(compiled, unsum.Norms()) as g:
            both(compiled, ids(4, seed=k)).backward()
        assert_norms(g[unsum.Norms], per_sample_gradients(model, both, ids(4, seed=k)))
    assert len(compiled_calls) == 1
    model.zero_grad()
    with pytest.raises(unsum.errors.UnsupportedError, match="all parts of the compiled model"):
        with unsum.gradients(compiled, unsum.Norms()):
            first(compiled, ids(4)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    with unsum.gradients(compiled, unsum.Norms()) as g:
        first(compiled, ids(4)).backward()
    assert_norms(g[unsum.Norms], per_sample_gradients(model, first, ids(4)))


@pytest.mark.parametrize("make", [Broken, Loop], ids=["parts", "layers between"])
def test_a_backward_towards_some_parameters_is_refused(make, compiled_calls):
    model, compiled = build(make)
    chosen = [p for name, p in model.named_parameters() if not name.startswith("unused")]
    for k in range(3):
        with unsum.gradients(compiled, norms := unsum.Norms()):
            torch.autograd.grad(loss(compiled, ids(4, seed=k)), chosen)
    assert_norms(norms, per_sample_gradients(model, loss, ids(4, seed=2)))
    assert len(compiled_calls) == 1
    with pytest.raises(unsum.errors.UnsupportedError, match="graph breaks"), unsum.gradients(compiled, unsum.Norms()):
        torch.autograd.grad(loss(compiled, ids(4)), [model.head.weight])


@pytest.mark.parametrize("dynamic", [None, True], ids=["as it comes", "dynamic"])
def test_second_moments_of_other_batch_sizes(dynamic, compiled_calls):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = self.first(x).tanh()
            torch._dynamo.graph_break()
            return self.last(h)

    torch.manual_seed(0)
    model = Broken().double()
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic)
    for n, t in [(6, 5)] * 3 + [(4, 5)] * 3 + [(6, 5)] * 2 + [(3, 7)] * 3:
        x = torch.randn(n, t, 3, dtype=torch.float64)
        truth = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
        with unsum.gradients(compiled, unsum.SecondMoment()) as g:
            compiled(x).square().sum().backward()
        for name, value in g[unsum.SecondMoment].sum_squares().items():
            torch.testing.assert_close(value, truth[name].square().sum(0))
    assert compiled_calls
