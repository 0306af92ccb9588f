"""Where theory says that K-FAC is the Gauss–Newton matrix, it is; and labels drawn from the model tend to it."""

import pytest
import torch
from torch import nn

import unsum
from brute_curvature import (
    categorical_loss,
    flat,
    gauss_newton,
    gaussian_loss,
    part_of,
    random_rows,
    second_moment,
    trainable,
)
from curvature_checks import close, dense, distance, fitted, same
from curvature_nets import Averaged, classified, conv_net, forward, ids, linear_net, made, mlp, numbers, squared
from designed_labels import gaussian_labels, softmax_labels, weighted

SETTINGS = {
    "vectors, expand": (linear_net, (3, 4), "expand"),
    "vectors, no biases": (lambda: linear_net(bias=False), (3, 4), "expand"),
    "vectors, reduce": (linear_net, (3, 4), "reduce"),
    "positions, expand": (linear_net, (3, 2, 4), "expand"),
    "averaged positions, reduce": (lambda: made(Averaged), (3, 2, 4), "reduce"),
}


def layers(model):
    """The names of each block: a weight and its bias."""
    names = list(trainable(model))
    return [[n for n in names if n.rpartition(".")[0] == m] for m in dict.fromkeys(n.rpartition(".")[0] for n in names)]


# ---- exactly: labels by design --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SETTINGS)
def test_kfac_is_the_gauss_newton_block_of_deep_linear_networks(case):
    build, shape, setting = SETTINGS[case]
    model, x = build(), numbers(0, *shape)
    truth = gauss_newton(model, forward, [(x,)], gaussian_loss)
    c = fitted(model, squared, [gaussian_labels(model, x)], "kfac", setting=setting)
    for names in layers(model):
        close(dense(c, model, names), part_of(truth, model, names))


@pytest.mark.parametrize(
    ("build", "setting"), [(linear_net, "reduce"), (lambda: made(Averaged), "expand")], ids=["linear", "averaged"]
)
def test_the_other_setting_is_not_exact(build, setting):
    model, x = build(), numbers(0, 3, 2, 4)
    truth = gauss_newton(model, forward, [(x,)], gaussian_loss)
    c = fitted(model, squared, [gaussian_labels(model, x)], "kfac", setting=setting)
    names = layers(model)[0]
    assert distance(dense(c, model, names), part_of(truth, model, names)) > 0.02


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
def test_one_linear_layer_with_softmax_whose_probabilities_are_the_same_everywhere(kind):
    model, x = made(lambda: nn.Sequential(nn.Linear(4, 3))), numbers(0, 6, 4)
    with torch.no_grad():
        model[0].weight.zero_()
    truth = gauss_newton(model, forward, [(x,)], categorical_loss)
    c = fitted(model, weighted, [softmax_labels(model, x)], kind)
    close(dense(c, model, ["0.weight", "0.bias"]), truth)


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
def test_one_linear_layer_with_softmax_on_one_input(kind):
    model, x = made(lambda: nn.Sequential(nn.Linear(4, 3))), numbers(0, 1, 4)
    truth = gauss_newton(model, forward, [(x,)], categorical_loss)
    c = fitted(model, weighted, [softmax_labels(model, x)], kind)
    close(dense(c, model, ["0.weight", "0.bias"]), truth)


def test_corrected_eigenvalues_are_the_gauss_newton_diagonal_in_the_eigenbasis():
    model, x = mlp(), numbers(0, 6, 4)
    truth = gauss_newton(model, forward, [(x,)], categorical_loss)
    c = fitted(model, weighted, [softmax_labels(model, x)], "ekfac")
    for names in layers(model):
        values, vectors = torch.linalg.eigh(dense(c, model, names))
        wanted = (part_of(truth, model, names) @ vectors * vectors).sum(0)
        torch.testing.assert_close(values, wanted, rtol=1e-6, atol=1e-9)


def test_the_corrected_eigenvalues_are_nearer_to_the_second_moments():
    model, batch = mlp(), (numbers(0, 40, 4), ids(1, 40, high=3))
    for names in layers(model):
        truth = second_moment(model, classified, [batch], names)
        fits = (fitted(model, classified, [batch], kind) for kind in ("kfac", "ekfac"))
        kfac, ekfac = (distance(dense(c, model, names), truth) for c in fits)
        assert ekfac <= kfac + 1e-9


# ---- in expectation: labels drawn from the model --------------------------------------------------------------------


def many(x, *others, copies=1000, size=500):
    """Batches in which every sample comes many times, so that draws average out."""
    tensors = [tensor.repeat(copies, *([1] * (tensor.dim() - 1))) for tensor in (x, *others)]
    return list(zip(*(tensor.split(size) for tensor in tensors), strict=True))


