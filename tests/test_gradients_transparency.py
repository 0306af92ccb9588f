"""A `gradients` block leaves the user's own things as they are: hooks, `.grad`, random numbers, memory, copies,
threads, other blocks."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import unsum
from nets import SEQUENCES, D, N, in_float64, mlp, scalar, truth_of
from unsum.errors import UnsupportedError


def test_grad_hooks_and_random_numbers_are_as_without():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 5), nn.Dropout(0.3), nn.GELU(), nn.Linear(5, 3))
    twin, x = copy.deepcopy(model), SEQUENCES.float()
    fired = {"with": [], "without": []}

    def run(net, key):
        torch.manual_seed(1)
        net[0].weight.register_hook(lambda g: fired[key].append("parameter"))

        def hook(module, args, out):
            out.register_hook(lambda g: fired[key].append("tensor"))

        net[3].register_forward_hook(hook)
        net(x).square().mean().backward()
        net(x).square().mean().backward()
        return torch.rand(1)

    without = run(twin, "without")
    with unsum.gradients(model) as g:
        assert torch.equal(run(model, "with"), without)
    assert fired["with"] == fired["without"]
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert len(g.ids) == 2 * N
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    assert len(model[0].weight._backward_hooks) == 1


def test_a_users_hook_on_a_parameter_set_before_the_block():
    model = mlp()
    truth = truth_of(model, SEQUENCES)
    model[0].weight.register_hook(lambda g: g * 3)
    with unsum.gradients(model) as g:
        scalar(model, SEQUENCES).backward()
    torch.testing.assert_close(g["0.weight"].per_sample(), truth["0.weight"])
    torch.testing.assert_close(model[0].weight.grad, 3 * truth["0.weight"].sum(0))


@in_float64()
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


@in_float64()
def test_hooks_on_several_gradients_together():
    model, x, heard = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 5, 8), []
    torch.autograd.graph.register_multi_grad_hook([model[0].weight, model[1].weight], lambda g: heard.append(len(g)))
    for _ in range(4):
        with unsum.gradients(model, unsum.Norms()):
            model(x).square().sum().backward()
    assert heard == [2] * 4


def test_torch_autograd_grad_user_hooks_and_nested_blocks():
    model = mlp()
    truth = truth_of(model, SEQUENCES)
    with unsum.gradients(model) as outer, unsum.gradients(model, params="0.weight") as inner:
        torch.autograd.grad(scalar(model, SEQUENCES), [model[0].weight])
    for g in (outer, inner):
        torch.testing.assert_close(g["0.weight"].per_sample(), truth["0.weight"])
    assert (outer["2.weight"].per_sample() == 0).all()  # nothing was brought there
    assert model[0].weight.grad is None
    model[1].register_forward_hook(lambda m, a, out: (out, out.register_hook(lambda g: g * 2))[0])
    with unsum.gradients(model) as g:
        scalar(model, SEQUENCES).backward()
    torch.testing.assert_close(g["0.weight"].per_sample(), 2 * truth["0.weight"])
    torch.testing.assert_close(g["2.weight"].per_sample(), truth["2.weight"])


def test_a_capture_inside_and_an_edit():
    model = mlp()
    with unsum.edit(model, {"0:grad_output": unsum.scale(3.0)}), unsum.gradients(model) as g:
        with unsum.capture(model, "0:input", "0:grad_output") as got:
            scalar(model, SEQUENCES).backward()
    product = torch.einsum("nto,nti->noi", got["0:grad_output"], got["0:input"])
    torch.testing.assert_close(g["0.weight"].per_sample(), product)
    torch.testing.assert_close(g["0.weight"].sum(), model[0].weight.grad)


def test_grad_left_alone_and_the_scale_of_a_grad_scaler():
    model = mlp()
    truth = truth_of(model, SEQUENCES)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with unsum.gradients(model, grad=False, scaler=scaler) as g:
        scaler.scale(scalar(model, SEQUENCES)).backward()
    assert (model[0].weight.grad == 1).all() and model[2].weight.grad is None
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)


@in_float64()
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


def test_a_long_block_keeps_no_graph():
    model = mlp()
    with unsum.gradients(model) as g:
        refs = []
        for _ in range(200):
            loss = scalar(model, SEQUENCES[:1])
            refs.append(weakref.ref(unsum.seams.nodes.token(loss.grad_fn)))
            loss.backward()
            del loss
        gc.collect()
        assert sum(ref() is not None for ref in refs) <= 1
    assert len(g.ids) == 200


def test_copies_pickles_and_threads_inside_a_block():
    model = mlp()
    truth = truth_of(model, SEQUENCES)
    with unsum.gradients(model) as g:
        twin = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        scalar(twin, SEQUENCES[:2]).backward()
        scalar(loaded, SEQUENCES[:2]).backward()
        own: dict[str, torch.Tensor] = {}

        def work():
            with unsum.gradients(twin) as h:
                scalar(twin, SEQUENCES[:3]).backward()
            own["norms"] = h.norms()

        thread = threading.Thread(target=work)
        thread.start()
        scalar(model, SEQUENCES).backward()
        thread.join()
    assert len(g.ids) == N and len(own["norms"]) == 3
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)
    torch.testing.assert_close(own["norms"], g.norms()[:3])


def test_parameters_spread_over_processes_are_refused():
    class DTensor(torch.Tensor):  # by its name: making a real one needs a process group
        pass

    model = mlp()
    model[0].weight = nn.Parameter(torch.Tensor._make_subclass(DTensor, torch.ones(5, D)))
    with pytest.raises(UnsupportedError, match="DTensor"):
        unsum.gradients(model)
