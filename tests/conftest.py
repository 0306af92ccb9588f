"""Fixtures that several files of tests use."""

import contextlib
import gc
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import processes


@pytest.fixture(scope="session", autouse=True)
def _thawed_at_the_end():
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _few_objects_to_collect(_thawed_at_the_end):
    """Before the first test of each file, leave all that is there out of garbage collection: imported modules would be
    most of the work of every test that collects or counts objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks():
    """{2: two processes, 3: three}, for `ranks[2].run(check, ...)`. They start with the first check, for all files."""
    with processes.started(2, 3) as groups:
        yield groups


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The built site; a page, a link or an anchor that is not there ends the build."""
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    out = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", out]
    done = subprocess.run(build, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture
def doubles():
    """The same random numbers in every test, and float64 as the usual dtype."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def logged(words):
    """A list of what the logger of unsum says, of all that has these words in it."""
    log, records, handler = logging.getLogger("unsum"), [], logging.Handler()
    handler.emit = lambda record: records.append(record) if words in record.getMessage() else None
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield records
    finally:
        log.setLevel(before)
        log.removeHandler(handler)


@pytest.fixture
def learnt():
    """One entry for every graph that is learnt."""
    with logged("learnt a graph") as records:
        yield records


@pytest.fixture
def compiled_calls():
    """One entry for every call that runs compiled, with taps. Dynamo forgets what it compiled, before and after."""
    torch._dynamo.reset()
    with logged("ran compiled") as records:
        yield records
    torch._dynamo.reset()
