"""The data that `fit` and `influence` read: in which order, and whether it is what a fit was begun with."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import unsum
from brute_curvature import flat, per_sample, random_rows
from curvature_checks import close, fitted, same
from curvature_nets import Batches, Examples, classified, ids, mlp, numbers
from unsum.errors import UnsumError

X, Y = numbers(0, 12, 4), ids(1, 12, high=3)
DATA = Examples(X, Y)

SHUFFLED = {
    "shuffle=True": lambda: DataLoader(DATA, 4, shuffle=True),
    "a weighted sampler": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 12, 12)),
    "a sampler of a subset": lambda: DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(12))),
    "random batches": lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, False)),
    "a rank's share": lambda: DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 0, shuffle=True)),
}


@pytest.mark.parametrize("name", SHUFFLED)
def test_no_score_is_given_to_an_example_that_random_order_hides(name, tmp_path):
    with pytest.raises(UnsumError, match="shuffle"):
        unsum.influence(mlp(), classified, SHUFFLED[name](), DATA)
    with pytest.raises(UnsumError, match="shuffle"):
        unsum.influence(mlp(), classified, DATA, SHUFFLED[name]())
    with pytest.raises(UnsumError, match="order"):
        unsum.curvature.fit(mlp(), classified, SHUFFLED[name](), resume=tmp_path / "fit")


def test_a_sampler_that_keeps_the_order_is_read():
    model, loader = mlp(), DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 1, 0, shuffle=False))
    each = flat(per_sample(model, classified, [(X, Y)]))
    close(unsum.influence(model, classified, loader, loader).matrix, each @ each.T)


class Streamed(IterableDataset):
    """Examples that can only be iterated, with a length."""

    def __iter__(self):
        return iter([DATA[i] for i in range(len(DATA))])

    def __len__(self):
        return len(DATA)


def test_a_data_set_that_is_iterated_and_has_a_length():
    model = mlp()
    c, rows = unsum.curvature.fit(model, classified, Streamed(), batch_size=5), random_rows(model, 2)
    same(c.matvec(rows), fitted(model, classified, [(X, Y)], "ekfac").matvec(rows))


def test_a_list_of_batches_of_unequal_size_is_told_how_to_be_batches():
    with pytest.raises(UnsumError, match="batch_size=None"):
        unsum.curvature.fit(mlp(), classified, [(X[:5], Y[:5]), (X[5:], Y[5:])])


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    "other",
    [{"batch_size": 5}, {"data": Examples(X[:8], Y[:8])}, {"data": DataLoader(DATA, 6)}],
    ids=["another batch size", "less data", "a loader"],
)
def test_a_fit_that_was_begun_on_other_batches_is_not_continued(other, tmp_path):
    model, reads = mlp(), []

    def interrupted(model, batch):
        reads.append(batch)
        if len(reads) == 4:
            raise Stop
        return classified(model, batch)

    options = {"kind": "kfac", "resume": tmp_path / "fit", "chunk": 2}
    with pytest.raises(Stop):
        unsum.curvature.fit(model, interrupted, DATA, batch_size=2, **options)
    options |= {"data": DATA, "batch_size": 2} | other
    with pytest.raises(UnsumError, match="data"):
        unsum.curvature.fit(model, classified, options.pop("data"), **options)


class Once(torch.nn.Module):
    """Its bias is that of a linear layer in one batch, and added twice in another one, as the input's size tells."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(numbers(0, 3, 4)), torch.nn.Parameter(numbers(1, 3))

    def forward(self, x):
        if x.shape[1] == 4:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        return x[:, :4] @ self.weight.T + 2 * self.bias


def test_fits_in_which_a_bias_is_covered_in_two_ways_are_not_merged():
    model = Once()
    one, two = (fitted(model, classified, [(numbers(2, 5, size), ids(3, 5, high=3))]) for size in (4, 5))
    assert one.parameters["bias"] != two.parameters["bias"]
    for first, second in ((one, two), (two, one)):
        with pytest.raises(UnsumError, match="bias"):
            first.merge(second)


def test_batches_that_are_empty_change_nothing():
    model = mlp()
    losses = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    data = Batches((X[:0], Y[:0]), (X[:7], Y[:7]), (X[:0], Y[:0]), (X[7:], Y[7:]))
    close(
        unsum.influence(model, losses, data, data).matrix,
        unsum.influence(model, classified, DATA, DATA).matrix,
    )


def test_a_fit_is_not_continued_from_a_folder(tmp_path):
    with pytest.raises(UnsumError, match="folder"):
        unsum.curvature.fit(mlp(), classified, DATA, resume=tmp_path)


def test_a_last_example_alone_joins_the_batch_before_it():
    """A batch of one does not show that a recurrent layer's initial state is no data."""
    torch.manual_seed(0)
    model = torch.nn.LSTM(3, 4, batch_first=True)
    data = list(torch.randn(9, 5, 3))
    losses = lambda m, x: m(x)[0].square().sum((1, 2))
    c = unsum.curvature.fit(model, losses, data, batch_size=4)
    whole = unsum.curvature.fit(model, losses, data, batch_size=9)
    for name, block in c.blocks.items():
        torch.testing.assert_close(block.eigenvalues, whole.blocks[name].eigenvalues, rtol=1e-3, atol=1e-6)
