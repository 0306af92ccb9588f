"""A checkpoint runs the forward again inside the backward: no call is counted twice, no edit is lost."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import unsum
from unsum.errors import SiteError, UnsupportedError


class Net(nn.Module):
    """A module that is called in two checkpoints and outside, and others that are called once."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.reentrant = reentrant

    def part(self, h):
        return self.shared(torch.tanh(self.shared(torch.tanh(h))))

    def forward(self, x):
        h = self.first(x)
        for _ in range(2):
            if self.reentrant is None:
                h = self.part(h)
            else:
                h = checkpoint(self.part, h, use_reentrant=self.reentrant)
        return self.last(torch.tanh(self.shared(h)))


SITES = ["shared:input", "shared:output", "shared:grad_output", "shared:grad_input", "last:grad_input"]
KINDS = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def run(net, x, block):
    net.zero_grad()
    with block as got:
        loss = net(x).square().sum()
        loss.backward()
    return got, [p.grad.clone() for p in net.parameters()]


@pytest.fixture
def pair():
    torch.manual_seed(0)
    net = Net()
    return net, torch.randn(3, 4)


@KINDS
def test_every_call_is_counted_once_with_its_own_values_and_gradients(pair, reentrant):
    net, x = pair
    truth, grads = run(net, x, unsum.capture(net, *SITES, "shared.weight:grad"))
    net.reentrant = reentrant
    got, again = run(net, x, unsum.capture(net, *SITES, "shared.weight:grad"))
    for site in SITES:
        ours, theirs = got.calls(site), truth.calls(site)
        assert len(ours) == len(theirs) == (1 if "last" in site else 5)
        for k, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            torch.testing.assert_close(one, other, msg=f"{site}@{k}")
    torch.testing.assert_close(got["shared.weight:grad"], truth["shared.weight:grad"])
    for one, other in zip(grads, again, strict=True):
        torch.testing.assert_close(one, other)


@KINDS
@pytest.mark.parametrize("site", ["shared:output", "shared:input", "shared:output@2", "shared:grad_output@1"])
def test_an_edit_inside_a_checkpoint_acts_on_the_same_call_both_times(pair, reentrant, site):
    net, x = pair
    verb = unsum.scale(1.5)
    _, truth = run(net, x, unsum.edit(net, {site: verb}))
    net.reentrant = reentrant
    _, grads = run(net, x, unsum.edit(net, {site: verb}))
    for one, other in zip(truth, grads, strict=True):
        torch.testing.assert_close(one, other)


@KINDS
def test_noise_inside_a_checkpoint_is_the_same_both_times(pair, reentrant):
    net, x = pair

    def noisy():
        return unsum.edit(net, {"shared:output": unsum.noise(0.5, torch.Generator().manual_seed(7))})

    _, truth = run(net, x, noisy())
    net.reentrant = reentrant
    _, grads = run(net, x, noisy())
    for one, other in zip(truth, grads, strict=True):
        torch.testing.assert_close(one, other)


@KINDS
def test_leaving_an_edit_inside_a_checkpoint_before_its_backward_is_refused(pair, reentrant):
    net, x = pair
    net.reentrant = reentrant
    with pytest.raises(SiteError, match="shared:output.*backward"):
        with unsum.edit(net, {"shared:output": unsum.scale(2.0)}):
            loss = net(x).sum()
    with pytest.raises(SiteError, match="shared:output.*backward"):
        loss.backward()
    # Outside any checkpoint an edited output may be differentiated afterwards.
    with unsum.edit(net, {"last:output": unsum.scale(2.0)}):
        loss = net(x).sum()
    loss.backward()
    # And a graph that nobody holds any more will not be walked.
    with unsum.edit(net, {"shared:output": unsum.scale(2.0)}):
        net(x)


@KINDS
def test_a_second_backward_after_the_block_is_refused_too(pair, reentrant):
    net, x = pair
    net.reentrant = reentrant
    with unsum.edit(net, {"shared:output": unsum.scale(2.0)}):
        loss = net(x).sum()
        loss.backward(retain_graph=True)
    with pytest.raises(SiteError, match="shared:output.*backward"):
        loss.backward()


