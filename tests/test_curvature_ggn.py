"""`unsum.curvature.ggn`: exact Gauss–Newton products and solves, against dense Jᵀ H J."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

import unsum
from brute_curvature import categorical_loss, first, flat, gauss_newton, gaussian_loss, random_rows, trainable, unflat
from curvature_checks import fitted, same
from curvature_nets import ALL, Batches, Examples, Mixed, forward, ids, made, mlp, numbers
from unsum.errors import UnsumError

LOSSES = {"categorical": categorical_loss, "gaussian": gaussian_loss}
NETS = [net for net in ALL if "experts" not in net]


def exact(model, batches, make="categorical", **options):
    return unsum.curvature.ggn(model, Batches(*batches), getattr(unsum.curvature, make)(forward), **options)


def exact_of_loss(model, batches, loss):
    """Any loss(outputs, batch) -> (n,) that is convex in the outputs."""
    return unsum.curvature.ggn(model, Batches(*batches), unsum.curvature.convex(forward, loss))


def solved(matrix, rows, model, damping):
    damped = matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype)
    return unflat(torch.linalg.solve(damped, flat(rows).T).T, model)


# ---- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", LOSSES)
@pytest.mark.parametrize("net", NETS)
def test_products_are_dense_ones(net, make):
    model, _, batches = ALL[net]()
    matrix = gauss_newton(model, forward, batches, LOSSES[make])
    h, rows = exact(model, batches, make), random_rows(model, 3)
    wanted = unflat(flat(rows) @ matrix, model)
    same(h.matvec(rows), wanted)
    alone = h.matvec(first(rows))
    assert all(alone[name].shape == p.shape for name, p in trainable(model).items())
    same(alone, first(wanted))


def cubed(outputs, batch):
    """Convex where outputs are not 0, with a Hessian that depends on outputs and batch, and mixes outputs."""
    f = outputs.flatten(1)
    return (f.abs() ** 3).sum(1) + batch[1].flatten(1).double().mean(1).exp() * f.sum(1).square() + f.logsumexp(1)


@pytest.mark.parametrize("net", ["mlp", "convolution", "transformer"])
def test_any_loss_that_is_convex_in_the_outputs(net):
    model, _, batches = ALL[net]()
    if net == "mlp":
        batches = [(x, y[:, None]) for x, y in batches]
    elif net == "convolution":
        batches = [(x, y.reshape(-1, 1)) for x, y in batches]
    matrix = gauss_newton(model, forward, batches, cubed)
    rows = random_rows(model, 2)
    same(exact_of_loss(model, batches, cubed).matvec(rows), unflat(flat(rows) @ matrix, model))


@pytest.mark.parametrize("make", LOSSES)
def test_masked_positions_are_no_outputs(make):
    model, x = mlp(), numbers(0, 3, 4, 4)
    keep = torch.tensor([[True, True, False, True], [True, False, False, False], [True] * 4])
    matrix = gauss_newton(model, forward, [(x[i : i + 1, keep[i]],) for i in range(3)], LOSSES[make])
    likelihood = getattr(unsum.curvature, make)(forward, mask=lambda batch: batch[1])
    rows = random_rows(model, 2)
    h = unsum.curvature.ggn(model, Batches((x, keep)), likelihood)
    same(h.matvec(rows), unflat(flat(rows) @ matrix, model))


def test_examples_and_batches_give_one_matrix():
    model, x, y = mlp(), numbers(0, 9, 4), ids(1, 9, high=3)
    likelihood, rows = unsum.curvature.categorical(forward), random_rows(mlp(), 2)
    wanted = unflat(flat(rows) @ gauss_newton(model, forward, [(x, y)], categorical_loss), model)
    for data, options in (
        (Batches((x[:2], y[:2]), (x[2:], y[2:])), {}),
        (Examples(x, y), {"batch_size": 4}),
        ([(x[i], y[i]) for i in range(9)], {"batch_size": 4}),
        (torch.utils.data.DataLoader(Examples(x, y), batch_size=2), {}),
    ):
        h = unsum.curvature.ggn(model, data, likelihood, **options)
        same(h.matvec(rows), wanted)
        same(h.matvec(rows), wanted)  # the data are read again


def test_gradients_of_a_block_are_vectors_too():
    model, loss_fn, batches = ALL["layer norm and scale"]()
    matrix = gauss_newton(model, forward, batches, categorical_loss)
    with unsum.gradients(model) as g:
        loss_fn(model, batches[0]).sum().backward()
    each = g.per_sample()
    same(exact(model, batches).matvec(g), unflat(flat(each) @ matrix, model))


def test_products_leave_the_model_as_it_was():
    model, _, batches = ALL["layer norm and scale"]()
    model.train()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    h = exact(model, batches)
    h.matvec(random_rows(model, 1))
    h.solve(random_rows(model, 1), damping=1.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


# ---- solves ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["mlp", "convolution", "transformer", "tied transformer"])
def test_solves_are_dense_ones(net):
    model, _, batches = ALL[net]()
    matrix = gauss_newton(model, forward, batches, categorical_loss)
    rows = random_rows(model, 3)
    ours = exact(model, batches).solve(rows, damping=0.1, tol=1e-10)
    same(ours, solved(matrix, rows, model, 0.1), 1e-6)
    alone = exact(model, batches).solve(first(rows), damping=0.1, tol=1e-10)
    same(alone, first(solved(matrix, rows, model, 0.1)), 1e-6)


@pytest.mark.parametrize("kind", ["kfac", "ekfac", "diagonal"])
def test_a_preconditioner_changes_the_way_and_not_the_answer(kind):
    model, loss_fn, batches = ALL["layer norm and scale"]()
    c = fitted(model, loss_fn, batches, kind)
    matrix, rows = gauss_newton(model, forward, batches, categorical_loss), random_rows(model, 2)
    ours = exact(model, batches).solve(rows, damping=0.05, precondition=c, tol=1e-10)
    same(ours, solved(matrix, rows, model, 0.05), 1e-6)


def test_an_exact_preconditioner_needs_few_iterations():
    """One linear layer with the same probabilities everywhere: EK-FAC is the Gauss–Newton matrix."""
    model, x = made(lambda: nn.Sequential(nn.Linear(4, 1))), numbers(0, 30, 4) * torch.tensor([1.0, 10, 100, 1000])
    y = model(x).detach() + 1.0  # residuals of one size: empirical and Gauss–Newton are one
    c = fitted(model, lambda m, batch: (batch[1] - m(batch[0])).square().sum(1) / 2, [(x, y)], "kfac")
    h, rows = exact(model, [(x, y)], "gaussian"), random_rows(model, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = h.solve(rows, damping=1e-3, precondition=c, tol=1e-6, max_iter=4)
    matrix = gauss_newton(model, forward, [(x, y)], gaussian_loss)
    same(ours, solved(matrix, rows, model, 1e-3), 1e-3)


@pytest.mark.parametrize("tol", [1e-2, 1e-6, 1e-9])
def test_the_residual_is_as_small_as_it_was_asked_to_be(tol):
    model, _, batches = ALL["layer norm and scale"]()
    matrix, rows = gauss_newton(model, forward, batches, categorical_loss), random_rows(model, 3)
    found = exact(model, batches).solve(rows, damping=0.01, tol=tol)
    x = flat({name: found[name] for name in rows})
    residual = flat(rows) - x @ matrix - 0.01 * x
    assert (residual.norm(dim=1) <= 1.01 * tol * flat(rows).norm(dim=1)).all()


def test_stopping_short_warns():
    model, _, batches = ALL["layer norm and scale"]()
    h, rows = exact(model, batches), random_rows(model, 2)
    with pytest.warns(UserWarning, match="max_iter|iterations"):
        h.solve(rows, damping=1e-4, max_iter=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        h.solve(rows, damping=1.0)


def test_rows_of_zeros_and_rows_of_other_sizes_in_one_solve():
    model, _, batches = ALL["mlp"]()
    rows = random_rows(model, 3)
    for value in rows.values():
        value[1] = 0
        value[2] *= 1e6
    matrix = gauss_newton(model, forward, batches, categorical_loss)
    found = exact(model, batches).solve(rows, damping=0.1, tol=1e-10)
    wanted = solved(matrix, rows, model, 0.1)
    for i in range(3):
        same(
            {name: value[i] for name, value in found.items()}, {name: value[i] for name, value in wanted.items()}, 1e-6
        )


@pytest.mark.parametrize("n", [2, 40], ids=["fewer outputs", "fewer parameters"])
def test_the_default_damping_is_the_trace_over_the_smaller_of_parameters_and_outputs(n):
    model, x = mlp(), numbers(0, n, 4)
    matrix = gauss_newton(model, forward, [(x,)], gaussian_loss)
    damping = float(matrix.trace()) / min(len(matrix), 3 * n)
    rows = random_rows(model, 2)
    found = exact(model, [(x,)], "gaussian").solve(rows, tol=1e-10)
    same(found, solved(matrix, rows, model, damping), 1e-3)


def test_a_complex_number_is_two_parameters():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))

        def forward(self, x):
            return (x.to(torch.complex128) @ self.weight).abs()

    class Parts(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.real, self.imag = (nn.Parameter(part.detach().clone()) for part in (weight.real, weight.imag))

        def forward(self, x):
            return ((x @ self.real).square() + (x @ self.imag).square()).sqrt()

    torch.manual_seed(0)
    model, batches = Complex(), [(numbers(0, 40, 4),)]
    assert exact(model, batches).damping == pytest.approx(exact(Parts(model.weight), batches).damping)


# ---- refusals -------------------------------------------------------------------------------------------------------


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].exp()


class NoDoubleBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.below, self.above = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.above(Once.apply(self.below(x)))


def test_an_operation_without_double_backward_is_refused_by_name():
    model = made(NoDoubleBackward)
    with pytest.raises(UnsumError, match="Once"):
        exact(model, [(numbers(0, 3, 4),)]).matvec(random_rows(model, 1))


def test_a_one_shot_iterator_is_refused():
    model = made(Mixed)
    batches = [(numbers(0, 3, 4), ids(1, 3, high=3))]
    with pytest.raises(UnsumError, match="(?i)iterator|generator"):
        unsum.curvature.ggn(model, iter(batches), unsum.curvature.categorical(forward)).matvec(random_rows(model, 1))


def test_vectors_that_do_not_fit():
    model, _, batches = ALL["mlp"]()
    h, rows = exact(model, batches), random_rows(model, 2)
    with pytest.raises((UnsumError, KeyError), match="nothing"):
        h.matvec(rows | {"nothing": torch.zeros(2, 3).double()})
    with pytest.raises(UnsumError, match="0.weight"):
        h.matvec(rows | {"0.weight": torch.zeros(2, 3, 9).double()})


def test_empirical_labels_play_no_part():
    model, x = mlp(), numbers(0, 5, 4)
    rows = random_rows(model, 2)
    one, two = (exact(model, [(x, ids(s, 5, high=3))]).matvec(rows) for s in (1, 2))
    same(one, two, 1e-12)
