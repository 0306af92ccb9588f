"""Data is data however it arrives: through NumPy, lists, whole numbers or another thread."""

import concurrent.futures

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from changing_nets import centred
from one_by_one import assert_refused, assert_rows, random, squares

N, D = 4, 6


def in_a_thread(function, *args):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def one_by_one(x):
    out = torch.empty_like(x)
    for i, row in enumerate(x.tolist()):
        for j, value in enumerate(row):
            out[i, j] = value
    return out


PASSAGES = {
    "as_tensor of an array": lambda x: torch.as_tensor(x.numpy()),
    "as_tensor of a changed array": lambda x: torch.as_tensor(np.log1p(np.abs(x.numpy()))),
    "from_numpy": lambda x: torch.from_numpy(x.numpy().copy()),
    "tensor of an array": lambda x: torch.tensor(x.numpy()),
    "tensor of a list": lambda x: torch.tensor(x.tolist(), dtype=x.dtype),
    "tensor of items": lambda x: torch.tensor([[v.item() for v in row] for row in x], dtype=x.dtype),
    "stack of rows": lambda x: torch.stack([torch.tensor(row, dtype=x.dtype) for row in x.tolist()]),
    "new_tensor": lambda x: x.new_tensor(x.tolist()),
    "asarray": lambda x: torch.asarray(x.numpy()),
    "asarray of a list": lambda x: torch.asarray(x.tolist(), dtype=x.dtype),
    "frombuffer": lambda x: torch.frombuffer(bytearray(x.numpy().tobytes()), dtype=x.dtype).view(x.shape),
    "dlpack": lambda x: torch.from_dlpack(x.numpy()),
    "written number by number": one_by_one,
    "the array of a detached tensor": lambda x: torch.as_tensor(np.asarray(x.detach())),
    "data": lambda x: x.data.clone(),
    "without gradients": lambda x: torch.no_grad()(torch.exp)(x),
    "whole numbers": lambda x: (x * 100).long().to(x.dtype),
    "a mask": lambda x: (x > 0).to(x.dtype),
    "a thread": lambda x: in_a_thread(torch.exp, x),
    "an array in a thread": lambda x: in_a_thread(lambda: torch.as_tensor(np.exp(x.numpy()))),
}


class Two(nn.Module):
    """One branch sees the input, the other only what has passed. `mix` is done to the second."""

    def __init__(self, passage, mix=lambda h: h, direct=True):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(D, 5), nn.Linear(D, 5), nn.Linear(5, 2)
        self.passage, self.mix, self.direct = passage, mix, direct

    def forward(self, x):
        h = self.mix(torch.tanh(self.b(self.passage(x))))
        return self.head(h + torch.tanh(self.a(x)) if self.direct else h + self.a.bias)


@pytest.mark.parametrize("direct", [True, False], ids=["beside a branch of the input", "by itself"])
@pytest.mark.parametrize("passage", PASSAGES)
def test_data_that_has_passed_through_something_else_is_right(passage, direct):
    torch.manual_seed(0)
    assert_rows(Two(PASSAGES[passage], direct=direct).double(), squares, random(N, D))


@pytest.mark.parametrize("direct", [True, False], ids=["beside a branch of the input", "by itself"])
@pytest.mark.parametrize("passage", PASSAGES)
def test_samples_that_interact_after_they_have_passed_through_something_else_are_refused(passage, direct):
    torch.manual_seed(0)
    assert_refused(Two(PASSAGES[passage], centred, direct).double(), squares, random(N, D))


@pytest.mark.parametrize("n", [5, D], ids=["n = hidden features", "n = input features"])
@pytest.mark.parametrize("passage", ["as_tensor of an array", "tensor of a list", "an array in a thread"])
def test_data_that_has_passed_is_right_where_sizes_coincide(passage, n):
    torch.manual_seed(0)
    assert_rows(Two(PASSAGES[passage]).double(), squares, random(n, D))


class Columns(nn.Module):
    """A table: the first columns are ids, kept as floating-point numbers. `ids` reads them."""

    def __init__(self, ids, mix=lambda h: h):
        super().__init__()
        self.of, self.a, self.head = nn.Embedding(7, 5), nn.Linear(D, 5), nn.Linear(5, 2)
        self.ids, self.mix = ids, mix

    def forward(self, x):
        return self.head(self.mix(self.of(self.ids(x))) + torch.tanh(self.a(x)))


IDS = {
    "long": lambda x: x[:, 0].long(),
    "int": lambda x: x[:, 0].round().int(),
    "a list": lambda x: torch.tensor([int(v) for v in x[:, 0].tolist()]),
    "an array": lambda x: torch.as_tensor(x[:, 0].numpy().astype("int64")),
    "buckets": lambda x: torch.bucketize(x[:, 1], torch.tensor([-1.0, 0.0, 1.0]).double()),
    "largest": lambda x: x.argmax(1),
    "one hot": lambda x: F.one_hot(x[:, 0].long(), 7).argmax(1),
}


def table(n):
    x = random(n, D)
    x[:, 0] = torch.randint(7, (n,)).double()
    return x


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("n", [4, 7], ids=["no sizes coincide", "n = rows of the table"])
def test_columns_that_are_ids_are_right(n, ids):
    torch.manual_seed(0)
    assert_rows(Columns(IDS[ids]).double(), squares, table(n))


@pytest.mark.parametrize("ids", [name for name in IDS if name not in ("buckets", "largest")])  # choices carry no data
def test_samples_that_interact_after_an_embedding_of_columns_are_refused(ids):
    torch.manual_seed(0)
    assert_refused(Columns(IDS[ids], centred).double(), squares, table(N))


class Threaded(nn.Module):
    """A branch, with its parameters, is computed by a worker."""

    def __init__(self, mix):
        super().__init__()
        self.a, self.b, self.head, self.mix = nn.Linear(D, 5), nn.Linear(D, 5), nn.Linear(5, 2), mix

    def forward(self, x):
        branch = in_a_thread(lambda: self.mix(torch.tanh(self.b(x))))
        return self.head(branch + torch.tanh(self.a(x)))


def test_a_branch_that_is_computed_by_another_thread():
    torch.manual_seed(0)
    assert_rows(Threaded(lambda h: h).double(), squares, random(N, D))
    assert_refused(Threaded(centred).double(), squares, random(N, D))


def test_data_that_a_thread_has_prepared_before_and_hands_over_in_forward():
    class Fed(nn.Module):
        def __init__(self, mix):
            super().__init__()
            self.b, self.mix = nn.Linear(D, 2), mix

        def forward(self, future, x):
            return self.mix(torch.tanh(self.b(future.result()))) * x[:, :2]

    torch.manual_seed(0)
    x = random(N, D)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        run = lambda m, x: squares(m, pool.submit(lambda: torch.as_tensor(x.numpy() * 2)), x)
        assert_rows(Fed(lambda h: h).double(), run, x)
        assert_refused(Fed(centred).double(), run, x)
