"""Gauss–Newton products of models and losses that are out of the ordinary."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import unsum
from brute_curvature import categorical_loss, flat, gauss_newton, random_rows, unflat
from curvature_checks import close, distance, same
from curvature_nets import Batches, classified, forward, ids, made, mlp, numbers
from unsum.errors import InteractionError, UnsumError, UnsupportedError

BATCH = numbers(0, 12, 4), ids(1, 12, high=3)
CATEGORICAL = unsum.curvature.categorical(forward)


def ggn(model, likelihood=CATEGORICAL, batch=BATCH):
    return unsum.curvature.ggn(model, Batches(batch), likelihood)


def test_one_output_for_each_sample():
    model, one = mlp(), lambda model, batch: model(batch[0])[:, 0]
    loss = lambda outputs, batch: F.softplus(outputs)
    h, matrix = ggn(model, unsum.curvature.convex(one, loss)), gauss_newton(model, one, [BATCH], loss)
    rows = random_rows(model, 2)
    same(h.matvec(rows), unflat(flat(rows) @ matrix, model))
    assert h.trace == pytest.approx(float(matrix.trace()))
    assert h.damping == pytest.approx(float(matrix.trace()) / 12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_convex_loss_is_one_number_for_each_sample(reduction):
    loss = lambda outputs, batch: F.cross_entropy(outputs, batch[1], reduction=reduction)
    h = ggn(mlp(), unsum.curvature.convex(forward, loss))
    with pytest.raises(UnsumError, match=r"\(12,\).*\(\)"):
        h.matvec(random_rows(mlp(), 1))


def test_a_loss_that_is_not_convex_is_told_apart_from_too_few_steps():
    h = ggn(mlp(), unsum.curvature.convex(forward, lambda outputs, batch: -outputs.square().sum(1)))
    with pytest.warns(UserWarning, match="convex"):
        h.solve(random_rows(mlp(), 1), damping=0.01)


def test_batch_norm_in_training_is_refused():
    model = made(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    with pytest.raises(InteractionError, match=r"(?s)interact.*eval\(\)"):
        ggn(model)
    h, rows = ggn(model.eval()), random_rows(model, 2)
    matrix = gauss_newton(model, forward, [BATCH], categorical_loss)
    same(h.matvec(rows), unflat(flat(rows) @ matrix, model))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.below, self.above = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.above(checkpoint(torch.tanh, self.below(x), use_reentrant=True))


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_a_reentrant_checkpoint_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        ggn(made(Checkpointed)).matvec(random_rows(made(Checkpointed), 1))


class NormInSingle(nn.Module):
    """As models for text have it: float64 around a norm in float32."""

    def __init__(self):
        super().__init__()
        self.below, self.above = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.below(x).float()
        return self.above((h * h.square().mean(-1, keepdim=True).add(1e-3).rsqrt()).double())


def test_rounding_within_a_model_is_no_missing_second_derivative():
    model, rows = made(NormInSingle), random_rows(made(NormInSingle), 2)
    matrix = gauss_newton(model, forward, [BATCH], categorical_loss)
    same(ggn(model).matvec(rows), unflat(flat(rows) @ matrix, model), 1e-5)


class Half(torch.autograd.Function):
    """x, of whose backward a part cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 0.99 * grad + 0.01 * grad.detach()


