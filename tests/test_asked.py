"""What could not be asked is not answered: an error of unsum's own that says so, or the right numbers; never a crash,
never a guess. And asking leaves nothing behind."""

import collections
import copy
import itertools
import random
import re
import threading
import types
import warnings

import numpy as np
import pytest
import torch
from reference import each_of, per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from one_by_one import assert_same, right_or_refused, same, squares
from one_by_one import random as noise
from unsum.errors import InteractionError, UnsumError

N, D = 4, 5
SAID = r"verify|again"


def mlp(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 6), *between, nn.Tanh(), nn.Linear(6, 3)).double()


# ---- a model that cannot be run again -----------------------------------------------------------------------------


class Given(nn.Module):
    """The second argument is something to take a tensor from, by `read`. `mixing` leaves no trace in the graph."""

    def __init__(self, read, mixing=False):
        super().__init__()
        self.a, self.b, self.read, self.mixing = nn.Linear(D, 6), nn.Linear(6, 3), read, mixing

    def forward(self, x, other):
        h = torch.tanh(self.a(x + self.read(other)))
        return self.b(h - h.detach().mean(0) if self.mixing else h)


class Batch:
    """An object of the user's own."""

    def __init__(self, x):
        self.x = x


class Uncopied(Batch):
    def __deepcopy__(self, memo):
        raise TypeError("this cannot be copied")

    def __reduce_ex__(self, protocol):
        raise TypeError("this cannot be copied")


class Emptied(Batch):
    """A queue: what was taken is gone."""

    def take(self):
        taken, self.x = self.x, None
        return taken


CANNOT = {
    "an object": (Batch, lambda other: other.x),
    "an object that cannot be copied": (Uncopied, lambda other: other.x),
    "an object that is emptied": (Emptied, lambda other: other.take()),
    "a generator": (lambda x: (part for part in [x]), next),
}
MIGHT = {
    "an iterator": (lambda x: iter([x]), next),
    "a function": (lambda x: lambda: x, lambda other: other()),
    "a namespace": (lambda x: types.SimpleNamespace(x=x), lambda other: other.x),
    "an array": (lambda x: x.numpy(), torch.as_tensor),
}
KINDS = pytest.mark.parametrize("kind", [None, unsum.Norms], ids=["kept", "norms"])


def assert_says_so(error):
    """Nothing interacts: that is only not known."""
    assert not isinstance(error, InteractionError), error
    assert re.search(SAID, str(error)), error


def verified(model, kind, *batch):
    reducer = kind() if kind else None
    with unsum.gradients(model, *([reducer] if reducer else []), verify=True) as g:
        squares(model, *batch).backward()
    return g, reducer


@KINDS
@pytest.mark.parametrize("argument", CANNOT)
def test_verify_says_so_where_an_argument_cannot_be_given_again(argument, kind):
    torch.manual_seed(0)
    make, read = CANNOT[argument]
    model = Given(read).double()
    with pytest.raises(UnsumError) as caught:
        verified(model, kind, noise(N, D), make(noise(N, D)))
    assert_says_so(caught.value)


@KINDS
@pytest.mark.parametrize("argument", MIGHT)
def test_verify_is_right_or_says_so_where_an_argument_might_be_given_again(argument, kind):
    torch.manual_seed(0)
    make, read = MIGHT[argument]
    model, x, other = Given(read).double(), noise(N, D), noise(N, D)
    try:
        g, reducer = verified(model, kind, x, make(other))
    except UnsumError as error:
        assert_says_so(error)
    else:
        assert_same(g, each_of(model, model(x, make(other)).square().sum(1)), reducer)


@KINDS
@pytest.mark.parametrize("argument", CANNOT | MIGHT)
def test_verify_never_passes_samples_that_interact_because_an_argument_cannot_be_given_again(argument, kind):
    torch.manual_seed(0)
    make, read = (CANNOT | MIGHT)[argument]
    with pytest.raises(UnsumError):
        verified(Given(read, mixing=True).double(), kind, noise(N, D), make(noise(N, D)))


