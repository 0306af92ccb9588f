"""The second run of `verify=True` and of `check` leaves no state behind, calls hooks once and hears other threads."""

import collections
import copy
import itertools
import random
import threading

import numpy as np
import pytest
import torch
from reference import each_of, per_sample_gradients
from torch import nn

import unsum
from one_by_one import assert_same, squares
from one_by_one import random as noise
from unsum.errors import UnsumError
from verify_blocks import KINDS, D, N, assert_says_so, mlp, verified


class Stateful(nn.Module):
    """`begin` puts a state on the model; `use` changes it in every run. `matters`: results depend on it."""

    def __init__(self, begin, use, matters):
        super().__init__()
        self.net, self.use, self.matters = mlp(), use, matters
        self.state = begin()

    def forward(self, x):
        number = self.use(self.state, x)
        return self.net(x) * (1 + number) if self.matters else self.net(x)


class Meter:
    def __init__(self):
        self.seen, self.total = [], 0.0

    def update(self, x):
        self.seen.append(len(x))
        self.total += 1
        return self.total


def appended(state, x):
    state.append(len(x))
    return len(state)


def entered(state, x):
    state[len(state)] = len(x)
    return len(state)


def nested(state, x):
    state["seen"][0].append(len(x))
    return len(state["seen"][0])


def added(state, x):
    state.add(len(state))
    return len(state)


def counted(state, x):
    state["runs"] += 1
    return state["runs"]


def written(state, x):
    state += 1
    return float(state)


def counting():
    yield from range(100)


STATES = {
    "a list": (list, appended, list),
    "a dict": (dict, entered, dict),
    "a list in a dict": (lambda: {"seen": ([],)}, nested, copy.deepcopy),
    "a set": (set, added, set),
    "a deque": (lambda: collections.deque(maxlen=3), appended, list),
    "a counter": (collections.Counter, counted, dict),
    "an object": (Meter, lambda state, x: state.update(x), lambda state: copy.deepcopy(vars(state))),
    "an array": (lambda: np.zeros(()), written, float),
    "a tensor": (lambda: torch.zeros(()), written, float),
    "an iterator": (lambda: iter(range(100)), lambda state, x: next(state), next),
    "a count": (itertools.count, lambda state, x: next(state), next),
    "a generator": (counting, lambda state, x: next(state), next),
    "python's random numbers": (lambda: None, lambda state, x: random.random(), lambda state: random.getstate()),
    "numpy's random numbers": (
        lambda: None, lambda state, x: np.random.rand(), lambda state: np.random.rand(3).tolist()
    ),
    "torch's random numbers": (lambda: None, lambda state, x: torch.rand(()), lambda state: torch.rand(3).tolist()),
    "a generator of torch's": (
        lambda: torch.Generator().manual_seed(0),
        lambda state, x: torch.rand((), generator=state),
        lambda state: torch.rand(3, generator=state).tolist(),
    ),
    "a generator of numpy's": (
        lambda: np.random.default_rng(0), lambda state, x: state.random(), lambda state: state.random(3).tolist()
    ),
    "a generator of python's": (
        lambda: random.Random(0), lambda state, x: state.random(), lambda state: state.getstate()
    ),
}  # fmt: skip
MATTERS = pytest.mark.parametrize("matters", [True, False], ids=["in the result", "beside it"])


def seed(k):
    for start in (torch.manual_seed, random.seed, np.random.seed):
        start(k)


def stateful(name, matters):
    begin, use, read = STATES[name]
    model = Stateful(begin, use, matters)
    seed(1)
    return model, lambda: read(model.state)


@KINDS
@MATTERS
@pytest.mark.parametrize("name", STATES)
def test_verify_leaves_nothing_behind_or_says_that_it_cannot_ask(name, matters, kind):
    x = noise(N, D)
    model, read = stateful(name, matters)
    each = each_of(model, model(x).square().sum(1))
    wanted = read()
    model, read = stateful(name, matters)
    try:
        g, reducer = verified(model, kind, x)
    except UnsumError as error:
        assert_says_so(error)
        return
    assert read() == wanted  # what one run leaves
    assert_same(g, each, reducer)


