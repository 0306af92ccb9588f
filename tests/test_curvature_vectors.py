"""What a curvature is multiplied with: no rows, half precision, complex numbers, numbers that are none."""

import pytest
import torch
from torch import nn

import unsum
from brute_curvature import flat, random_rows
from curvature_checks import close, distance, fitted, same
from curvature_nets import Batches, classified, forward, ids, mlp, numbers
from unsum.errors import UnsumError

BATCH = numbers(0, 12, 4), ids(1, 12, high=3)
KINDS = ("kfac", "ekfac", "diagonal")


def gauss_newton(model):
    return unsum.curvature.ggn(model, Batches(BATCH), unsum.curvature.categorical(forward))


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_give_no_rows(kind):
    model = mlp()
    none = {name: rows[:0] for name, rows in random_rows(model, 1).items()}
    c, h = fitted(model, classified, [BATCH], kind), gauss_newton(model)
    for found in (c.solve(none), c.matvec(none), h.matvec(none), h.solve(none)):
        assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in none.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_are_refused_rather_than_cut_to_zero(kind):
    model = mlp()
    whole = {name: torch.ones_like(p, dtype=torch.long) for name, p in model.named_parameters()}
    c, h = fitted(model, classified, [BATCH], kind), gauss_newton(model)
    for read in (c.solve, c.matvec, h.solve, h.matvec):
        with pytest.raises(UnsumError, match="floating"):
            read(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_rounded_once(kind):
    model = mlp()
    c, rows = fitted(model, classified, [BATCH], kind), random_rows(model, 3)
    half = {name: value.bfloat16() for name, value in rows.items()}
    ours, exact = c.solve(half, 1e-3), c.solve({name: value.double() for name, value in half.items()}, 1e-3)
    assert {value.dtype for value in ours.values()} == {torch.bfloat16}
    for name, value in exact.items():
        torch.testing.assert_close(ours[name], value.bfloat16(), rtol=2**-7, atol=1e-4 * float(value.abs().max()))


def test_queries_in_half_precision_are_solved_in_single():
    """1 / damping is more than a half can hold."""
    torch.manual_seed(0)
    model, (x, y) = mlp().half(), BATCH
    loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")
    c = unsum.curvature.fit(model, loss, Batches((x.half(), y)), kind="diagonal")
    scores = unsum.influence(model, loss, Batches((x.half(), y)), Batches((x.half(), y)), c, damping=1e-5).matrix
    wide, data = mlp(), Batches((x.half().double(), y))
    wide.load_state_dict(model.state_dict())
    c = unsum.curvature.fit(wide, classified, data, kind="diagonal")
    exact = unsum.influence(wide, classified, data, data, c, damping=1e-5).matrix
    assert float((scores - exact).norm() / exact.norm()) < 0.02


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4, dtype=torch.complex128), nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.inner(x.to(torch.complex128)).abs())


def real(rows):
    return flat({name: torch.view_as_real(v) if v.is_complex() else v for name, v in rows.items()})


def test_both_parts_of_complex_gradients_count():
    torch.manual_seed(0)
    model, data = Complex(), Batches(BATCH)
    with unsum.gradients(model) as g:
        classified(model, BATCH).sum().backward()
    c, each = fitted(model, classified, [BATCH], "ekfac"), real(g.per_sample())
    solved = real(c.solve(g))
    unit = lambda rows: nn.functional.normalize(rows, dim=1)
    close(unsum.influence(model, classified, data, data, c).matrix, solved @ each.T)
    close(unsum.influence(model, classified, data, data, c, "cosine").matrix, unit(solved) @ unit(each).T)
    h, rows = gauss_newton(model), {name: torch.randn_like(p)[None] for name, p in model.named_parameters()}
    x = h.solve(rows, damping=0.1, tol=1e-10)
    same({"": real(h.matvec(x)) + 0.1 * real(x)}, {"": real(rows)}, 1e-8)


def test_a_block_that_nothing_reached():
    """Zero where its gradient is zero; a gradient for it is refused, with the damping that is missing."""

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.other = nn.Linear(4, 3), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    model = Unused().double()
    for kind in KINDS:
        c = fitted(model, classified, [BATCH], kind)
        assert unsum.influence(model, classified, Batches(BATCH), Batches(BATCH), c).matrix.isfinite().all()
        with pytest.raises(UnsumError, match="(?s)other.*reached.*other.weight': 1e-3"):
            c.solve(random_rows(model, 1))


def test_a_large_vocabulary_is_solved_with_the_default_damping():
    """Most of its rows were never met: the mean eigenvalue is far below the largest, and its damping is one."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(20_000, 4), nn.Linear(4, 20_000, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids):
            return self.head(self.words(ids).tanh())

    torch.manual_seed(0)
    model, batch = Words(), (ids(0, 4, 6), ids(1, 4, 6))
    for kind in ("kfac", "ekfac"):
        c = unsum.curvature.fit(model, classified, Batches(batch), kind)
        with unsum.gradients(model) as g:
            classified(model, batch).sum().backward()
        x, damping = c.solve(g), c.damping["words.weight"]
        back = c.matvec(x)["words.weight"] + damping * x["words.weight"]
        assert distance(back, g["words.weight"].per_sample()) < 1e-2
        assert unsum.influence(model, classified, Batches(batch), Batches(batch), c).matrix.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_for_the_damping_always_wins(kind):
    """Also one that rounding hides beside the largest eigenvalue."""
    model = mlp().float()
    c = fitted(model, classified, [(BATCH[0].float(), BATCH[1])], kind)
    rows = {name: value.float() for name, value in random_rows(model, 2).items()}
    tiny = c.solve(rows, damping=1e-9)
    assert all(value.isfinite().all() for value in tiny.values())
    half = c.solve(rows, damping=2e-9)  # what is not met by any eigenvalue is divided by the damping alone
    ratio = float(flat(tiny).norm() / flat(half).norm())
    assert ratio == pytest.approx(2, rel=0.2) or kind == "diagonal"
