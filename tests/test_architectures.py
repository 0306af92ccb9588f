"""Exact on architectures that nobody here wrote: every parameter, every sample, in float64."""

import pytest
import torch

import unsum
from architectures import BOTH, DECODERS, ENCODERS, VISION

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
    with unsum.gradients(model) as g:
        out = call(family, model, dtype).reshape(N, -1)
        losses = (out.logsumexp(1) + 0.1 * out.square().sum(1)) / N
        losses.sum().backward(retain_graph=True)
    parameters = [model.get_parameter(n) for n in g]
    truth = [torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) for loss in losses]
    largest = max(sum(0 if t is None else t.double().square().sum() for t in row) for row in truth) ** 0.5
    assert largest > 1e-4
    for i, parameter in enumerate(g):
        for n in range(N):
            wanted = torch.zeros_like(parameters[i]) if truth[n][i] is None else truth[n][i]
            assert (g[parameter].per_sample()[n] - wanted).norm() <= tolerance * largest, (parameter, n)
