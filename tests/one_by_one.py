"""What blocks find, compared with gradients that were computed one sample at a time (`reference.py`). `each` is that
truth, {parameter: (n, *shape)}; tolerances are shares of its largest sample's norm."""

import pytest
import torch
from reference import each_of, per_sample_gradients

import unsum
from unsum.errors import InteractionError, UnsumError

TWICE_EACH_WAY = ("kept", "kept", "norms", "norms")  # learnt, and again


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def squares(model, *batch):
    return model(*batch).square().sum()


def norms_of(each):
    """(n,): the norm of each sample's gradient, over all parameters."""
    return torch.cat([values.reshape(len(values), -1) for values in each.values()], 1).norm(dim=1)


def scale_of(each):
    """The norm of the largest sample, of which tolerances are shares."""
    scale = float(norms_of(each).max())
    assert scale > 0
    return scale


def same(ours, wanted, tolerance, what):
    """Every number within an absolute tolerance; `what` names them if not."""
    assert ours.shape == wanted.shape, f"{what}: {tuple(ours.shape)}, wanted {tuple(wanted.shape)}"
    off = float((ours.double() - wanted).abs().max()) if wanted.numel() else 0.0
    assert off <= tolerance, f"{what}: off by {off:.1e}"


def assert_same(g, each, reducer=None, tolerance=1e-9):
    """What a block has found: the norms of this reducer, or else the gradients that it kept."""
    allowed = tolerance * scale_of(each)
    if reducer is not None:
        same(g[reducer].norms(), norms_of(each), allowed, "Norms")
        return
    assert sorted(g) == sorted(each)
    for name, wanted in each.items():
        same(g[name].per_sample(), wanted, allowed, f"{name}.per_sample")


def assert_grads(model, each, shared, tolerance, what):
    """Every `.grad`: the sum over samples, and what is shared."""
    allowed = len(norms_of(each)) * tolerance * scale_of(each)
    parameters = dict(model.named_parameters())
    for name, values in each.items():
        wanted = values.sum(0) + (shared or {}).get(name, 0)
        grad = parameters[name].grad
        same(torch.zeros_like(wanted) if grad is None else grad, wanted, allowed, f"{name}.grad, {what}")


def assert_plain(model, run, each, *, shared=None, tolerance=1e-9):
    """The truth of a test itself: without unsum, a backward of `run()` gives its sum."""
    model.zero_grad()
    run().backward()
    assert_grads(model, each, shared, tolerance, "without unsum")


def step(model, run, each, kind, *, shared=None, tolerance=1e-9, **options):
    """One block, one backward of `run()`, everything compared. `kind`: "kept" or "norms"; `shared`: {parameter: what
    belongs to nobody}."""
    reducer = unsum.Norms() if kind == "norms" else None
    model.zero_grad()
    with unsum.gradients(model, *([reducer] if reducer else []), **options) as g:
        run().backward()
    assert_same(g, each, reducer, tolerance)
    assert_grads(model, each, shared, tolerance, kind)
    if reducer is None:
        allowed = len(norms_of(each)) * tolerance * scale_of(each)
        for name, wanted in each.items():
            nobodys = (shared or {}).get(name, torch.zeros_like(wanted[0]))
            same(g[name].shared(), nobodys, allowed, f"{name}.shared")


def assert_right(model, run, each, *, shared=None, tolerance=1e-9, **options):
    """The truth itself, then blocks of both kinds, twice each."""
    assert_plain(model, run, each, shared=shared, tolerance=tolerance)
    for kind in TWICE_EACH_WAY:
        step(model, run, each, kind, shared=shared, tolerance=tolerance, **options)


def assert_rows(model, loss, *batch, **options):
    """`assert_right` of a loss that is a sum over rows: `loss(model, *batch)`, with each row run alone as the truth."""
    assert_right(model, lambda: loss(model, *batch), per_sample_gradients(model, loss, *batch), **options)


def assert_both(model, run, alone, n, **options):
    """A block with norms and one that keeps, against `alone(i)`, the loss of each sample, in the model's own dtype."""
    each = each_of(model, (alone(i) for i in range(n)))
    for kind in ("norms", "kept"):
        step(model, run, each, kind, **options)


def assert_each_row(model, loss, *batch, **options):
    """`assert_both` of a loss that is a sum over rows: `loss(*batch)`, with each row run alone."""
    alone = lambda i: loss(*(t[i : i + 1] for t in batch))
    assert_both(model, lambda: loss(*batch), alone, len(batch[0]), **options)


def right_or_refused(model, run, each, *, tolerance=1e-9, **options):
    """As `assert_right`, but each block may be refused by an error of unsum's own. True if none was."""
    assert_plain(model, run, each, tolerance=tolerance)
    right = True
    for kind in TWICE_EACH_WAY:
        try:
            step(model, run, each, kind, tolerance=tolerance, **options)
        except UnsumError:
            right = False
    return right


def assert_refused(model, loss, *batch):
    """Blocks of both kinds say that samples interact, twice each; `loss(model, *batch)` is the loss of the batch."""
    for _ in range(2):
        for reducers in ((), (unsum.Norms(),)):
            with pytest.raises(InteractionError):
                with unsum.gradients(model, *reducers):
                    loss(model, *batch).backward()
