"""The pytest plugin. Outside the package, so that torch is imported by the tests that use it and by no others."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def assert_exact() -> Any:
    """`assert_exact(model, loss_fn, batch)`: the per-sample gradients are those of plain autograd."""
    from unsum.testing import assert_exact as function

    return function