@pytest.mark.parametrize("width", [4, 400])
def test_a_small_part_that_is_lost_shows_in_a_wide_model_too(width):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.below, self.above = nn.Linear(4, width), nn.Linear(width, 3)

        def forward(self, x):
            return self.above(Half.apply(self.below(x)))

    model = Net()
    batch = BATCH[0].float(), BATCH[1]
    with pytest.raises(UnsupportedError, match="Half"):
        ggn(model, batch=batch).matvec({name: p.detach() for name, p in model.named_parameters()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision(dtype):
    x, y = BATCH
    model, wide = mlp().to(dtype), mlp()
    wide.load_state_dict(model.state_dict())
    h, exact = ggn(model, batch=(x.to(dtype), y)), ggn(wide, batch=(x.to(dtype).double(), y))
    assert h.damping == pytest.approx(exact.damping, rel=0.02)
    rows = {name: value.to(dtype) for name, value in random_rows(wide, 2).items()}
    double = {name: value.double() for name, value in rows.items()}
    assert distance(flat(h.matvec(rows)).double(), flat(exact.matvec(double))) < 0.02
    with pytest.warns(UserWarning, match="exact enough"):  # such products do not get to a residual of 1e-6
        found = h.solve(rows)
    assert distance(flat(found).double(), flat(exact.solve(double))) < 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        h.solve(rows, tol=0.01)


@pytest.mark.parametrize("how", ["model", "autocast"])
def test_logits_in_float32_of_a_model_in_bfloat16(how):
    """What rounding explains is that of bfloat16, and no missing second backward."""
    build = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model = made(build).to(torch.bfloat16 if how == "model" else torch.float32)
    wide = copy.deepcopy(model).double()

    def logits(model, batch):
        if how == "model":
            return model(batch[0].bfloat16()).float()
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch[0].float()).float()

    x = BATCH[0].bfloat16()
    h, exact = ggn(model, unsum.curvature.categorical(logits), (x,)), ggn(wide, batch=(x.double(), BATCH[1]))
    rows = {name: value.bfloat16() for name, value in random_rows(wide, 2).items()}
    found = h.matvec({name: value.to(model[0].weight.dtype) for name, value in rows.items()})
    double = {name: value.double() for name, value in rows.items()}
    assert distance(flat(found).double(), flat(exact.matvec(double))) < 0.03


def test_classes_that_never_come():
    """Logits of -inf: a vocabulary that was made longer, a choice that is not allowed."""
    never = torch.tensor([0.0, -torch.inf, 0.0], dtype=torch.float64)
    model, masked = mlp(), lambda model, batch: model(batch[0]) + never
    h, rows = ggn(model, unsum.curvature.categorical(masked)), random_rows(model, 2)
    two = lambda model, batch: model(batch[0])[:, [0, 2]]
    matrix = gauss_newton(model, two, [BATCH], categorical_loss)
    same(h.matvec(rows), unflat(flat(rows) @ matrix, model))
    assert h.trace == pytest.approx(float(matrix.trace()))


def test_outputs_that_are_not_finite_are_named():
    x, y = BATCH[0].clone(), BATCH[1]
    x[7] = torch.nan
    with pytest.raises(UnsumError, match=r"\b7\b"):
        unsum.curvature.ggn(mlp(), Batches((x[:5], y[:5]), (x[5:], y[5:])), CATEGORICAL)


def test_a_right_side_that_is_not_finite_is_refused():
    rows = random_rows(mlp(), 3)
    rows["0.bias"][1, 0] = torch.nan
    with pytest.raises(UnsumError, match=r"\b1\b.*right side"):
        ggn(mlp()).solve(rows, damping=0.1)


def test_the_matrix_of_another_model_is_refused():
    model, other = mlp(), made(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), seed=1)
    h, data = ggn(other), Batches(BATCH)
    with pytest.raises(UnsumError, match="changed"):
        unsum.influence(model, classified, data, data, h)
    with unsum.gradients(model) as g:
        classified(model, BATCH).sum().backward()
    for read in (h.matvec, h.solve):
        with pytest.raises(UnsumError, match="changed"):
            read(g)


def test_parameters_that_were_written_to_behind_autograd_are_seen():
    model = mlp()
    h = ggn(model)
    model[0].weight.data.mul_(2)
    with pytest.raises(UnsumError, match="changed"):
        h.solve(random_rows(model, 1), damping=0.1)
    with pytest.raises(UnsumError, match="changed"):
        unsum.influence(model, classified, Batches(BATCH), Batches(BATCH), h, damping=0.1)


def test_labels_are_drawn_for_packed_documents():
    """Documents in one row, samples by unsum.packed: as many samples as documents, the same labels by position."""
    model, x = mlp(), numbers(3, 1, 7, 4)
    options = {"kind": "kfac", "likelihood": CATEGORICAL}
    packed = unsum.curvature.fit(model, None, Batches((x,)), samples=unsum.packed(torch.tensor([0, 3, 7])), **options)
    whole = unsum.curvature.fit(model, None, Batches((x,)), **options)
    assert (packed.n, whole.n) == (2, 1)
    rows = random_rows(model, 2)
    close(2 * flat(packed.matvec(rows)), flat(whole.matvec(rows)))  # K-FAC's sums are those over all positions
