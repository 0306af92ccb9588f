"""`verify=True` runs the model again: where that cannot be done, an error says so, and no interaction passes."""

import itertools
import types

import pytest
import torch
from reference import each_of, per_sample_gradients
from torch import nn

from one_by_one import assert_same, right_or_refused, squares
from one_by_one import random as noise
from small_nets import gpt2
from unsum.errors import UnsumError
from verify_blocks import KINDS, D, N, assert_says_so, mlp, verified


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


class Cached(nn.Module):
    """A language model that writes to a cache it is given."""

    def __init__(self, mixing=False):
        super().__init__()
        self.lm, self.mixing = gpt2().double(), mixing

    def make(self):
        return pytest.importorskip("transformers").DynamicCache()

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
