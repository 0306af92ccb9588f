"""Verbs on their own, and `.at`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import unsum
from unsum.errors import VerbError

VERBS = {
    "scale": unsum.scale(-2.5),
    "add": unsum.add(1.5),
    "clip": unsum.clip(-0.5, None),
    "clip_norm": unsum.clip_norm(0.7),
    "zero": unsum.zero(),
    "replace": unsum.replace(3.0),
    "mean_ablate": unsum.mean_ablate(),
    "noise": unsum.noise(0.1, torch.Generator().manual_seed(0)),
    "reverse": unsum.reverse(2.0),
    "steer": unsum.steer(torch.tensor([1.0, 2.0, 2.0]), 3.0),
    "remove": unsum.remove(torch.tensor([1.0, 2.0, 2.0])),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_verb_keeps_shape_and_dtype_and_leaves_its_argument_alone(verb, dtype):
    t = torch.randn(2, 4, 3).to(dtype)
    before = t.clone()
    new = verb(t)
    assert new.shape == t.shape and new.dtype == dtype
    assert torch.equal(t, before)
    assert new.data_ptr() != t.data_ptr()
    part = verb.at(positions=[1, -1])(t)
    assert torch.equal(part[:, [0, 2]], t[:, [0, 2]])
    assert part.dtype == dtype


def index(size):
    whole = st.integers(-size, size - 1)
    masks = st.lists(st.booleans(), min_size=size, max_size=size).map(torch.tensor)
    return st.one_of(whole, st.lists(whole, min_size=1, max_size=4), st.slices(size), masks, st.just(range(size)))


@given(index(3), index(4), index(5))
def test_at_changes_exactly_the_part_that_numpy_would(samples, positions, features):
    t = torch.arange(1.0, 61).view(3, 4, 5)
    new = unsum.zero().at(samples=samples, positions=positions, features=features)(t)
    chosen = torch.zeros(3, 4, 5)
    masks = []
    for size, one in zip((3, 4, 5), (samples, positions, features), strict=True):
        mask = torch.zeros(size, dtype=torch.bool)
        mask[list(range(size)[one]) if isinstance(one, slice) else list(one) if isinstance(one, range) else one] = True
        masks.append(mask)
    chosen = masks[0][:, None, None] & masks[1][None, :, None] & masks[2][None, None, :]
    assert torch.equal(new == 0, chosen)
    assert torch.equal(new[~chosen], t[~chosen])


@settings(deadline=None)  # the first call loads what compares tensors
@given(arrays.arrays("float64", (3, 5), elements=st.floats(-100, 100)))
def test_clip_norm_never_lengthens_and_keeps_the_direction(values):
    t = torch.from_numpy(values)
    new = unsum.clip_norm(2.0)(t)
    norm = t.norm()
    torch.testing.assert_close(new.norm(), norm.clamp(max=2.0))
    torch.testing.assert_close(new * norm, t * new.norm(), atol=1e-6, rtol=1e-6)


def test_the_mathematics():
    t = torch.randn(4, 3, dtype=torch.float64)
    v = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    removed = unsum.remove(v)(t)
    torch.testing.assert_close(removed @ v, torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(unsum.remove(v)(removed), removed)
    torch.testing.assert_close(unsum.steer(v, 6.0)(t), t + 2 * v)
    assert torch.equal(unsum.reverse(2.0)(t), -2 * t)
    assert unsum.zero()(torch.tensor([float("nan"), float("inf")])).tolist() == [0, 0]
    assert unsum.clip_norm(1.0)(torch.tensor([float("nan"), 1.0])).isnan().all()
    assert unsum.clip_norm(1.0)(torch.zeros(3)).tolist() == [0, 0, 0]
    torch.manual_seed(0)
    drawn = unsum.noise(2.0)(torch.zeros(20000))
    assert abs(drawn.std() - 2) < 0.05 and abs(drawn.mean()) < 0.05
    one, two = (unsum.noise(1.0, torch.Generator().manual_seed(3))(t) for _ in range(2))
    assert torch.equal(one, two)


def test_a_direction_may_be_huge_tiny_whole_numbers_a_list_or_complex():
    t = torch.zeros(2, 5)
    for v in (torch.ones(5) * 1e30, torch.ones(5) * 1e-30, torch.ones(5, dtype=torch.long), [1, 1, 1, 1, 1]):
        torch.testing.assert_close(unsum.steer(v)(t), torch.full((2, 5), 5**-0.5))
    t, v = torch.randn(3, 4, dtype=torch.complex128), torch.randn(4, dtype=torch.complex128)
    removed = unsum.remove(v)(t)
    torch.testing.assert_close(removed @ v.conj(), torch.zeros(3, dtype=torch.complex128), atol=1e-12, rtol=0)


def test_the_order_of_an_index_is_kept():
    part = torch.tensor([[10.0, 20.0]])
    for index in ([2, 0], (2, 0), torch.tensor([2, 0]), range(2, -1, -2), slice(2, None, -2), [2, 0, 2]):
        assert unsum.replace(part).at(features=index)(torch.zeros(1, 4)).tolist() == [[20, 0, 10, 0]]
    assert torch.equal(unsum.zero().at(samples=[])(torch.ones(2, 2)), torch.ones(2, 2))


def test_other_dimensions_and_parts_of_a_patch():
    t = torch.randn(2, 3, 4, 5)
    new = unsum.zero().at(dims={2: [0, 1]}, samples=1)(t)
    assert (new[1, :, :2] == 0).all() and torch.equal(new[0], t[0]) and torch.equal(new[1, :, 2:], t[1, :, 2:])
    whole = torch.randn(2, 3, 4, 5)
    assert torch.equal(unsum.replace(whole).at(positions=1)(t)[:, 1], whole[:, 1])
    part = torch.randn(2, 1, 4, 5)
    assert torch.equal(unsum.replace(part).at(positions=1)(t)[:, 1:2], part)
    norm_of_part = unsum.clip_norm(1.0).at(samples=0)(t * 100)
    torch.testing.assert_close(norm_of_part[0].norm(), torch.tensor(1.0))
    assert torch.equal(norm_of_part[1], t[1] * 100)
    assert repr(unsum.scale(2.0).at(samples=0)) == "scale(2.0).at(samples=0)"


@pytest.mark.parametrize(
    "call",
    [
        lambda: unsum.zero().at(positions=0)(torch.ones(3)),
        lambda: unsum.zero().at(dims={5: 0})(torch.ones(3, 4)),
        lambda: unsum.zero().at(positions=0, features=0)(torch.ones(3, 4)),
        lambda: unsum.zero().at(samples=7)(torch.ones(3, 4)),
        lambda: unsum.zero().at(),
        lambda: unsum.zero().at(samples=True)(torch.ones(3, 4)),
        lambda: unsum.zero().at(features="a")(torch.ones(3, 4)),
        lambda: unsum.zero().at(features=1, dims={-1: 2}),
        lambda: unsum.zero().at(features=1).at(features=2),
        lambda: unsum.clip_norm(-1.0),
        lambda: unsum.noise(-1.0),
        lambda: unsum.noise(1.0)(torch.ones(3, dtype=torch.long)),
        lambda: unsum.clip_norm(1.0)(torch.ones(3, dtype=torch.long)),
        lambda: unsum.remove(torch.ones(3))(torch.ones(2, 3, dtype=torch.long)),
        lambda: unsum.replace(1.5)(torch.ones(3, dtype=torch.long)),
        lambda: unsum.steer(torch.ones(3, dtype=torch.complex64))(torch.ones(2, 3)),
        lambda: unsum.clip(),
        lambda: unsum.replace(torch.zeros(2))(torch.ones(3)),
        lambda: unsum.replace(torch.zeros(2, 9)).at(samples=[0])(torch.ones(3, 4)),
        lambda: unsum.steer(torch.zeros(4))(torch.ones(3, 4)),
        lambda: unsum.remove(torch.ones(2, 4))(torch.ones(3, 4)),
        lambda: unsum.replace(torch.zeros(3, device="meta"))(torch.ones(3)),
        lambda: unsum.add(torch.zeros(3, device="meta"))(torch.ones(3)),
    ],
)
def test_a_verb_that_does_not_fit_says_so(call):
    with pytest.raises(VerbError):
        call()
