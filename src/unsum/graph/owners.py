"""The sweep: whose is each position of each node?

A fixed random gradient is sent from the cut to the leaves by calling the nodes ourselves, and beside it copies in
which every sample's part is multiplied by its own power of two. Such a factor is exact in floating point, so that at
every position of every node the ratio spells the owner: 48 samples in one copy, 2,304 in two. Where the ratio is no
such power the position belongs to nobody: the node is on the weight side, or samples interact there.

Not the loss's own gradient: ignored labels, dead units and cancellation would hide owners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from unsum.errors import SamplesError, UnsupportedError
from unsum.graph.cut import Cut
from unsum.graph.nodes import Edge, Node, edge_of, is_leaf
from unsum.graph.replay import Grads, replay

STEP = 48  # samples that one copy tells apart: exponents from -24 to 24, without 0
NOBODY, UNSEEN = -1, -2

Owners = list[Tensor | None]  # for each output of a node; None where no gradient arrives


def sweep(
    model: Sequence[Node],
    starts: Mapping[Edge, Tensor],
    n: int,
    *,
    only: Mapping[Edge, Tensor] | None = None,
    known: Mapping[Edge, Tensor] | None = None,
    keep: Callable[[Node], bool],
    mixed: Callable[[Node], None],
) -> dict[Node, Owners | None]:
    """The owners of the nodes in `model`, which are in order; None where positions mix samples. `mixed` is told of each
    such node, and may raise. With `only`, the sweep starts just where that is true. Beside the sweep's front, only the
    owners of nodes that `keep` names are held."""
    if n > STEP**2:
        raise SamplesError(f"{n} samples in one backward; at most {STEP**2} can be told apart")
    copies = 1 if n <= STEP else 2
    front = _start(starts, n, copies, only)
    owners: dict[Node, Owners | None] = {}
    for node in model:
        streams = front.pop(node, None)
        if streams is None or is_leaf(node):
            continue
        found = _decode(streams, n)
        if found is None:
            mixed(node)
        else:
            _compare(node, found, known or {})
        owners[node] = found if found is None or keep(node) else []
        if isinstance(node, BackwardCFunction):
            _refuse_changing(node, streams[0])
        for stream, grads in enumerate(streams):
            for (child, output), value in zip(node.next_functions, replay(node, grads), strict=True):
                if child is not None and value is not None and not is_leaf(child):
                    _add(front, child, output, stream, value, copies)
    return owners


Front = dict[Node, list[list[Tensor | None]]]  # node -> for each stream, for each output, the gradient so far


def _add(front: Front, node: Node, output: int, stream: int, value: Tensor, copies: int) -> None:
    if node not in front:
        front[node] = [[None] * len(node._input_metadata) for _ in range(copies + 1)]
    known = front[node][stream][output]
    front[node][stream][output] = value if known is None else known + value


def _compare(node: Node, found: Owners, known: Mapping[Edge, Tensor]) -> None:
    """Outputs that lie upstream of others say themselves whose they are: both must agree."""
    for output, owner in enumerate(found):
        said = known.get((node, output))
        if said is not None and owner is not None and bool(((owner != said.to(owner.device)) & (owner >= 0)).any()):
            raise SamplesError(
                f"at {node.name()}, the output of a module, two ways of counting disagree whose the samples are: the "
                "dimension of the samples has changed between two calls.\n  unsum.mark_samples(losses) says it"
            )


def _refuse_changing(node: Node, grads: Grads) -> None:
    """A custom Function must give the same twice: one that changes what it has saved cannot be called again."""
    for one, other in zip(replay(node, grads), replay(node, grads), strict=True):
        if one is not None and other is not None and not torch.allclose(one, other, equal_nan=True):
            raise UnsupportedError(
                f"{node.name()} gives something else when it is called again: its backward draws random numbers, or "
                "changes what it has saved"
            )


def where_nonzero(cut: Cut, roots: Sequence[Any], grads: Sequence[Tensor | None]) -> dict[Edge, Tensor]:
    """Where the loss's own gradient at the cut is not zero: the loss's nodes called by us, so that no hook fires."""
    front: Front = {}
    arrived: dict[Edge, Tensor] = {}

    def send(node: Node, output: int, value: Tensor) -> None:
        if (node, output) in cut.starts:
            known = arrived.get((node, output))
            arrived[node, output] = value if known is None else known + value
        elif not is_leaf(node):
            _add(front, node, output, 0, value, 0)

    for root, grad in zip(roots, grads, strict=True):
        node, output = edge_of(root) if isinstance(root, Tensor) else (root.node, root.output_nr)
        if node is not None:
            send(node, output, torch.ones_like(root) if grad is None else grad)
    for node in cut.loss:
        if node in front:
            for (child, output), value in zip(node.next_functions, replay(node, front.pop(node)[0]), strict=True):
                if child is not None and value is not None:
                    send(child, output, value)
    return {edge: value != 0 for edge, value in arrived.items()}


def all_are_seen(starts: Mapping[Edge, Tensor], only: Mapping[Edge, Tensor], n: int) -> bool:
    """Whether every sample has a place at the cut where this is true."""
    seen = torch.zeros(n + 1, dtype=torch.bool)
    for edge, mask in only.items():
        seen[starts[edge][mask.cpu()]] = True
    return bool(seen[:n].all())


def _start(starts: Mapping[Edge, Tensor], n: int, copies: int, only: Mapping[Edge, Tensor] | None) -> Front:
    generator = torch.Generator().manual_seed(0)
    front: Front = {}
    for (node, output), owner in starts.items():
        meta = node._input_metadata[output]
        drawn = torch.randn(tuple(meta.shape), generator=generator, dtype=torch.float64)
        drawn = drawn.sign() * (drawn.abs() + 0.1)
        if meta.dtype.is_complex:
            other = torch.randn(tuple(meta.shape), generator=generator, dtype=torch.float64)
            drawn = torch.complex(drawn, other)
        for stream in range(copies + 1):
            # Made on the CPU: CUDA's pow is not exact.
            factor = 1.0 if stream == 0 else torch.pow(2.0, _exponents(n, stream - 1)[owner].double())
            value = (drawn.to(meta.dtype) * factor).to(meta.dtype).to(meta.device)
            if only is not None:
                mask = only.get((node, output))
                value = torch.zeros_like(value) if mask is None else value * mask
            _add(front, node, output, stream, value, copies)
    return front


def _digits(n: int, copy: int) -> int:
    """How many exponents this copy needs."""
    return min(n, STEP) if copy == 0 else -(-n // STEP)


def _exponents(n: int, copy: int) -> Tensor:
    """The exponent of each sample in this copy, never 0; the last entry, index -1, is nobody's: 0."""
    sample = torch.arange(n)
    digit = (sample % STEP if copy == 0 else sample // STEP) - _digits(n, copy) // 2
    return torch.cat([torch.where(digit >= 0, digit + 1, digit), torch.zeros(1, dtype=torch.long)])


def _decode(streams: list[list[Tensor | None]], n: int) -> Owners | None:
    """The owners of a node's positions, from its gradients in all streams; None where they have none."""
    found: Owners = []
    for plain, *scaled in zip(*streams, strict=True):
        if plain is None:
            found.append(None)
            continue
        owner = _owner_of(plain, [copy for copy in scaled if copy is not None], n)
        if owner is None:
            return None
        found.append(complete(owner, n))
    return found


def _owner_of(plain: Tensor, scaled: list[Tensor], n: int) -> Tensor | None:
    seen = plain != 0
    owner = torch.zeros(plain.shape, dtype=torch.long, device=plain.device)
    precise = plain.dtype in (torch.float64, torch.complex128)
    tolerance, small = (1e-9, 1e-13) if precise else (2e-5, 1e-6) if plain.dtype == torch.float32 else (2e-2, 1e-3)
    tiny = plain.abs() <= small * plain.abs().max() if plain.numel() else seen
    clear = seen  # where the ratio spells an owner; elsewhere it must be too small to matter
    for copy, value in enumerate(scaled):
        if bool(((value != 0) & ~seen).any()):
            return None
        ratio = torch.where(seen, value / torch.where(seen, plain, torch.ones_like(plain)), torch.ones_like(plain))
        real = (ratio.real if ratio.is_complex() else ratio).double()
        logarithm = real.clamp_min(1e-300).log2()
        exponent = logarithm.round()
        clear = clear & ((logarithm - exponent).abs() <= tolerance) & (real > 0)
        if bool((seen & ~tiny & ~clear).any()):
            return None
        digit = exponent.long()
        index = torch.where(digit > 0, digit - 1, digit) + _digits(n, copy) // 2
        clear = clear & ((digit == 0) | ((index >= 0) & (index < _digits(n, copy))))
        if bool((seen & ~tiny & ~clear).any()):
            return None
        owner = torch.where(digit == 0, NOBODY, index if copy == 0 else owner + index * STEP)
    if bool((clear & ~tiny & (owner >= n)).any()):
        return None
    return torch.where(clear & (owner < n), owner, UNSEEN)


def complete(owner: Tensor, n: int) -> Tensor:
    """Positions that no gradient reached, from the others if these follow owner = (position // block) mod n."""
    unseen = owner == UNSEEN
    if not bool(unseen.any()) or bool(unseen.all()):
        return owner
    fitting: Tensor | None = None
    for d, size in enumerate(owner.shape):
        if size % n:
            continue
        each = size // n
        for block in [b for b in range(each, 0, -1) if each % b == 0]:
            along = (torch.arange(size, device=owner.device) // block) % n
            wanted = along.view([-1 if k == d else 1 for k in range(owner.dim())]).expand(owner.shape)
            if bool((unseen | (owner == wanted)).all()):
                if fitting is not None and not torch.equal(fitting, wanted):
                    return owner  # more than one layout fits: none is known
                fitting = wanted
    return owner if fitting is None else fitting.contiguous()