@MATTERS
@pytest.mark.parametrize("name", STATES)
def test_check_leaves_nothing_behind_or_is_refused(name, matters):
    x = noise(N, D)
    wanted = stateful(name, matters)[1]()
    model, read = stateful(name, matters)
    try:
        unsum.check(model, lambda m, x: m(x).square().sum(1), x)
    except UnsumError:
        return
    assert read() == wanted


@MATTERS
@pytest.mark.parametrize("name", STATES)
def test_a_block_without_verify_leaves_what_one_run_leaves(name, matters):
    """As many samples as outputs: a library may want to ask along which dimension they lie."""
    x = noise(3, D)
    model, read = stateful(name, matters)
    each = each_of(model, model(x).square().sum(1))
    wanted = read()
    for reducer in (None, unsum.Norms()):
        model, read = stateful(name, matters)
        with unsum.gradients(model, *([reducer] if reducer else [])) as g:
            squares(model, x).backward()
        assert read() == wanted
        assert_same(g, each, reducer)


def in_a_thread(function):
    done = []
    thread = threading.Thread(target=lambda: done.append(function()))
    thread.start()
    thread.join(10)
    return done[0]


class Threaded(nn.Module):
    """A branch is computed by a worker."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, 3), nn.Linear(D, 3)

    def forward(self, x):
        return self.a(x) + in_a_thread(lambda: torch.tanh(self.b(x)))


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_that_another_thread_has_put_there_are_called_once(kind):
    torch.manual_seed(0)
    model, x, calls = Threaded().double(), noise(N, D), []
    for part in (model, model.a, model.b):
        in_a_thread(lambda part=part: getattr(part, kind)(lambda *a: calls.append(part)))
    try:
        g, _ = verified(model, None, x)
    except UnsumError:
        return
    assert len(calls) == 3
    assert_same(g, per_sample_gradients(model, squares, x))


def test_a_call_from_another_thread_is_heard_while_the_model_is_asked():
    """A hook of the user's must not be off for everybody while the model is run again."""
    runs, heard, asked, called = itertools.count(), [], threading.Event(), threading.Event()

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            if next(runs):
                asked.set()
                called.wait(5)
            return self.net(x)

    model = Slow()
    model.net[0].register_forward_hook(lambda *a: heard.append(threading.current_thread()))

    def other():
        if asked.wait(5):
            with torch.no_grad():
                model.net[0](noise(1, D))
        called.set()

    thread = threading.Thread(target=other)
    thread.start()
    try:
        verified(model, None, noise(N, D))
    except UnsumError:
        return
    finally:
        called.set()
        thread.join(10)
    assert heard.count(thread) == asked.is_set()
    assert len(heard) == 1 + asked.is_set()


@pytest.mark.parametrize("block", ["verify", "clip", "check"])
def test_buffers_that_are_changed_in_place_and_then_used(block):
    """The graph that the caller walks has saved them: they are as they were, and torch must not say otherwise."""

    class Decaying(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(D, 3)
            self.register_buffer("keys", torch.randn(5, 3))

        def forward(self, x):
            self.keys.mul_(0.9)
            return self.a(x) @ self.keys.T

    model = Decaying().double()
    for _ in range(3):
        x, before = noise(N, D), model.keys.clone()
        each = each_of(
            model, (x @ model.a.weight.T + model.a.bias)[:, None].matmul(0.9 * before.T).square().sum((1, 2))
        )
        if block == "clip":
            with unsum.clip_per_sample(model, max_norm=1e9, verify=True):
                squares(model, x).backward()
            for name, wanted in each.items():
                torch.testing.assert_close(model.get_parameter(name).grad, wanted.sum(0))
        elif block == "verify":
            g, _ = verified(model, None, x)
            assert_same(g, each)
        else:
            loss = squares(model, x)
            unsum.check(model, lambda m, x: m(x).square().sum(1), x)
            loss.backward()
        torch.testing.assert_close(model.keys, 0.9 * before)
        model.zero_grad()
