"""Rows for tokens, batches by a budget of tokens, independent sketches, ids and texts, the second stage of queries."""

import json

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import unsum
from curvature_nets import Batches, D, Examples, T, V, classified, ids, made, numbers
from unsum.errors import OptionError, SamplesError, UnsupportedError


class Reader(nn.Module):
    """Attention that looks back, and a head that is the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(V, D), nn.Embedding(32, D)
        self.attend = nn.MultiheadAttention(D, 2, batch_first=True)
        self.norm, self.between = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, tokens):
        t = tokens.shape[1]
        x = self.embed(tokens) + self.place(torch.arange(t))
        mask = torch.ones(t, t, dtype=torch.bool).triu(1)
        x = x + self.attend(x, x, x, attn_mask=mask, need_weights=False)[0]
        return self.between(self.norm(x)).tanh() @ self.embed.weight.T


def reader():
    return made(Reader)


TOKENS, LABELS = ids(0, 9, T), ids(1, 9, T)
EQUAL = Examples(TOKENS, LABELS)
LENGTHS = [3, 7, 1, 12, 5, 5, 9, 2, 12, 4, 8, 6, 30]
UNEQUAL = [(ids(k, t), ids(100 + k, t)) for k, t in enumerate(LENGTHS)]
WORDS = [" ".join(map(str, tokens.tolist())) for tokens, _ in UNEQUAL]


def padded(examples):
    tokens, labels = zip(*examples, strict=True)
    return pad_sequence(tokens, True), pad_sequence(labels, True, -100)


def build(path, model, data, **options):
    unsum.index.build(model, classified, data, path, **({"dtype": "float32", "project": 3} | options))
    return unsum.index.open(path, data if hasattr(data, "__getitem__") else None, collate=options.get("collate"))


def sketched(model, batch, k=3, seed=0):
    with unsum.gradients(model, unsum.Project(k=k, seed=seed)) as g:
        classified(model, batch).sum().backward()
    return torch.cat(list(g[unsum.Project].by_parameter().values()), 1)


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_rows_of_tokens_add_up_to_those_of_their_examples(tmp_path):
    model = reader()
    i, whole = build(tmp_path / "t", model, EQUAL, tokens=True, batch_size=4), build(tmp_path / "i", model, EQUAL)
    assert len(i) == 9 * T and i.info["examples"] == 9
    examples, positions = i.tokens(0, len(i))
    assert examples.tolist() == [k // T for k in range(9 * T)] and positions.tolist() == list(range(T)) * 9
    kept = [name for name in whole.info["columns"] if name in i.info["columns"]]
    left = [name for name, how in i.info["covered"].items() if how.startswith("left out")]
    assert left == [name for name in whole.info["columns"] if name not in kept] and set(left) <= {"place.weight"}
    ends = torch.tensor(list(whole.info["columns"].values())).cumsum(0).tolist()
    where = [
        range(end - whole.info["columns"][name], end)
        for name, end in zip(whole.info["columns"], ends, strict=True)
        if name in kept
    ]
    columns = torch.tensor([k for part in where for k in part])
    summed = i.rows(0, len(i)).view(9, T, -1).sum(1)
    torch.testing.assert_close(summed, whole.rows(0, 9)[:, columns], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("parameter", ["between.weight", "embed.weight", "norm.weight", "attend.in_proj_weight"])
def test_a_row_is_the_projected_gradient_of_its_token(parameter, tmp_path):
    """The truth: factors that are multiplied out, position by position."""
    model = reader()
    i = build(tmp_path / "t", model, EQUAL, tokens=True, params=parameter, project=64)  # kept whole
    with unsum.gradients(model, params=parameter) as g:
        classified(model, (TOKENS, LABELS)).sum().backward()
    if parameter == "embed.weight":  # it met data twice, so that it has no one row of positions: its sum is compared
        wanted = g[parameter].per_sample().flatten(1)
        found = i.rows(0, len(i)).view(9, T, -1).sum(1)
    else:
        wanted, found = g[parameter].per_token().flatten(0, 1).flatten(1), i.rows(0, len(i))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)


def test_padding_has_no_rows(tmp_path):
    i = build(tmp_path / "t", reader(), UNEQUAL, tokens=True, collate=padded, batch_size=4)
    assert len(i) == sum(LENGTHS)
    examples, positions = i.tokens(0, len(i))
    assert examples.tolist() == [k for k, t in enumerate(LENGTHS) for _ in range(t)]
    assert positions.tolist() == [p for t in LENGTHS for p in range(t)]


def test_tokens_are_not_lost_where_something_else_is_taken_for_their_number(tmp_path):
    model, data = reader(), [(ids(k, 2), ids(k, 5)) for k in range(6)]
    loss = lambda m, batch: m(batch[1]).square().flatten(1).sum(1)
    with pytest.raises(OptionError, match="length="):
        unsum.index.build(model, loss, data, tmp_path / "i", tokens=True)
    unsum.index.build(model, loss, data, tmp_path / "i", tokens=True, length=lambda example: len(example[1]))
    assert len(unsum.index.open(tmp_path / "i")) == 30


def test_examples_and_tokens_are_found_by_their_tokens_rows(tmp_path):
    model = reader()
    i = build(tmp_path / "t", model, UNEQUAL, tokens=True, collate=padded, batch_size=4, shard_size=8)
    asked = padded(UNEQUAL[:2])
    hits = i.query(model, classified, asked, k=4, tokens=True)
    rows, (examples, positions) = i.rows(0, len(i)).double(), i.tokens(0, len(i))
    names = list(i.info["columns"])
    with unsum.gradients(model, unsum.Project(k=3), params=names) as g:
        classified(model, asked).sum().backward()
    queries = torch.cat([g[unsum.Project].by_parameter()[name] for name in names], 1)
    scores = queries @ rows.T
    summed = torch.zeros(2, len(LENGTHS)).double().index_add_(1, examples, scores)
    best = summed.topk(4)
    assert torch.equal(hits.ids, best.indices)
    torch.testing.assert_close(hits.scores, best.values, rtol=1e-4, atol=1e-6)
    for query in range(2):
        for rank in range(4):
            own = scores[query, examples == hits.ids[query, rank]]
            torch.testing.assert_close(hits.tokens[query][rank], own, rtol=1e-4, atol=1e-6)
    by = i.query(model, classified, asked, k=5, by="token")
    best = scores.topk(5)
    assert torch.equal(by.ids, examples[best.indices]) and torch.equal(by.positions, positions[best.indices])


def test_what_has_no_tokens_is_told(tmp_path):
    model, mlp = reader(), made(lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3)))
    curvature = unsum.curvature.fit(model, classified, EQUAL)
    with pytest.raises(UnsupportedError, match="eigenbasis"):
        build(tmp_path / "i", model, EQUAL, tokens=True, curvature=curvature)
    i = build(tmp_path / "i", model, EQUAL)
    for wrong in ({"by": "token"}, {"by": "word"}, {"tokens": 1}, {"rerank": 0}):
        with pytest.raises(OptionError):
            i.query(model, classified, (TOKENS[:2], LABELS[:2]), **wrong)
    t = build(tmp_path / "t", model, EQUAL, tokens=True)
    for call in (lambda: t.query(model, classified, (TOKENS, LABELS), score="cosine"), t.duplicates):
        with pytest.raises(OptionError, match="tokens"):
            call()
    lstm = made(lambda: nn.LSTM(3, 3, batch_first=True))
    loss = lambda m, batch: m(batch[0])[0].square().flatten(1).sum(1)
    unsum.index.build(lstm, loss, Examples(numbers(0, 5, 4, 3)), tmp_path / "l", tokens=True)
    left = {name for name, how in unsum.index.open(tmp_path / "l").info["covered"].items() if "left out" in how}
    assert "weight_hh_l0" in left
    assert mlp is not None


# ---- batches by a budget --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"shard_size": 5}, {"shards": 3}, {"tokens": True}], ids=str)
def test_examples_of_like_length_go_together_and_come_back_in_order(options, tmp_path):
    model, widths = reader(), []

    def noted(examples):
        widths.append([len(tokens) for tokens, _ in examples])
        return padded(examples)

    i = build(tmp_path / "i", model, UNEQUAL, collate=noted, batch_tokens=24, **options)
    assert max(len(some) * max(some) for some in widths if len(some) > 1) <= 24
    j = build(tmp_path / "j", model, UNEQUAL, collate=padded, batch_size=1, tokens=options.get("tokens", False))
    torch.testing.assert_close(i.rows(0, len(i)), j.rows(0, len(j)), rtol=1e-4, atol=1e-6)


def test_a_budget_needs_lengths(tmp_path):
    with pytest.raises(OptionError, match="length="):
        unsum.index.build(reader(), classified, [3.0, 4.0], tmp_path / "i", batch_tokens=8)
    loader = torch.utils.data.DataLoader(EQUAL, batch_size=3)
    with pytest.raises(OptionError, match="DataLoader makes its batches itself"):
        build(tmp_path / "i", reader(), loader, batch_tokens=8)
    with pytest.raises(OptionError, match="batch_tokens"):
        build(tmp_path / "i", reader(), Batches((TOKENS, LABELS)), batch_tokens=8)


# ---- independent sketches -------------------------------------------------------------------------------------------


def test_sketches_are_independent_and_give_error_bars(tmp_path):
    model, m = made(lambda: nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 3))), 6
    data = Examples(numbers(0, 40, 12), ids(1, 40, high=3))
    i = build(tmp_path / "i", model, data, sketches=m)
    asked = data.tensors[0][:4] + 1, data.tensors[1][:4]
    hits = i.query(model, classified, asked, k=40)
    one_by_one = []
    for j in range(m):
        rows, own = (sketched(model, batch, seed=1_000_003 * j) for batch in (data.tensors, asked))
        one_by_one.append((own @ rows.T).gather(1, hits.ids))
    every = torch.stack(one_by_one)
    torch.testing.assert_close(hits.scores, every.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(hits.errors, every.std(0) / m**0.5, rtol=1e-3, atol=1e-5)
    exact = unsum.influence(model, classified, data, iter([asked])).matrix.gather(1, hits.ids)
    inside = ((hits.scores - exact).abs() <= 4 * hits.errors + 1e-6).double().mean()
    assert inside > 0.9  # far wider than needed: with six sketches a standard error is itself uncertain
    cosine = i.query(model, classified, asked, k=40, score="cosine")
    assert cosine.errors.shape == (4, 40) and float(cosine.scores.max()) <= 1 + 1e-5


# ---- ids, texts, the second stage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, 24])
def test_hits_have_ids_and_texts(budget, tmp_path):
    model = reader()
    options = {"ids": [f"n{k}" for k in range(13)], "text": lambda example: " ".join(map(str, example[0].tolist()))}
    i = build(
        tmp_path / "i", model, UNEQUAL, collate=padded, batch_tokens=budget, batch_size=4, shard_size=5, **options
    )
    hits = i.query(model, classified, padded(UNEQUAL[:2]), k=3)
    assert hits.names == [[f"n{k}" for k in row] for row in hits.ids.tolist()]
    assert hits.texts == [[WORDS[k] for k in row] for row in hits.ids.tolist()]
    assert all(text[:50] in str(hits) for row in hits.texts for text in row)
    told = json.loads(hits.json())
    assert [row["id"] for row in told] == [name for row in hits.names for name in row]
    (tmp_path / "i" / "examples-000001.parquet").write_bytes(b"")
    assert i.verify() == ["examples-000001.parquet"]
    build(tmp_path / "i", model, UNEQUAL, collate=padded, batch_tokens=budget, batch_size=4, shard_size=5, **options)
    assert i.verify() == []


def test_ids_of_batches_and_of_mappings(tmp_path):
    model = reader()
    loader = torch.utils.data.DataLoader([{"x": t, "name": f"n{k}"} for k, t in enumerate(TOKENS)], batch_size=2)
    loss = lambda m, batch: m(batch["x"]).square().flatten(1).sum(1)
    unsum.index.build(model, loss, loader, tmp_path / "i", ids="name")
    hits = unsum.index.open(tmp_path / "i").query(model, loss, {"x": TOKENS[:1]}, k=3)
    assert hits.names == [[f"n{k}" for k in row] for row in hits.ids.tolist()]
    with pytest.raises(OptionError, match="no such part"):
        unsum.index.build(model, loss, loader, tmp_path / "j", ids="nome")


@pytest.mark.parametrize("score", ["dot", "cosine", "influence"])
def test_the_second_stage_is_exact(score, tmp_path):
    model = reader()
    c = unsum.curvature.fit(model, classified, EQUAL) if score == "influence" else None
    i = build(tmp_path / "i", model, EQUAL, project=2, curvature=c)
    asked = ids(7, 2, T), ids(8, 2, T)
    hits = i.query(model, classified, asked, k=4, score=score, rerank=9, tokens=True)
    by = {"curvature": c} if c is not None else {"score": score}
    exact = unsum.influence(model, classified, EQUAL, iter([asked]), tokens=True, **by)
    assert torch.equal(hits.ids, exact.top(4).ids)
    torch.testing.assert_close(hits.scores, exact.top(4).scores, rtol=1e-6, atol=1e-9)
    for query, row in enumerate(hits.ids.tolist()):
        for rank, example in enumerate(row):
            torch.testing.assert_close(hits.tokens[query][rank], exact.tokens[query, example])
    few = i.query(model, classified, asked, k=2, score=score, rerank=3)
    scan = i.query(model, classified, asked, k=3, score=score)
    assert all(set(a) <= set(b) for a, b in zip(few.ids.tolist(), scan.ids.tolist(), strict=True))


def test_the_second_stage_needs_the_data(tmp_path):
    model = reader()
    build(tmp_path / "i", model, EQUAL)
    i = unsum.index.open(tmp_path / "i")
    asked = TOKENS[:2], LABELS[:2]
    with pytest.raises(OptionError, match="needs the data set"):
        i.query(model, classified, asked, rerank=5)
    with pytest.raises(OptionError, match="it has 8 examples, not 9"):
        i.query(model, classified, asked, rerank=5, data=Examples(TOKENS[:8], LABELS[:8]))
    with pytest.raises(OptionError, match="no curvature"):
        i.query(model, classified, asked, rerank=5, data=EQUAL, score="influence")


# ---- data of other kinds --------------------------------------------------------------------------------------------


def test_a_hugging_face_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"input_ids": TOKENS.tolist(), "labels": LABELS.tolist()})
    loss = lambda m, batch: classified(m, (batch["input_ids"], batch["labels"]))
    model = reader()
    unsum.index.build(model, loss, data, tmp_path / "i", project=3, dtype="float32", batch_size=4)
    i = unsum.index.open(tmp_path / "i", data)
    torch.testing.assert_close(i.rows(0, 9), build(tmp_path / "j", model, EQUAL).rows(0, 9), rtol=1e-4, atol=1e-6)
    hits = i.query(model, loss, {"input_ids": TOKENS[:1], "labels": LABELS[:1]}, k=2, rerank=5)
    assert hits.examples[0][0]["input_ids"] == TOKENS[int(hits.ids[0, 0])].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_without_reading_what_is_done(workers, tmp_path):
    read = []

    class Noted(Examples):
        def __getitem__(self, k):
            read.append(k)
            return super().__getitem__(k)

    data = Noted(TOKENS, LABELS)
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=workers)
    model = reader()
    i = build(tmp_path / "i", model, loader, shard_size=2)
    wanted = build(tmp_path / "j", model, EQUAL).rows(0, 9)
    torch.testing.assert_close(i.rows(0, 9), wanted, rtol=1e-4, atol=1e-6)
    before = (tmp_path / "i" / "shard-000001.safetensors").read_bytes()
    (tmp_path / "i" / "shard-000001.safetensors").unlink()
    read.clear()
    build(tmp_path / "i", model, loader, shard_size=2)
    assert (tmp_path / "i" / "shard-000001.safetensors").read_bytes() == before
    if not workers:
        assert {5, 7} <= set(read) and 3 not in read  # 0, 2, 4, ... are looked at to see that it is the same


def test_another_loss_is_not_continued(tmp_path):
    model = reader()
    build(tmp_path / "i", model, EQUAL, shard_size=4)
    (tmp_path / "i" / "shard-000001.safetensors").unlink()
    with pytest.raises(OptionError, match="loss_fn"):
        unsum.index.build(
            model, lambda m, b: classified(m, b) * 2, EQUAL, tmp_path / "i", project=3, dtype="float32", shard_size=4
        )


def test_a_frozen_part_that_changed_is_told(tmp_path):
    model = reader()
    model.between.requires_grad_(False)
    i = build(tmp_path / "i", model, EQUAL)
    with torch.no_grad():
        model.between.weight[0, 0] += 1
    with pytest.raises(OptionError, match="not trained"):
        build(tmp_path / "i", model, EQUAL)
    with pytest.raises(UnsupportedError, match="frozen"):
        i.query(model, classified, (TOKENS, LABELS))


def test_a_parameter_that_nothing_reaches_has_zeros(tmp_path):
    model = made(lambda: nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)}))
    loss = lambda m, batch: m["used"](batch).square().sum(1)
    for tokens in (False, True):
        data = list(numbers(0, 6, 4, 3)) if tokens else list(numbers(0, 6, 3))
        each = (lambda m, b: loss(m, b).sum(1)) if tokens else loss
        unsum.index.build(model, each, data, tmp_path / f"{tokens}", tokens=tokens, dtype="float32")
        rows = unsum.index.open(tmp_path / f"{tokens}").rows(0, 6)
        assert (rows[:, 8:] == 0).all() and (rows[:, :8] != 0).any()


def test_samples_that_interact_are_refused(tmp_path):
    model = made(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    with pytest.raises(unsum.errors.InteractionError, match="eval"):
        unsum.index.build(model, lambda m, b: m(b).square().sum(1), list(numbers(0, 6, 4)), tmp_path / "i")


def test_losses_that_are_not_one_for_each_example(tmp_path):
    model = reader()
    with pytest.raises(SamplesError, match=r"\(n,\)"):
        unsum.index.build(model, lambda m, b: classified(m, b).sum(), EQUAL, tmp_path / "i")
