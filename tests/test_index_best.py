"""The best rows of shards, found from products in a narrow dtype, beside all scores in float64."""

import pytest
import torch

from unsum.index import sieve, store
from unsum.index.best import best_rows

WIDTH, K = 48, 5


def rows(kind, n=900):
    chance = torch.Generator().manual_seed(3)
    found = torch.randn(n, WIDTH, generator=chance, dtype=torch.float64)
    if kind == "of all sizes":
        return found * torch.logspace(-12, 12, n, dtype=torch.float64)[torch.randperm(n, generator=chance), None]
    if kind == "nearly the same":  # closer together than the dtype's products can tell
        return found[:1] * (1 + 1e-3 * torch.rand(n, 1, generator=chance, dtype=torch.float64))
    if kind == "each three times":
        return found[: n // 3].repeat(3, 1)
    if kind == "mostly zero":
        return torch.where(torch.rand(n, 1, generator=chance, dtype=torch.float64) < 0.99, 0.0, found)
    return found


def shards(folder, given, dtype, parts=3):
    for number, some in enumerate(given.chunk(parts)):
        stored, scales = store.scaled(some, dtype)
        told = {"number": number, "dtype": str(dtype).removeprefix("torch.")}
        store.write_shard(folder, number, {"rows": stored, "scales": scales}, told)
    return [store.Shard(folder, number) for number in range(parts)]


def first_best(found, asked, k, *, cosine):
    """Numbers and scores of the best, by float64 over all rows; of equal ones the first."""
    stored = torch.cat([s.stored()[0].double() * s.stored()[1].double()[:, None] for s in found])
    scores = torch.stack([(stored * query).sum(1) for query in asked])
    if cosine:
        scores = scores / stored.norm(dim=1).clamp_min(1e-300) / asked.norm(dim=1, keepdim=True)
    ordered = scores.sort(dim=1, descending=True, stable=True)
    return ordered.indices[:, :k], ordered.values[:, :k]


KINDS = ["random", "of all sizes", "nearly the same", "each three times", "mostly zero"]


@pytest.mark.parametrize("cosine", [False, True], ids=["dot", "cosine"])
@pytest.mark.parametrize("queries", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_rows_are_those_of_all_scores_in_float64(kind, dtype, queries, cosine, tmp_path):
    found = shards(tmp_path, rows(kind), dtype)
    asked = torch.randn(queries, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    best = best_rows(found, [0, 300, 600], asked, K, cosine=cosine)
    numbers, scores = first_best(found, asked, K, cosine=cosine)
    size = (
        1.0
        if cosine
        else asked.norm(dim=1, keepdim=True) * max(float(s.norms().double().mul(s.stored()[1]).max()) for s in found)
    )
    assert ((best.scores - scores).abs() <= 1e-6 * size).all()
    assert best.numbers.equal(numbers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_one_query_finds_the_first_of_equal_rows(dtype, tmp_path):
    found = shards(tmp_path, rows("each three times"), dtype)
    asked = torch.randn(1, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    best = best_rows(found, [0, 300, 600], asked, 6)
    assert best.numbers.equal(first_best(found, asked, 6, cosine=False)[0])


WAYS = [sieve.one_by_one, sieve.together, sieve.in_tiles, sieve.in_float32]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [3, 48, 2186])
def test_products_are_off_by_less_than_the_margin(width, dtype, way):
    chance = torch.Generator().manual_seed(1)
    given = torch.randn(2000, width, generator=chance).to(dtype)
    queries = torch.randn(2, width, generator=chance, dtype=torch.float64)
    queries = torch.nn.functional.normalize(queries)
    narrow = torch.float32 if way is sieve.in_float32 else dtype
    found = torch.empty(2, 2000, dtype=narrow)
    way(given, queries.to(narrow), found)
    off = (found.double() - queries @ given.double().T).abs() / given.double().norm(dim=1)
    assert 0 < off.max() < sieve.margin(narrow, width)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("cosine", [False, True], ids=["dot", "cosine"])
def test_the_answer_does_not_depend_on_the_product(way, cosine, tmp_path, monkeypatch):
    narrow = torch.float32 if way is sieve.in_float32 else torch.bfloat16
    monkeypatch.setattr(sieve, "fastest", lambda *_: (way, narrow, sieve.margin(narrow, WIDTH)))
    found = shards(tmp_path, rows("nearly the same"), torch.bfloat16)
    asked = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    best = best_rows(found, [0, 300, 600], asked, K, cosine=cosine)
    numbers, scores = first_best(found, asked, K, cosine=cosine)
    assert best.numbers.equal(numbers)
    torch.testing.assert_close(best.scores, scores, rtol=1e-12, atol=0)


def test_a_product_that_adds_in_a_narrow_dtype_is_found_out():
    def narrow(rows, queries, out):
        total = torch.zeros_like(out)
        for column in range(rows.shape[1]):
            total += queries[:, column, None] * rows[:, column]
        out.copy_(total)

    for dtype in (torch.float16, torch.bfloat16):
        assert sieve.adds_in_float32(lambda rows, queries, out: out.copy_(queries.float() @ rows.float().T), dtype, 64)
        assert not sieve.adds_in_float32(narrow, dtype, 64)


def test_few_rows_are_scored_again(tmp_path, monkeypatch):
    again = []
    exact = sieve.Sieve._exact
    monkeypatch.setattr(
        sieve.Sieve, "_exact", lambda self, shard, some: (again.append(len(some)), exact(self, shard, some))[1]
    )
    found = shards(tmp_path, rows("random", 9000), torch.float16)
    best_rows(found, [0, 3000, 6000], torch.ones(1, WIDTH, dtype=torch.float64), K)
    assert 0 < sum(again) < 60


def test_an_index_without_norms_is_answered_all_the_same(tmp_path):
    found = shards(tmp_path, rows("random"), torch.float16)
    for shard in found:
        del shard._places["norms"]
    asked = torch.ones(1, WIDTH, dtype=torch.float64)
    best = best_rows(found, [0, 300, 600], asked, K)
    assert best.numbers.equal(first_best(found, asked, K, cosine=False)[0])
