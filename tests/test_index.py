"""The gradients of a data set on disk: what is in them, what can be asked, what is refused."""

import json
import shutil

import pytest
import torch
from torch import nn

import unsum
from curvature_nets import ALL, Batches, Examples, classified, ids, mlp, numbers
from unsum.errors import OptionError, SamplesError, UnsupportedError
from unsum.index import alike

X, Y = numbers(0, 23, 4), ids(1, 23, high=3)
DATA = Examples(X, Y)


def built(path, model=None, data=DATA, **options):
    model = mlp() if model is None else model
    options = {"project": 3, "batch_size": 4, "shard_size": 8, "dtype": "float32"} | options
    unsum.index.build(model, classified, data, path, **options)
    return unsum.index.open(path)


def projected(model, x, y, k=3):
    with unsum.gradients(model, unsum.Project(k=k, seed=0)) as g:
        classified(model, (x, y)).sum().backward()
    parts = g[unsum.Project].by_parameter()
    return torch.cat(list(parts.values()), 1)


def bytes_of(path):
    return {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith(".")}


def test_rows_are_the_projected_gradients(tmp_path):
    model = mlp()
    i = built(tmp_path / "i", model)
    wanted = projected(model, X, Y)
    assert len(i) == 23 and i.info["width"] == wanted.shape[1] and len(i.info["shards"]) == 3
    torch.testing.assert_close(i.rows(0, 23).double(), wanted, rtol=1e-5, atol=1e-7)
    for start, stop in ((0, 0), (7, 9), (3, 20), (22, 23)):
        assert torch.equal(i.rows(start, stop), i.rows(0, 23)[start:stop])
    assert i.info["audit"] < 1e-8 and i.verify() == []


