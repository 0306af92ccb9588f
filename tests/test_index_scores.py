"""Scores of an index: of gradients of any size, of equal ones, with error bars where there are any."""

import pytest
import torch
from torch.nn.functional import normalize

import unsum
from curvature_nets import Examples, classified, ids, made, mlp, numbers
from test_index import DATA, X, Y, built, projected
from test_index_tokens import EQUAL, TOKENS, UNEQUAL, build, padded, reader
from unsum.errors import OptionError, UnsupportedError


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


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("score", ["dot", "cosine", "influence"])
def test_scores_are_the_same_whatever_torchs_default_dtype_is(score, dtype, tmp_path):
    model = mlp()
    i = built(tmp_path / "i", model, DATA, dtype=dtype)
    usual = i.query(model, classified, (X[:5], Y[:5]), k=7, score=score)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        other = i.query(model, classified, (X[:5], Y[:5]), k=7, score=score)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(usual.ids, other.ids) and torch.equal(usual.scores, other.scores)


def test_an_index_has_the_same_bytes_whatever_torchs_default_dtype_is(tmp_path):
    model, before = mlp(), torch.get_default_dtype()
    built(tmp_path / "usual", model, DATA)
    torch.set_default_dtype(torch.float64)
    try:
        built(tmp_path / "other", model, DATA)
    finally:
        torch.set_default_dtype(before)
    shards = sorted(path.name for path in (tmp_path / "usual").glob("*.safetensors"))
    assert shards
    for name in shards:
        assert (tmp_path / "usual" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


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


@pytest.mark.parametrize("options", [{}, {"rerank": 5}])
def test_what_the_scores_of_tokens_are_without_is_named(options, tmp_path):
    model = reader()
    i = build(tmp_path / "i", model, EQUAL, project=16)
    asked = (TOKENS[:2], EQUAL.tensors[1][:2])
    hits = i.query(model, classified, asked, k=3, tokens=True, **options)
    assert "embed.weight" in hits.left_out  # it is the head as well
    kept = [name for name in i.info["parameters"] if name not in hits.left_out]
    apart = unsum.influence(model, classified, EQUAL, iter([asked]), params=kept).matrix.gather(1, hits.ids)
    found = torch.tensor([[float(tokens.sum()) for tokens in row] for row in hits.tokens], dtype=torch.float64)
    torch.testing.assert_close(found, apart)


def test_other_data_is_told_and_never_scored(tmp_path):
    model = mlp()
    built(tmp_path / "i", model)
    other = Examples(X.flip(0), Y.flip(0))
    with pytest.warns(UserWarning, match="not what the index was built from: other examples, another order"):
        i = unsum.index.open(tmp_path / "i", other)
    with pytest.raises(OptionError, match="not what the index was built from"):
        i.query(model, classified, (X[:2], Y[:2]), rerank=5)
    with pytest.raises(OptionError, match="it has 22 examples, not 23"):
        unsum.index.open(tmp_path / "i", Examples(X[1:], Y[1:]))
    with pytest.warns(UserWarning, match="not what the index was built from"):
        unsum.index.open(tmp_path / "i").query(model, classified, (X[:2], Y[:2]), data=other)


def test_autocast_rounds_the_model_and_nothing_else(tmp_path):
    model = mlp().float()
    data, asked = Examples(X.float(), Y), (X[:5].float(), Y[:5])
    for score in ("dot", "cosine", "influence"):
        for dtype in ("float16", "float32"):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                i = built(tmp_path / f"{score} {dtype}", model, data, dtype=dtype)
                hits = i.query(model, classified, asked, k=23, score=score)
            rows = i.rows(0, 23).double()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                again = built(tmp_path / "5", model, Examples(*asked), dtype="float32").rows(0, 5).double()
            moment = rows.T @ rows / 23
            damped = moment + 0.1 * moment.diagonal().mean() * torch.eye(len(moment), dtype=torch.float64)
            turned = torch.linalg.solve(damped, again.T).T if score == "influence" else again
            wanted = normalize(again) @ normalize(rows).T if score == "cosine" else turned @ rows.T
            off = (hits.scores - wanted.gather(1, hits.ids)).abs().max() / wanted.abs().max()
            assert off < 1e-4


class Waves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.complex128))
        self.size = torch.nn.Parameter(torch.ones((), dtype=torch.complex128))

    def forward(self, x):
        return (x.to(torch.complex128) @ self.turn).tanh() * self.size


def test_complex_parameters(tmp_path):
    """The inner product of gradients has both parts."""
    model, loss = made(Waves), lambda m, x: (m(x) - 1j).abs().square().sum(1)
    wanted = unsum.influence(model, loss, list(X), iter([X[:3]])).matrix
    alone = [torch.autograd.grad(loss(model, x[None]).sum(), list(model.parameters())) for x in X]
    flat = torch.stack([torch.cat([torch.view_as_real(g).flatten() for g in each]) for each in alone])
    torch.testing.assert_close(wanted, flat[:3] @ flat.T)
    unsum.index.build(model, loss, list(X), tmp_path / "whole", dtype="float32")
    hits = unsum.index.open(tmp_path / "whole").query(model, loss, X[:3], k=23)
    torch.testing.assert_close(hits.scores, wanted.gather(1, hits.ids), rtol=1e-5, atol=1e-5)
    mean = 0.0
    for seed in range(40):
        folder = tmp_path / str(seed)
        unsum.index.build(model, loss, list(X), folder, dtype="float32", project=3, sketches=4, seed=seed)
        hits = unsum.index.open(folder).query(model, loss, X[:3], k=23)
        mean = mean + hits.scores.gather(1, hits.ids.argsort(1)) / 40
    assert (mean - wanted).norm() < 0.1 * wanted.norm()
    c = unsum.curvature.fit(model, loss, list(X))
    with pytest.raises(UnsupportedError, match="complex"):
        unsum.index.build(model, loss, list(X), tmp_path / "curved", curvature=c)


def test_the_second_stage_without_collate_is_told_what_it_needs(tmp_path):
    build(tmp_path / "i", reader(), UNEQUAL, collate=padded)
    i = unsum.index.open(tmp_path / "i", UNEQUAL)
    with pytest.raises(OptionError, match=r"open\(path, data, collate=...\) what build was given"):
        i.query(reader(), classified, padded(UNEQUAL[:2]), rerank=5)
