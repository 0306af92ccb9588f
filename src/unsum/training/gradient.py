"""`.grad`: sums are added to it as torch would add them, and averaged over ranks as DDP would."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unsum import seams
from unsum.choice import Chosen
from unsum.errors import UnsupportedError
from unsum.flow.flow import Flow
from unsum.seams.sharding import part_of
from unsum.seams.tensors import have_foreign_hooks
from unsum.step.deliver import accumulate


def refuse_unclipped(name: str, call: seams.Backward, chosen: Chosen, *, has_parts: bool) -> None:
    """Raise where a backward would hand gradients of these parameters to somebody before they are clipped: to who calls
    `torch.autograd.grad`, or to hooks and edits, whose results would be lost, too."""
    if not call.accumulates:
        names = [chosen.by_id[id(given)] for given in call.inputs if id(given) in chosen.by_id]
        if names:
            raise UnsupportedError(
                f"{name}: torch.autograd.grad of {', '.join(names[:4])} returns gradients that are not clipped.\n  "
                "call backward, which puts clipped ones into .grad; gradients of inputs are allowed"
            )
        return
    hooked: list[str] = []
    if not has_parts and have_foreign_hooks(list(chosen.unique.values())):
        hooked = [chosen.by_id[key] for key, p in chosen.unique.items() if have_foreign_hooks([p])]
    flows = [block for block in seams.here() if isinstance(block, Flow) and block.receiver.edits]
    edited = [
        chosen.by_id[id(at.thing)] for flow in flows for at in flow.requests.wants if id(at.thing) in chosen.by_id
    ]
    for what, names in (("hooks on a parameter see its gradient", hooked), ("an edit of its gradient sees it", edited)):
        if names:
            raise UnsupportedError(
                f"{name}: {', '.join(names[:4])}: {what} before it is clipped, and what comes of it would be lost.\n  "
                "do it to .grad, after the block"
            )


def add_to_grad(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Add to `.grad`, in its own dtype and with memory of its own."""
    plain: tuple[list[nn.Parameter], list[Tensor]] = ([], [])
    for parameter, value in zip(parameters, values, strict=True):
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        known = parameter.grad
        if value.is_complex() and not dtype.is_complex:
            value = value.real
        if known is not None and known.layout != torch.strided:
            parameter.grad = known.to_dense() + value.to(known.device, dtype)
        elif dtype == parameter.dtype:
            plain[0].append(parameter)
            plain[1].append(value.to(parameter.device))
        elif known is None:
            parameter.grad = value.to(parameter.device, dtype, copy=True)
        else:
            known.add_(value.to(known.device, dtype))
    if plain[0]:
        accumulate(*plain)


def average_over_ranks(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """What DDP does with `.grad` after a backward: the mean over ranks, in one collective call. Nothing without DDP, or
    inside its `no_sync`."""
    if not isinstance(model, nn.parallel.DistributedDataParallel) or not model.require_backward_grad_sync:
        return
    for parameter in parameters:  # every rank sends the same numbers of numbers
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = all_summed([p.grad for p in parameters if p.grad is not None], model.process_group)
    size = torch.distributed.get_world_size(model.process_group)
    for parameter, value in zip(parameters, flat, strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(value / size)


def add_to_parts(parts: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """What FSDP2 does with gradients: each rank keeps its part of the mean over ranks. In one collective call."""
    size = torch.distributed.get_world_size()
    for part, value in zip(parts, all_summed(values), strict=True):
        mean = part_of(value / size, part)
        part.grad = mean if part.grad is None else part.grad + mean


def all_summed(values: Sequence[Tensor], group: object = None) -> list[Tensor]:
    """The sums of these tensors over all ranks, in one collective call, in float32 at least."""
    if not values:
        return []
    dtype = torch.float64 if any(v.dtype == torch.float64 for v in values) else torch.float32
    flat = torch.cat([v.reshape(-1).to(values[0].device, dtype) for v in values])
    torch.distributed.all_reduce(flat, group=group)
    parts = flat.split([v.numel() for v in values])
    return [part.view(v.shape).to(v.device) for part, v in zip(parts, values, strict=True)]
