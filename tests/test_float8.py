"""Linear layers of float8 training: factors before they are rounded; sums agree with `.grad` to float8's rounding."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import unsum
from unsum.errors import InteractionError, UnsupportedError
from unsum.rules.registry import RULES

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.float8 as torchao
except ImportError:
    torchao = None

with_torchao = pytest.mark.skipif(torchao is None, reason="torchao is not installed: pip install --no-deps torchao")

ROUNDING = 0.1  # of norms: float8 keeps two or three bits behind the first


def net(recipe: str, dtype: torch.dtype = torch.float32, t: int | None = None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 48)).to(dtype)
    config = replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    x = torch.randn(8, 32, dtype=dtype) if t is None else torch.randn(8, t, 32, dtype=dtype)
    return torchao.convert_to_float8_training(model, config=config), x


def rounded(x, by_row):
    largest = x.abs().amax(-1, keepdim=True) if by_row else x.abs().amax()
    scale = largest.clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


class matmul_with_hp_or_float8_args(torch.autograd.Function):
    """In the place of torchao's Function of this name, where that is not installed."""

    @staticmethod
    def forward(ctx, x, w, config):
        ctx.save_for_backward(x, w)
        ctx.config, ctx.by_row = config, config.cast_config_input.scaling_granularity.value == "axiswise"
        return rounded(x, ctx.by_row) @ rounded(w.t(), ctx.by_row).t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        turned = [rounded(each.flatten(0, -2).t(), ctx.by_row) for each in (x, g)]
        return rounded(g, ctx.by_row) @ rounded(w, ctx.by_row).t(), turned[0] @ turned[1].t(), None


class StandIn(nn.Linear):
    def __init__(self, i, o, granularity):
        super().__init__(i, o)
        kind = SimpleNamespace(value=granularity)
        cast = SimpleNamespace(scaling_type=SimpleNamespace(value="dynamic"), scaling_granularity=kind)
        self.config = SimpleNamespace(cast_config_input=cast, cast_config_grad_output=cast)

    def forward(self, x):
        return matmul_with_hp_or_float8_args.apply(x, self.weight.t(), self.config) + self.bias


def stand_in(granularity):
    torch.manual_seed(0)
    return nn.Sequential(StandIn(32, 64, granularity), nn.Tanh(), StandIn(64, 48, granularity)), torch.randn(8, 5, 32)


def mx_net(dtype: torch.dtype = torch.float32):
    module = pytest.importorskip(
        "torchao.prototype.moe_training.mxfp8_linear", reason="this torchao has no MXFP8Linear"
    )
    torch.manual_seed(0)
    layer = lambda i, o: module.MXFP8Linear(i, o, kernel_preference=module.KernelPreference.EMULATED)
    return nn.Sequential(layer(64, 96), nn.Tanh(), layer(96, 160)).to(dtype), torch.randn(32, 64, dtype=dtype)


def loss_of(model, x):
    return (model(x) - 1).square().flatten(1).sum(1)


def factors(model, x):
    """{weight: Σ_t δ ⊗ a of each sample}, from plain hooks: the truth as it is defined."""
    seen: dict[str, list[torch.Tensor]] = {}
    handles = []
    for name, layer in model.named_children():
        if not isinstance(layer, nn.Linear):
            continue

        def hook(module, args, out, name=name):
            out.register_hook(lambda g: seen.setdefault(name, []).extend([args[0].detach(), g]))

        handles.append(layer.register_forward_hook(hook))
    loss_of(model, x).sum().backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    split = lambda each: each.double().reshape(len(x), -1, each.shape[-1])
    return {
        f"{name}.weight": torch.einsum("nti,nto->noi", *map(split, seen[name]))
        for name, layer in model.named_children()
        if name in seen
    }


def apart(one, other):
    return float((one.double() - other.double()).norm() / other.double().norm())


