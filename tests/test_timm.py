"""Exact on timm's families: every parameter, every sample, in float64. The models are those of `batches.py`."""

import importlib.util
import re

import pytest
import torch
from reference import each_of

import unsum
from batches import TIMM, suite
from reads import assert_reads, assert_reducers

N, SUITE = 3, suite()
CONVOLUTIONAL = (
    "resnet",
    "mobilenet",
    "efficientnet",
    "convnext",
    "regnet",
    "repvgg",
    "ghostnet",
    "lcnet",
    "dense",
    "dla",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_every_parameter_of_every_sample(name):
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed (pip install --no-deps timm pillow)")
    model = SUITE[f"timm/{name}"].model().double()
    for size in (64, 224):
        x = torch.randn(N, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        try:
            model(x)
            break
        except (AssertionError, RuntimeError):
            continue
    with unsum.gradients(model) as g:
        losses = model(x).square().sum(1) / N
        losses.sum().backward(retain_graph=True)
    truth = {name: values for name, values in each_of(model, losses).items() if name in g}
    assert_reads(g, truth, 1e-9)
    total = lambda model: (model(x).square().sum(1) / N).sum()
    try:
        for _ in range(2):
            total(model).backward()
    except RuntimeError:  # in eval mode some keep part of the graph for the next forward: torch itself cannot go on
        pass
    else:
        assert_reducers(model, total, truth, 1e-9)
    by_rule = float(re.search(r"by rule: ([\d.]+)%", g.coverage())[1])
    assert by_rule >= (95 if name.startswith(CONVOLUTIONAL) else 50), g.coverage()
