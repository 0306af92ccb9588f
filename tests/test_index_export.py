"""What an index writes for other programs has its rows, ids and texts."""

import json

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch

from test_index import built
from unsum import cli
from unsum.errors import NotInstalled, OptionError

IDS, TEXTS = [f"#{k}" for k in range(23)], [f"text {k}" for k in range(23)]


@pytest.fixture(scope="module")
def i(tmp_path_factory):
    return built(tmp_path_factory.mktemp("export") / "i", ids=IDS, text=TEXTS)


@pytest.mark.parametrize("format", ["arrow", "parquet"])
def test_tables_have_rows_ids_and_texts(format, i, tmp_path):
    i.export(tmp_path / "rows", format)
    if format == "parquet":
        table = pyarrow.parquet.read_table(tmp_path / "rows")
    else:
        table = pyarrow.ipc.open_file(str(tmp_path / "rows")).read_all()
    assert table.column("id").to_pylist() == IDS and table.column("text").to_pylist() == TEXTS
    assert table.column("example").to_pylist() == [*range(23)]
    assert torch.equal(torch.tensor(table.column("row").to_pylist()), i.rows(0, 23))


def test_an_array_has_the_rows(i, tmp_path):
    i.export(tmp_path / "rows.npy", "numpy")
    assert numpy.array_equal(numpy.load(tmp_path / "rows.npy", allow_pickle=False), i.rows(0, 23).numpy())


def test_faiss_finds_what_the_index_finds(i, tmp_path):
    faiss = pytest.importorskip("faiss")
    i.export(tmp_path / "rows.faiss", "faiss")
    rows = i.rows(0, 23)
    scores, found = faiss.read_index(str(tmp_path / "rows.faiss")).search(rows[:2].numpy(), 3)
    wanted = (rows[:2] @ rows.T).topk(3)
    assert found.tolist() == wanted.indices.tolist()
    torch.testing.assert_close(torch.from_numpy(scores), wanted.values)


def test_faiss_that_is_not_there_is_named(i, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(NotInstalled, match="pip install faiss-cpu"):
        i.export(tmp_path / "rows.faiss", "faiss")
    assert not any(tmp_path.iterdir())


def test_a_format_that_does_not_exist_is_refused_and_leaves_nothing(i, tmp_path):
    with pytest.raises(OptionError, match="choose 'faiss', 'arrow', 'parquet', 'numpy'"):
        i.export(tmp_path / "rows", "csv")
    assert not any(tmp_path.iterdir())


def test_the_command_writes_the_same(i, tmp_path, capsys):
    folder = i.files()[0].parent
    assert not cli.main(["index", "export", str(folder), str(tmp_path / "rows.npy"), "--format", "numpy", "--json"])
    assert json.loads(capsys.readouterr().out)["format"] == "numpy"
    assert numpy.array_equal(numpy.load(tmp_path / "rows.npy"), i.rows(0, 23).numpy())


def test_ids_and_texts_of_scraped_data_are_kept_as_far_as_a_file_can(tmp_path):
    odd = ["a\ud83dz", "\ud83d\ude00", *TEXTS[2:]]
    i = built(tmp_path / "i", ids=odd, text=odd)
    i.export(tmp_path / "rows.parquet", "parquet")
    assert pyarrow.parquet.read_table(tmp_path / "rows.parquet").column("text").to_pylist()[:2] == ["a\ufffdz", "😀"]
    with pytest.raises(OptionError, match="ids=: got None"):
        built(tmp_path / "j", ids=[None, *IDS[1:]])


@pytest.mark.parametrize("option", ["project", "seed", "sketches"])
def test_none_is_no_number(option, tmp_path):
    with pytest.raises(OptionError, match=f"{option}=None: a whole number"):
        built(tmp_path / "i", **{option: None})


def test_an_empty_path_is_refused():
    with pytest.raises(OptionError, match="name the folder"):
        built("")