def check(model, x, **options):
    truth = factors(model, x)
    with unsum.gradients(model, **options) as g:
        loss_of(model, x).sum().backward()
    fine = 1e-5 if x.dtype == torch.float32 else 1e-2
    for name, parameter in model.named_parameters():
        if name in truth:
            assert "float8" in str(g.coverage())
            assert apart(g[name].per_sample(), truth[name]) < fine
            assert apart(g[name].sum(), parameter.grad) < ROUNDING
        else:
            assert apart(g[name].sum(), parameter.grad) < fine
    norms = g.norms()
    plain = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for _ in range(2):  # the second goes by what was learnt in the first
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms(), **options) as g:
            loss_of(model, x).sum().backward()
        torch.testing.assert_close(g.norms(), norms, rtol=fine, atol=0)
        for name, parameter in model.named_parameters():
            if name in truth:
                assert torch.equal(parameter.grad, plain[name]), "the weight gradient is torch's own, rounded as ever"


def test_a_layer_in_the_place_of_torchaos():
    check(*stand_in("axiswise"))
    model, x = stand_in("tensorwise")
    with pytest.raises(InteractionError, match="float8 with one scale"), unsum.gradients(model):
        loss_of(model, x).sum().backward()
    check(model, x, interacting="exact")


def test_inside_a_checkpoint():
    model, x = stand_in("axiswise")
    truth = factors(model, x)
    with unsum.gradients(model) as g:
        hidden = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        (hidden - 1).square().sum().backward()
    for name, wanted in truth.items():
        assert apart(g[name].per_sample(), wanted) < 1e-5


def test_factors_that_are_swapped_are_noticed(monkeypatch):
    rule = RULES["matmul_with_hp_or_float8_argsBackward", 1]
    wrong = lambda call: replace(found := rule.make(call), a=found.a.flip(0))
    monkeypatch.setitem(RULES, ("matmul_with_hp_or_float8_argsBackward", 1), replace(rule, make=wrong))
    model, x = stand_in("axiswise")
    with pytest.warns(UserWarning, match="does not give what"), pytest.raises(UnsupportedError, match="not linear"):
        with unsum.gradients(model):
            loss_of(model, x).sum().backward()


@with_torchao
@pytest.mark.parametrize("t", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_a_scale_for_each_row(recipe, dtype, t):
    check(*net(recipe, dtype, t))


@with_torchao
@pytest.mark.parametrize("t", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_scale_for_the_batch_is_an_interaction(dtype, t):
    model, x = net("tensorwise", dtype, t)
    with pytest.raises(InteractionError, match=r"float8 with one scale[\s\S]*rowwise"), unsum.gradients(model):
        loss_of(model, x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    check(model, x, interacting="exact")


@with_torchao
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mx_formats(dtype):
    check(*mx_net(dtype))


@with_torchao
def test_other_batch_sizes_go_by_the_same_plan():
    model, _ = net("rowwise")
    for n, t in ((4, 3), (6, 7), (2, 1)):
        x = torch.randn(n, t, 32)
        truth = factors(model, x)
        with unsum.gradients(model) as g:
            loss_of(model, x).sum().backward()
        for name, wanted in truth.items():
            assert apart(g[name].per_sample(), wanted) < 1e-5
        model.zero_grad()


@with_torchao
def test_replay_is_refused_where_it_is_not_additive():
    model, x = net("tensorwise")
    with pytest.raises(UnsupportedError, match=r"not linear[\s\S]*without engine='graph'"):
        with unsum.gradients(model, engine="graph", interacting="exact"):
            loss_of(model, x).sum().backward()


@with_torchao
def test_clipping_gives_the_sum_of_clipped_factors():
    model, x = net("rowwise_with_gw_hp")
    for layer in (model[0], model[2]):
        layer.bias.requires_grad_(False)
    truth = torch.cat([each.flatten(1) for each in factors(model, x).values()], dim=1)
    weights = (1 / truth.norm(dim=1)).clamp(max=1)
    with unsum.clip_per_sample(model, max_norm=1.0):
        loss_of(model, x).sum().backward()
    found = torch.cat([model[0].weight.grad.flatten(), model[2].weight.grad.flatten()])
    assert apart(found, weights @ truth) < 1e-5


@with_torchao
def test_clipping_refuses_one_scale_for_the_batch():
    model, x = net("tensorwise")
    with pytest.raises(InteractionError, match="one scale"), unsum.clip_per_sample(model, max_norm=1.0):
        loss_of(model, x).sum().backward()