@pytest.mark.parametrize("argument", CANNOT | MIGHT)
def test_what_cannot_be_given_again_is_right_without_verify(argument):
    torch.manual_seed(0)
    make, read = (CANNOT | MIGHT)[argument]
    model, x, other = Given(read).double(), noise(N, D), noise(N, D)
    each = each_of(model, model(x, make(other)).square().sum(1))
    assert right_or_refused(model, lambda: squares(model, x, make(other)), each)


class Once(nn.Module):
    """`spoil(run)` is called with the number of the run, which is known outside the model alone."""

    def __init__(self, spoil):
        super().__init__()
        runs = itertools.count()
        self.net, self.spoil = mlp(), lambda x: spoil(next(runs), x)

    def forward(self, x):
        return self.net(x) * self.spoil(x)


def raises_later(run, x):
    if run:
        raise RuntimeError("this model runs only once")
    return 1.0


def grows(run, x):
    return 1.0 + run


def raises_where_rows_repeat(run, x):
    if len(x.unique(dim=0)) < len(x):
        raise ValueError("each row once")
    return 1.0


def interrupted(run, x):
    if run:
        raise KeyboardInterrupt
    return 1.0


@KINDS
@pytest.mark.parametrize("spoil", [raises_later, grows, raises_where_rows_repeat])
def test_verify_says_so_where_a_second_run_fails_or_gives_something_else(spoil, kind):
    with pytest.raises(UnsumError) as caught:
        verified(Once(spoil), kind, noise(N, D))
    assert_says_so(caught.value)


def test_an_interrupt_in_a_second_run_is_not_swallowed():
    with pytest.raises((KeyboardInterrupt, UnsumError)):
        verified(Once(interrupted), None, noise(N, D))


def test_the_block_after_one_that_could_not_be_verified_is_right():
    model, x = Once(lambda run, x: raises_later(run == 1, x)), noise(N, D)
    with pytest.raises(UnsumError):
        verified(model, None, x)
    assert all(p.grad is None for p in model.parameters())
    each = {f"net.{name}": values for name, values in per_sample_gradients(model.net, squares, x).items()}
    assert right_or_refused(model, lambda: squares(model, x), each)


def gpt2():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=16)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval().double(), transformers.DynamicCache


class Cached(nn.Module):
    """A language model that writes to a cache it is given."""

    def __init__(self, mixing=False):
        super().__init__()
        (self.lm, self.make), self.mixing = gpt2(), mixing

    def forward(self, ids, cache):
        logits = self.lm(input_ids=ids, past_key_values=cache, use_cache=True).logits
        return logits - logits.detach().mean(0) if self.mixing else logits


@pytest.mark.parametrize("verify", [False, True])
def test_a_cache_that_is_written_to_is_right_or_refused(verify):
    model, ids, caches = Cached(), torch.randint(1, 20, (N, 3)), []
    each = per_sample_gradients(model, lambda m, ids: squares(m, ids, m.make()), ids)

    def run():
        caches.append(model.make())
        return squares(model, ids, caches[-1])

    right_or_refused(model, run, each, verify=verify)
    assert all(cache.get_seq_length() == 3 for cache in caches)


def test_verify_never_passes_samples_that_interact_because_there_is_a_cache():
    model = Cached(mixing=True)
    with pytest.raises(UnsumError):
        verified(model, None, torch.randint(1, 20, (N, 3)), model.make())


# ---- nothing is left behind ---------------------------------------------------------------------------------------


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


# ---- tensors, modules and calls of other kinds --------------------------------------------------------------------


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


NESTED = {
    "given": lambda net, rows: net(jagged(rows)).values().square().sum(),
    "given, made dense": lambda net, rows: net(jagged(rows)).to_padded_tensor(0.0).square().sum(),
    "given, made a list": lambda net, rows: sum(part.square().sum() for part in net(jagged(rows)).unbind()),
    "of strides": lambda net, rows: net(torch.nested.as_nested_tensor(rows)).to_padded_tensor(0.0).square().sum(),
}


