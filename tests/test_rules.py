"""Rules give the gradients of each sample: every read and reducer of each, also for layers that are taken together."""

from dataclasses import replace

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from modules import Using
from nets import IDS, IMAGES, SEQUENCES, D, N, T, deep, made, mlp, scalar
from unsum.errors import UnsupportedError
from unsum.rules.registry import RULES as RULES_OF
from unsum.testing import laws


def conv(kind, *args, **kwargs):
    return lambda: kind(*args, bias=False, **kwargs)


VOLUMES = torch.randn(N, 2, 5, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
RULES = {
    "linear, two dimensions": ("linear.mm", lambda: nn.Linear(D, 3, bias=False), SEQUENCES[:, 0]),
    "linear, bias": ("linear.addmm", lambda: nn.Linear(D, 3), SEQUENCES),
    "Conv1D as in GPT-2": ("linear.addmm", lambda: Using((D, 3), lambda x, p: torch.addmm(p[:1].sum(0), x.flatten(0, 1), p).view(N, T, 3)), SEQUENCES),
    "transposed twice": ("linear.mm", lambda: Using((D, 3), lambda x, p: x @ p.T.contiguous().T), SEQUENCES),
    "slices of a weight": ("linear.mm", lambda: Using((9, D), lambda x, p: torch.cat([x @ p[:4].T, x @ p[4:].T.sin().asin()], -1)), SEQUENCES),
    "chunks of a weight": ("linear.mm", lambda: Using((9, D), lambda x, p: (x @ p.chunk(3)[1].T) * (x @ p.split([2, 3, 4])[2].T)[..., :3]), SEQUENCES),
    "a weight used twice": ("linear.mm", lambda: Using((D, D), lambda x, p: torch.tanh(x @ p) @ p), SEQUENCES),
    "weight on the left": ("from_the_left", lambda: Using((3, D), lambda x, p: (p @ x.flatten(0, 1).T).T.view(N, T, 3)), SEQUENCES),
    "time first": ("linear.mm", lambda: Using((D, 3), lambda x, p: (x.transpose(0, 1) @ p).transpose(0, 1)), SEQUENCES),
    "embedding": ("lookup.embedding", lambda: nn.Embedding(20, D, padding_idx=3), IDS),
    "bags of rows": ("lookup.embedding_bag", lambda: nn.EmbeddingBag(20, D, mode="sum"), IDS),
    "bags, mean": ("lookup.embedding_bag", lambda: nn.EmbeddingBag(20, D, padding_idx=3), IDS),
    "bags, weighted": ("lookup.embedding_bag", lambda: Using((20, D), lambda x, p: F.embedding_bag(x, p, mode="sum", per_sample_weights=x.double().cos())), IDS),
    "bags of other sizes": ("lookup.embedding_bag", lambda: Using((20, D), lambda x, p: F.embedding_bag(x.flatten(), p, torch.tensor([0, 1, T + 2, 2 * T])[:N])), IDS),
    "instance norm": ("elementwise.repeat", lambda: nn.InstanceNorm2d(3, affine=True), IMAGES),
    "class token, repeated": ("elementwise.repeat", lambda: Using((1, 2, D), lambda x, p: torch.cat([p.repeat(N, 1, 1), x], 1)), SEQUENCES),
    "rows, repeated": ("elementwise.repeat", lambda: Using((T, D), lambda x, p: x * p.repeat(N, 1).view(N, T, D)), SEQUENCES),
    "layer norm": ("norm.layer_norm_scale", lambda: nn.LayerNorm((T, D)), SEQUENCES),
    "RMS norm": ("", lambda: nn.RMSNorm(D), SEQUENCES),
    "group norm": ("norm.group_norm_scale", lambda: nn.GroupNorm(1, 3), IMAGES),
    "batch norm in eval mode": ("norm.batch_norm_scale", lambda: nn.BatchNorm2d(3).eval(), IMAGES),
    "gain": ("elementwise", lambda: Using((D,), lambda x, p: x * p), SEQUENCES),
    "gain before": ("elementwise", lambda: Using((1, 1, D), lambda x, p: p * x), SEQUENCES),
    "channel gain": ("elementwise", lambda: Using((3, 1, 1), lambda x, p: p * x), IMAGES),
    "scalar gain": ("elementwise", lambda: Using((), lambda x, p: x * p), SEQUENCES),
    "shift": ("elementwise", lambda: Using((T, 1), lambda x, p: x - p), SEQUENCES),
    "positions": ("elementwise", lambda: Using((1, T, D), lambda x, p: torch.add(x, p, alpha=2)), SEQUENCES),
    "class token": ("elementwise", lambda: Using((1, 1, D), lambda x, p: torch.cat([p.expand(N, 1, D), x], 1)), SEQUENCES),
    "convolution": ("convolution", conv(nn.Conv2d, 3, 4, 3, padding=1), IMAGES),
    "convolution, stride and dilation": ("convolution", conv(nn.Conv2d, 3, 4, 3, stride=2, dilation=2, padding=(1, 2)), IMAGES),
    "convolution, groups": ("convolution", conv(nn.Conv2d, 3, 6, (3, 1), groups=3), IMAGES),
    "convolution, circular": ("convolution", conv(nn.Conv2d, 3, 4, 3, padding=2, padding_mode="circular"), IMAGES),
    "convolution, same": ("convolution", conv(nn.Conv2d, 3, 4, 4, padding="same", padding_mode="reflect"), IMAGES),
    "convolution 1×1": ("convolution", conv(nn.Conv2d, 3, 4, 1, stride=2), IMAGES),
    "convolution in one dimension": ("convolution", conv(nn.Conv1d, T, 4, 3), SEQUENCES),
    "convolution in three": ("convolution", conv(nn.Conv3d, 2, 3, 2, stride=2, padding=1), VOLUMES),
    "transposed convolution": ("convolution", conv(nn.ConvTranspose2d, 3, 4, 3, stride=2, padding=1, output_padding=1), IMAGES),
    "transposed, groups": ("convolution", conv(nn.ConvTranspose2d, 3, 6, 3, groups=3, dilation=2), IMAGES),
}  # fmt: skip
STACKS = {
    "linear": (deep(lambda: nn.Linear(D, D)), SEQUENCES),
    "linear, two dimensions": (deep(lambda: nn.Linear(D, D, bias=False)), SEQUENCES[:, 0]),
    "layer norm": (deep(lambda: nn.LayerNorm(D)), SEQUENCES),
    "layer norm over two dimensions": (deep(lambda: nn.LayerNorm((T, D))), SEQUENCES),
    "RMS norm": (deep(lambda: nn.RMSNorm(D)), SEQUENCES),
    "group norm": (deep(lambda: nn.GroupNorm(1, 3)), IMAGES),
    "gains": (deep(lambda: Using((D,), lambda x, p: x * p)), SEQUENCES),
    "shifts": (deep(lambda: Using((D,), lambda x, p: p - x)), SEQUENCES),
    "gains before": (deep(lambda: Using((1, T, 1), lambda x, p: p * x)), SEQUENCES),
}


@pytest.mark.parametrize("name", STACKS)
def test_layers_of_one_shape_are_taken_together(name):
    make, x = STACKS[name]
    laws(made(make, x))
    model, x = made(make, x)()
    truth = per_sample_gradients(model, lambda m, b: m(b).square().flatten(1).sum(1), x)
    for _ in range(2):
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms()) as g:
            model(x).square().sum().backward()
        for key, squares in g[unsum.Norms].by_parameter().items():
            torch.testing.assert_close(squares, truth[key].flatten(1).square().sum(1))
            torch.testing.assert_close(model.get_parameter(key).grad, truth[key].sum(0))
    assert max(len(names) for names, _ in g[unsum.Norms].groups()) > 1


