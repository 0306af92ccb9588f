"""The programs of the four articles on hooks, in a few lines each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unsum


class Net(nn.Module):
    """Two linear layers."""

    def __init__(self, d_in: int, d_hidden: int, d_out: int, *, bias: bool, relu: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d_in, d_hidden, bias=bias)
        self.fc2 = nn.Linear(d_hidden, d_out, bias=bias)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(F.relu(h) if self.relu else h)


def main() -> None:
    """Run all four."""
    torch.manual_seed(0)
    for number, (title, part) in enumerate(_PARTS.items()):
        print(f"\n── {number}. {title} {'─' * max(0, 90 - len(title))}\n")
        part()
    print("\nNext: unsum.sites(model) lists the places in a model of yours.")


def _activations() -> None:
    net, x, y = Net(10, 5, 2, bias=True, relu=False), torch.randn(1, 10), torch.randn(1, 2)
    with unsum.capture(net, "fc1:output", "fc1:grad_output", "fc1.weight:grad") as got:
        F.mse_loss(net(x), y).backward()
    print("one step of a two-layer net; captured at fc1:")
    for name, value in got.items():
        print(f"  {name:<18} {tuple(value.shape)}")
    with unsum.edit(net, {"fc1:output": unsum.scale(2.0)}), unsum.capture(net, "fc1.weight:grad") as doubled:
        F.mse_loss(net(x), y).backward()
    norm, other = got["fc1.weight:grad"].norm().item(), doubled["fc1.weight:grad"].norm().item()
    print(f"with fc1's output doubled the norm of its gradient is {other:.3f} instead of {norm:.3f}")


def _edited_output() -> None:
    net, x = nn.Sequential(nn.Linear(10, 5)), torch.randn(1, 10)
    with unsum.edit(net, {"0:output": unsum.add(1.0)}), unsum.capture(net, "0:output", "0.weight:grad") as got:
        (net(x) ** 2).sum().backward()
    edited = torch.allclose(got["0.weight:grad"], (2 * got["0:output"]).T @ x)
    original = torch.allclose(got["0.weight:grad"], (2 * (got["0:output"] - 1)).T @ x)
    print("an output is edited: y + 1. The gradient is that of")
    print(f"  the edited forward: {edited}; the original one: {original}   (the article says the original)")
    with unsum.edit(net, {"0.weight:grad": unsum.replace(torch.ones(5, 10))}):
        net.zero_grad()
        (net(x) ** 2).sum().backward()
    weight = net.get_parameter("0.weight").grad
    assert weight is not None
    print(f"a gradient of one's own: weight.grad is all ones: {bool((weight == 1).all())}")


def _tensor_hooks() -> None:
    def gradient(start: float, verb: unsum.verbs.Verb | None, *, twice: bool = False) -> float:
        x = torch.tensor(float(start), requires_grad=True)
        with unsum.edit(None, {"y:grad_output": verb} if verb else {}):
            y = unsum.mark(x**2, "y")
            (y * 3 + y * 2 if twice else y * 3).backward()
        assert x.grad is not None
        return x.grad.item()

    print("y = x², z = 3y; the gradient at y is edited, no module anywhere:")
    print(f"  x = 2,  scale(2):    {gradient(2, None):g} → {gradient(2, unsum.scale(2.0)):g}")
    print(f"  x = 10, clip(-1, 1): {gradient(10, None):g} → {gradient(10, unsum.clip(-1, 1)):g}   (the article says 6)")
    print(f"  x = 2,  scale(0.5), y used twice: {gradient(2, unsum.scale(0.5), twice=True):g}")


def _factors() -> None:
    model, x, y = Net(4, 3, 2, bias=False, relu=True), torch.randn(5, 6, 4), torch.randn(5, 6, 2)
    with unsum.capture(model, "fc1:input", "fc2:input", "fc1:grad_output", "fc2:grad_output") as got:
        (0.5 * ((model(x) - y) ** 2).sum()).backward()
    print("which hook fires when (5 sequences of 6 tokens):")
    print("  " + str(got.trace()).replace("\n", "\n  "))
    for name in ("fc1", "fc2"):
        again = torch.einsum("nto,nti->oi", got[f"{name}:grad_output"], got[f"{name}:input"])
        stored = model.get_parameter(f"{name}.weight").grad
        assert stored is not None
        print(f"Σ δ⊗a = {name}.weight.grad: {torch.allclose(again, stored, atol=1e-6)}")
    try:
        with unsum.capture(model, "fc1:grad_input"):
            model(x).sum().backward()
    except unsum.errors.SiteError as error:
        print(f"and the gradient of the data (the article: computed and thrown away)?\n  {str(error).splitlines()[0]}")


_PARTS = {
    "What a forward hook sees, and what follows from an edit": _activations,
    "An edited output, and a gradient of one's own": _edited_output,
    "Hooks on tensors": _tensor_hooks,
    "The two factors of a weight gradient": _factors,
}
