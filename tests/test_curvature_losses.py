"""One loss for each example: the losses say what the samples are, and each must be its example's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unsum
from brute_curvature import flat, per_sample, random_rows
from curvature_checks import close, distance, fitted, same
from curvature_nets import Batches, Examples, classified, forward, ids, made, mlp, numbers
from unsum.errors import InteractionError, UnsumError

BATCH = numbers(0, 5, 4), ids(1, 5, high=3)


def contrasted(model, batch):
    """Every example against all others."""
    return F.cross_entropy(model(batch[0]) @ model(1.1 * batch[0]).T, torch.arange(len(batch[0])), reduction="none")


def centred(model, batch):
    losses = classified(model, batch)
    return losses - losses.mean()


@pytest.mark.parametrize("loss_fn", [contrasted, centred])
def test_a_loss_that_depends_on_other_examples_is_refused(loss_fn):
    model, data = mlp(), Batches(BATCH)
    for kind in ("kfac", "ekfac", "diagonal"):
        with pytest.raises(
            InteractionError, match=r"(?s)^fit.*interact.*model\.eval\(\).*depends on its example alone$"
        ):
            fitted(model, loss_fn, [BATCH], kind)
    with pytest.raises(InteractionError, match="^query"):
        unsum.influence(model, loss_fn, data, data)
    with pytest.raises(InteractionError, match="^train"):
        plain = lambda model, batch: (classified if len(batch[0]) == 2 else loss_fn)(model, batch)
        unsum.influence(model, plain, data, Batches(tuple(tensor[:2] for tensor in BATCH)))


def one_by_one(model, batch):
    """The model is called for one example after the other."""
    return torch.stack([classified(model, (x[None], y[None]))[0] for x, y in zip(*batch, strict=True)])


def test_a_loss_that_calls_the_model_for_each_example():
    model, data, rows = mlp(), Batches(BATCH), random_rows(mlp(), 2)
    for kind in ("kfac", "ekfac", "diagonal"):
        ours, wanted = fitted(model, one_by_one, [BATCH], kind), fitted(model, classified, [BATCH], kind)
        assert ours.n == wanted.n
        same(ours.matvec(rows), wanted.matvec(rows))
    each = flat(per_sample(model, classified, [BATCH]))
    close(unsum.influence(model, one_by_one, data, data).matrix, each @ each.T)


def test_as_many_examples_as_outputs():
    """Of a square output nothing but the losses tells which side the examples are."""
    model, batch = mlp(), tuple(tensor[:3] for tensor in BATCH)
    model[0].weight.requires_grad_(False)
    each = flat(per_sample(model, classified, [batch]))
    close(unsum.influence(model, classified, Batches(batch), Batches(batch)).matrix, each @ each.T)


@pytest.mark.parametrize("wrong", [lambda x: x[:-1], lambda x: x[[0, 0, 1, 2, 3, 4]]], ids=["one less", "one more"])
def test_losses_that_are_not_as_many_as_examples(wrong):
    model, data = mlp(), Examples(*BATCH)
    losses = lambda model, batch: wrong(classified(model, batch))
    with pytest.raises(UnsumError, match="losses for a batch of 5"):
        unsum.curvature.fit(model, losses, data)
    with pytest.raises(UnsumError, match="losses for a batch of 5"):
        unsum.influence(model, losses, data, data)


class NearlyItsBias(nn.Module):
    """A bias whose gradient is nearly, and not quite, what the gradients at the weight's outputs add up to."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + 0.01 * F.linear(x.flip(1), self.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bias_that_is_nearly_its_weights_is_by_itself(dtype):
    model = made(NearlyItsBias).to(dtype)
    c = fitted(model, classified, [(BATCH[0].to(dtype), BATCH[1])], "ekfac")
    assert c.parameters == {"weight": "kronecker", "bias": "diagonal"}


def test_an_embedding_with_sparse_gradients():
    class Words(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            self.words, self.head = nn.Embedding(6, 3, sparse=sparse), nn.Linear(3, 3)

        def forward(self, ids):
            return self.head(self.words(ids).mean(1))

    sparse, dense = (made(lambda sparse=sparse: Words(sparse)) for sparse in (True, False))
    batch, rows = (ids(0, 7, 4, high=6), ids(1, 7, high=3)), random_rows(dense, 2)
    h, wanted = (
        unsum.curvature.ggn(model, Batches(batch), unsum.curvature.categorical(forward)) for model in (sparse, dense)
    )
    same(h.matvec(rows), wanted.matvec(rows))
    assert h.trace == pytest.approx(wanted.trace)
    c, of_dense = (fitted(model, classified, [batch], "ekfac") for model in (sparse, dense))
    assert distance(flat(c.matvec(rows)), flat(of_dense.matvec(rows))) < 1e-10
