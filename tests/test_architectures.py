"""Exact on architectures that nobody here wrote: every parameter, every sample, in float64."""

import pytest
import torch

import unsum
from architectures import BOTH, DECODERS, ENCODERS, VISION
from reads import assert_reads, assert_reducers

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
transformers.logging.set_verbosity_error()

N = 3
IDS = torch.randint(3, 40, (N, 6), generator=torch.Generator().manual_seed(0))


def build(kind, name, options):
    config = transformers.AutoConfig.for_model(name, **options)
    config.pad_token_id = config.bos_token_id = 0
    config.eos_token_id = 1
    torch.manual_seed(0)
    return kind.from_config(config).eval()


def call(family, model, dtype):
    if family is VISION:
        size = getattr(model.config, "image_size", 32)
        images = torch.randn(N, 3, size, size, generator=torch.Generator().manual_seed(1)).to(dtype)
        return model(pixel_values=images).logits
    if family is BOTH:
        return model(input_ids=IDS, decoder_input_ids=IDS, use_cache=False).logits
    return model(input_ids=IDS, **({"use_cache": False} if family is DECODERS else {})).logits


FAMILIES = [
    (DECODERS, "AutoModelForCausalLM"),
    (ENCODERS, "AutoModelForMaskedLM"),
    (BOTH, "AutoModelForSeq2SeqLM"),
    (VISION, "AutoModelForImageClassification"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "name"),
    [pytest.param(family, kind, name, id=name) for family, kind in FAMILIES for name in family],
)
def test_every_parameter_of_every_sample(family, kind, name):
    model = build(getattr(transformers, kind), name, family[name])
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):  # noqa: B007
        model.to(dtype)
        try:
            call(family, model, dtype)
            break
        except RuntimeError:  # some kernels of experts have no float64
            continue

    def losses(model):
        out = call(family, model, dtype).reshape(N, -1)
        return (out.logsumexp(1) + 0.1 * out.square().sum(1)) / N

    with unsum.gradients(model) as g:
        each = losses(model)
        each.sum().backward(retain_graph=True)
    parameters = [model.get_parameter(n) for n in g]
    rows = [torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True) for loss in each]
    truth = {name: torch.stack(values) for name, values in zip(g, zip(*rows, strict=True), strict=True)}
    assert max(v.double().norm() for v in truth.values()) > 1e-4
    assert_reads(g, truth, tolerance)
    assert_reducers(model, lambda model: losses(model).sum(), truth, tolerance)
