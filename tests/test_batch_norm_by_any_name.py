"""Batch norm in training is refused by whatever name it is called; norms that keep samples apart are right."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unsum
from one_by_one import assert_refused, assert_rows, random, squares
from unsum.rules.registry import RULES

N, T, D = 4, 3, 6


class Normed(nn.Module):
    """`first`: the input itself is normed."""

    def __init__(self, norm, first=False, features=D):
        super().__init__()
        self.a, self.head, self.norm, self.first = nn.Linear(D, features), nn.Linear(features, 2), norm, first
        self.gain, self.shift = nn.Parameter(torch.rand(features) + 1), nn.Parameter(torch.randn(features))
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("var", torch.ones(features))

    def forward(self, x):
        x = self.norm(self, x) if self.first else x
        h = torch.tanh(self.a(x))
        return self.head(h if self.first else self.norm(self, h))


aten = torch.ops.aten
BATCH_NORMS = {
    "F.batch_norm": lambda m, h: F.batch_norm(h, None, None, m.gain, m.shift, True),
    "F.batch_norm, running": lambda m, h: F.batch_norm(h, m.mean, m.var, m.gain, m.shift, training=True),
    "F.batch_norm, no parameters": lambda m, h: F.batch_norm(h, None, None, training=True) * m.gain + m.shift,
    "torch.batch_norm": lambda m, h: torch.batch_norm(h, m.gain, m.shift, None, None, True, 0.1, 1e-5, False),
    "torch.batch_norm, no parameters": lambda m, h: (
        torch.batch_norm(h, None, None, None, None, True, 0.1, 1e-5, False) * m.gain + m.shift
    ),
    "torch.native_batch_norm": lambda m, h: torch.native_batch_norm(h, m.gain, m.shift, m.mean, m.var, True, 0.1, 1e-5)[
        0
    ],
    "torch.native_batch_norm, no parameters": lambda m, h: (
        torch.native_batch_norm(h, None, None, None, None, True, 0.1, 1e-5)[0] * m.gain + m.shift
    ),
    "torch._native_batch_norm_legit": lambda m, h: torch._native_batch_norm_legit(
        h, m.gain, m.shift, m.mean, m.var, True, 0.1, 1e-5
    )[0],
    "aten.native_batch_norm": lambda m, h: aten.native_batch_norm(h, m.gain, m.shift, None, None, True, 0.1, 1e-5)[0],
    "aten._batch_norm_with_update": lambda m, h: aten._batch_norm_with_update(
        h, m.gain, m.shift, m.mean, m.var, 0.1, 1e-5
    )[0],
    "aten._batch_norm_impl_index": lambda m, h: aten._batch_norm_impl_index(
        h, m.gain, m.shift, None, None, True, 0.1, 1e-5, False
    )[0],
    "by hand": lambda m, h: (h - h.mean(0)) / h.var(0, unbiased=False).add(1e-5).sqrt() * m.gain + m.shift,
}


@pytest.mark.parametrize("norm", BATCH_NORMS)
def test_batch_norm_of_activations_in_training_is_refused_by_any_name(norm):
    torch.manual_seed(0)
    assert_refused(Normed(BATCH_NORMS[norm]).double(), squares, random(N, D))


@pytest.mark.parametrize("norm", [name for name in BATCH_NORMS if name != "by hand"])  # verify=True is for that
def test_batch_norm_of_the_input_in_training_is_refused_by_any_name(norm):
    torch.manual_seed(0)
    assert_refused(Normed(BATCH_NORMS[norm], first=True).double(), squares, random(N, D))


class Images(Normed):
    def forward(self, x):
        return self.head(torch.tanh(self.norm(self, self.a(x).transpose(1, 2))).mean(2))


@pytest.mark.parametrize("norm", [name for name in BATCH_NORMS if name != "by hand" and "no parameters" not in name])
def test_batch_norm_of_channels_in_training_is_refused_by_any_name(norm):
    torch.manual_seed(0)
    assert_refused(Images(BATCH_NORMS[norm]).double(), squares, random(N, T, D))


FINE = {
    "F.batch_norm in evaluation": lambda m, h: F.batch_norm(h, m.mean, m.var, m.gain, m.shift, False),
    "torch.batch_norm in evaluation": lambda m, h: torch.batch_norm(
        h, m.gain, m.shift, m.mean, m.var, False, 0.1, 1e-5, False
    ),
    "torch.native_batch_norm in evaluation": lambda m, h: torch.native_batch_norm(
        h, m.gain, m.shift, m.mean, m.var, False, 0.1, 1e-5
    )[0],
    "F.layer_norm": lambda m, h: F.layer_norm(h, h.shape[-1:], m.gain, m.shift),
    "F.group_norm": lambda m, h: F.group_norm(h, 3, m.gain, m.shift),
}
FINE_IMAGES = {
    "F.instance_norm": lambda m, h: F.instance_norm(h, weight=m.gain, bias=m.shift, use_input_stats=True),
    "F.instance_norm, no parameters": lambda m, h: (
        F.instance_norm(h, use_input_stats=True) * m.gain[:, None] + m.shift[:, None]
    ),
    "F.instance_norm, running": lambda m, h: F.instance_norm(h, m.mean, m.var, m.gain, m.shift, use_input_stats=True),
    "torch.instance_norm": lambda m, h: torch.instance_norm(h, m.gain, m.shift, None, None, True, 0.1, 1e-5, False),
    "F.group_norm": lambda m, h: F.group_norm(h, 3, m.gain, m.shift),
}


@pytest.mark.parametrize("first", [False, True], ids=["of activations", "of the input"])
@pytest.mark.parametrize("norm", FINE)
def test_norms_that_keep_samples_apart_are_right(norm, first):
    torch.manual_seed(0)
    assert_rows(Normed(FINE[norm], first).double(), squares, random(N, D))


@pytest.mark.parametrize("n", [4, D], ids=["no sizes coincide", "n = channels"])
@pytest.mark.parametrize("norm", FINE_IMAGES)
def test_norms_of_each_channel_of_each_sample_are_right(norm, n):
    torch.manual_seed(0)
    assert_rows(Images(FINE_IMAGES[norm]).double(), squares, random(n, T, D))


class CudnnBatchNorm(torch.autograd.Function):
    """cuDNN's batch norm, which torch takes on a GPU for float32, as far as autograd sees it: its edges and what it has
    saved. `test_cuda.py` has the real one."""

    @staticmethod
    def forward(ctx, x, weight, bias, mean, var, eps):
        ctx._saved_input, ctx._saved_weight, ctx._saved_training, ctx._saved_epsilon = x, weight, False, eps
        ctx._saved_running_mean, ctx._saved_running_var = mean, var
        return F.batch_norm(x, mean, var, weight, bias, False, 0.1, eps)

    @staticmethod
    def backward(ctx, grad):
        over = [d for d in range(grad.dim()) if d != 1]
        turned = [1, -1, *[1] * (grad.dim() - 2)]
        by = (ctx._saved_running_var + ctx._saved_epsilon).rsqrt().view(turned)
        normed = (ctx._saved_input - ctx._saved_running_mean.view(turned)) * by
        found = grad * ctx._saved_weight.view(turned) * by, (grad * normed).sum(over), grad.sum(over)
        return *found, None, None, None


@pytest.mark.parametrize("kind", [Normed, Images])
def test_cudnns_batch_norm_in_evaluation_is_read_by_a_rule(kind, monkeypatch):
    for edge in (1, 2):
        monkeypatch.setitem(RULES, ("CudnnBatchNormBackward", edge), RULES["CudnnBatchNormBackward0", edge])
    torch.manual_seed(0)
    model = kind(lambda m, h: CudnnBatchNorm.apply(h, m.gain, m.shift, m.mean, m.var, 1e-5)).double()
    model.mean.normal_(), model.var.uniform_(0.5, 2)
    x = random(N, D) if kind is Normed else random(N, T, D)
    assert_rows(model, squares, x)
    with unsum.gradients(model) as g:
        squares(model, x).backward()
    lines = [line for line in str(g.coverage()).splitlines() if line.startswith(("gain", "shift"))]
    assert len(lines) == 2 and all("norm.batch_norm" in line for line in lines), str(g.coverage())
