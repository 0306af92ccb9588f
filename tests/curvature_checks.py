"""What several tests of curvature do: fit batches, compare vectors by name."""

import torch

import unsum
from brute_curvature import basis_of, flat
from curvature_nets import Batches


def fitted(model, loss_fn, batches, kind="kfac", **options):
    return unsum.curvature.fit(model, loss_fn, Batches(*batches), kind=kind, **options)


def same(ours, wanted, tolerance=1e-8):
    """The same names, shapes and numbers; the tolerance is a share of the largest number."""
    assert sorted(ours) == sorted(wanted)
    largest = max(float(value.abs().max()) for value in wanted.values())
    for name, values in wanted.items():
        assert ours[name].shape == values.shape, name
        off = float((ours[name].double() - values).abs().max())
        assert off <= tolerance * largest, f"{name}: off by {off:.1e}, of {largest:.1e}"


def dense(curvature, model, names):
    """(p, p): the products of a curvature with the unit vectors of these parameters, in this order."""
    products = curvature.matvec(basis_of(model, names))
    return flat({name: products[name] for name in names})


def distance(ours, wanted):
    """Of two matrices, as a share of the second."""
    return float((ours - wanted).norm() / wanted.norm())


def close(ours, wanted):
    torch.testing.assert_close(ours, wanted, rtol=1e-7, atol=1e-9 * float(wanted.abs().max()))
