"""Private training draws batches by Poisson sampling; parts, empty batches and ranks give the same steps."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import unsum
from unsum.errors import OptionError, SamplesError
from unsum.training.noise import sources

N = 200


class Rows(Dataset):
    """Examples whose first number is their own number."""

    def __init__(self, n=N):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(n, 4, generator=generator)
        self.y = (self.x[:, 1] > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, k):
        return {"k": k, "x": self.x[k], "y": self.y[k], "name": f"row {k}"}


def mlp(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 2))


def made(model, rate=0.1, **options):
    options = {"max_norm": 0.5, "noise_multiplier": 0.0, "expected_batch": rate * N, "seed": 0, **options}
    return unsum.private(model, torch.optim.SGD(model.parameters(), lr=1.0), sample_rate=rate, **options)


def step(model, dp, batch):
    with dp:
        F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum").backward()
    return dp.step()


def drawn(dp, dataset, steps, **options):
    """(steps, examples): which were drawn, without training."""
    found = torch.zeros(steps, len(dataset), dtype=torch.bool)
    for row, batch in zip(found, dp.loader(dataset, steps=steps, **options), strict=True):
        row[batch["k"]] = True
        assert len(batch["k"]) == int(row.sum())  # no example twice
        dp._seen = len(batch["k"])  # as if it had been clipped
        dp.step()
    return found


@pytest.mark.parametrize("secure", [False, True])
def test_every_example_is_drawn_by_itself(secure):
    rate, steps = 0.1, 2000
    dp = made(nn.Linear(4, 2), rate, **({"seed": None, "secure": True} if secure else {}))
    found = drawn(dp, Rows(50), steps).double()
    sizes, mean, variance = found.sum(1), 50 * rate, 50 * rate * (1 - rate)
    assert abs(float(sizes.mean()) - mean) < 5 * math.sqrt(variance / steps)  # five standard errors
    assert abs(float(sizes.var()) / variance - 1) < 5 * math.sqrt(2 / steps)
    each = found.mean(0)
    assert float((each - rate).abs().max()) < 5 * math.sqrt(rate * (1 - rate) / steps)
    between = torch.corrcoef(found.T)[~torch.eye(50, dtype=torch.bool)]
    assert float(between.abs().max()) < 6 / math.sqrt(steps)  # examples are independent of each other
    later = torch.corrcoef(torch.stack([sizes[:-1], sizes[1:]]))[0, 1]
    assert abs(float(later)) < 5 / math.sqrt(steps)  # and of what was drawn before


def test_noise_and_sampling_have_streams_of_their_own():
    quiet, noisy = made(nn.Linear(4, 2)), made(nn.Linear(4, 2), noise_multiplier=1.0)
    assert torch.equal(drawn(quiet, Rows(), 20), drawn(noisy, Rows(), 20))
    other = made(nn.Linear(4, 2), seed=None, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(drawn(made(nn.Linear(4, 2)), Rows(), 20), drawn(other, Rows(), 20))
    noise, sampling, _ = sources(0, None, secure=False, rank=0)
    of_rank_1 = sources(0, None, secure=False, rank=1)[1]
    streams = torch.stack([source.uniform(1000) for source in (noise, sampling, of_rank_1)])
    assert float(torch.corrcoef(streams).triu(1).abs().max()) < 0.2  # six standard errors


@pytest.mark.parametrize(("rate", "batches"), [(0.1, 10), (0.3, 3), (0.4, 2), (0.9, 1), (1.0, 1)])
def test_one_pass_draws_each_example_once_on_average(rate, batches):
    model = mlp()
    dp = made(model, rate)
    loader = dp.loader(Rows())
    assert len(loader) == batches == sum(step(model, dp, batch) for batch in loader) == dp.steps


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_give_the_same_step_as_the_whole(workers):
    whole, parts = mlp(), mlp()
    dp = made(whole, noise_multiplier=1.0)
    for batch in dp.loader(Rows()):
        assert step(whole, dp, batch)
    dp = made(parts, noise_multiplier=1.0)
    acted, sizes = [], []
    for batch in dp.loader(Rows(), batch_size=7, num_workers=workers):
        dp._optimizer.zero_grad()  # a habit that must not lose the first parts
        acted.append(step(parts, dp, batch))
        sizes.append(len(batch["x"]))
    assert sum(acted) == dp.steps == 10 and len(acted) > 20 and max(sizes) == 7
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_an_empty_batch_has_no_rows_and_steps_and_counts():
    model = mlp()
    dp = made(model, 0.002, noise_multiplier=1.0)
    empty, before = 0, copy.deepcopy(model)
    for batch in dp.loader(Rows(), steps=20, num_workers=0):
        assert batch["x"].shape[1:] == (4,) and len(batch["y"]) == len(batch["x"]) == len(batch["name"])
        assert step(model, dp, batch)
        empty += not len(batch["x"])
        assert not torch.equal(before[0].weight, model[0].weight)  # noise
        before = copy.deepcopy(model)
    assert dp.steps == 20 and 5 < empty < 20


def test_a_batch_that_is_empty_may_be_left_out_of_the_block():
    model = mlp()
    dp = made(model, 0.002)
    for batch in dp.loader(Rows(), steps=20):
        if len(batch["x"]):
            step(model, dp, batch)
        else:
            assert dp.step()
    assert dp.steps == 20


@pytest.mark.parametrize("kind", ["convolution", "embedding", "attention"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_empty_batches_through_other_layers(kind, reduction):
    torch.manual_seed(0)
    model, x = {
        "convolution": (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)), torch.randn(N, 1, 4, 4)
        ),
        "embedding": (nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2)), torch.randint(9, (N, 3))),
        "attention": (
            nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(12, 2)),
            torch.randn(N, 3, 4),
        ),
    }[kind]  # fmt: skip
    dp = made(model, 0.01, loss_reduction="mean" if reduction == "mean" else None)
    sizes = []
    for one, y in dp.loader(TensorDataset(x, torch.randint(2, (N,))), steps=15):
        with dp as clipped:
            F.cross_entropy(model(one), y, reduction=reduction).backward()
        assert clipped.norms.shape == (len(one),)
        assert dp.step()
        sizes.append(len(one))
    assert 0 in sizes and max(sizes) > 1
    assert all(p.isfinite().all() for p in model.parameters())


# ---- refusals -------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


def test_what_does_not_sample_is_refused():
    dp = made(mlp())
    with pytest.raises(OptionError, match="shuffles instead of sampling"):
        dp.loader(DataLoader(Rows(), shuffle=True))
    with pytest.raises(OptionError, match="length"):
        dp.loader(Stream())
    with pytest.raises(OptionError, match="length"):
        dp.loader(iter([1, 2]))
    with pytest.raises(OptionError, match="no examples"):
        dp.loader([])
    for options in ({"shuffle": True}, {"drop_last": True}, {"batch_size": 0}, {"steps": 0}):
        with pytest.raises(OptionError, match=next(iter(options))):
            dp.loader(Rows(), **options)


def test_copies_of_examples_are_refused_unless_they_are_one_sample():
    model = mlp()
    dp = made(model)
    batch = next(iter(dp.loader(Rows())))
    n = len(batch["x"])
    twice = {"x": batch["x"].repeat(2, 1), "y": batch["y"].repeat(2)}
    with pytest.raises(SamplesError, match=rf"{n} examples were drawn, and {2 * n} samples"):
        step(model, dp, twice)
    model = mlp()
    dp = made(model)
    next(iter(dp.loader(Rows())))
    dp.open(samples=torch.arange(n).repeat(2))
    F.cross_entropy(model(twice["x"]), twice["y"], reduction="sum").backward()
    dp.close()
    assert dp.step()


def test_a_batch_without_a_step_is_refused():
    model = mlp()
    dp = made(model)
    with pytest.raises(OptionError, match=r"dp.step\(\) was not called"):
        for batch in dp.loader(Rows()):
            with dp:
                F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum").backward()
    with pytest.raises(OptionError, match="started again"):
        next(iter(dp.loader(Rows())))
    with pytest.raises(SamplesError, match="0 samples"):
        dp = made(mlp())
        for _ in dp.loader(Rows()):
            dp.step()  # of a batch that was never clipped


# ---- ranks ----------------------------------------------------------------------------------------------------------


def run_rank(rank):
    model = mlp()
    dp = made(model, 1.0, noise_multiplier=0.0)
    for batch in dp.loader(Rows(), steps=3, batch_size=33):
        step(model, dp, batch)
    quiet = [p.detach().clone() for p in model.parameters()]
    dp = made(model, 0.1, noise_multiplier=1.0, seed=None)  # of which each rank knows nothing
    for batch in dp.loader(Rows(), steps=3):
        step(model, dp, batch)
    return {"quiet": quiet, "noisy": [p.detach() for p in model.parameters()]}


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(ranks):
    alone, (first, second) = run_rank(0), ranks[2].run(run_rank)
    for one, other, wanted in zip(first["quiet"], second["quiet"], alone["quiet"], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, wanted)
    for one, other, wanted in zip(first["noisy"], second["noisy"], alone["noisy"], strict=True):
        assert torch.equal(one, other) and not torch.equal(one, wanted)


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flat", "layer", "automatic"])
def test_training_learns_nearly_as_much_as_without_privacy(how):
    torch.manual_seed(0)
    rows = Rows(2000)
    accuracy = lambda model: float((model(rows.x).argmax(1) == rows.y).double().mean())
    model, plain = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    dp = unsum.private(
        model, optimizer, max_norm=1.0, noise_multiplier=1.0, expected_batch=200, sample_rate=0.1, how=how, seed=0
    )
    for _ in range(4):
        for batch in dp.loader(TensorDataset(rows.x, rows.y)):
            with dp:
                F.cross_entropy(model(batch[0]), batch[1], reduction="sum").backward()
            dp.step()
    optimizer = torch.optim.SGD(plain.parameters(), lr=2.0)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(plain(rows.x), rows.y).backward()
        optimizer.step()
    assert accuracy(plain) > 0.95 and accuracy(model) > accuracy(plain) - 0.05
