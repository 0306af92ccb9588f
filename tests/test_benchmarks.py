"""What the benchmarks promise: nobody is dropped in silence, and a limit of time loses nothing."""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"
TINY = {"width": 16, "depth": 1, "heads": 2, "vocabulary": 20}


@pytest.fixture
def scripts(monkeypatch):
    """The benchmarks' modules, by name; forgotten afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = (
        "measuring", "models", "peers", "norms", "growth", "checks", "quantities", "shapes", "lds", "lds_problems",
        "lds_kronfluence", "retraining", "index", "index_build", "index_bergson", "index_query", "index_recall",
        "index_tables",
    )  # fmt: skip
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)

    def imported(name):
        module = __import__(name)
        gc.freeze()  # benchmarks collect garbage before each step: not all that they import
        return module

    yield imported
    for name in names:
        sys.modules.pop(name, None)


def test_a_peer_that_fails_or_is_absent_is_shown_with_its_reason(scripts, monkeypatch):
    peers, norms = scripts("peers"), scripts("norms")

    def broken(model, loss):
        raise ValueError("does not know\nthis layer")

    monkeypatch.setattr(peers, "PEERS", {"torch": (peers.func, broken), "no_such_library": (broken,)})
    model, loss, x, y = norms.gpt(1, 16, 8, 4, 20, 2)("cpu")
    ways, notes = peers.installed(model, loss, x, y)
    assert [way.name for way in ways] == ["torch.func, vmap of grad"]
    assert [note["note"] for note in notes] == ["fails: ValueError: does not know this layer", "not installed"]


def test_a_row_of_norms_is_measured_and_checked(scripts, monkeypatch):
    norms = scripts("norms")
    monkeypatch.setattr(norms, "installed", lambda *given: ([], [{"way": "some peer", "note": "not installed"}]))
    monkeypatch.setattr(norms, "peak_memory", lambda *given: None)
    made = norms.run("tiny", norms.gpt(1, 16, 8, 4, 20, 2), device="cpu", dtype=torch.float32, seconds=0)
    shown = {row["way"]: row.get("norms", row.get("note")) for row in made["rows"]}
    assert shown["unsum, Norms"].startswith("off by") and shown["some peer"] == "not installed"
    monkeypatch.setattr(norms, "truth", lambda *given: torch.ones(4))
    made = norms.run("tiny", norms.gpt(1, 16, 8, 4, 20, 2), device="cpu", dtype=torch.float32, seconds=0)
    assert "WRONG norms" in norms.table(made)


def test_growth_writes_after_each_size_and_goes_on(scripts, monkeypatch, tmp_path):
    growth = scripts("growth")
    path, real = tmp_path / "growth.json", growth.measure

    def measure(batch, length, *given, **options):
        if (batch, length) == (2, 16):
            raise torch.OutOfMemoryError("too much")
        if length == 24:
            raise ValueError("odd")
        if length == 32:
            assert [row["T"] for row in json.loads(path.read_text())["tokens"]] == [8, 16, 24]
        return real(batch, length, *given, **options)

    sizes = {"samples": [(2, 8)], "tokens": [(2, t) for t in (8, 16, 24, 32)], "model": TINY}
    monkeypatch.setitem(growth.SIZES, "cpu", sizes)
    monkeypatch.setattr(growth, "measure", measure)
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["growth.py", "--seconds", "0.001", "--json", str(path)])
    growth.main()
    rows = json.loads(path.read_text())["tokens"]
    assert [(row["B"], row["T"]) for row in rows] == [(2, 8), (1, 16), (2, 24), (2, 32)]
    assert rows[2]["note"] == "fails: ValueError: odd" and all(rows[k]["norms"].startswith("off") for k in (0, 1, 3))
    monkeypatch.setattr(sys, "argv", ["growth.py", "--limit", "-1", "--json", str(path)])
    growth.main()
    torch.set_num_threads(threads)
    assert {row["note"] for row in json.loads(path.read_text())["samples"]} == {"not measured: the time was up"}


def test_every_kind_of_batch_is_measured_and_a_wrong_norm_is_seen(scripts, monkeypatch, tmp_path, capsys):
    shapes, models = scripts("shapes"), scripts("models")
    path, threads = tmp_path / "shapes.json", torch.get_num_threads()
    make = lambda: models.GPT(length=16, **TINY)
    case = shapes.Case(make, TINY["vocabulary"], batch=4, usual=8, lengths=tuple(range(4, 17)), new=3, before=2)
    monkeypatch.setattr(shapes, "CPU", {"one": case, "two": case, "neither": case})
    monkeypatch.setattr(sys, "argv", ["shapes.py", "--seconds", "0", "--only", "o", "--json", str(path)])
    shapes.main()
    measured = json.loads(path.read_text())["models"]
    assert [model["model"] for model in measured] == ["one", "two"]
    rows = {row["way"]: row for row in measured[0]["rows"]}
    assert {way: row["repetitions"] for way, row in rows.items()} == {
        "first batch": 3, "new length": 3, "seen once before": 3, "seen twice": 3, "seen often": 3, "fewer samples": 2,
        "plain, again": 17,
    }  # fmt: skip
    for way in ("first batch", "new length", "seen often", "fewer samples"):
        assert rows[way]["norms"].startswith("off by"), way
    monkeypatch.setattr(shapes, "truth", lambda *given: torch.ones(1))
    made = shapes.run("tiny", case, device="cpu", dtype=torch.float32, quick=True, seconds=None)
    torch.set_num_threads(threads)
    assert "WRONG norms" in shapes.table(made)


@pytest.mark.parametrize("name", ["norms", "clipped", "projected", "tokens", "dots", "captured"])
def test_every_quantity_is_checked_and_a_wrong_one_is_seen(name, scripts):
    quantities, checks = scripts("quantities"), scripts("checks")
    torch.manual_seed(0)
    model, losses, x, y = quantities.gpt(4, length=32, **TINY | {"width": 32, "vocabulary": 40})()
    step = quantities.ways_of(model, losses, x, y, (name,))[name]
    assert checks.checked(name, step, model, losses, x, y).startswith("off by")
    other = quantities.ways_of(model, losses, x.flip(1), y, (name,))[name]
    assert checks.checked(name, other, model, losses, x, y).startswith("WRONG")


def test_an_index_is_built_beside_plain_steps_and_its_rows_are_projected_gradients(scripts, monkeypatch):
    build, tables = scripts("index_build"), scripts("index_tables")
    found = build.measure("cpu", 1, 0, batches=1, shape=build.TINY)
    assert found["off"] < 1e-5 and found["repetitions"] == 3
    rows = {row["way"]: row for row in found["rows"]}
    assert list(rows) == list(build.WAYS)
    ours = [row for way, row in rows.items() if "bergson" not in way]
    assert all(row["to_plain"]["median"] > 0 and row["tokens_per_second"] > 0 for row in ours)
    report = {"machine": {"cpu": "one", "torch": "2", "date": "now"}, "quick": True, "build": [found], "large": []}
    shown = tables.tables([report], "build")
    assert all(f"| {way} |" in shown for way in rows) and "--quick" in shown
    real = build.Maker.rows
    monkeypatch.setattr(build.Maker, "rows", lambda *given: real(*given).flip(0))
    assert build.agreement(build.task_of(build.TINY, "cpu", 1)[0]) > 0.1


def test_a_large_index_is_asked_beside_plain_reads_and_costs_are_computed(scripts, monkeypatch):
    query, tables = scripts("index_query"), scripts("index_tables")
    monkeypatch.setattr(query, "BATCH", 50)
    found = list(query.measure("cpu", 0, examples=100, threads=(1,)))
    assert [each["dtype"] for each in found] == ["float16", "bfloat16", "float32"]
    for each in found:
        assert each["nearest"] and set(each["megabytes"]) == {"10%", "50%", "100%"}
        assert each["bytes_per_example"] > 2 * each["width"]
        assert {row["way"] for row in each["asked"][0]["rows"]} >= {
            "plain read",
            "scan, 1 query",
            "1 query",
            "8 queries",
        }
    build = {"length": 100, "width": 50, "shape": "some", "rows": [{"way": "rows, written", "tokens_per_second": 1e3}]}
    report = {"machine": {"cpu": "one", "torch": "2", "date": "now"}, "quick": True, "build": [build], "large": found}
    last = tables.costs(tables.constants(report))[-1]
    assert last["tokens"] == 1e12 and last["bytes"] == 1e10 * 104 and last["build_seconds"] == 1e9
    shown = tables.tables([report], "computed")
    assert "Computed, not measured" in shown and "| 1e12 | 1.04 TB | 31.7 years |" in shown
    assert "| bfloat16 | 1 | scan, 8 queries |" in tables.tables([report], "asked")


def test_recall_is_a_share_and_is_whole_where_nothing_is_left_out(scripts):
    recall, problems = scripts("index_recall"), scripts("lds_problems")
    torch.manual_seed(0)
    model = problems.mlp(5, 6, 3)
    train, asked = ((torch.randn(n, 5), torch.randint(3, (n,))) for n in (120, 4))
    problem = problems.Problem(
        "tiny", "tiny", lambda: model, problems.class_losses, problems.drawn_class_losses, "categorical", train, asked,
        None, 0,
    )  # fmt: skip
    truth = {score: recall.scored(problem, model, score=score) for score in recall.SCORES}
    some = recall.recall(problem, model, truth, 2, 4, seeds=1)
    assert [row["score"] for row in some] == ["dot", "cosine"]
    assert all(0 <= row[key] <= 1 for row in some for key in ("top10", "top100", "reranked"))
    for row in recall.recall(problem, model, truth, 8, 1, seeds=1):  # 8² is more than any parameter has
        assert row["top10"] > 0.9 and row["top100"] == row["reranked"] == 1.0
    assert recall.shared(torch.tensor([[3, 1, 2]]), torch.tensor([[2, 9]])) == 0.5


def test_the_page_on_indexes_shows_what_was_measured(scripts):
    index, tables = scripts("index"), scripts("index_tables")
    page = (FOLDER.parent / "docs" / "gradient_index.md").read_text(encoding="utf-8")
    for part in tables.PARTS:
        _, mark, rest = page.partition(f"<!-- begin: benchmarks/index.py {part} -->\n")
        assert mark and rest.partition("<!-- end -->")[0].strip() == tables.tables(index.results(), part)


def test_pages_show_the_figures_of_curvature_and_influence():
    """The tables on the pages are those of benchmarks/results."""
    scores = json.loads((FOLDER / "results" / "lds_cpu.json").read_text())
    page = (FOLDER.parent / "docs" / "influence.md").read_text()
    rows = [row for problem in scores["problems"] for row in problem["rows"]]
    assert len(rows) > 20
    for row in rows:
        values = row.get("note") or f"{row['lds']:.3f} | {row['deviation']:.3f} | {row['seconds']:.2f}"
        assert f"| {row['method']} | {values} |" in page
    page = (FOLDER.parent / "docs" / "cost.md").read_text()
    for device in ("cpu", "cuda"):
        costs = json.loads((FOLDER / "results" / f"curvature_{device}.json").read_text())
        for row in (row for shape in costs["shapes"] for row in shape["rows"] if "note" not in row):
            ratio = row["to_plain"]
            assert f"| {row['way']} | {ratio['median']:.2f}× | {ratio['low']:.2f}, {ratio['high']:.2f} |" in page