@KINDS
def test_a_forward_that_was_run_before_the_block_is_left_alone(pair, reentrant):
    net, x = pair
    net.reentrant = reentrant
    net(x).sum().backward()
    truth = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    loss = net(x).sum()
    with unsum.edit(net, {"shared:output": unsum.zero()}, missing="ignore"):
        with unsum.capture(net, "shared:output", "shared:grad_output", missing="ignore") as got:
            loss.backward()
    assert got.calls("shared:output") == []
    for one, other in zip(truth, net.parameters(), strict=True):
        assert torch.equal(one, other.grad)


def test_checkpoints_inside_checkpoints():
    class Nested(nn.Module):
        def __init__(self, inner, outer):
            super().__init__()
            self.a, self.b, self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4), inner, outer

        def maybe(self, f, x, reentrant):
            return f(x) if reentrant is None else checkpoint(f, x, use_reentrant=reentrant)

        def forward(self, x):
            inside = lambda h: torch.tanh(self.b(torch.tanh(self.b(h))))
            return self.maybe(lambda h: self.maybe(inside, torch.tanh(self.a(h)), self.inner), x, self.outer)

    torch.manual_seed(0)
    sites = ["a:grad_output", "b:input", "b:output", "b:grad_output", "b:grad_input"]
    plain, x = Nested(None, None), torch.randn(3, 4, requires_grad=True)
    truth, grads = run(plain, x, unsum.capture(plain, *sites))
    _, edited = run(plain, x, unsum.edit(plain, {"b:output@1": unsum.scale(2.0), "b:grad_output@0": unsum.scale(3.0)}))
    for inner in (False, True):
        for outer in (False, True):
            net = Nested(inner, outer)
            net.load_state_dict(plain.state_dict())
            got, again = run(net, x, unsum.capture(net, *sites))
            for site in sites:
                for one, other in zip(got.calls(site), truth.calls(site), strict=True):
                    torch.testing.assert_close(one, other)
            _, changed = run(
                net, x, unsum.edit(net, {"b:output@1": unsum.scale(2.0), "b:grad_output@0": unsum.scale(3.0)})
            )
            for one, other in zip([*grads, *edited], [*again, *changed], strict=True):
                torch.testing.assert_close(one, other)


def test_sequential_checkpoints_and_marks():
    torch.manual_seed(0)

    class Marked(nn.Module):
        def forward(self, x):
            return unsum.mark(torch.tanh(x), "t") * 2

    net = nn.Sequential(nn.Linear(4, 4), Marked(), nn.Linear(4, 4), Marked())
    x = torch.randn(3, 4, requires_grad=True)
    with unsum.capture(None, "t:output", "t:grad_output") as truth:
        net(x).sum().backward()
    for reentrant in (False, True):
        with unsum.capture(None, "t:output", "t:grad_output") as got:
            checkpoint_sequential(net, 2, x, use_reentrant=reentrant).sum().backward()
        for site in ("t:output", "t:grad_output"):
            for one, other in zip(got.calls(site), truth.calls(site), strict=True):
                torch.testing.assert_close(one, other)


def test_a_loss_on_an_activation_inside_a_checkpoint(pair):
    net, x = pair

    def penalised(**options):
        net.zero_grad()
        with unsum.capture(net, "shared:output", keep="graph", **options) as got:
            out = net(x)
            penalties = got.calls("shared:output")
            (out.sum() + sum(p.square().sum() if p.dim() else p for p in penalties)).backward()
        return [p.grad.clone() for p in net.parameters()]

    for options in ({}, {"reduce": lambda t: t.square().sum()}, {"reduce": "norm"}):
        net.reentrant = None
        truth = penalised(**options)
        net.reentrant = False
        for one, other in zip(truth, penalised(**options), strict=True):
            torch.testing.assert_close(one, other)
    net.reentrant = True
    with pytest.raises(SiteError, match="shared:output.*reentrant"):
        penalised()


