"""Paths into nested values."""

from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unsum.errors import SiteError, UnsupportedError
from unsum.nested import find, format_path, leaves, parse_path, put

trees = st.recursive(
    st.integers(0, 9).map(float).map(torch.tensor) | st.none() | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("ab c", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(trees)
def test_every_leaf_is_found_by_its_written_path_and_can_be_replaced(tree):
    found = list(leaves(tree))
    for path, tensor in found:
        assert find(tree, parse_path(format_path(path))) == (path, tensor)
    new = put(tree, {path: tensor + 100 for path, tensor in found})
    assert [path for path, _ in leaves(new)] == [path for path, _ in found]
    assert all(torch.equal(b, a + 100) for (_, a), (_, b) in zip(found, leaves(new), strict=True))
    assert all(a is b for (_, a), (_, b) in zip(found, leaves(tree), strict=True))  # the old one is as it was
    assert type(new) is type(tree)


def test_what_is_not_on_the_way_is_not_copied():
    kept = [torch.zeros(1)]
    tree = {"a": kept, "b": (torch.zeros(1),)}
    assert put(tree, {("b", 0): torch.ones(1)})["a"] is kept
    assert put(tree, {}) is tree


@pytest.mark.parametrize("text", ["x", "[", "[x]", ".", ".a.", "['a]", "[0] "])
def test_a_path_that_cannot_be_read(text):
    with pytest.raises(SiteError, match="path"):
        parse_path(text)


def test_a_container_that_cannot_be_changed_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="mappingproxy"):
        put(MappingProxyType({"a": torch.zeros(1)}), {("a",): torch.ones(1)})