def test_a_rule_that_says_wrongly_that_layers_can_be_taken_together_is_found(monkeypatch):
    true = RULES_OF["NativeLayerNormBackward0", 1]
    monkeypatch.setitem(
        RULES_OF,
        ("NativeLayerNormBackward0", 1),
        replace(
            true,
            make=lambda call: true.make(
                replace(call, delta=call.delta.roll(len(call.delta) // 3, 0)) if call.by.n > N else call
            ),
        ),
    )
    model, x = made(deep(lambda: nn.LayerNorm(D)), SEQUENCES)()
    with pytest.raises(UnsupportedError, match=r"norm.layer_norm_scale does not give the same for layers together"):
        for _ in range(2):
            with unsum.gradients(model, unsum.Norms()):
                model(x).square().sum().backward()


@pytest.mark.parametrize("name", RULES)
def test_every_read_and_reducer_of_a_rule(name):
    rule, make, x = RULES[name]
    laws(made(make, x), None if name.startswith(("slices", "Conv1D")) else rule)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["rows last", "channels last"])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": (1, 2)}, {"dilation": 2, "padding": 3}, {"kernel_size": 1, "stride": 2}],
    ids=str,
)
def test_windows_with_channels_last(options, memory, monkeypatch):
    """As on a GPU."""
    layer = nn.Conv2d(3, 5, bias=False, **({"kernel_size": (3, 2)} | options)).double()
    x = IMAGES.contiguous(memory_format=memory)
    truth = per_sample_gradients(layer, scalar, x)["weight"]
    with unsum.gradients(layer) as g:
        scalar(layer, x).backward()
    (kind,) = g["weight"]._shares[0].kinds
    monkeypatch.setattr("unsum.kernels.costs.cheaper", lambda *shape, **options: "gram")
    torch.testing.assert_close(kind._on_a_gpu(want_sum=True)[0], truth.flatten(1).square().sum(1))
    monkeypatch.setattr("unsum.kernels.costs.cheaper", lambda *shape, **options: "product")
    squares, total = kind._on_a_gpu(want_sum=True)
    torch.testing.assert_close(squares, truth.flatten(1).square().sum(1))
    torch.testing.assert_close(total, truth.sum(0))


