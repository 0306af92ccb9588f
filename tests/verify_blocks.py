"""Blocks with `verify=True`, which run the model a second time, and what their errors must say."""

import functools
import re

import pytest

import small_nets
import unsum
from one_by_one import squares
from unsum.errors import InteractionError

N, D = 4, small_nets.D
SAID = r"verify|again"
mlp = functools.partial(small_nets.mlp, outputs=3)  # another number than there are samples
KINDS = pytest.mark.parametrize("kind", [None, unsum.Norms], ids=["kept", "norms"])


def assert_says_so(error):
    """Nothing interacts: that is only not known."""
    assert not isinstance(error, InteractionError), error
    assert re.search(SAID, str(error)), error


def verified(model, kind, *batch):
    reducer = kind() if kind else None
    with unsum.gradients(model, *([reducer] if reducer else []), verify=True) as g:
        squares(model, *batch).backward()
    return g, reducer
