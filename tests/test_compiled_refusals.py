"""Compiled models that run eagerly and say so, and uses of their outputs that are refused."""

import contextlib

import pytest
import torch
import torch.utils.checkpoint
from reference import norms_of_all, per_sample_gradients
from torch import nn

import unsum
from compiled_nets import Attention, assert_norms, build, ids, loss, norms_of
from unsum.compiled import tapped
from unsum.errors import InteractionError, SamplesError, UnsupportedError

# ---- what runs eagerly, and says so ---------------------------------------------------------------------------------


def messages(caplog):
    return " ".join(record.getMessage() for record in caplog.records)


class NoRule(nn.Module):
    """A weight in an operation for which there is no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(6, 4), nn.Parameter(torch.rand(4))

    def forward(self, x):
        return torch.atan2(self.first(x), self.scale)


def test_without_a_rule_it_runs_eagerly(compiled_calls, caplog):
    model = NoRule().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 6, dtype=torch.float64)
    for _ in range(4):
        assert_norms(norms_of(model, compiled, x), per_sample_gradients(model, loss, x))
    assert not compiled_calls and "Atan2Backward0" in messages(caplog) and "eagerly" in messages(caplog)


def test_factors_run_eagerly(compiled_calls):
    model, compiled, batch = build("attention")
    x = batch(4)
    truth = per_sample_gradients(model, loss, x)
    for _ in range(3):
        with unsum.gradients(compiled) as g:
            loss(compiled, x).backward()
        torch.testing.assert_close(g["gate"].per_sample(), truth["gate"])
    assert not compiled_calls


class Breaks(Attention):
    def forward(self, ids):
        torch._dynamo.graph_break()
        return super().forward(ids)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_graph_break_is_no_error(fullgraph, compiled_calls):
    """It runs in parts (test_compiled_parts.py), also where torch itself would refuse: a block never did."""
    model = Breaks().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    for k in range(4):
        x = ids(3, seed=k)
        assert_norms(norms_of(model, compiled, x), per_sample_gradients(model, loss, x))
    assert len(compiled_calls) == 2


class Rolls(nn.Module):
    """Samples change places, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.first, self.last = 0, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.first(x).tanh().roll(self.shift, 0))


def test_an_attribute_that_moves_samples_is_not_overlooked(compiled_calls):
    """With a roll, sample n of the output is another sample's input."""
    model = Rolls().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 4, dtype=torch.float64)
    for shift in (0, 0, 0, 1, 1, 1, 0):
        model.shift = shift
        if shift:
            with pytest.raises(SamplesError, match="samples of the loss"):
                norms_of(model, compiled, x)
        else:
            assert_norms(norms_of(model, compiled, x), per_sample_gradients(model, loss, x))
    assert compiled_calls


def test_an_attribute_that_chooses_a_layer_is_not_overlooked(compiled_calls):
    """Torch runs what it has compiled for one layer also for the other."""
    model, compiled, batch = build("choosing")
    for step in range(16):
        model.active = (model.a, model.b)[step // 4 % 2]
        x = batch(4, step)
        assert_norms(norms_of(model, compiled, x), per_sample_gradients(model, loss, x))
    assert len(compiled_calls) == 13  # two calls of the one layer ran eagerly, and one of the other


def test_hooks_on_what_compile_has_returned_are_called(compiled_calls):
    model, compiled, batch = build("choosing")
    compiled.register_forward_hook(lambda module, args, output: output * 2)
    for step in range(4):
        x = batch(4, step)
        doubled = lambda model, x: loss(lambda x: 2 * model(x), x)
        assert_norms(norms_of(model, compiled, x), per_sample_gradients(model, doubled, x))
    assert not compiled_calls


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_hooks_on_all_modules_are_called(compiled_calls):
    """Torch calls them for what torch.compile has returned, too."""
    model, compiled, batch = build("choosing")
    doubled = lambda model, x: loss(lambda x: 2 * model(x), x)
    for step in range(5):
        x = batch(4, step)
        truth = per_sample_gradients(model, doubled if step > 2 else loss, x)
        doubling = lambda module, args, output: output * 2 if step > 2 and module is compiled else None  # noqa: B023
        handle = nn.modules.module.register_module_forward_hook(doubling)
        if step < 3:
            handle.remove()
        assert_norms(norms_of(model, compiled, x), truth)
        handle.remove()
    assert len(compiled_calls) == 1


def test_modes_are_learnt_apart(compiled_calls):
    """A batch norm that trains makes samples interact, compiled or not."""
    model, compiled, batch = build("images")
    x = batch(4)
    for _ in range(3):
        norms_of(model, compiled, x)
    assert len(compiled_calls) == 1
    model.train()
    with pytest.raises(InteractionError, match="interact"):
        norms_of(model, compiled, x)


# ---- refusals -------------------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.one(h), self.other(h)


def two_heads(compiled_calls):
    model = TwoHeads().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 4, dtype=torch.float64)
    for _ in range(3):
        with unsum.gradients(compiled, unsum.Norms()) as g:
            compiled(x)[0].square().sum().backward()
    truth = per_sample_gradients(model, lambda m, x: m(x)[0].square().sum(), x)
    assert_norms(g[unsum.Norms], truth)
    assert len(compiled_calls) == 1
    return model, compiled, x