@pytest.mark.parametrize("lengths", [(3, 1, 5, 2), (4, 4, 4, 4)], ids=["other lengths", "n = T"])
@pytest.mark.parametrize("way", NESTED)
def test_nested_tensors_are_right_or_refused(way, lengths):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    rows = [noise(length, D) for length in lengths]
    each = each_of(model, [squares(model, row) for row in rows])
    with warnings.catch_warnings(action="ignore"):
        right_or_refused(model, lambda: NESTED[way](model, rows), each)


def test_nested_tensors_inside_the_model_are_right_or_refused():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, lengths):
            return self.net(jagged([row[:length] for row, length in zip(x, lengths, strict=True)])).values()

    model, x, lengths = Inside(), noise(N, 5, D), [3, 1, 5, 2]
    each = each_of(model, [squares(model.net, row[:length]) for row, length in zip(x, lengths, strict=True)])
    right_or_refused(model, lambda: model(x, lengths).square().sum(), each)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.gain = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, h):
        return torch.tanh(self.a(h)) * self.gain + h


JITTED = {
    "a scripted part": lambda x: mlp(torch.jit.script(Scripted().double())),
    "a traced part": lambda x: mlp(torch.jit.trace(Scripted().double(), noise(N, 6))),
    "a scripted model": lambda x: torch.jit.script(mlp(Scripted().double())),
    "a traced model": lambda x: torch.jit.trace(mlp(Scripted().double()), x),
}


@pytest.mark.parametrize("way", JITTED)
def test_scripted_modules_are_right_or_refused(way):
    x = noise(N, D)
    with warnings.catch_warnings(action="ignore"):
        model = JITTED[way](x)
    each = each_of(model, model(x).square().sum(1))
    for _ in range(2):  # such a module is optimised after some runs
        right_or_refused(model, lambda: squares(model, x), each)