def test_running_statistics_may_change_before_factors_are_read():
    layer = nn.BatchNorm2d(3).double().eval()
    layer.running_mean.normal_()
    truth = per_sample_gradients(layer, scalar, IMAGES)
    for _ in range(2):  # what is learnt in the first is known in the second
        with unsum.gradients(layer) as g:
            scalar(layer, IMAGES).backward()
    layer.train()(IMAGES + 1)
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)


def test_a_rule_that_is_wrong_is_found_out(monkeypatch):
    from unsum.rules import registry

    right = registry.RULES["AddmmBackward0", 2]
    wrong = registry.Rule("linear.addmm", right.features, lambda call: right.make(call).times(2.0))
    monkeypatch.setitem(registry.RULES, ("AddmmBackward0", 2), wrong)
    model = mlp()
    truth = per_sample_gradients(model, scalar, SEQUENCES)
    with pytest.raises(UnsupportedError, match=r"linear\.addmm.*AddmmBackward0"):
        with unsum.gradients(model, strict=True):
            scalar(model, SEQUENCES).backward()
    with pytest.warns(UserWarning, match=r"linear\.addmm.*torch"), unsum.gradients(model) as g:
        scalar(model, SEQUENCES).backward()
    torch.testing.assert_close(g["0.weight"].per_sample(), truth["0.weight"])
    assert "replay" in g.coverage()


class Grouped(nn.Module):
    """Experts whose tokens are sorted, and one product for all of them."""

    def __init__(self, turned):
        super().__init__()
        self.gate, self.turned = nn.Linear(D, 3), turned
        self.w = nn.Parameter(torch.randn(3, D, D))

    def forward(self, x):
        flat = x.reshape(-1, D)
        score, chosen = self.gate(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=3).cumsum(0).to(torch.int32)
        w = self.w.transpose(1, 2) if self.turned else self.w
        out = F.grouped_mm(flat[order], w, offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return (out[back] * score[:, None]).view_as(x)


@pytest.mark.parametrize("turned", [False, True])
def test_experts_in_one_product(turned):
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    torch.manual_seed(0)
    model = Grouped(turned)
    for _ in range(3):
        x = torch.randn(N, T, D)
        with unsum.gradients(model) as g:
            losses = model(x).flatten(1).square().sum(1)
            losses.sum().backward(retain_graph=True)
        assert "batched.grouped_mm" in g.coverage() and "replay " not in g.coverage()
        for name, p in model.named_parameters():
            wanted = torch.stack([torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in losses])
            torch.testing.assert_close(g[name].per_sample(), wanted, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(g[name].sq_norms(), wanted.flatten(1).square().sum(1), rtol=1e-3, atol=1e-3)


BLOCKS = {
    "bmm": ("batched.bmm", lambda x, p: torch.bmm(x.reshape(-1, 2, 4).transpose(0, 1), p).transpose(0, 1).reshape(N, T, -1)),
    "einsum": ("batched.bmm", lambda x, p: torch.einsum("nthi,hio->ntho", x.unflatten(-1, (2, 4)), p).flatten(2)),
    "baddbmm": ("batched.baddbmm", lambda x, p: torch.baddbmm(torch.ones(2, 1, 3).double(), x.reshape(-1, 2, 4).transpose(0, 1), p, alpha=2.0).transpose(0, 1).reshape(N, T, -1)),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_block_diagonal_layers(name):
    rule, use = BLOCKS[name]
    laws(made(lambda: Using((2, 4, 3), use), SEQUENCES), rule)
    if name == "baddbmm":
        bias = lambda x, p: torch.baddbmm(p, x.reshape(-1, 2, 4).transpose(0, 1), torch.ones(2, 4, 3).double())
        laws(
            made(lambda: Using((2, 1, 3), lambda x, p: bias(x, p).transpose(0, 1).reshape(N, T, -1)), SEQUENCES),
            "baddbmm_bias",
        )
