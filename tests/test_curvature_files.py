"""A fit on disk, fits of parts put together, fits that are continued."""

import json
import pickle
import re
import struct
import sys
from io import StringIO

import pytest
import torch

import unsum
from brute_curvature import KINDS, matvec, random_rows
from curvature_checks import fitted, same
from curvature_nets import ALL, LAYERED, Batches, Examples, classified, forward, ids, mlp, numbers
from unsum.errors import UnsumError


def saved_files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def nothing_unpickled(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)


# ---- saved and loaded -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_unpickled")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", ["layer norm and scale", "transformer", "tied", "fused experts"])
def test_a_fit_that_was_saved_is_the_same_when_loaded(net, kind, tmp_path):
    model, loss_fn, batches = ALL[net]()
    c, rows = fitted(model, loss_fn, batches, kind), random_rows(model, 2)
    for path in (tmp_path / "one", str(tmp_path / "two")):
        c.save(path)
        d = unsum.curvature.load(path)
        assert d.parameters == c.parameters
        assert {k: float(v) for k, v in d.damping.items()} == {k: float(v) for k, v in c.damping.items()}
        same(d.matvec(rows), c.matvec(rows), 1e-12)
        same(d.solve(rows, damping=0.1), c.solve(rows, damping=0.1), 1e-12)


def test_the_files_are_safetensors_and_json(tmp_path):
    model, loss_fn, batches = LAYERED["layer norm and scale"]()
    fitted(model, loss_fn, batches, "ekfac").save(tmp_path / "c")
    tensors, manifests = 0, 0
    for path in saved_files(tmp_path):
        content = path.read_bytes()
        if content[:1] == b"{":
            manifests += bool(json.loads(content))
            continue
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        manifests += "__metadata__" in header
        tensors += len([name for name in header if name != "__metadata__"])
    assert tensors and manifests