def test_a_scripted_function_in_the_model_is_right_or_refused():
    with warnings.catch_warnings(action="ignore"):
        gelu = torch.jit.script(_gelu)

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(D, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.b(gelu(self.a.bias, F.linear(x, self.a.weight)))

    model, x = Fused().double(), noise(N, D)
    each = each_of(model, model(x).square().sum(1))
    for _ in range(2):
        right_or_refused(model, lambda: squares(model, x), each)


def _gelu(bias: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    h = h + bias
    return h * 0.5 * (1.0 + torch.tanh(0.79788456 * h * (1 + 0.044715 * h * h)))


@KINDS
def test_many_backwards_at_once_for_the_inputs_bring_no_samples_or_are_refused(kind):
    reducer = kind() if kind else None
    model, x = mlp(), noise(N, D).requires_grad_()
    each = per_sample_gradients(model, squares, x.detach())
    directions = torch.eye(3).double()[:, None].expand(3, N, 3)
    wanted = torch.autograd.grad(model(x), x, directions, is_grads_batched=True)[0]
    for _ in range(3):
        try:
            with unsum.gradients(model, *([reducer] if reducer else [])) as g:
                (found,) = torch.autograd.grad(model(x), x, directions, is_grads_batched=True)
                squares(model, x.detach()).backward()
            assert_same(g, each, reducer)
        except UnsumError:
            continue
        same(found, wanted, 1e-9, "the rows of the Jacobian")


@KINDS
def test_many_backwards_at_once_for_the_parameters_add_up_or_are_refused(kind):
    reducer = kind() if kind else None
    model, x = mlp(), noise(N, D)
    parameters = list(model.parameters())
    directions = torch.eye(3).double()[:, None].expand(3, N, 3)
    wanted = torch.autograd.grad(model(x), parameters, directions, is_grads_batched=True)
    for _ in range(3):
        try:
            with unsum.gradients(model, *([reducer] if reducer else [])) as g:
                found = torch.autograd.grad(model(x), parameters, directions, is_grads_batched=True)
            assert_same(g, per_sample_gradients(model, lambda m, x: m(x).sum(), x), reducer)
        except UnsumError:
            continue
        for ours, right in zip(found, wanted, strict=True):
            same(ours, right, 1e-9, "what was asked for")


class Empty(nn.Module):
    """A layer without inputs, or without outputs, beside others."""

    def __init__(self, inputs, outputs):
        super().__init__()
        with warnings.catch_warnings(action="ignore"):  # "initialising is a no-op"
            self.empty, self.a = nn.Linear(inputs, outputs), nn.Linear(D, 3)
        self.inputs = inputs

    def forward(self, x):
        return torch.cat([torch.tanh(self.empty(x[..., : self.inputs])), self.a(x)], -1)


@pytest.mark.parametrize("shape", [(N, D), (N, 3, D), (3, D)], ids=["rows", "tokens", "n = outputs"])
@pytest.mark.parametrize("sizes", [(0, 3), (2, 0), (0, 0)], ids=["no inputs", "no outputs", "neither"])
def test_layers_without_inputs_or_outputs_are_right_or_refused(sizes, shape):
    torch.manual_seed(0)
    model, x = Empty(*sizes).double(), noise(*shape)
    each = per_sample_gradients(model, squares, x)
    right_or_refused(model, lambda: squares(model, x), each)


def test_a_layer_without_inputs_alone_is_right_or_refused():
    with warnings.catch_warnings(action="ignore"):
        model = nn.Linear(0, 3).double()
    nn.init.normal_(model.bias)
    x = torch.zeros(N, 0).double()
    right_or_refused(model, lambda: squares(model, x), per_sample_gradients(model, squares, x))


def test_parameters_of_no_rows_are_right_or_refused():
    class Virtual(nn.Module):
        """A table to which no virtual token was added."""

        def __init__(self):
            super().__init__()
            self.prompt, self.net = nn.Parameter(torch.zeros(0, D)), mlp()

        def forward(self, x):
            return self.net(torch.cat([self.prompt.expand(len(x), -1, -1), x], 1))

    model, x = Virtual().double(), noise(N, 3, D)
    right_or_refused(model, lambda: squares(model, x), per_sample_gradients(model, squares, x))


@KINDS
def test_a_model_that_lies_on_the_meta_device_in_part_is_refused_by_name(kind):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.here, self.nowhere = nn.Linear(D, 6), nn.Linear(6, 3, device="meta")

        def forward(self, x):
            return self.nowhere(torch.tanh(self.here(x)).to("meta"))

    model = Parts()
    for _ in range(2):
        with pytest.raises(UnsumError, match=r"nowhere.*meta|meta.*nowhere"):
            with unsum.gradients(model, *([kind()] if kind else [])) as g:
                squares(model, torch.randn(N, D)).backward()
            g[kind].norms() if kind else g.norms()


def test_a_model_on_the_meta_device_is_refused_by_name():
    model = nn.Linear(D, 3, device="meta")
    with pytest.raises(UnsumError, match="meta"):
        with unsum.gradients(model) as g:
            squares(model, torch.randn(N, D, device="meta")).backward()
        g.norms()


def test_parameters_on_the_meta_device_that_are_not_used_are_right_or_refused():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.nowhere = mlp(), nn.Linear(6, 3, device="meta")

        def forward(self, x):
            return self.net(x)

    model, x = Unused(), noise(N, D)
    each = {f"net.{name}": values for name, values in per_sample_gradients(model.net, squares, x).items()}
    right_or_refused(model, lambda: squares(model, x), each)
    right_or_refused(model, lambda: squares(model, x), each, params="net.*")


GRAD_DTYPES = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float64)]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype")
@pytest.mark.parametrize("frozen_bias", [False, True], ids=["all", "weights alone"])
@pytest.mark.parametrize(("weights", "grads"), GRAD_DTYPES)
def test_gradients_of_another_dtype_than_the_weights_are_right_or_refused(weights, grads, frozen_bias):
    model, x = mlp().to(weights), torch.randn(N, D).to(weights)
    each = per_sample_gradients(model, squares, x)
    for name, p in model.named_parameters():
        if not (frozen_bias and name.endswith("bias")):
            p.grad_dtype = grads
    squares(model, x).backward()
    wanted = {name: p.grad.dtype for name, p in model.named_parameters()}
    tolerance = 0.05 if torch.bfloat16 in (weights, grads) else 1e-5
    right_or_refused(model, lambda: squares(model, x), each, tolerance=tolerance)
    for options in ({}, {"grad": False}):
        model.zero_grad()
        try:
            with unsum.gradients(model, unsum.Norms(), **options):
                squares(model, x).backward()
        except UnsumError:
            continue
        found = {name: p.grad.dtype for name, p in model.named_parameters() if p.grad is not None}
        assert found == ({} if options else wanted)


