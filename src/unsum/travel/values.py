"""What nodes say by their values. A node is called by hand with a random gradient, and again with every sample's part
of it multiplied by a factor of its own: what comes out tells whose each position of its arguments is.

Where the table is silent, the node is asked (`ask`). Where the table speaks, its word is compared once, on the first
batch of a structure (`Claims`), and so are the rules that are to be used there (`audit`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from unsum.graph.codes import Codes
from unsum.graph.layout import UNSEEN, Layout, Mapped, Regular
from unsum.graph.nodes import Node
from unsum.graph.owners import Owners, hidden_owners, in_range, refuse_changing
from unsum.graph.replay import Grads, Heard, replay
from unsum.graph.rounded import rounding_of
from unsum.seams.nodes import outputs_of, saved_or
from unsum.travel.table import MIXED, Answer

# How far values may be from what is said of them: what is said of samples that mix is off by as much as it is large.
_LOOSE = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-2, torch.complex64: 1e-2}


def ask(node: Node, outs: Owners, n: int) -> tuple[list[Layout | Answer | None], list[Owners]]:
    """Whose the positions of each argument are, and of the backwards that the node runs by itself."""
    codes = Codes(n, signs=any(meta.dtype == torch.float16 for meta in outputs_of(node)))
    plain = drawn(node, outs)
    streams = [plain]
    for copy in range(len(codes.tables)):
        streams.append(
            [
                None if grad is None or out is None else grad * codes.factor(copy, out, grad)
                for grad, out in zip(plain, outs, strict=True)
            ]
        )
    heard: list[list[Heard]] = [[] for _ in streams]
    results = [replay(node, grads, heard[k], still=True) for k, grads in enumerate(streams)]
    if isinstance(node, BackwardCFunction):
        refuse_changing(node, plain, results[0])
    found: list[Layout | Answer | None] = []
    for values in zip(*results, strict=True):
        first, *copies = in_range(list(values))
        if first is None:
            found.append(None)
            continue
        copies = [torch.zeros_like(first) if copy is None else copy for copy in copies]
        layout = codes.read(first, copies, fills=False)  # type: ignore[arg-type]
        found.append(MIXED if layout is None else layout.narrowed() if isinstance(layout, Mapped) else layout)
    return found, hidden_owners(node, heard, codes) if heard[0] else []


_PERIOD = 65_537  # a prime: what is repeated lies otherwise in every row


@cache
def _numbers(dtype: torch.dtype, device: torch.device) -> Tensor:
    drawn = torch.randn(
        _PERIOD,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.complex128 if dtype.is_complex else torch.float64,
    )
    return (drawn + 0.1 * drawn.sgn()).to(device, dtype)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers that are always the same, none of them near zero. To draw them anew takes longer than to call a
    node."""
    count, known = prod(shape), _numbers(dtype, device)
    return (known[:count] if count <= _PERIOD else known.repeat(-(-count // _PERIOD))[:count]).reshape(shape)


def drawn(node: Node, outs: Owners) -> list[Tensor | None]:
    """A random gradient for the results whose owners are known."""
    found: list[Tensor | None] = []
    for meta, out in zip(outputs_of(node), outs, strict=True):
        if out is None:
            found.append(None)
            continue
        value = _random(tuple(meta.shape), meta.dtype, meta.device)
        like = saved_or(node, "output", None)
        if isinstance(like, Tensor) and like.shape == value.shape:  # some kernels want it to lie in memory as it does
            value = torch.empty_like(like).copy_(value)
        if isinstance(out, Mapped) and not out.is_whole:
            value = value.masked_fill(out.beside(out.map.to(value.device) == UNSEEN), 0)
        found.append(value)
    return found


class Claims:
    """What is said of nodes, compared with their values; read all at once, for a GPU would be waited for each time."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(n)
        size = torch.rand(n + 1, generator=generator, dtype=torch.float64) * 2 - 1
        sign = torch.randint(2, (n + 1,), generator=generator) * 2 - 1
        self.factors = torch.pow(4.0, size) * sign  # from 1/4 to 4
        self.factors[n] = 0  # of what is nobody's
        self._tables: dict[object, Tensor] = {}
        self._said: list[tuple[Node, float]] = []
        self._off: list[Tensor] = []
        self._seen: set[Hashable] = set()  # what was compared: the table says the same of the same geometry

    def is_new(self, geometry: Hashable) -> bool:
        """Whether nothing was compared yet of which the table knows no difference."""
        is_new = geometry not in self._seen
        self._seen.add(geometry)
        return is_new

    def of(self, layout: Layout, like: Tensor) -> Tensor:
        """Each position's factor."""
        dtype = like.real.dtype if like.is_complex() else like.dtype
        key = dtype, like.device
        if key not in self._tables:
            self._tables[key] = self.factors.to(like.device, dtype)
        table = self._tables[key]
        if isinstance(layout, Regular):
            view = [-1 if d == layout.dim else 1 for d in range(like.dim())]
            return table[layout.along(like.device)].view(view)
        return layout.beside(table[layout.map.to(like.device).long()])

    def compare(
        self, node: Node, outs: Owners, said: Mapping[int, Layout]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Note how far the node's values are from what is said of its edges. Returns a gradient, and what the node
        sends along its edges for the same gradient, each sample's part times its factor."""
        plain = drawn(node, outs)
        scaled = [
            None if grad is None or out is None else grad * self.of(out, grad)
            for grad, out in zip(plain, outs, strict=True)
        ]
        after: Sequence[Tensor | None] = replay(node, scaled)
        before: Grads = replay(node, plain) if said else ()
        for edge, layout in said.items():
            one, other = before[edge], after[edge]
            if one is None or other is None or not one.numel():
                continue
            off, size = (other - one * self.of(layout, one)), other
            norms = torch.stack([torch.linalg.vector_norm(each.flatten()).double() for each in (off, size)])
            dtypes = (one.dtype, *(meta.dtype for meta in outputs_of(node)))
            self._said.append((node, max(rounding_of(node), *(_LOOSE.get(dtype, 1e-1) for dtype in dtypes))))
            self._off.append(norms.real)
        return plain, list(after)

    def contradicted(self) -> dict[Node, None]:
        """The nodes of which something was said that is not so."""
        by_device: dict[torch.device, list[int]] = {}
        for k, off in enumerate(self._off):
            by_device.setdefault(off.device, []).append(k)
        found: dict[Node, None] = {}
        for places in by_device.values():
            read = torch.stack([self._off[k] for k in places]).tolist()
            largest: dict[Node, float] = {}  # beside what a node sends along its other edges, rounding is nothing
            for k, (_, size) in zip(places, read, strict=True):
                node = self._said[k][0]
                largest[node] = max(largest.get(node, 0.0), size)
            for k, (off, size) in zip(places, read, strict=True):
                node, tolerance = self._said[k]
                if off > tolerance * size and off > 1e-3 * tolerance * largest[node]:  # not so where a NaN hides it
                    found[node] = None
        return found
