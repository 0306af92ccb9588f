"""Files of an index that are damaged, changed by hand, or another's: named by `verify`, built anew, never believed."""

import json
import random
import shutil

import pytest
import torch

import unsum
from curvature_nets import classified, mlp
from test_index import DATA, X, Y, built, bytes_of
from unsum.errors import OptionError

NAMED = {"text": lambda example: f"label {int(example[1])}", "ids": [f"#{k}" for k in range(23)]}


def swap(folder, one, other):
    first, second = (folder / one).read_bytes(), (folder / other).read_bytes()
    (folder / one).write_bytes(second)
    (folder / other).write_bytes(first)


@pytest.mark.parametrize("name", ["shard-00000{}.safetensors", "examples-00000{}.parquet"])
def test_files_that_changed_places(name, tmp_path):
    i = built(tmp_path / "i", **NAMED)
    before = bytes_of(tmp_path / "i")
    swap(tmp_path / "i", name.format(0), name.format(1))
    assert i.verify() == [name.format(0), name.format(1)]
    assert built(tmp_path / "i", **NAMED).verify() == [] and bytes_of(tmp_path / "i") == before


def test_shards_that_changed_places_before_the_build_was_done(tmp_path):
    wanted = built(tmp_path / "whole").rows(0, 23)
    for shard in (0, 1):
        unsum.index.build(
            mlp(), classified, DATA, tmp_path / "i", project=3, batch_size=4, shard_size=8, dtype="float32", shard=shard
        )
    swap(tmp_path / "i", "shard-000000.safetensors", "shard-000001.safetensors")
    assert torch.equal(built(tmp_path / "i").rows(0, 23), wanted)


def test_a_shard_of_another_index_is_not_believed(tmp_path):
    built(tmp_path / "i")
    before = bytes_of(tmp_path / "i")
    built(tmp_path / "j", seed=1)
    shutil.copy(tmp_path / "j" / "shard-000001.safetensors", tmp_path / "i")
    i = built(tmp_path / "i")
    assert i.verify() == [] and bytes_of(tmp_path / "i") == before


@pytest.mark.parametrize("name", ["examples-000001.parquet", "manifest.json", "plan.json", "shard-000001.safetensors"])
def test_no_bit_goes_unseen(name, tmp_path):
    i = built(tmp_path / "i", **NAMED)
    before, path, chance = bytes_of(tmp_path / "i"), tmp_path / "i" / name, random.Random(0)
    rows, named = i.rows(0, 23), i.query(mlp(), classified, (X, Y), k=23).texts
    for place in chance.sample(range(len(before[name])), 150):
        data = bytearray(before[name])
        data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(data))
        try:
            opened = unsum.index.open(tmp_path / "i")
            if opened.verify() != [name]:  # what is left are names in a header that nobody reads
                assert opened.verify() == [] and torch.equal(opened.rows(0, 23), rows)
                assert name.startswith("shard") and opened.query(mlp(), classified, (X, Y), k=23).texts == named
        except OptionError as error:
            assert name in str(error)  # noqa: PT017
    if name != "manifest.json":
        assert built(tmp_path / "i", **NAMED).verify() == [] and bytes_of(tmp_path / "i") == before


def test_a_manifest_that_was_edited_is_refused_and_written_anew(tmp_path):
    built(tmp_path / "i")
    before, path = bytes_of(tmp_path / "i"), tmp_path / "i" / "manifest.json"
    told = json.loads(path.read_text())
    told["sketch"]["seed"] = 1
    path.write_text(json.dumps(told))
    with pytest.raises(OptionError, match="checksum differs"):
        unsum.index.open(tmp_path / "i")
    built(tmp_path / "i")
    assert bytes_of(tmp_path / "i") == before


@pytest.mark.parametrize("damage", ["a bit", "a header", "missing", "another"])
def test_the_curvature_beside_the_rows(damage, tmp_path):
    model = mlp()
    c = unsum.curvature.fit(model, classified, DATA)
    i = built(tmp_path / "i", model, curvature=c)
    before, path = bytes_of(tmp_path / "i"), tmp_path / "i" / "curvature.safetensors"
    data = bytearray(path.read_bytes())
    data[-5 if damage == "a bit" else 60] ^= 2
    path.write_bytes(bytes(data))
    if damage == "missing":
        path.unlink()
    if damage == "another":
        unsum.curvature.fit(model, classified, list(DATA)[:9]).save(path)
    assert i.verify() == ["curvature.safetensors"]
    with pytest.raises(OptionError, match=r"curvature.safetensors.*\n.*called again"):
        i.query(model, classified, (X, Y), score="influence")
    assert built(tmp_path / "i", model, curvature=c).verify() == [] and bytes_of(tmp_path / "i") == before


@pytest.mark.parametrize("again", [{}, {"shard": 0}])
def test_a_bit_that_flipped_before_the_build_was_done(again, tmp_path):
    wanted = built(tmp_path / "whole").rows(0, 23)
    options = {"project": 3, "batch_size": 4, "shard_size": 8, "dtype": "float32"}
    unsum.index.build(mlp(), classified, DATA, tmp_path / "i", shard=0, **options)
    shard = tmp_path / "i" / "shard-000000.safetensors"
    before = shard.read_bytes()
    shard.write_bytes(before[:-5] + bytes([before[-5] ^ 0x40]) + before[-4:])
    unsum.index.build(mlp(), classified, DATA, tmp_path / "i", **again, **options)
    assert shard.read_bytes() == before
    i = built(tmp_path / "i")
    assert i.verify() == [] and torch.equal(i.rows(0, 23), wanted)


def test_open_names_damaged_files_if_it_is_asked_to(tmp_path):
    built(tmp_path / "i")
    assert len(unsum.index.open(tmp_path / "i", verify=True)) == 23
    shard = tmp_path / "i" / "shard-000001.safetensors"
    before = shard.read_bytes()
    shard.write_bytes(before[:-5] + bytes([before[-5] ^ 0x40]) + before[-4:])
    with pytest.raises(OptionError, match="damaged or missing: shard-000001.safetensors"):
        unsum.index.open(tmp_path / "i", verify=True)


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(b"PAR1 no more")])
def test_texts_that_are_damaged_are_named_by_a_query(damage, tmp_path):
    i = built(tmp_path / "i", **NAMED)
    for file in (tmp_path / "i").glob("examples-*"):
        damage(file)
    with pytest.raises(OptionError, match=r"examples-00000\d.parquet: damaged or missing"):
        i.query(mlp(), classified, (X[:2], Y[:2]))


@pytest.mark.parametrize(
    "other",
    [{"ids": [f"other {k}" for k in range(23)]}, {"text": lambda example: "other"}, {"text": None}],
    ids=["list", "function", "none"],
)
def test_other_ids_or_texts_are_refused_when_a_build_goes_on(other, tmp_path):
    options = {"project": 3, "batch_size": 4, "shard_size": 8, "dtype": "float32"}
    unsum.index.build(mlp(), classified, DATA, tmp_path / "i", shard=0, **NAMED, **options)
    with pytest.raises(OptionError, match=f"{next(iter(other))}= differ"):
        unsum.index.build(mlp(), classified, DATA, tmp_path / "i", **{**NAMED, **other}, **options)
    i = built(tmp_path / "i", **NAMED)
    assert i.query(mlp(), classified, (X[:1], Y[:1]), k=23).names[0][0] == NAMED["ids"][0]


def test_other_parameters_are_told_by_their_option(tmp_path):
    built(tmp_path / "i", params="0.*")
    with pytest.raises(OptionError, match=r"other parameters are chosen \(params="):
        built(tmp_path / "i", params="*")
