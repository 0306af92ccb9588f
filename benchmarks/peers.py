"""Other libraries' ways to the norms of all per-sample gradients. A way is made of a copy of the model, and gives the
squared norms (n,) of one step."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Way:
    name: str
    model: nn.Module
    step: Callable[[nn.Module, Tensor, Tensor], Tensor | None]  # the squared norms (n,)
    key: str = ""  # by which another process can make it
    free: Callable[[], None] = lambda: None  # lets go of what it keeps of the last step


@contextmanager
def no_need_of(*names: str) -> Iterator[None]:
    """Modules that are imported but not used for gradients may be absent: Opacus reads scipy for privacy accounting."""
    absent = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is None]
    for name in absent:
        module = ModuleType(name)
        module.__getattr__ = lambda attribute, name=name: f"{name}.{attribute} is not installed"  # type: ignore[method-assign]
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)


SCIPY = ("scipy", "scipy.stats", "scipy.special", "scipy.fft", "scipy.signal")


def opacus_hooks(model: nn.Module, loss: Loss) -> Way:
    with no_need_of(*SCIPY):
        from opacus import GradSampleModule

    wrapped = GradSampleModule(copy.deepcopy(model), loss_reduction="sum", strict=False)

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss(model, x, y).backward()
        parameters: list[Any] = list(model.parameters())
        squares = [p.grad_sample.flatten(1).float().square().sum(1) for p in parameters]
        for p in parameters:
            p.grad_sample = None
        return torch.stack(squares).sum(0)

    return Way("Opacus, per-sample gradients", wrapped, step)


def opacus_ghost(model: nn.Module, loss: Loss) -> Way:
    with no_need_of(*SCIPY):
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        copy.deepcopy(model), loss_reduction="sum", max_grad_norm=1.0, use_ghost_clipping=True, strict=False
    )

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss(model, x, y).backward()
        return model.get_norm_sample().square()

    return Way("Opacus, ghost norms", wrapped, step)


def func(model: nn.Module, loss: Loss) -> Way:
    def one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        call = lambda given: torch.func.functional_call(model, parameters, (given,))
        return loss(call, x[None], y[None])

    each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0), randomness="different")

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        detached = {name: p.detach() for name, p in model.named_parameters()}
        grads = each(detached, x, y)
        for name, p in model.named_parameters():
            p.grad = grads[name].sum(0)
        return torch.stack([g.flatten(1).float().square().sum(1) for g in grads.values()]).sum(0)

    return Way("torch.func, vmap of grad", copy.deepcopy(model), step)


def backpack_norms(model: nn.Module, loss: Loss) -> Way:
    from backpack import backpack, extend
    from backpack.extensions import BatchL2Grad

    extended = extend(copy.deepcopy(model), use_converter=False)

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with backpack(BatchL2Grad()):
            loss(model, x, y).backward()
        parameters: list[Any] = list(model.parameters())
        return torch.stack([p.batch_l2 for p in parameters]).sum(0)

    return Way("BackPACK, BatchL2Grad", extended, step)


def dattri_norms(model: nn.Module, loss: Loss) -> Way:
    from dattri_llm import REGISTER_ALL, HookManager, HookManagerConfig
    from dattri_llm.gradient import ops

    hooked = copy.deepcopy(model)
    manager = HookManager(hooked, config=HookManagerConfig(linear_io=REGISTER_ALL))

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with manager.collect():
            loss(model, x, y).backward()
        found = manager.get_gradient()
        squares = [ops.grad_norm_sq(found.data[name], kind) for name, kind in found.layer_types.items()]
        return torch.stack(squares).sum(0)

    return Way("dattri-llm, factorized", hooked, step, free=manager.remove)  # it is hooked again by `collect`


PEERS: dict[str, tuple[Callable[[nn.Module, Loss], Way], ...]] = {
    "opacus": (opacus_hooks, opacus_ghost),
    "torch": (func,),
    "backpack": (backpack_norms,),
    "dattri_llm": (dattri_norms,),
}


def installed(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> tuple[list[Way], list[dict[str, Any]]]:
    """The peers that can do a step of this model; and of the others why not."""
    ways, notes = [], []
    for library, makers in PEERS.items():
        for maker in makers:
            label = maker.__name__.replace("_", " ")
            if importlib.util.find_spec(library) is None:
                notes.append({"way": label, "note": "not installed"})
                continue
            try:
                way = replace(maker(model, loss), key=maker.__name__)
                way.step(way.model, x, y)
                way.model.zero_grad(set_to_none=True)
                ways.append(way)
            except Exception as error:  # whatever a peer raises is what the table says of it
                notes.append({"way": label, "note": reason(error)})
    return ways, notes


def peer(key: str, model: nn.Module, loss: Loss) -> Way:
    """One of them, by its key."""
    return next(maker for makers in PEERS.values() for maker in makers if maker.__name__ == key)(model, loss)


def reason(error: Exception) -> str:
    """One line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"fails: {text[:100]}"
