"""Fixtures that several files of tests use."""

import pytest
import torch


@pytest.fixture
def doubles():
    """The same random numbers in every test, and float64 as the usual dtype."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
