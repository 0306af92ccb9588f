"""A report of a model that fails in part shows the rest, and leaves the model as it was."""

import html
import math

import torch
from reference import per_sample_gradients
from torch import nn

import unsum
from report_nets import batch, kinds, net, squares


def test_samples_that_interact_are_told_and_the_rest_is_there(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    before = model[1].running_mean.clone()
    made = unsum.report(model, squares, batch(), tmp_path / "r.html")
    assert "interacting" in kinds(made) and made.norms is not None and len(made.layers) == 4
    assert "samples interact" in (tmp_path / "r.html").read_text()
    assert torch.equal(model[1].running_mean, before)


def test_a_model_that_is_refused_still_has_its_layers(tmp_path):
    class Head(nn.Module):  # dimension 0 of what it returns is not the samples
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 2)

        def forward(self, x):
            return self.fc(x).sum(0)

    model, x = Head(), torch.randn(4, 6)
    made = unsum.report(model, lambda m, b: m(b).square(), x, tmp_path / "r.html")
    assert made.samples is None and "samples" in made.missing["per-sample gradients"]
    assert [layer.name for layer in made.layers] == ["fc", ""]
    assert html.escape(made.missing["per-sample gradients"].splitlines()[0]) in (tmp_path / "r.html").read_text()


def test_a_frozen_model_has_activations_only(tmp_path):
    model = net().requires_grad_(False)
    made = unsum.report(model, squares, batch(), tmp_path / "r.html")
    assert "requires a gradient" in made.missing["gradients"] and all(layer.gradient is None for layer in made.layers)


def test_a_backward_that_fails_leaves_what_came_before(tmp_path):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("no way back")

    class Wall(nn.Module):
        def forward(self, x):
            return Fails.apply(x)

    model = nn.Sequential(nn.Linear(6, 4), Wall(), nn.Linear(4, 2))
    made = unsum.report(model, squares, batch(), tmp_path / "r.html")
    assert "no way back" in made.missing["gradients"] and len(made.layers) == 4
    assert made.layers[2].gradient is not None and made.layers[0].gradient is None


def test_the_model_is_afterwards_as_it_was(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    model[3].eval()
    squares(model, batch()).sum().backward()
    grads = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in grads]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    stepped = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: stepped.append(p))
    given = batch()
    torch.manual_seed(5)
    rng = torch.get_rng_state()
    made = unsum.report(model, squares, given, tmp_path / "r.html")
    assert not stepped, "an optimiser that steps in the backward must not be called"
    assert "waits for a parameter's gradient" in made.missing["check"]
    assert torch.equal(rng, torch.get_rng_state())
    assert all(p.grad is g and torch.equal(g, c) for p, g, c in zip(model.parameters(), grads, copies, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [m.training for m in model] == [True, True, True, False]
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks
    assert [set(vars(module)) for module in model.modules()] == attributes


def test_both_passes_see_the_same_random_numbers(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 2))
    given = batch()
    made = unsum.report(model, squares, given, tmp_path / "r.html", check=False)
    losses = squares(model, given)  # draws what the report drew and gave back
    grads = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    norms = torch.tensor([math.hypot(*(float(g.norm()) for g in row)) for row in grads])
    torch.testing.assert_close(made.losses, losses.detach())
    torch.testing.assert_close(made.norms.float(), norms, rtol=1e-4, atol=0)


def test_a_reentrant_checkpoint(tmp_path):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.reentrant = nn.Linear(6, 8), nn.Linear(8, 2), True

        def forward(self, x):
            return self.second(checkpoint(torch.tanh, self.first(x), use_reentrant=self.reentrant))

    torch.manual_seed(0)
    model = Checkpointed()
    made = unsum.report(model, squares, batch(), tmp_path / "r.html")
    model.reentrant = False
    truth = per_sample_gradients(model, lambda m, x, y: (m(x) - y).square().sum(), *batch())
    flat = torch.cat([g.flatten(1) for g in truth.values()], 1)
    torch.testing.assert_close(made.norms.double(), flat.norm(dim=1), rtol=1e-4, atol=0)
    assert all(p.grad is None for p in model.parameters()) and "gradients" not in made.missing