# ---- second order -------------------------------------------------------------------------------------------------


class Energy(nn.Module):
    """Forces are the derivatives of an energy, taken inside forward."""

    def __init__(self, give="forces", summed=True):
        super().__init__()
        self.a, self.b, self.give, self.summed = nn.Linear(3, 6), nn.Linear(6, 1), give, summed

    def forward(self, positions):
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energy = self.b(torch.tanh(self.a(positions)).sum(1))[:, 0]
            ones = None if self.summed else torch.ones_like(energy)
            (slope,) = torch.autograd.grad(energy.sum() if self.summed else energy, positions, ones, create_graph=True)
        return {"forces": -slope, "both": (energy, -slope), "energy": energy}[self.give]


def energy_loss(model, positions):
    out = model(positions)
    return sum(part.sin().sum() for part in (out if isinstance(out, tuple) else (out,)))


@pytest.mark.parametrize("n", [4, 3, 5], ids=["no sizes coincide", "n = dimensions", "n = atoms"])
@pytest.mark.parametrize("summed", [True, False], ids=["of the sum", "of each energy"])
@pytest.mark.parametrize("give", ["forces", "both", "energy"])
def test_forces_are_right_or_refused(give, summed, n):
    torch.manual_seed(0)
    model, x = Energy(give, summed).double(), noise(n, 5, 3)
    right_or_refused(model, lambda: energy_loss(model, x), per_sample_gradients(model, energy_loss, x))


def penalised(model, x, of=lambda out: out.sum()):
    x = x.detach().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(of(out), x, create_graph=True)
    return out, (slope.flatten(1).norm(dim=1) - 1).square()


@pytest.mark.parametrize("alone", [False, True], ids=["with the loss", "alone"])
@pytest.mark.parametrize("n", [4, 3, 5], ids=["no sizes coincide", "n = outputs", "n = features"])
def test_a_penalty_on_gradients_in_the_loss_is_right_or_refused(n, alone):
    model, x = mlp(), noise(n, D)

    def loss(m, x):
        out, penalty = penalised(m, x)
        return penalty.sum() + (0 if alone else out.square().sum())

    right_or_refused(model, lambda: loss(model, x), per_sample_gradients(model, loss, x))


def test_a_penalty_on_gradients_that_is_marked_is_right_or_refused():
    model, x = mlp(), noise(N, D)
    loss = lambda m, x: penalised(m, x)[1]
    each = per_sample_gradients(model, lambda m, x: loss(m, x).sum(), x)
    right_or_refused(model, lambda: unsum.mark_samples(loss(model, x)).sum(), each)


@pytest.mark.parametrize(
    "of", [lambda out: out.square().mean(), lambda out: out.logsumexp(0).sum()], ids=["mean", "mixed"]
)
def test_a_penalty_on_gradients_inside_the_model_is_right_or_refused(of):
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return penalised(self.net, x, of)[1]

    model, x = Inside(), noise(N, D)
    each = each_of(model, model(x))  # each entry's derivative, also where `of` mixes samples
    right_or_refused(model, lambda: model(x).sum(), each)


def test_a_step_of_learning_inside_the_model_is_right_or_refused():
    class Learning(nn.Module):
        """The weight that is used has taken a step on the batch."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, D))

        def forward(self, x):
            (slope,) = torch.autograd.grad((x @ self.weight.T).sin().sum(), self.weight, create_graph=True)
            return torch.tanh(x @ (self.weight - 0.1 * slope).T)

    torch.manual_seed(0)
    model, x = Learning().double(), noise(N, D)
    each = each_of(model, model(x).square().sum(1))
    right_or_refused(model, lambda: squares(model, x), each)
    with pytest.raises(UnsumError):  # the step mixes samples
        with unsum.gradients(model):
            squares(model, x).backward()
