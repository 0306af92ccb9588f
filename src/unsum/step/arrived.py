"""What torch brings to each parameter, to be compared with what was found: Σ per sample + nobody's part must be it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unsum import seams
from unsum.errors import NotFinite, UnknownSamples
from unsum.graph.nodes import Node, below, is_leaf
from unsum.graph.rounded import rounding_of_sums
from unsum.kernels.product import wide
from unsum.plan.plan import Plan


class Arrived:
    """Waits at the parameters while a backward runs. Local: before accumulation, and before processes are averaged."""

    def __init__(self, wanted: Mapping[int, nn.Parameter], names: Mapping[int, str]) -> None:
        self._wanted, self._names = wanted, names
        self.rounding = 1e-9  # how far sums may be off
        self._received: dict[int, Tensor] = {}
        self._sent: dict[int, Tensor] = {}  # by nodes at which a narrow parameter met data
        self._handles: list[seams.Handle] = []

    def attach(self, hears: Callable[[], bool]) -> None:
        """Wait, and take in what arrives while `hears()`. First of all hooks, to see what arrives and not what the
        user's own make of it."""
        for key, parameter in self._wanted.items():
            if not parameter.requires_grad:  # frozen since the block began
                continue
            self._handles.append(seams.on_gradient(parameter, self._receiver(key, hears), first=True))

    def listen(self, plan: Plan, nodes: Sequence[Node]) -> None:
        """Listen to what torch's own nodes send straight to parameters of a narrow dtype. Some nodes add thousands of
        rows up in bfloat16 (layer norms and embeddings on a CPU), and their sum is far off what it should be."""
        for node in map(nodes.__getitem__, plan.owned):
            keys = {edge: id(child.variable) for edge, child, _ in below(node) if is_leaf(child)}
            narrow = {edge: key for edge, key in keys.items() if key in self._wanted and _is_narrow(self._wanted[key])}
            if narrow:
                self._handles.append(seams.after_node(node, partial(self._hear, narrow)))

    def _hear(self, narrow: Mapping[int, int], results: tuple[Tensor | None, ...], _: Any) -> None:
        for edge, key in narrow.items():
            if (sent := results[edge]) is not None:
                dense = _dense(sent)
                self._sent[key] = self._sent[key] + dense if key in self._sent else dense

    def detach(self) -> None:
        """Wait no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def clear(self) -> None:
        """Another backward begins."""
        self._received.clear()
        self._sent.clear()

    def _receiver(self, key: int, hears: Callable[[], bool]) -> Any:
        def received(grad: Tensor) -> None:
            if grad is None or not hears():
                return
            dense = _dense(grad)
            self._received[key] = self._received[key] + dense if key in self._received else dense.clone()

        return received

    def check(self, found: Callable[[int], Tensor | None]) -> None:
        """Raise where what was found of a parameter is not what arrived: then something was not seen."""
        finite = [torch.where(g.isfinite(), g, 0) for g in self._received.values() if g.numel()]
        scale = max([float(g.abs().max()) for g in finite], default=0.0)
        for key, received in self._received.items():
            if not received.numel():
                continue
            ours = found(key)
            ours = torch.zeros_like(received) if ours is None else ours
            bad = torch.where(ours.isfinite(), torch.inf, 0.0)
            missing = float(torch.where(received.isfinite(), (received - ours).abs(), bad).max())
            if missing == torch.inf:
                raise NotFinite(
                    "a gradient is not finite, and cannot be traced to a sample.",
                    at=self._names[key],
                    write="with unsum.watch(model) as w: ...  # w.last.nonfinite names the first such value",
                )
            rounding = max(self.rounding, rounding_of_sums(self._wanted[key].dtype))  # narrower than the rest, perhaps
            if not missing <= rounding * scale and not self._is_all_sent(key, rounding * scale):
                raise UnknownSamples(
                    f"{self._names[key]}: part of its gradient comes from where no samples are known "
                    f"({missing:.1e} of {scale:.1e}). A hook of yours on a tensor that is computed from the parameter "
                    "has the same effect.",
                    write=[
                        "y = module(x)  # call the module that uses it, inside the block, not torch.nn.functional",
                        f"with unsum.gradients(model, params=[p for p, _ in model.named_parameters() "
                        f"if p != {self._names[key]!r}]) as g: ...",
                    ],
                )

    def _is_all_sent(self, key: int, off: float) -> bool:
        """Whether what arrived is what nodes with known samples have sent, as torch's own sums are rounded. The rules
        there were compared with torch's nodes, sample by sample, when the graph was learnt."""
        sent = self._sent.get(key)
        return sent is not None and float((self._received[key] - sent).abs().max()) <= off


def _dense(grad: Tensor) -> Tensor:
    return (grad.to_dense() if grad.layout != torch.strided else grad).detach().to(wide(grad.dtype))


def _is_narrow(parameter: Tensor) -> bool:
    """Whether torch may add gradients up in few bits: a GPU's kernels do not."""
    return parameter.is_floating_point() and parameter.dtype.itemsize < 4 and parameter.device.type == "cpu"
