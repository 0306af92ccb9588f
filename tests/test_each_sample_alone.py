"""Every sample has the gradient that it has alone, in plain autograd and float64: layers of every kind, language
models, weights made of weights, functions of one's own, many samples, small dtypes."""

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch.nn.utils import parametrizations

import unsum
from nets import IDS, NETS, SEQUENCES, Adapted, D, N, compare, in_float64, mlp, scalar, truth_of
from unsum.errors import UnsupportedError


@pytest.mark.parametrize("name", NETS)
def test_every_sample_has_the_gradient_that_it_has_alone(name):
    make, x = NETS[name]
    torch.manual_seed(0)
    model = make().double()
    truth = per_sample_gradients(model, scalar, x)
    for engine in ("graph", "auto", "auto"):  # the last time remembered, where it can be
        with unsum.gradients(model, engine=engine) as g:
            model.zero_grad()
            scalar(model, x).backward()
        assert_truth(g, model, truth)


def assert_truth(g, model, truth):
    largest = sum(t.flatten(1).square().sum(1) for t in truth.values()).max().sqrt()
    assert largest > 1e-3
    for parameter, wanted in truth.items():
        ours = g[parameter].per_sample()
        assert (ours - wanted).flatten(1).norm(dim=1).max() <= 1e-9 * largest, parameter
        if (wanted - wanted.roll(1, 0)).norm() > 1e-6:  # and no other sample's
            assert (ours - wanted.roll(1, 0)).norm() > 1e-9 * largest, parameter
        torch.testing.assert_close(
            g[parameter].sum() + g[parameter].shared(), _dense(model.get_parameter(parameter).grad)
        )
    torch.testing.assert_close(g.norms(), sum(t.flatten(1).square().sum(1) for t in truth.values()).sqrt())


def _dense(grad):
    return grad.to_dense() if grad.layout != torch.strided else grad


def hf(name, **small):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.AutoConfig.for_model(name, **small)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    kind = transformers.AutoModelForMaskedLM if name in ("bert", "roberta") else transformers.AutoModelForCausalLM
    return kind.from_config(config, attn_implementation="eager").eval()


SMALL = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 40, "intermediate_size": 24
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 1}
ARCHITECTURES = {
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40},
    "llama": GROUPED,
    "gpt_neox": SMALL,
    "qwen3": GROUPED | {"head_dim": 8},
    "bert": SMALL,
    "roberta": SMALL,
    "mamba": {"num_hidden_layers": 2, "hidden_size": 16, "vocab_size": 40, "state_size": 4},
    "gemma2": GROUPED | {"head_dim": 8},
    "phi": SMALL,
    "bloom": {"n_layer": 2, "hidden_size": 16, "n_head": 2, "vocab_size": 40},
    "falcon": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 40},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_language_models(name):
    torch.manual_seed(0)
    model = hf(name, **ARCHITECTURES[name]).double()
    run = lambda m, ids: m(input_ids=ids).logits.logsumexp(-1).square().sum() / N
    truth = per_sample_gradients(model, run, IDS)
    with unsum.gradients(model) as g:
        run(model, IDS).backward()
    largest = sum(t.flatten(1).square().sum(1) for t in truth.values()).max().sqrt()
    # Some of them compute parts in float32.
    tolerance = 1e-6 if name in ("mamba", "gemma2", "llama", "qwen3") else 1e-9
    for parameter, wanted in truth.items():
        assert (g[parameter].per_sample() - wanted).flatten(1).norm(dim=1).max() <= tolerance * largest, parameter
    # gemma2's norm layers multiply by 1 + weight in float32: that sum is replayed.
    assert ("by rule: 96.9" if name == "gemma2" else "by rule: 100") in g.coverage()


def test_weights_of_every_making_are_weights():
    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(D, D))

        def forward(self, x):
            return x @ (self.w.T * 2) + x @ self.w.mT.relu() + x @ (self.w @ self.w.T)

    orthogonal = lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(D, D)))
    for make in (Made, orthogonal):
        torch.manual_seed(0)
        model = make().double()
        truth = truth_of(model, SEQUENCES)
        with unsum.gradients(model) as g:
            scalar(model, SEQUENCES).backward()
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)


def test_adapters_before_and_after_they_have_learnt():
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), Adapted()).double()
    for _ in range(3):
        truth = truth_of(model, SEQUENCES)
        with unsum.gradients(model) as g:
            scalar(model, SEQUENCES).backward()
        assert list(g) == [name for name, p in model.named_parameters() if p.requires_grad]
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad if p.grad is not None else 0


def test_a_function_that_changes_what_it_saved_is_refused_before_backward():
    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.x = x.clone()
            return x * w

        @staticmethod
        def backward(ctx, grad):
            ctx.x.mul_(2)
            return grad, (grad * ctx.x).sum((0, 1))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(D))

        def forward(self, x):
            return Doubling.apply(x, self.w)

    model = Net().double()
    with pytest.raises(UnsupportedError, match="DoublingBackward"):
        with unsum.gradients(model):
            model(SEQUENCES).sum().backward()
    assert model.w.grad is None


@in_float64()
def test_a_custom_function_in_place_on_a_view():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            ctx.save_for_backward(x.clone())
            return x.mul_(x)

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return Square.apply(self.layer(x))

    model, x = Net(), torch.randn(4, 5, 6)
    compare(model, lambda: model(x))


@in_float64()
def test_a_gradient_that_is_rounding_alone_is_no_gradient():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            attend = nn.functional.scaled_dot_product_attention
            mixed = attend(self.q(x)[:, None], self.k(x)[:, None], self.v(x)[:, None], is_causal=True)[:, 0]
            return mixed[torch.arange(len(x)), torch.zeros(len(x), dtype=torch.long)]

    for seed in range(20):
        torch.manual_seed(seed)
        model, x = First(), torch.randn(5, 7, 6)
        compare(model, lambda: model(x))  # noqa: B023


def test_many_samples_need_two_copies():
    model = mlp()
    x = torch.randn(100, D, dtype=torch.float64)
    run = lambda m, x: m(x).square().sum()
    truth = truth_of(model, x, run)
    with unsum.gradients(model) as g:
        run(model, x).backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)
    x = torch.randn(2500, D, dtype=torch.float64)  # and three
    with unsum.gradients(model, params="2.bias") as g:
        run(model, x).backward()
    torch.testing.assert_close(g["2.bias"].per_sample(), 2 * model(x))


def test_float16_with_many_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)).half()
    x = torch.randn(60, D).half()
    run = lambda m, x: m(x).square().sum()
    with unsum.gradients(model) as g:
        run(model, x).backward()
    for name, wanted in truth_of(model, x, run).items():
        assert (g[name].per_sample() - wanted).norm() < 2e-3 * wanted.norm()


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside the region", "outside"])
def test_autocast(inside):
    model, x = mlp().float(), SEQUENCES.float()
    truth = truth_of(model, SEQUENCES)
    with unsum.gradients(model) as g:
        with torch.autocast("cpu", torch.bfloat16):
            loss = scalar(model, x)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    for name, wanted in truth.items():
        ours = g[name].per_sample()
        assert ours.dtype == torch.float32
        assert (ours - wanted).norm() < 0.03 * wanted.norm()
