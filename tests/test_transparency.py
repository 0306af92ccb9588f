"""With captures on, everything is bit for bit as without: outputs, gradients, random numbers, buffers."""

import copy

import pytest
import torch
from torch import nn

import unsum

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GELU(), nn.Dropout(0.3))
        self.pool, self.head = nn.AdaptiveAvgPool2d(2), nn.Linear(32, 5)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.body(x)
        return self.head(self.pool(x).flatten(1))


class Rnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(11, 6), nn.LSTM(6, 5, 2, batch_first=True), nn.Linear(5, 11)

    def forward(self, ids):
        out, _ = self.rnn(self.embed(ids))
        return self.head(out)


def hf(name, **small):
    config = transformers.AutoConfig.for_model(name, **small)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 40}
IDS = torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
MODELS = {
    "cnn": (Cnn, IMAGES),
    "rnn": (Rnn, IDS),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)),
    "decoder": (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), torch.randn(2, 5, 8)),
    "gpt2": (lambda: hf("gpt2", n_layer=2, n_embd=16, n_head=2, vocab_size=40), IDS),
    "llama": (lambda: hf("llama", **SMALL, intermediate_size=24, num_key_value_heads=1), IDS),
    "mixtral": (
        lambda: hf("mixtral", **SMALL, intermediate_size=24, num_key_value_heads=1, num_local_experts=3),
        IDS,
    ),
}


def run(model, x):
    torch.manual_seed(3)
    model.train()
    out = model(x, x) if isinstance(model, nn.Transformer) else model(x)
    out = out if isinstance(out, torch.Tensor) else out.logits
    out.float().square().mean().backward()
    return out.detach(), torch.rand(1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kinds", [["input", "output", "grad_output"], ["grad_input"], ["grad"]], ids="+".join)
def test_captures_change_nothing(name, kinds):
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    plain, drawn = run(twin, x)
    with unsum.capture(model, *(f"*:{kind}" for kind in kinds)) as got:
        out, drawn_too = run(model, x)
    assert len(got) >= len(list(model.parameters())) // 4
    assert torch.equal(out, plain)
    assert torch.equal(drawn, drawn_too)
    for (key, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), key
        assert one.grad is None or torch.equal(one.grad, other.grad), key
    for (key, one), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other), key


def test_model_outputs_and_keyword_inputs_of_transformers():
    model = hf("gpt2", n_layer=2, n_embd=16, n_head=2, vocab_size=40)
    sites = [":output.logits", ":grad_output.logits", ":output.loss", ":input.input_ids", "transformer.h.*:output"]
    with unsum.capture(model, *sites) as got:
        out = model(input_ids=IDS, labels=IDS)
        out.loss.backward()
    assert torch.equal(got[":output.logits"], out.logits)
    assert torch.equal(got[":input.input_ids"], IDS)
    assert got[":grad_output.logits"].shape == out.logits.shape
    assert got["transformer.h.1:output"].shape == (3, 7, 16)
    with unsum.edit(model, {":output.logits": unsum.zero()}):
        edited = model(input_ids=IDS)
    assert type(edited) is type(out)
    assert (edited.logits == 0).all() and (edited[0] == 0).all()


def test_a_generation_loop_of_transformers():
    torch.manual_seed(0)
    model = hf("gpt2", n_layer=2, n_embd=16, n_head=2, vocab_size=40, eos_token_id=None, bos_token_id=0)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(IDS[:1], **options)
    with unsum.capture(model, "lm_head:output") as got:
        assert torch.equal(model.generate(IDS[:1], **options), plain)
    assert len(got.calls("lm_head:output")) == 5
    forced = torch.zeros(1, 1, 40)
    forced[..., 17] = 1e4
    with unsum.edit(model, {"lm_head:output@2": unsum.add(forced)}):
        edited = model.generate(IDS[:1], **options)
    assert torch.equal(edited[0, :9], plain[0, :9])
    assert edited[0, 9] == 17


def test_a_block_changes_no_class():
    """Python 3.13 stops remembering what it knows of a class that was changed some hundred times, for good."""
    model, x, before = nn.Linear(3, 2), torch.randn(4, 3), (dict(vars(nn.Module)), dict(vars(torch.Tensor)))
    same = lambda: all(dict(vars(kind)) == known for kind, known in zip((nn.Module, torch.Tensor), before, strict=True))
    with unsum.gradients(model, unsum.Norms()), unsum.capture(model, ":input"):
        model(x).square().sum().backward()
        assert same()
    assert same() and nn.Module.__call__.__code__.co_consts == nn.Module._wrapped_call_impl.__code__.co_consts
    assert nn.Module.__call__.__code__.co_name == "_wrapped_call_impl"
    with pytest.raises(ValueError, match="on purpose"), unsum.gradients(model, unsum.Norms()):
        model(x)
        raise ValueError("on purpose")
    assert nn.Module.__call__.__code__.co_name == "_wrapped_call_impl"