@pytest.mark.parametrize("damage", ["cut short", "other bytes", "empty"])
def test_a_damaged_file_is_a_clear_error(damage, tmp_path):
    model, loss_fn, batches = LAYERED["mlp"]()
    c = fitted(model, loss_fn, batches)
    (tmp_path / "whole").mkdir()
    c.save(tmp_path / "whole" / "c")
    for number, name in enumerate(path.relative_to(tmp_path / "whole") for path in saved_files(tmp_path / "whole")):
        folder = tmp_path / str(number)
        folder.mkdir()
        c.save(folder / "c")
        content = (folder / name).read_bytes()
        broken = {"cut short": content[: len(content) // 2], "other bytes": b"\x93NUMPY" + content[6:], "empty": b""}
        (folder / name).write_bytes(broken[damage])
        with pytest.raises(UnsumError, match=re.escape(str(folder))):
            unsum.curvature.load(folder / "c")


def test_one_number_that_was_changed_on_disk_is_noticed(tmp_path):
    model, loss_fn, batches = LAYERED["mlp"]()
    fitted(model, loss_fn, batches).save(tmp_path / "c")
    largest = max(saved_files(tmp_path), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-3] ^= 0xFF
    largest.write_bytes(bytes(content))
    with pytest.raises(UnsumError, match="damaged|checksum|changed"):
        unsum.curvature.load(tmp_path / "c")


FOREIGN = ["empty", "text", "json", "pickle"]


@pytest.mark.parametrize("content", [b"", b"hello", b'{"a": 1}', pickle.dumps({"a": 1})], ids=FOREIGN)
def test_a_file_of_something_else_is_a_clear_error(content, tmp_path):
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(UnsumError, match="c"):
        unsum.curvature.load(tmp_path / "c")


def test_a_path_where_nothing_is(tmp_path):
    with pytest.raises((UnsumError, FileNotFoundError), match="nothing here"):
        unsum.curvature.load(tmp_path / "nothing here")


# ---- merged ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kfac", "diagonal"])
@pytest.mark.parametrize("net", ALL)
def test_a_merge_is_the_fit_of_all_data(net, kind):
    model, loss_fn, batches = ALL[net]()
    assert len(batches) == 2 and len(batches[0][0]) != len(batches[1][0])
    whole, rows = fitted(model, loss_fn, batches, kind), random_rows(model, 2)
    one, two = (fitted(model, loss_fn, [batch], kind) for batch in batches)
    before = one.matvec(rows)
    merged = one.merge(two)
    same(merged.matvec(rows), whole.matvec(rows))
    same(merged.solve(rows, damping=0.1), whole.solve(rows, damping=0.1))
    for name, damping in whole.damping.items():
        assert float(merged.damping[name]) == pytest.approx(float(damping), abs=1e-12)
    same(two.merge(one).matvec(rows), whole.matvec(rows))
    same(one.matvec(rows), before, 1e-12)  # a merge is a new fit


def test_three_parts_one_of_them_from_disk(tmp_path):
    model, x, y = mlp(), numbers(0, 12, 4), ids(1, 12, high=3)
    parts = [(x[i:j], y[i:j]) for i, j in ((0, 2), (2, 7), (7, 12))]
    one, two, three = (fitted(model, classified, [part]) for part in parts)
    two.save(tmp_path / "two")
    merged, rows = one.merge(unsum.curvature.load(tmp_path / "two")).merge(three), random_rows(model, 2)
    same(merged.matvec(rows), matvec(KINDS["kfac"](model, classified, parts), rows))


def test_ekfacs_are_not_merged():
    model, loss_fn, batches = LAYERED["mlp"]()
    one, two = (fitted(model, loss_fn, [batch], "ekfac") for batch in batches)
    with pytest.raises(UnsumError, match="(?i)bas[ei]s"):
        one.merge(two)


def test_fits_of_other_kinds_settings_or_models_are_not_merged():
    model, loss_fn, batches = LAYERED["mlp on sequences"]()
    c = fitted(model, loss_fn, batches)
    others = [
        fitted(model, loss_fn, batches, "diagonal"),
        fitted(model, loss_fn, batches, setting="reduce"),
        fitted(*LAYERED["convolution"]()),
    ]
    with torch.no_grad():
        model[0].weight += 0.1
    for other in [*others, fitted(model, loss_fn, batches)]:
        with pytest.raises(UnsumError):
            c.merge(other)


# ---- progress, and going on -----------------------------------------------------------------------------------------


class Terminal(StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_a_terminal_only(monkeypatch):
    model, loss_fn, batches = LAYERED["mlp"]()
    monkeypatch.delenv("UNSUM_PROGRESS", raising=False)
    for stream in (Terminal(), StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        fitted(model, loss_fn, batches, "ekfac")
        assert bool(stream.getvalue()) == stream.isatty()


RESUMED = {"chunk": 2}  # batches after which what is known is written down


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drawn", [False, True], ids=["empirical", "labels drawn"])
def test_an_interrupted_fit_is_continued(kind, drawn, tmp_path):
    model, x, y = mlp(), numbers(0, 24, 4), ids(1, 24, high=3)
    options = {"kind": kind, "batch_size": 3} | ({"likelihood": unsum.curvature.categorical(forward)} if drawn else {})
    whole = unsum.curvature.fit(model, classified, Examples(x, y), **options)

    class Failing(Examples):
        """Fails after some reads."""

        reads, allowed = 0, 17

        def __getitem__(self, i):
            self.reads += 1
            if self.reads > self.allowed:
                raise RuntimeError("the machine is gone")
            return super().__getitem__(i)

    data, path = Failing(x, y), tmp_path / "fit"
    with pytest.raises(RuntimeError, match="the machine is gone"):
        unsum.curvature.fit(model, classified, data, **options, resume=path, **RESUMED)
    before, data.allowed, rows = data.reads, 10**6, random_rows(model, 2)
    c = unsum.curvature.fit(model, classified, data, **options, resume=path, **RESUMED)
    same(c.matvec(rows), whole.matvec(rows), 1e-12)
    passes = 2 if kind == "ekfac" else 1
    assert data.reads - before < passes * 24  # what was done is not done again


class Gone(Batches):
    """Its batches, and then an error."""

    def __iter__(self):
        yield from self.batches
        raise RuntimeError("gone")


def test_a_fit_of_something_else_is_not_continued(tmp_path):
    model, loss_fn, batches = LAYERED["mlp"]()
    with pytest.raises(RuntimeError, match="gone"):
        unsum.curvature.fit(model, loss_fn, Gone(*batches), kind="kfac", resume=tmp_path / "fit", **RESUMED)
    with torch.no_grad():
        model[0].weight += 0.1
    with pytest.raises(UnsumError):
        unsum.curvature.fit(model, loss_fn, Batches(*batches), kind="kfac", resume=tmp_path / "fit", **RESUMED)


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
def test_a_fit_is_not_continued_in_batches_of_another_size(kind, tmp_path):
    """It would leave out, or count twice, what lies between."""
    x, y = numbers(0, 24, 4), ids(1, 24, high=3)
    calls = []

    def failing(model, batch):
        calls.append(len(batch[0]))
        if len(calls) > 4:
            raise RuntimeError("gone")
        return classified(model, batch)

    model, options = mlp(), {"kind": kind, "resume": tmp_path / "fit", "chunk": 2}
    with pytest.raises(RuntimeError, match="gone"):
        unsum.curvature.fit(model, failing, Examples(x, y), batch_size=3, **options)
    with pytest.raises(UnsumError, match="other data"):
        unsum.curvature.fit(model, classified, Examples(x, y), batch_size=6, **options)
    assert unsum.curvature.fit(model, classified, Examples(x, y), batch_size=3, **options).n == 24
