"""Fixtures that several files of tests use."""

import contextlib
import logging

import pytest
import torch


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