@pytest.mark.parametrize(("dtype", "loose"), [("float16", 2e-3), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_narrow_numbers_of_any_size(dtype, loose, size, tmp_path):
    model = mlp()
    loss = lambda m, batch: size * classified(m, batch)
    unsum.index.build(model, loss, DATA, tmp_path / "i", project=3, dtype=dtype)
    found, wanted = unsum.index.open(tmp_path / "i").rows(0, 23).double(), size * projected(model, X, Y)
    assert ((found - wanted).abs().amax(1) <= loose * wanted.abs().amax(1)).all()


@pytest.mark.parametrize("make", [lambda: list(DATA), lambda: torch.utils.data.DataLoader(DATA, batch_size=4)])
def test_data_of_every_kind(make, tmp_path):
    assert torch.equal(built(tmp_path / "i", data=make()).rows(0, 23), built(tmp_path / "j").rows(0, 23))


def test_batches_that_nobody_counted_and_of_unequal_sizes(tmp_path):
    model = mlp()
    i = built(tmp_path / "i", model, Batches((X[:5], Y[:5]), (X[5:6], Y[5:6]), (X[6:], Y[6:])))
    torch.testing.assert_close(i.rows(0, 23).double(), projected(model, X, Y), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("score", ["dot", "cosine"])
def test_scores_are_those_of_projected_gradients(score, tmp_path):
    model = mlp()
    i = built(tmp_path / "i", model)
    rows, asked = projected(model, X, Y), projected(model, X[:5] + 1, Y[:5])
    if score == "cosine":
        rows, asked = (part / part.norm(dim=1, keepdim=True) for part in (rows, asked))
    best = (asked @ rows.T).topk(4)
    hits = i.query(model, classified, (X[:5] + 1, Y[:5]), k=4, score=score)
    assert torch.equal(hits.ids, best.indices)
    torch.testing.assert_close(hits.scores, best.values, rtol=1e-4, atol=1e-6)


def test_influence_by_the_rows_own_second_moment(tmp_path):
    model = mlp()
    i = built(tmp_path / "i", model)
    rows, asked = projected(model, X, Y), projected(model, X[:5] + 1, Y[:5])
    moment = rows.T @ rows / len(rows)
    damped = moment + 0.1 * moment.diagonal().mean() * torch.eye(len(moment)).double()
    best = (torch.linalg.solve(damped, asked.T).T @ rows.T).topk(3)
    hits = i.query(model, classified, (X[:5] + 1, Y[:5]), k=3, score="influence")
    assert torch.equal(hits.ids, best.indices)
    torch.testing.assert_close(hits.scores, best.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["ekfac", "kfac", "diagonal"])
def test_with_a_curvature_that_is_kept_whole_influence_is_exact(kind, tmp_path):
    model = mlp()
    c = unsum.curvature.fit(model, classified, DATA, kind=kind)
    i = built(tmp_path / "i", model, curvature=c, project=10)
    s = unsum.influence(model, classified, DATA, Examples(X[:5] + 1, Y[:5]), curvature=c)
    hits = i.query(model, classified, (X[:5] + 1, Y[:5]), k=23, score="influence")
    torch.testing.assert_close(hits.scores, s.top(23).scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["ekfac", "kfac"])
@pytest.mark.parametrize("net", ALL)
def test_the_coordinates_with_the_largest_eigenvalues_are_kept(net, kind, tmp_path):
    """They come from factors; the truth is gradients that are formed, in the block's own basis."""
    model, loss, batches = ALL[net]()
    c = unsum.curvature.fit(model, loss, Batches(*batches), kind=kind)
    unsum.index.build(model, loss, Batches(*batches), tmp_path / "i", curvature=c, project=2, dtype="float32")
    i, first = unsum.index.open(tmp_path / "i"), 0
    wanted = []
    for batch in batches:
        with unsum.gradients(model, params=list(c.parameters)) as g:
            loss(model, batch).sum().backward()
        each = g.per_sample()
        wanted.append([block.into({n: each[n] for n in block.names}).flatten(1) for block in c.blocks.values()])
    for block, parts in zip(c.blocks.values(), zip(*wanted, strict=True), strict=True):
        values, size = block.eigenvalues.flatten(), min(4, block.eigenvalues.numel())
        found = i.rows(0, len(i))[:, first : first + size].double()
        place = torch.sort(values, descending=True, stable=True).indices[:size].sort().values
        torch.testing.assert_close(found, torch.cat(parts)[:, place], rtol=1e-4, atol=1e-6)
        first += size
    assert first == i.info["width"]


def test_hits_bring_their_examples(tmp_path):
    built(tmp_path / "i")
    hits = unsum.index.open(tmp_path / "i", data=DATA).query(mlp(), classified, (X[:2], Y[:2]), k=2)
    assert torch.equal(hits.examples[1][0][0], X[int(hits.ids[1, 0])])


def test_packed_documents(tmp_path):
    starts, model = torch.tensor([0, 2, 3, 7, 9]), mlp()
    x, y = numbers(3, 1, 9, 4), ids(4, 1, 9, high=3)

    def loss(model, batch):
        each = nn.functional.cross_entropy(model(batch[0])[0], batch[1][0], reduction="none")
        document = torch.bucketize(torch.arange(9), starts, right=True) - 1
        return torch.zeros(4, dtype=each.dtype).index_add(0, document, each)

    unsum.index.build(model, loss, Batches((x, y)), tmp_path / "i", samples=unsum.packed(starts), dtype="float32")
    wanted = torch.cat([projected(model, x[:, a:b], y[:, a:b], 16) for a, b in ((0, 2), (2, 3), (3, 7), (7, 9))])
    torch.testing.assert_close(unsum.index.open(tmp_path / "i").rows(0, 4).double(), wanted, rtol=1e-5, atol=1e-7)


def test_examples_that_stand_out(tmp_path):
    loud = lambda model, batch: classified(model, batch) * torch.where((batch[0] == X[7]).all(1), 1e3, 1.0)
    unsum.index.build(mlp(), loud, DATA, tmp_path / "i", project=3)
    i = unsum.index.open(tmp_path / "i")
    found = i.outliers()
    assert found.ids.tolist() == [[7]]
    torch.testing.assert_close(found.scores[0], i.rows(7, 8).double().norm(dim=1), rtol=1e-5, atol=0)
    assert built(tmp_path / "j").outliers().ids.shape == (1, 0)


def test_examples_that_are_nearly_the_same(tmp_path, monkeypatch):
    x, y = X.clone(), Y.clone()
    x[20], y[20] = x[3], y[3]
    x[11], y[11] = x[4] * (1 + 1e-4), y[4]
    i = built(tmp_path / "i", data=Examples(x, y))
    rows = i.rows(0, 23).double()
    rows = rows / rows.norm(dim=1, keepdim=True)
    cosines = (rows @ rows.T).triu(1)
    for some in (4096, 5):  # in parts, too
        monkeypatch.setattr(alike, "_PAIRED", some)
        found = i.duplicates(0.9)
        assert found.ids[0].tolist() == [3, 20]
        assert {tuple(pair) for pair in found.ids.tolist()} == {tuple(p) for p in (cosines >= 0.9).nonzero().tolist()}
    assert {tuple(pair) for pair in i.duplicates(0.9999).ids.tolist()} == {(3, 20), (4, 11)}


# ---- interruptions --------------------------------------------------------------------------------------------------


class Gone(Exception):
    pass


class Failing(Examples):
    """Fails at one read."""

    def __init__(self, at):
        super().__init__(X, Y)
        self.at, self.reads = at, 0

    def __getitem__(self, k):
        self.reads += 1
        if self.reads == self.at:
            raise Gone
        return super().__getitem__(k)


@pytest.mark.parametrize("at", [6, 9, 13, 20, 27, 31])
def test_a_build_that_was_interrupted_gives_the_same_bytes(at, tmp_path):
    whole = built(tmp_path / "whole")
    with pytest.raises(Gone):
        built(tmp_path / "i", data=Failing(at))
    with pytest.raises(OptionError, match=r"no index|not done"):
        unsum.index.open(tmp_path / "i")
    i = built(tmp_path / "i")
    assert bytes_of(tmp_path / "i") == bytes_of(tmp_path / "whole") and len(i) == len(whole)


def test_several_processes_build_parts(tmp_path):
    for part in ((1, 3), (0, 3)):
        with pytest.raises(OptionError, match="not done"):
            built(tmp_path / "i", part=part)
    built(tmp_path / "i", part=(2, 3))  # the last one completes the index
    built(tmp_path / "whole")
    assert bytes_of(tmp_path / "i") == bytes_of(tmp_path / "whole")


def test_an_array_of_jobs(tmp_path):
    built(tmp_path / "whole", shard_size=None, shards=10)
    for number in (9, 8, 7, 0, 2, 4, 6, 1, 3):  # ten shards of 23 examples are eight of three: two have nothing to do
        with pytest.raises(OptionError, match="not done"):
            built(tmp_path / "i", shard_size=None, shards=10, shard=number)
    with pytest.raises(OptionError, match="shard=10: there are 8"):
        built(tmp_path / "i", shard_size=None, shards=10, shard=10)
    with pytest.raises(OptionError, match="shards=5, and it has 8"):
        built(tmp_path / "i", shard_size=None, shards=5, shard=0)
    built(tmp_path / "i", shard_size=None, shards=10, shard=5)
    assert bytes_of(tmp_path / "i") == bytes_of(tmp_path / "whole")


def test_shards_are_of_whole_batches_unless_somebody_says_otherwise(tmp_path):
    many = Examples(numbers(0, 700, 4), ids(1, 700, high=3))
    i = built(tmp_path / "i", data=many, shard_size=None, batch_size=2)
    assert [shard["rows"] for shard in i.info["shards"]] == [32] * 21 + [28]
    assert len(built(tmp_path / "j", shard_size=None, batch_size=5).info["shards"]) == 1


def test_a_second_builder_is_told(tmp_path):
    from unsum.index import locks

    (tmp_path / "i").mkdir()
    with locks.building(tmp_path / "i", alone=True):
        with pytest.raises(OptionError, match=r"another process builds this index \(process \d+ on"):
            built(tmp_path / "i")
        with pytest.raises(OptionError, match="a process builds the whole of this index"):
            built(tmp_path / "i", part=(0, 2))
    with locks.building(tmp_path / "i", alone=False):
        with pytest.raises(OptionError, match="several processes build shards of it"):
            built(tmp_path / "i")
        with pytest.raises(OptionError, match="not done"):
            built(tmp_path / "i", part=(0, 2))
        with locks.shard(tmp_path / "i", 1):
            with pytest.raises(OptionError, match="another process makes shard 1"):
                built(tmp_path / "i", shard=1)
    built(tmp_path / "i")  # a lock that nobody holds is none


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_an_index_of_something_else_is_not_continued(tmp_path):
    model = mlp()
    built(tmp_path / "i", model)
    other = mlp()
    with torch.no_grad():
        other[0].weight += 1e-3
    for match, options in (
        ("parameters", {"model": other}),
        ("projection", {"project": 4}),
        ("projection", {"seed": 1}),
        ("dtype", {"dtype": "float16"}),
        ("data", {"data": Examples(X + 1, Y)}),
        ("data", {"data": Examples(X[:9], Y[:9])}),
        ("shard_size", {"shard_size": 3}),
        ("curvature", {"curvature": unsum.curvature.fit(model, classified, DATA)}),
    ):
        with pytest.raises(OptionError, match=match):
            built(tmp_path / "i", **({"model": model} | options))
    with pytest.raises(UnsupportedError, match="changed"):
        unsum.index.open(tmp_path / "i").query(other, classified, (X, Y))


def test_an_example_that_is_not_finite_is_named(tmp_path):
    broken = X.clone()
    broken[14, 2] = torch.nan
    with pytest.raises(SamplesError, match="example 14"):
        built(tmp_path / "i", data=Examples(broken, Y))
    huge = X.clone()
    huge[9] = 1e308
    with pytest.raises(SamplesError, match="example 9"):
        built(tmp_path / "j", data=Examples(huge, Y))


def test_bad_input(tmp_path):
    model = mlp()
    for options in ({"project": 0}, {"seed": -1}, {"dtype": "int8"}, {"part": (2, 2)}, {"part": 1}, {"curvature": 3}):
        with pytest.raises(OptionError):
            built(tmp_path / "i", model, **options)
    with pytest.raises(OptionError, match="iterator"):
        built(tmp_path / "i", model, iter([(X, Y)]))
    with pytest.raises(SamplesError, match="empty"):
        built(tmp_path / "i", model, [])
    with pytest.raises(OptionError, match="no index"):
        unsum.index.open(tmp_path / "nowhere")
    i = built(tmp_path / "i", model)
    for bad in ((-1, 3), (0, 24), (5, 3), (0.0, 3)):
        with pytest.raises(OptionError, match="rows"):
            i.rows(*bad)
    with pytest.raises(OptionError, match="score"):
        i.query(model, classified, (X, Y), score="best")
    with pytest.raises(OptionError, match="k="):
        i.query(model, classified, (X, Y), k=0)


def test_the_manifest_is_read_or_refused(tmp_path):
    built(tmp_path / "i")
    manifest = tmp_path / "i" / "manifest.json"
    told = json.loads(manifest.read_text())
    for text, match in (("{", "damaged"), ("{}", "not of an index"), (json.dumps(told | {"version": 99}), "newer")):
        manifest.write_text(text)
        with pytest.raises(OptionError, match=match):
            unsum.index.open(tmp_path / "i")
    shutil.rmtree(tmp_path / "i")


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_dropout_is_refused_in_train_mode_when_an_index_is_built_or_asked(mode, tmp_path):
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).to(X.dtype)
    getattr(model, mode)()
    if mode == "train":
        with pytest.raises(OptionError, match=r"draws random numbers(.|\n)*model.eval\(\)"):
            unsum.index.build(model, classified, DATA, tmp_path / "i")
        assert not (tmp_path / "i" / "manifest.json").exists()
        return
    unsum.index.build(model, classified, DATA, tmp_path / "i")
    i = unsum.index.open(tmp_path / "i")
    assert len(i.query(model, classified, (X[:1], Y[:1])).ids[0]) == 10
    model.train()
    with pytest.raises(OptionError, match="draws random numbers"):
        i.query(model, classified, (X[:1], Y[:1]))
