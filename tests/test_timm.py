"""Exact on timm's families: every parameter, every sample, in float64. torchvision, which timm imports for its data
loading, has no build for the CPU alone everywhere: names stand in for it where it is missing."""

import importlib.util
import re

import pytest
import torch

import torchvision_names
import unsum
from reads import assert_reads, assert_reducers

N = 3
SMALL = [
    "resnet10t", "resnetv2_18", "mobilenetv2_035", "mobilenetv3_small_050", "efficientnet_lite0", "convnext_atto",
    "convnextv2_atto", "regnetx_002", "repvgg_a0", "ghostnet_050", "lcnet_035", "tinynet_e", "mnasnet_small",
    "rexnet_100",
    "hrnet_w18_small", "densenet121", "dla46_c", "edgenext_xx_small", "mobilevit_xxs", "fastvit_t8", "poolformer_s12",
    "resmlp_12_224", "mixer_s32_224", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "xcit_nano_12_p16_224",
    "pvt_v2_b0", "levit_128s", "coat_lite_tiny", "efficientformer_l1", "swin_tiny_patch4_window7_224",
]  # fmt: skip

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


@pytest.fixture(scope="module")
def timm():
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed (pip install --no-deps timm pillow)")
    if importlib.util.find_spec("torchvision") is None:
        torchvision_names.install()
    return pytest.importorskip("timm", reason="timm cannot be imported")


def build(timm, name):
    for options in ({"img_size": 64, "depth": 2}, {"img_size": 64}, {}):
        try:
            torch.manual_seed(0)
            model = timm.create_model(name, num_classes=7, **options).double().eval()
        except TypeError:
            continue
        for p in model.parameters():  # what begins at zero would hide all that comes before it
            if p.abs().max() < 1e-4:
                torch.nn.init.normal_(p, std=0.1)
        return model
    raise AssertionError(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_of_every_sample(timm, name):
    model = build(timm, name)
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
    parameters = [model.get_parameter(n) for n in g]
    rows = [torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True) for loss in losses]
    truth = {name: torch.stack(values) for name, values in zip(g, zip(*rows, strict=True), strict=True)}
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
