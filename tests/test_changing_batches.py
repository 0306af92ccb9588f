"""A training loop's batches: other lengths, fewer samples, other masks, another order. Exact in every step of it, on
every architecture of the suite: what was learnt of one batch is never taken for another's."""

import importlib.util

import pytest
import torch

import batches
import unsum
from reads import assert_reads, assert_reducers, close

SUITE = batches.suite()
# One image, whose gradient lies in memory as no other does: torch 2.13's batch norm differentiates its scale wrongly on
# a CPU there (the sum over δ·x̂ by hand is another number), and unsum refuses, for the parts are not what torch stores.
ALONE = ("timm/xcit_nano_12_p16_224", "timm/levit_128s", "timm/efficientformer_l1")
READS = ("reads", "norms", "norms", "reads", "reducers", "norms")  # beside norms, which are read in each step


def needed(name):
    if name.startswith("timm/"):
        return "timm"
    return "torch" if name.startswith("nn/") else "transformers"


def assert_norms(architecture, model, step, each, tolerance):
    """As a loop has them: while backward runs, with `.grad` as ever."""
    flat = torch.cat([v.double().flatten(1) for v in each.values()], 1)
    scale = float(flat.norm(dim=1).max())
    assert scale > 1e-4
    model.zero_grad()
    with unsum.gradients(model, unsum.Norms()) as g:
        architecture.losses(model, step).sum().backward()
    found = g[unsum.Norms]
    close(found.sq_norms(), flat.square().sum(1), tolerance, scale**2, "Norms")
    for name, squares in found.by_parameter().items():
        wanted = each[name].double().flatten(1).square().sum(1)
        close(squares, wanted, tolerance, scale**2, f"{name}: Norms")
    for name, values in each.items():
        grad = model.get_parameter(name).grad
        grad = torch.zeros_like(values[0]) if grad is None else grad
        close(grad, values.double().sum(0), max(tolerance, 1e-6), scale, f"{name}.grad")


def assert_step(architecture, model, step, each, tolerance, what):
    assert_norms(architecture, model, step, each, tolerance)
    if what == "reads":
        with unsum.gradients(model) as g:
            architecture.losses(model, step).sum().backward()
        assert {name for name, values in each.items() if values.any()} <= {*g}
        assert_reads(g, {name: each[name] for name in g}, tolerance)
    if what == "reducers":
        assert_reducers(model, lambda model: architecture.losses(model, step).sum(), each, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITE)
def test_every_step_of_a_loop(name):
    if importlib.util.find_spec(needed(name)) is None:
        pytest.skip(f"{needed(name)} is not installed")
    architecture = SUITE[name]
    model, steps = architecture.model(), architecture.steps()
    dtype, tolerance = torch.float64, 1e-9
    if isinstance(batches.plain(architecture, model.double(), steps[0]), str):  # some kernels of experts have none
        dtype, tolerance = torch.float32, 1e-4
    model.to(dtype)
    ran = 0
    whats = [what if k != 3 or needed(name) != "timm" else "norms" for k, what in enumerate(READS)]  # they take longest
    for step, what in zip(steps, whats, strict=True):
        done = batches.plain(architecture, model, step)
        if isinstance(done, str) or (name in ALONE and done[0].n == 1):  # torch itself cannot, at this shape
            continue
        ran += 1
        try:
            assert_step(architecture, model, *done, tolerance, what)
        except (AssertionError, unsum.errors.UnsumError) as error:
            error.add_note(f"in the step {done[0]} ({what})")
            raise
    assert ran >= 4
