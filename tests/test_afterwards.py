"""What is left when blocks are closed: nothing that a later plain step would have to look at."""

import threading

import pytest
import torch
from torch import nn

import unsum

BLOCKS = {
    "gradients": lambda model: unsum.gradients(model, unsum.Norms()),
    "gradients by replay": lambda model: unsum.gradients(model, engine="graph"),
    "capture": lambda model: unsum.capture(model, (nn.Linear, "input"), (nn.Linear, "grad_output")),
    "capture of weights": lambda model: unsum.capture(model, "*.weight:grad"),
    "edit": lambda model: unsum.edit(model, {"0:output": unsum.scale(0.5)}),
    "edit of weights": lambda model: unsum.edit(model, {"*.weight:grad": unsum.scale(0.5)}),
}


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)


def hooks_of(model):
    """Everything on a model that torch looks at in a step, as far as it is not as in a new model."""
    modules = [value for module in model.modules() for name, value in vars(module).items() if "hook" in name and value]
    leaves = [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in model.parameters()]
    return modules, [each for each in leaves if each != (None, None)]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_plain_step_after_a_block_finds_what_it_found_before(name):
    model, x = made()
    engine, call = torch.autograd._engine_run_backward, nn.Module.__call__.__code__
    for _ in range(3):
        with BLOCKS[name](model):
            model(x).square().sum().backward()
    assert hooks_of(model) == ([], [])
    assert torch.autograd._engine_run_backward is engine and nn.Module.__call__.__code__ is call


def test_hooks_of_the_user_stay_and_those_that_come_later_are_called():
    model, x = made()
    heard = []
    model[0].weight.register_hook(lambda grad: heard.append("before"))
    with unsum.gradients(model, unsum.Norms()):
        model[2].weight.register_hook(lambda grad: heard.append("within"))
        model(x).square().sum().backward()
    model[0].bias.register_hook(lambda grad: heard.append("after"))
    heard.clear()
    model(x).square().sum().backward()
    assert sorted(heard) == ["after", "before", "within"]


def test_a_block_that_is_left_while_a_backward_runs():
    """Torch is about to ask the weight for its hooks, in this thread or in another one: they stay where they are."""
    model, x = made()
    block = unsum.capture(model, "2.weight:grad")
    got = block.__enter__()

    def leave(grad):
        block.__exit__(None, None, None)

    output = model(x)
    hook = model[2].weight.register_hook(leave)
    output.square().sum().backward()
    hook.remove()
    assert got["2.weight:grad"].shape == (2, 4)

    begun, go = threading.Event(), threading.Event()

    def wait(grad):
        begun.set()
        go.wait(10)

    def other():
        result = model(x)
        result.register_hook(wait)
        result.square().sum().backward()

    thread = threading.Thread(target=other)
    with unsum.capture(model, "0.weight:grad"):
        model(x).square().sum().backward()
        thread.start()
        assert begun.wait(10)
    assert model[0].weight._backward_hooks is not None
    go.set()
    thread.join()


class Slow(nn.Module):
    """Waits inside its forward, if it is told to, for another thread."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.inside, self.go = threading.Event(), threading.Event()
        self.go.set()

    def forward(self, x):
        hidden = self.first(x)
        self.inside.set()
        assert self.go.wait(10)
        return self.last(hidden)


def test_a_block_that_another_thread_opens_while_a_known_call_runs():
    """Inside a known call modules are called as if nobody watched; a block of another thread sees its calls all the
    same, and the first block the calls that come after."""
    slow, x = Slow(), torch.randn(5, 3)
    for _ in range(3):
        with unsum.gradients(slow, unsum.Norms()):
            slow(x).square().sum().backward()
    slow.inside.clear()
    slow.go.clear()
    found = []

    def step():
        with unsum.gradients(slow, unsum.Norms()) as g:
            slow(x).square().sum().backward()
            slow(x).square().sum().backward()
        found.append(g[unsum.Norms].norms())

    thread = threading.Thread(target=step)
    thread.start()
    assert slow.inside.wait(10)
    model, x2 = made()
    with unsum.gradients(model) as g:
        model(x2).square().sum().backward()
        slow.go.set()
        thread.join()
        model(x2).square().sum().backward()
    assert g.norms().shape == (10,) and found[0].shape == (10,)
    torch.testing.assert_close(g.norms()[:5], g.norms()[5:])
    torch.testing.assert_close(found[0][:5], found[0][5:])
    assert hooks_of(slow) == hooks_of(model) == ([], [])
