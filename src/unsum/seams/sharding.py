"""FSDP2 (`fully_shard`): each process holds a part of every parameter, and the whole ones while a module runs.

A module's parameters are DTensors while it is at rest; inside its forward and backward, whole parameters stand in their
place, always the same objects, whose memory is given back in between. The graph leads to the whole ones."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from unsum.errors import UnsumError

POST_BACKWARD = "RegisterPostBackwardFunctionBackward"  # the node that averages gradients; it hands them on as they are


_FAILED = 2  # told instead of 0 or 1 where the processes agree on what is needed
_HEARD = timedelta(seconds=60)  # how long a process that fails waits for the others to hear of it


class OtherRankFailed(UnsumError):
    """Another process has failed, and says so."""


@dataclass(frozen=True)
class Sharded:
    """A parameter that is spread over processes."""

    part: nn.Parameter  # a DTensor: what this process holds
    whole: nn.Parameter


def _sharded_modules(model: nn.Module) -> Iterator[Any]:
    """The modules on which `fully_shard` was called. There are none without a process group: most often there is
    none, and then the modules of the model are not gone through in every step."""
    if "torch.distributed.fsdp" not in sys.modules or not torch.distributed.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [g for g in [state._fsdp_param_group] if g is not None]


def is_sharded(model: nn.Module) -> bool:
    """Whether any part of the model is under `fully_shard`."""
    return next(_sharded_modules(model), None) is not None


def sharded_parameters(model: nn.Module) -> dict[tuple[int, str], Sharded]:
    """{(id of the module, name in it): parameter}, of those that are spread. The first time, every process must come
    here: the whole parameters are gathered once, so that they are there."""
    found: dict[tuple[int, str], Sharded] = {}
    for module in _sharded_modules(model):
        for group in _groups(module):
            if any(not hasattr(p, "_unsharded_param") for p in group.fsdp_params):
                module.unshard()
                module.reshard()
            for parameter in group.fsdp_params:
                info, both = parameter._module_info, Sharded(parameter.sharded_param, parameter._unsharded_param)
                found[id(info.module), info.param_name] = both
                for other, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    found[id(other), name] = both
    return found


@contextlib.contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Within this, all parameters have their memory. Every process must come here."""
    gathered = []
    try:
        for module in _sharded_modules(model):
            if any(not group.is_unsharded for group in _groups(module)):
                module.unshard()
                gathered.append(module)
        yield
    finally:
        for module in gathered:
            module.reshard()


def on_any_rank(model: nn.Module, needed: bool) -> bool:
    """Whether any process needs something: one collective, in which all take part; of a model that is not spread over
    processes, this process alone. Raises `OtherRankFailed` where another process comes by `tell_failed`."""
    if not is_sharded(model) or torch.distributed.get_world_size() == 1:
        return needed
    flag = _flag(model, int(needed))
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    if int(flag.item()) == _FAILED:
        raise OtherRankFailed("another rank failed")
    return bool(flag.item())


def tell_failed(model: nn.Module) -> None:
    """This process goes no further: the others hear of it when they next ask `on_any_rank`."""
    if is_sharded(model) and torch.distributed.get_world_size() > 1:
        flag = _flag(model, _FAILED)
        told: Any = torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, async_op=True)
        with contextlib.suppress(RuntimeError):  # they are elsewhere: they will hear when this process ends
            told.wait(_HEARD)


def _flag(model: nn.Module, value: int) -> Tensor:
    return torch.tensor([value], device=next(iter(sharded_parameters(model).values())).part.device)


def part_of(value: Tensor, part: nn.Parameter) -> Tensor:
    """What this process holds of a value that every process has, spread as a parameter is."""
    from torch.distributed.tensor import DTensor, Replicate

    spread: Any = part
    mesh = spread.device_mesh
    everywhere = DTensor.from_local(value.to(part.dtype), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, spread.placements)


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if type(tensor).__name__ == "DTensor" else tensor  # type: ignore[attr-defined]
