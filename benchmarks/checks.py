"""How far each quantity is from what plain autograd gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unsum
from norms import truth
from unsum.factors.factors import projection

Pairs = dict[str, tuple[Tensor, Tensor]]  # found and wanted, by name


def clip(norms: Tensor) -> Tensor:
    return (norms.median() / norms).clamp_max(1.0)


def checked(name: str, step: Callable[[], Any], model: nn.Module, losses: Any, x: Tensor, y: Tensor) -> str:
    """How far a way's result is from what plain autograd gives, relative."""
    model.zero_grad(set_to_none=True)
    found = step()
    kind = name.partition(",")[0]  # "clipped, twice" is a clipped sum
    if kind not in CHECKS:
        return "-"
    off = CHECKS[kind](found, model, losses, x, y)
    loose = 0.05 if next(model.parameters()).dtype == torch.bfloat16 else 1e-3
    return f"{'off' if off < loose else 'WRONG'} by {float(off):.0e}"


def norms(found: Tensor, model: nn.Module, losses: Any, x: Tensor, y: Tensor) -> Tensor:
    wanted = truth(model, lambda m, x, y: losses(m, x, y).sum(), x, y, 4)
    return (found[: len(wanted)].float() / wanted.float() - 1).abs().max()


def dots(found: Tensor, model: nn.Module, losses: Any, x: Tensor, y: Tensor) -> Tensor:
    return norms(found.diagonal(), model, losses, x, y)


def clipped(found: dict[str, Tensor], model: nn.Module, losses: Any, x: Tensor, y: Tensor) -> Tensor:
    with unsum.gradients(model, unsum.Norms(), grad=False) as g:
        losses(model, x, y).sum().backward()
    w = clip(g[unsum.Norms].norms())
    model.zero_grad(set_to_none=True)
    (losses(model, x, y) * w.to(x.device)).sum().backward()
    return _furthest({n: (found[n], p.grad) for n, p in model.named_parameters()})


def projected(found: dict[str, Tensor], model: nn.Module, losses: Any, x: Tensor, y: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    losses(model, x, y).sum().backward()
    pairs = {}
    for n, p in model.named_parameters():
        if n in found and p.dim() == 2:
            left, right = (m.to(p.device) for m in projection(n, 0, 16, p.shape[0], p.shape[1]))
            pairs[n] = (found[n].float().sum(0), (left @ p.grad.float() @ right).flatten())
    return _furthest(pairs)


def tokens(found: Tensor, model: nn.Module, losses: Any, x: Tensor, y: Tensor) -> Tensor:
    """From what each module was given and what came back to it: a row of a product is an outer product."""
    kinds = (nn.Linear, nn.LayerNorm, nn.Embedding)
    sites = [(kind, side) for kind in kinds for side in ("input", "grad_output")]
    with unsum.capture(model, *sites, keep="reference") as got:
        losses(model, x, y).sum().backward()
    square = lambda t: t.float().square().sum(-1)
    total = torch.zeros(found.shape, device=x.device)
    for name, module in model.named_modules():
        if not isinstance(module, kinds):
            continue
        given, delta = got[f"{name}:input"], got[f"{name}:grad_output"].float()
        if isinstance(module, nn.Linear):
            total += square(given) * square(delta)
        elif isinstance(module, nn.LayerNorm):
            total += square(F.layer_norm(given.float(), module.normalized_shape, eps=module.eps) * delta)
        else:
            total += square(delta)
        total += square(delta) if getattr(module, "bias", None) is not None else 0
    return (found.float().square() - total).norm() / total.norm()


def captured(found: Any, model: nn.Module, losses: Any, x: Tensor, y: Tensor) -> Tensor:
    """The products of what was captured are the weights' gradients."""
    model.zero_grad(set_to_none=True)
    losses(model, x, y).sum().backward()
    pairs = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            given, delta = (found[f"{name}:{side}"].flatten(0, -2).float() for side in ("input", "grad_output"))
            pairs[name] = (delta.T @ given, module.weight.grad)
    return _furthest(pairs)


CHECKS: dict[str, Callable[..., Tensor]] = {
    "norms": norms, "dots": dots, "clipped": clipped, "projected": projected, "tokens": tokens, "captured": captured,
}  # fmt: skip


def _furthest(pairs: Pairs) -> Tensor:
    scale = max(b.float().norm() for _, b in pairs.values())
    return max((a.float() - b.float()).norm() / scale for a, b in pairs.values())