def test_an_output_that_was_not_used_before_is_refused(compiled_calls):
    model, compiled, x = two_heads(compiled_calls)
    model.zero_grad()
    with pytest.raises(UnsupportedError, match="output of the compiled model"):
        with unsum.gradients(compiled, unsum.Norms()):
            one, other = compiled(x)
            (one.square().sum() + other.square().sum()).backward()
    assert all(p.grad is None for p in model.parameters())


def test_after_a_refusal_it_runs_eagerly(compiled_calls):
    model, compiled, x = two_heads(compiled_calls)
    both = lambda model, x: sum(out.square().sum() for out in model(x))
    with pytest.raises(UnsupportedError), unsum.gradients(compiled, unsum.Norms()):
        both(compiled, x).backward()
    for _ in range(3):
        with unsum.gradients(compiled, unsum.Norms()) as g:
            both(compiled, x).backward()
        assert_norms(g[unsum.Norms], per_sample_gradients(model, both, x))
    assert len(compiled_calls) == 2


def test_a_parameter_beside_the_model_is_refused(compiled_calls):
    model, compiled, x = two_heads(compiled_calls)
    model.zero_grad()
    with pytest.raises(UnsupportedError, match=r"body\.weight.*compiled"):
        with unsum.gradients(compiled, unsum.Norms()):
            (compiled(x)[0].square().sum() + model.body.weight.square().sum()).backward()
    assert all(p.grad is None for p in model.parameters())


def test_two_calls_in_one_backward_are_refused(compiled_calls):
    _, compiled, x = two_heads(compiled_calls)
    with pytest.raises(UnsupportedError, match="several calls of a compiled model"):
        with unsum.gradients(compiled, unsum.Norms()):
            (compiled(x)[0].sum() + compiled(x)[0].square().sum()).backward()


def test_marked_samples_are_refused_where_they_were_not_learnt(compiled_calls):
    _, compiled, x = two_heads(compiled_calls)
    with pytest.raises(UnsupportedError, match="compiled"):
        with unsum.gradients(compiled, unsum.Norms()):
            unsum.mark_samples(compiled(x)[0].square().sum(1)).sum().backward()


def test_a_tap_that_got_nothing_is_an_error(compiled_calls, monkeypatch):
    _, compiled, x = two_heads(compiled_calls)
    monkeypatch.setattr(tapped.Outlet, "_take", lambda self, results: None)
    norms = unsum.Norms()
    with pytest.raises(UnsupportedError, match="nothing in the tap"):
        with unsum.gradients(compiled, norms):
            compiled(x)[0].square().sum().backward()
    with pytest.raises(SamplesError, match="no backward"):
        norms.norms()


def test_a_failing_backward_is_taken_back(compiled_calls):
    _, compiled, x = two_heads(compiled_calls)
    norms = unsum.Norms()
    with unsum.gradients(compiled, norms):
        out = compiled(x)[0].square()
        out.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        compiled(x)[0].square().sum().backward()
    assert norms.norms().shape == (5,)


@pytest.mark.parametrize("how", ["create_graph", "is_grads_batched"])
def test_backwards_that_are_refused_in_eager_models_are_refused_in_compiled_ones(how, compiled_calls):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 4, dtype=torch.float64)
    for _ in range(3):
        with unsum.gradients(compiled, unsum.Norms(), grad=False):
            compiled(x).sum().backward()
    with unsum.gradients(compiled, norms := unsum.Norms()):
        out = compiled(x).sum(1)
        with pytest.raises(unsum.errors.UnsupportedError, match=how):
            if how == "create_graph":
                out.sum().backward(create_graph=True)
            else:
                torch.autograd.grad(out, list(model.parameters()), torch.eye(5).double(), is_grads_batched=True)
    assert norms.samples() == 0 and all(p.grad is None for p in model.parameters())
    assert len(compiled_calls) == 2


@pytest.mark.parametrize("same", [False, True], ids=["of two outputs", "of one output"])
def test_two_losses_with_a_backward_each(same, compiled_calls, caplog):
    """What leaves a compiled model is that of one loss: of two outputs it runs eagerly, in every step."""
    torch.manual_seed(0)
    model = TwoHeads().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(5):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        both = lambda m, x: m(x)[0].square().sum() + m(x)[0 if same else 1].sin().sum()
        wanted = per_sample_gradients(model, both, x)
        with unsum.gradients(compiled, sums := unsum.WeightedSum(torch.ones(5)), grad=False):
            outputs = compiled(x)
            outputs[0].square().sum().backward(retain_graph=True)
            outputs[0 if same else 1].sin().sum().backward()
        for name, each in wanted.items():
            torch.testing.assert_close(sums.sum()[name], each.sum(0))
    assert bool(compiled_calls) == same
    assert same or "have a backward each" in messages(caplog)