@pytest.mark.parametrize("case", ["vectors, expand", "positions, expand", "averaged positions, reduce"])
def test_gaussian_labels_tend_to_the_gauss_newton_matrix(case):
    build, shape, setting = SETTINGS[case]
    model, x = build(), numbers(0, *shape)
    truth = gauss_newton(model, forward, [(x,)], gaussian_loss)
    likelihood = unsum.curvature.gaussian(forward)
    data = many(x, numbers(9, *model(x).shape))
    c = fitted(model, squared, data, "kfac", setting=setting, likelihood=likelihood)
    for names in layers(model):
        assert distance(dense(c, model, names), part_of(truth, model, names)) < 0.1, names


@pytest.mark.parametrize("kind", ["ekfac", "diagonal"])
@pytest.mark.parametrize("shape", [(4, 4), (4, 3, 4)], ids=["vectors", "positions"])
def test_categorical_labels_tend_to_the_gauss_newton_diagonal(kind, shape):
    """One label for each position: a label for a whole sample would add products of positions."""
    model, x = mlp(), numbers(0, *shape)
    truth = gauss_newton(model, forward, [(x,)], categorical_loss)
    c = fitted(
        model, classified, many(x, ids(9, *shape[:-1], high=3)), kind, likelihood=unsum.curvature.categorical(forward)
    )
    for names in layers(model):
        matrix = dense(c, model, names)
        vectors = torch.linalg.eigh(matrix)[1] if kind == "ekfac" else torch.eye(len(matrix)).double()
        ours, wanted = ((m @ vectors * vectors).sum(0) for m in (matrix, part_of(truth, model, names)))
        assert distance(ours, wanted) < 0.1, names


@pytest.mark.parametrize("make", ["categorical", "gaussian"])
def test_a_mask_says_which_positions_are_labelled(make):
    model, x = mlp(), numbers(0, 4, 3, 4)
    keep = torch.tensor([[True, True, False], [True, False, False], [True, True, True], [False, True, False]])
    loss = {"categorical": categorical_loss, "gaussian": gaussian_loss}[make]
    apart = [(x[i : i + 1, keep[i]],) for i in range(4)]
    truth = gauss_newton(model, forward, apart, loss).diagonal()
    likelihood = getattr(unsum.curvature, make)(forward, mask=lambda batch: batch[2])
    c = fitted(model, classified, many(x, ids(9, 4, 3, high=3), keep), "diagonal", likelihood=likelihood)
    assert distance(dense(c, model, list(trainable(model))).diagonal(), truth) < 0.1


def test_images_and_their_categorical_labels():
    model, x = conv_net(), numbers(0, 3, 2, 4, 4)
    truth = gauss_newton(model, forward, [(x,)], categorical_loss)
    data = many(x, ids(9, 3, high=3), copies=500, size=300)
    c = fitted(model, classified, data, "diagonal", likelihood=unsum.curvature.categorical(forward))
    assert distance(dense(c, model, list(trainable(model))).diagonal(), truth.diagonal()) < 0.1


# ---- drawing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kfac", "ekfac", "diagonal"])
def test_a_seed_gives_the_same_labels_again(kind):
    model, batch = mlp(), (numbers(0, 12, 4), ids(1, 12, high=3))
    likelihood, rows = unsum.curvature.categorical(forward), random_rows(mlp(), 2)

    def found(**options):
        torch.rand(1)  # the global generator plays no part
        return fitted(model, classified, [batch], kind, likelihood=likelihood, **options).matvec(rows)

    once = found(seed=3)
    same(found(seed=3), once, 0)
    same(found(), found(seed=0), 0)
    other = found(seed=4)
    assert distance(flat(other), flat(once)) > 1e-3


def test_the_labels_of_the_data_are_not_used():
    model, x = mlp(), numbers(0, 12, 4)
    likelihood, rows = unsum.curvature.categorical(forward), random_rows(mlp(), 2)
    one, two = (
        fitted(model, classified, [(x, ids(s, 12, high=3))], likelihood=likelihood).matvec(rows) for s in (1, 2)
    )
    same(one, two, 1e-12)
    empirical = fitted(model, classified, [(x, ids(1, 12, high=3))]).matvec(rows)
    assert distance(flat(empirical), flat(one)) > 1e-3


def test_batches_do_not_repeat_their_labels():
    """The same batch twice draws twice: another result than once."""
    model, batch = mlp(), (numbers(0, 12, 4), ids(1, 12, high=3))
    likelihood, rows = unsum.curvature.categorical(forward), random_rows(mlp(), 2)
    once, twice = (fitted(model, classified, [batch] * k, likelihood=likelihood).matvec(rows) for k in (1, 2))
    assert distance(flat(twice), flat(once)) > 1e-3