def test_edits_of_a_parameters_gradient_that_comes_in_parts_are_refused(pair):
    net, x = pair
    net.reentrant = True
    with pytest.raises(SiteError, match="shared.weight:grad.*parts"):
        run(net, x, unsum.edit(net, {"shared.weight:grad": unsum.clip(-1, 1)}))
    with pytest.raises(SiteError, match="shared.weight:grad.*parts"):
        run(net, x, unsum.capture(net, "shared.weight:grad", reduce="norm"))


def test_a_reversible_function_that_computes_again_in_its_own_backward():
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, layer):
            ctx.save_for_backward(x)
            ctx.layer = layer
            with torch.no_grad():
                return layer(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                out = ctx.layer(x)
            torch.autograd.backward(out, grad)
            return x.grad, None

    net, x = nn.ModuleDict({"fc": nn.Linear(4, 4)}), torch.randn(3, 4, requires_grad=True)
    with unsum.capture(net, "fc:output", "fc:grad_output") as got:
        (Again.apply(Again.apply(x, net["fc"]), net["fc"]) * 3).sum().backward()
    assert len(got.calls("fc:output")) == 2
    first, second = got.calls("fc:grad_output")
    assert (second == 3).all()
    torch.testing.assert_close(first, (second @ net["fc"].weight).detach())


class NewStyle(torch.autograd.Function):
    """Computes again in its backward; its forward has no context."""

    @staticmethod
    def forward(x, layer):
        return layer(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.x, ctx.layer = inputs

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            out = ctx.layer(x)
        torch.autograd.backward(out, grad)
        return x.grad, None


def test_a_function_without_a_context_that_computes_again_is_refused_by_name():
    net, x = nn.ModuleDict({"fc": nn.Linear(4, 4)}), torch.randn(3, 4, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"fc: .*NewStyle(.|\n)*ctx"):
        with unsum.edit(net, {"fc:output": unsum.scale(3.0)}):
            NewStyle.apply(x, net["fc"]).sum().backward()


def test_a_module_that_is_called_for_the_first_time_inside_a_backward():
    critic = nn.Sequential(nn.Linear(4, 4))

    class Critic(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return critic(grad)

    x = torch.randn(3, 4, requires_grad=True)
    with unsum.capture(critic, "0:input") as got, unsum.edit(critic, {"0:output": unsum.zero()}):
        Critic.apply(x).sum().backward()
    assert torch.equal(got["0:input"], torch.ones(3, 4))
    assert (x.grad == 0).all()


def test_a_function_that_does_not_compute_again_is_no_checkpoint():
    layer = nn.Linear(4, 4)

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return layer(x)

        @staticmethod
        def backward(ctx, grad):
            return grad

    x = torch.randn(3, 4, requires_grad=True)
    with unsum.edit(nn.Sequential(layer), {"0:output": unsum.zero()}):
        loss = Once.apply(x).sum()
        loss.backward()
    assert loss == 0
    assert (x.grad == 1).all()


@KINDS
@pytest.mark.parametrize("preserve", [True, False])
def test_noise_from_torchs_own_generator_is_the_same_both_times(reentrant, preserve):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5) if preserve else nn.Identity(), nn.Linear(4, 4))

    def gradients(checkpointed):
        model.zero_grad()
        torch.manual_seed(5)
        with unsum.edit(model, {"0:output": unsum.noise(2.0)}):
            run = lambda x: torch.tanh(model(x)).square().sum()
            x = torch.ones(3, 4, requires_grad=True)
            if checkpointed:
                checkpoint(run, x, use_reentrant=reentrant, preserve_rng_state=preserve).backward()
            else:
                run(x).backward()
        return [p.grad for p in model.parameters()]

    for one, other in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(one, other)


def test_many_steps_inside_one_block_do_not_pile_up(pair):
    net, x = pair
    net.reentrant = False
    objects = []
    with unsum.edit(net, {"shared:grad_output": unsum.scale(0.5), "shared:output": unsum.scale(1.0)}):
        for step in range(141):
            net(x).sum().backward()
            if step in (40, 140):
                gc.collect()
                objects.append(len(gc.get_objects()))
    assert objects[1] - objects[0] < 100  # not one for each step
