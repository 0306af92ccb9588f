"""Blocks that are opened and closed without `with`, and what they say of themselves."""

from __future__ import annotations

import gc
import pickle
import warnings

import pytest
import torch
from torch import nn

import unsum


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def blocks(model: nn.Module) -> dict[str, unsum.opened.Opened]:
    return {
        "capture": unsum.capture(model, "0:output"),
        "edit": unsum.edit(model, {"0:output": unsum.scale(2.0)}),
        "gradients": unsum.gradients(model),
    }


@pytest.mark.parametrize("kind", ["capture", "edit", "gradients"])
def test_open_and_close_are_what_with_does(kind: str) -> None:
    model, x = net(), torch.randn(5, 3)
    with blocks(model)[kind] as inside:
        model(x).sum().backward()
    block = blocks(model)[kind]
    found = block.open()
    assert block.is_open
    model(x).sum().backward()
    block.close()
    assert not block.is_open
    block.close()  # twice is once
    if kind == "capture":
        assert torch.equal(found["0:output"], inside["0:output"])
    if kind == "gradients":
        assert torch.equal(found["2.weight"].per_sample(), inside["2.weight"].per_sample())
    plain = model(x)
    assert not unsum.seams.here()
    assert torch.equal(plain, model(x))


def test_a_block_may_be_opened_again() -> None:
    model = net()
    block = unsum.gradients(model, unsum.Norms())
    for n in (2, 3):
        g = block.open()
        model(torch.randn(n, 3)).sum().backward()
        block.close()
        assert g.norms().shape == (n,)
    with pytest.raises(unsum.errors.OptionError, match="open already"):
        block.open(), block.open()
    block.close()


@pytest.mark.parametrize("kind", ["capture", "edit", "gradients"])
def test_a_block_that_nobody_holds_is_closed_with_a_warning(kind: str) -> None:
    model = net()
    held = [blocks(model)[kind]]
    held[0].open()
    with pytest.warns(UserWarning, match=f"unsum.{kind}: no reference to the open block"):
        held.clear()
    assert not unsum.seams.here()


def test_close_in_finally_keeps_the_users_error() -> None:
    block = unsum.capture(net(), "0:output")
    block.open()
    with pytest.raises(ZeroDivisionError):
        try:
            1 / 0
        finally:
            block.close()  # whose site never fired
    block.open()
    with pytest.raises(unsum.errors.SiteError, match="0:output"):
        block.close()


def test_stop_needs_with() -> None:
    with pytest.raises(unsum.errors.OptionError, match="with"):
        unsum.capture(net(), "0:output", stop=True).open()


def test_norms_are_read_from_the_block() -> None:
    model, x = net(), torch.randn(5, 3)
    with unsum.gradients(model) as kept:
        model(x).sum().backward()
    with unsum.gradients(model, unsum.Norms()) as g:
        model(x).sum().backward()
    torch.testing.assert_close(g.norms(), kept.norms())
    torch.testing.assert_close(g.sq_norms(), kept.sq_norms())
    with unsum.gradients(model, unsum.TokenNorms()) as g:
        model(x).sum().backward()
    with pytest.raises(unsum.errors.SamplesError, match="keep=True"):
        g.norms()


def test_what_is_printed() -> None:
    model = net()
    with unsum.gradients(model, unsum.Norms(), keep=True) as g:
        assert "no backward yet" in repr(g)
        model(torch.randn(5, 3)).sum().backward()
    assert "5 samples, 26 parameters in 4 tensors" in str(g)
    assert "g['2.bias']: (2,)" in str(g)
    assert "Norms of 5 samples: norms()" in str(g)
    assert str(g["0.weight"]) == "per-sample gradients of 0.weight (4, 3): 5 samples, kept as: outer"
    assert list(g.keys()) == [name for name, _ in model.named_parameters()]
    assert len(g) == 4
    with unsum.capture(model, "*:output") as got:
        model(torch.randn(5, 3))
    assert len(got) == len(got.keys()) == 3
    assert repr(unsum.Norms()) == "Norms of no backward yet: norms(), sq_norms(), by_parameter()"


def test_pickling_says_why_not() -> None:
    model = net()
    block = unsum.gradients(model)
    with block as g:
        model(torch.randn(5, 3)).sum().backward()
    for thing in (block, g, g["0.weight"], unsum.watch(model)):
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(thing)


def test_with_leaves_no_finalizer() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with unsum.gradients(net()):
            pass
        gc.collect()
