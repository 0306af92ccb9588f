"""How many numbers `Project` gives, and that they are worth as many."""

import pytest
import torch
from torch import nn

import unsum
from unsum.errors import OptionError


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def projected(model, reducer):
    with unsum.gradients(model, reducer, keep=True) as g:
        model(X).square().sum().backward()
    return g[reducer].matrix(), torch.cat([each.flatten(1) for each in g.per_sample().values()], 1)


@pytest.mark.parametrize("k", [1, 2, 4, 16])
def test_k_tells_the_number_of_columns(k):
    model = net()
    matrix, _ = projected(model, unsum.Project(k=k))
    assert matrix.shape == (4, sum(min(p.numel(), k * k) for p in model.parameters()))


@pytest.mark.parametrize("dim", [1, 7, 20, 40, 53, 60])
def test_a_number_of_columns_is_what_comes(dim):
    matrix, whole = projected(net(), unsum.Project(dim=dim))
    assert matrix.shape == (4, dim)
    if dim >= whole.shape[1]:  # nothing is lost
        torch.testing.assert_close(matrix @ matrix.T, whole @ whole.T)


@pytest.mark.parametrize("dim", [7, 25, 40])
def test_inner_products_are_those_of_gradients_on_average(dim):
    model, found = net(), []
    for seed in range(400):
        matrix, whole = projected(model, unsum.Project(seed=seed, dim=dim))
        found.append(matrix @ matrix.T)
    each = torch.stack(found)
    error = each.std(0) / len(each) ** 0.5
    assert ((each.mean(0) - whole @ whole.T).abs() < 5 * error + 1e-9).all()


def test_the_same_seed_gives_the_same_numbers_in_another_block():
    model = net()
    one, two, other = (projected(model, unsum.Project(seed=seed, dim=9))[0] for seed in (3, 3, 4))
    assert torch.equal(one, two) and not torch.allclose(one, other)


def test_a_reducer_is_used_for_another_model():
    reducer = unsum.Project(dim=9)
    assert projected(net(), reducer)[0].shape == (4, 9)
    assert projected(nn.Linear(6, 40).double(), reducer)[0].shape == (4, 9)


def test_sizes_that_make_no_sense():
    for options in ({"k": 0}, {"k": True}, {"dim": 0}, {"dim": 2.5}, {"k": 4, "dim": 9}):
        with pytest.raises(OptionError, match="Project"):
            unsum.Project(**options)


def test_damping_from_a_schedule():
    damping = unsum.curvature.schedule_damping
    assert damping([0.1] * 100) == pytest.approx(0.1)
    assert damping((0.1 * (1 - k / 10) for k in range(10)), weight_decay=0.5) == pytest.approx(1 / 0.55 + 0.5)
    for rates, decay in (([], 0.0), ([0.0], 0.0), ([-1.0, 2.0], 0.0), ([0.1], -1.0), ([float("nan")], 0.0)):
        with pytest.raises(OptionError):
            damping(rates, decay)
