"""The ways to capture the inputs and the output gradients of a model's blocks that `capture_overhead.py` compares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import unsum
from models import GPT, Block, loss_of
from unsum.flow.captured import Captured

HAND, UNSUM = "hooks by hand", "unsum.capture"
BLOCKS = 12
KINDS = ("input", "grad_output", "output", "grad_input")
TWO = KINDS[:2]
Values = dict[str, list[Tensor]]  # kind -> one tensor for each block
backward = torch.Tensor.backward  # as it is before nnsight is imported


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to make a step, and to read afterwards what it has captured."""

    name: str
    model: GPT
    step: Callable[[GPT, Tensor, Tensor], Any]
    kinds: Sequence[str] = TWO  # what it captures
    read: Callable[[Any], Values] = lambda kept: kept


def plain(model: GPT, x: Tensor, y: Tensor) -> Values:
    backward(loss_of(model(x), y))
    return {}


def hooks_by_hand(model: GPT, x: Tensor, y: Tensor) -> dict[str, dict[int, Tensor]]:
    """Forward hooks, and a hook on each output tensor for its gradient."""
    inputs: dict[int, Tensor] = {}
    grads: dict[int, Tensor] = {}
    handles = []

    def hook_for(i: int) -> Callable[..., None]:
        def keep_gradient(grad: Tensor) -> None:
            grads[i] = grad

        def hook(module: Block, args: tuple[Tensor], output: Tensor) -> None:
            inputs[i] = args[0].detach()
            handles.append(output.register_hook(keep_gradient))

        return hook

    try:
        for i, block in enumerate(model.blocks):
            handles.append(block.register_forward_hook(hook_for(i)))
        backward(loss_of(model(x), y))
    finally:
        for handle in handles:
            handle.remove()
    return {"input": inputs, "grad_output": grads}


def read_by_hand(kept: dict[str, dict[int, Tensor]]) -> Values:
    return {kind: [kept[kind][i] for i in range(BLOCKS)] for kind in kept}


def full_backward_hooks(model: GPT, x: Tensor, y: Tensor) -> dict[str, dict[int, Tensor]]:
    """Forward hooks, and module backward hooks."""
    inputs: dict[int, Tensor] = {}
    grads: dict[int, Tensor] = {}
    handles = []

    def hooks_for(i: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: Block, args: tuple[Tensor], output: Tensor) -> None:
            inputs[i] = args[0].detach()

        def after(module: Block, grad_input: tuple[Tensor], grad_output: tuple[Tensor]) -> None:
            grads[i] = grad_output[0]

        return before, after

    try:
        for i, block in enumerate(model.blocks):
            before, after = hooks_for(i)
            handles += [block.register_forward_hook(before), block.register_full_backward_hook(after)]
        backward(loss_of(model(x), y))
    finally:
        for handle in handles:
            handle.remove()
    return {"input": inputs, "grad_output": grads}


def with_unsum(kinds: Sequence[str], model: GPT, x: Tensor, y: Tensor) -> Captured:
    # By type: "blocks.*" would also name every module inside the blocks.
    with unsum.capture(model, *((Block, kind) for kind in kinds)) as got:
        backward(loss_of(model(x), y))
    return got


def read_unsum(kinds: Sequence[str], got: Captured) -> Values:
    return {kind: [got[f"blocks.{i}:{kind}"] for i in range(BLOCKS)] for kind in kinds}


class TraceDict(dict[str, dict[str, Tensor]]):
    """What baukit's class of this name does, in short: a forward hook on every module named keeps input and output,
    makes autograd keep the gradient of the output, and hands on a copy of it (in-place changes may follow)."""

    def __init__(self, model: GPT, names: Sequence[str]) -> None:
        super().__init__({name: {} for name in names})
        self.handles = [model.get_submodule(n).register_forward_hook(partial(self._hook, self[n])) for n in names]

    @staticmethod
    def _hook(kept: dict[str, Tensor], module: Block, args: tuple[Tensor], output: Tensor) -> Tensor:
        kept["input"], kept["output"] = args[0], output
        output.retain_grad()
        return output.clone()

    def __enter__(self) -> TraceDict:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()


def with_trace_dict(model: GPT, x: Tensor, y: Tensor) -> TraceDict:
    with TraceDict(model, [f"blocks.{i}" for i in range(BLOCKS)]) as kept:
        backward(loss_of(model(x), y))
    return kept


def read_trace_dict(kept: TraceDict) -> Values:
    return {
        "input": [one["input"].detach() for one in kept.values()],
        "grad_output": [one["output"].grad for one in kept.values()],
    }


def with_nnsight(net: Any, model: GPT, x: Tensor, y: Tensor) -> Values:
    """One trace, with the backward as a trace inside it; gradients have to be asked for in the order they come in."""
    from nnsight import save

    with net.trace(x):
        inputs, grads = save([]), save([])
        outputs = []
        for block in net.blocks:
            inputs.append(block.input)
            outputs.append(block.output)
        loss = loss_of(net.output, y)
        with loss.backward():
            for output in reversed(outputs):
                grads.append(output.grad)
    return {"input": inputs, "grad_output": grads[::-1]}


def ways_for(model: GPT) -> list[Way]:
    def unsum_way(name: str, kinds: Sequence[str]) -> Way:
        step, read = partial(with_unsum, kinds), partial(read_unsum, kinds)
        return Way(name=name, model=model, step=step, kinds=kinds, read=read)

    return [
        Way(name="plain", model=model, step=plain, kinds=()),
        Way(name="plain, again", model=model, step=plain, kinds=()),
        Way(name=HAND, model=model, step=hooks_by_hand, read=read_by_hand),
        Way(name="full_backward_hook", model=model, step=full_backward_hooks, read=read_by_hand),
        unsum_way(UNSUM, TWO),
        unsum_way(f"{UNSUM}, 4 kinds", KINDS),
        Way(name="like baukit", model=model, step=with_trace_dict, read=read_trace_dict),
    ]


def ways_with_nnsight(model: GPT) -> list[Way]:
    import nnsight

    twin = copy.deepcopy(model)  # nnsight changes the modules that it wraps
    step = partial(with_nnsight, nnsight.NNsight(twin))
    return [
        Way(name="plain", model=model, step=plain, kinds=()),
        Way(name=f"nnsight {nnsight.__version__}", model=twin, step=step),
    ]
