"""The references for curvature, compared with each other and with torch.func: no unsum here."""

import pytest
import torch
from torch import nn

from brute_curvature import (
    block_of,
    categorical_loss,
    diagonal,
    ekfac,
    factors,
    flat,
    gauss_newton,
    gaussian_loss,
    kfac,
    matvec,
    meetings,
    part_of,
    per_sample,
    random_rows,
    second_moment,
    solve,
    trainable,
    unflat,
)
from curvature_nets import LAYERED, Averaged, forward, linear_net, made, numbers, squared
from designed_labels import gaussian_labels, softmax_labels, weighted


def close(ours, wanted):
    torch.testing.assert_close(ours, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("net", LAYERED)
def test_meetings_multiply_out_to_the_gradients(net):
    model, loss_fn, batches = LAYERED[net]()
    each, met = per_sample(model, loss_fn, batches), meetings(model, loss_fn, batches)
    assert met
    for module, pairs in met.items():
        layer = model.get_submodule(module)
        products = torch.stack([delta.T @ a for a, delta in pairs])
        products = products.mT if isinstance(layer, nn.Embedding) else products
        close(products.flatten(1), each[f"{module}.weight"].flatten(1))


@pytest.mark.parametrize("net", LAYERED)
def test_corrected_eigenvalues_keep_the_trace(net):
    model, loss_fn, batches = LAYERED[net]()
    each = per_sample(model, loss_fn, batches)
    squares = torch.stack([block.matrix.trace() for block in ekfac(model, loss_fn, batches)]).sum()
    close(squares, flat(each).square().sum(1).mean())
    close(sum(block.matrix.trace() for block in diagonal(model, loss_fn, batches)), squares)


def test_solve_is_the_inverse_of_the_damped_product():
    model, loss_fn, batches = LAYERED["layer norm and scale"]()
    blocks, rows = kfac(model, loss_fn, batches), random_rows(model, 3)
    solved = solve(blocks, rows, 0.3)
    close(flat(matvec(blocks, solved)) + 0.3 * flat(solved), flat(rows))
    assert block_of(blocks, "fc.bias") is block_of(blocks, "fc.weight")


@pytest.mark.parametrize("bias", [True, False])
def test_gauss_newton_of_a_linear_model_is_the_hessian(bias):
    model = made(lambda: nn.Linear(4, 2, bias))
    batch = numbers(0, 6, 4), numbers(1, 6, 2)

    def mean_loss(vector):
        parameters = {name: row[0] for name, row in unflat(vector[None], model).items()}
        outputs = torch.func.functional_call(model, parameters, (batch[0],))
        return (batch[1] - outputs).square().sum() / 2 / 6

    at = flat({name: p.detach()[None] for name, p in trainable(model).items()})[0]
    close(gauss_newton(model, forward, [batch], gaussian_loss), torch.func.hessian(mean_loss)(at))


def test_designed_labels_turn_second_moments_into_gauss_newton():
    model, x = linear_net(), numbers(0, 3, 4)
    names = list(trainable(model))
    moment = second_moment(model, squared, [gaussian_labels(model, x)], names)
    close(moment, gauss_newton(model, forward, [(x,)], gaussian_loss))
    model = made(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)))
    moment = second_moment(model, weighted, [softmax_labels(model, x)], list(trainable(model)))
    close(moment, gauss_newton(model, forward, [(x,)], categorical_loss))


@pytest.mark.parametrize(
    ("build", "shape", "setting"),
    [(linear_net, (3, 4), "expand"), (linear_net, (3, 2, 4), "expand"), (lambda: made(Averaged), (3, 2, 4), "reduce")],
    ids=["vectors", "positions", "averaged"],
)
def test_kfac_is_exact_on_deep_linear_networks(build, shape, setting):
    model, x = build(), numbers(0, *shape)
    truth = gauss_newton(model, forward, [(x,)], gaussian_loss)
    for block in kfac(model, squared, [gaussian_labels(model, x)], setting):
        ours = block.unpack(torch.eye(len(block.matrix), dtype=torch.float64))
        wanted = part_of(truth, model, block.names)
        order = flat({name: ours[name] for name in block.names}).argmax(1)  # where each packed number lies
        close(block.matrix, wanted[order][:, order])


def test_positions_without_a_gradient_do_not_count():
    a, delta = numbers(0, 5, 3), numbers(1, 5, 2)
    delta[3:] = 0
    for setting in ("expand", "reduce"):
        short, long = (factors([(a[:k], delta[:k])], bias=True, setting=setting) for k in (3, 5))
        close(long[0], short[0])
        close(long[1], short[1])
        close(short[0][-1, -1], torch.tensor(1.0).double())
