"""Scores of an index: of gradients of any size, of equal ones, with error bars where there are any."""

import pytest
import torch
from torch.nn.functional import normalize

import unsum
from curvature_nets import Examples, classified, ids, mlp, numbers
from test_index import DATA, X, Y, built, projected
from unsum.errors import OptionError


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("size", [1e-30, 1e-18, 1.0, 1e18, 1e30])
def test_gradients_of_any_size_have_scores(size, dtype, tmp_path):
    model = mlp()
    loss = lambda m, batch: size * classified(m, batch)
    unsum.index.build(model, loss, DATA, tmp_path / "i", project=3, dtype=dtype)
    i, rows = unsum.index.open(tmp_path / "i"), projected(model, X, Y)
    moment = rows.T @ rows / 23
    damped = moment + 0.1 * moment.diagonal().mean() * torch.eye(len(moment), dtype=torch.float64)
    wanted = {
        "dot": size**2 * (rows[:5] @ rows.T),
        "cosine": normalize(rows[:5]) @ normalize(rows).T,
        "influence": torch.linalg.solve(damped, rows[:5].T).T @ rows.T,
    }
    loose = 2e-3 if dtype == "float16" else 1e-5
    for score, each in wanted.items():
        hits = i.query(model, loss, (X[:5], Y[:5]), k=23, score=score)
        assert ((hits.scores - each.gather(1, hits.ids)).abs() <= loose * each.abs().max()).all()
    off = i.self_influence() / (size**2 * rows.square().sum(1)) - 1
    assert off.abs().max() < loose


def test_of_equal_scores_the_first_ones_are_given(tmp_path):
    model = mlp()
    x, y = numbers(0, 200, 4), ids(1, 200, high=3)
    i = built(tmp_path / "i", model, Examples(x, y), shard_size=150, batch_size=50)
    nothing = lambda m, batch: 0 * classified(m, batch)
    assert i.query(model, nothing, (X[:2], Y[:2]), k=7).ids.tolist() == [list(range(7))] * 2


def test_examples_that_are_the_same_have_a_cosine_of_one(tmp_path):
    i = built(tmp_path / "i", data=Examples(X.repeat(3, 1), Y.repeat(3)), dtype="float16")
    assert {(k % 23, j % 23) for k, j in i.duplicates(1.0).ids.tolist()} == {(k, k) for k in range(23)}
    assert len(i.duplicates(1.0).ids) == 3 * 23


def test_influence_by_the_rows_second_moment_has_no_error_bars(tmp_path):
    """The moment mixes the sketches: there are no independent estimates whose spread would say anything."""
    i = built(tmp_path / "i", sketches=3)
    assert i.query(mlp(), classified, (X, Y), score="cosine").errors is not None
    assert i.query(mlp(), classified, (X, Y), score="influence").errors is None


@pytest.mark.parametrize(
    ("options", "match"),
    [({"damping": 1.0}, "only score='influence'"), ({"score": "influence", "damping": float("nan")}, "0 or more")],
)
def test_a_damping_that_says_nothing_is_refused(options, match, tmp_path):
    with pytest.raises(OptionError, match=match):
        built(tmp_path / "i").query(mlp(), classified, (X, Y), **options)