class InACheckpoint(nn.Module):
    """A layer whose input is turned inside a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_turned = nn.Linear(2, 1, bias=False), False

    def part(self, x):
        return self.layer(x.flip(0) if self.is_turned else x)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False)


class BetweenParts(InACheckpoint):
    """A layer whose input is turned in a function that torch does not compile."""

    @torch._dynamo.disable
    def moved(self, x):
        return x.flip(0) if self.is_turned else x

    def forward(self, x):
        return self.layer(self.moved(x))


@pytest.mark.parametrize("kind", [InACheckpoint, BetweenParts])
def test_rows_that_begin_to_move_where_no_node_shows_it(kind, compiled_calls):
    torch.manual_seed(0)
    model = kind().double()
    compiled = torch.compile(model, backend="aot_eager")
    for k in range(7):
        model.is_turned = k >= 4
        x, norms = torch.randn(3, 2, dtype=torch.float64), unsum.Norms()
        refused = pytest.raises(unsum.errors.UnknownSamples) if model.is_turned else contextlib.nullcontext()
        with refused, unsum.gradients(compiled, norms):
            compiled(x).sum().backward()
        if not model.is_turned:
            torch.testing.assert_close(norms.norms(), x.norm(dim=1))
    assert compiled_calls


class WithToken(nn.Module):
    """A class token before the others, as vision transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(torch.cat([self.token.expand(len(x), -1, -1), self.first(x)], 1).tanh())[:, 0]


def test_a_batch_of_one_sample_does_not_end_compiled_calls(compiled_calls):
    torch.manual_seed(0)
    model = WithToken().double()
    compiled = torch.compile(model, backend="aot_eager")
    ran = []
    for n in (8, 8, 8, 1, 1, 1, 8, 8):
        before, norms, x = len(compiled_calls), unsum.Norms(), torch.randn(n, 5, 4, dtype=torch.float64)
        with unsum.gradients(compiled, norms):
            compiled(x).square().sum().backward()
        ran.append(len(compiled_calls) > before)
        each = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
        wanted = norms_of_all(each)
        torch.testing.assert_close(norms.norms(), wanted)
    assert ran[2]
    assert ran[-1]


class Regional(nn.Module):
    """A model of which one block is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)

    def forward(self, x):
        h = self.first(x)
        return self.last(h + self.block(h))


@pytest.mark.parametrize("sizes", [(4, 4, 1), (1, 1, 4), (4, 1, 5, 1)], ids=str)
def test_a_forward_is_watched_past_a_block_that_is_compiled_by_itself(sizes):
    torch.manual_seed(0)
    model, same = Regional().double(), Regional().double()
    same.load_state_dict(model.state_dict())
    model.block.compile(backend="aot_eager")
    for n in sizes:
        x = torch.randn(n, 5, 4, dtype=torch.float64)
        found, wanted = unsum.TokenNorms(), unsum.TokenNorms()
        for each, tokens in ((model, found), (same, wanted)):
            with unsum.gradients(each, tokens):
                each(x).square().sum().backward()
        assert found.left_out == wanted.left_out
        torch.testing.assert_close(found.norms(), wanted.norms())


NUMBERS = torch.rand(6, dtype=torch.float64)


class WithConstants(nn.Module):
    """Parts that are given tensors which are neither parameters nor buffers, but were there before."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(4, 6), nn.Linear(6, 3), kind
        self.scale, self.listed = torch.rand(6, dtype=torch.float64), [torch.rand(6, dtype=torch.float64)]
        self.register_buffer("table", torch.rand(9, dtype=torch.float64))

    def forward(self, x):
        h = self.first(x).tanh()
        torch._dynamo.graph_break()
        if self.kind == "rows of a buffer":
            for _ in range(2):
                h = h * self.table[:6]
                torch._dynamo.graph_break()
        else:
            h = h * {"an attribute": self.scale, "in a list": self.listed[0], "of the file": NUMBERS}[self.kind]
        return self.last(h)


@pytest.mark.parametrize("kind", ["an attribute", "in a list", "of the file", "rows of a buffer"])
def test_parts_that_are_given_constants_run_compiled(kind, compiled_calls):
    torch.manual_seed(0)
    model = WithConstants(kind).double()
    compiled = torch.compile(model, backend="aot_eager")
    ran = []
    for n in (5, 5, 5, 5, 3, 3, 3, 5):
        before, norms, x = len(compiled_calls), unsum.Norms(), torch.randn(n, 4, dtype=torch.float64)
        with unsum.gradients(compiled, norms):
            compiled(x).square().sum().backward()
        ran.append(len(compiled_calls) > before)
        each = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
        wanted = norms_of_all(each)
        torch.testing.assert_close(norms.norms(), wanted)
    assert ran[3]
    assert ran[-1]
