"""What the calls of a block were given: the rows of each input, inputs that all samples share, lists of tensors; and
what these say of a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from unsum.graph.layout import Layout, same
from unsum.graph.nodes import Edge, Node, is_leaf
from unsum.graph.owners import Owners
from unsum.learn.refusals import coincide, given_in_a_list
from unsum.learn.rows import Rows
from unsum.nested import listed
from unsum.samples import Dim, Samples
from unsum.seams.nodes import outputs_of
from unsum.seams.tensors import memory_number
from unsum.step.reading import Reading, Told
from unsum.travel.walk import with_states


class Inputs:
    """The inputs of a block's calls."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.rows = Rows()
        self.shared: set[int] = set()  # memory of inputs that have no samples
        self._unclear = Rows()  # of inputs that have several dimensions like the samples'
        self._lists: dict[int, int] = {}  # of calls that were given lists: how many items, which may be samples

    def begin(self, call: int, found: Sequence[tuple[Any, Tensor]]) -> None:
        """A call begins with these tensors, each with its place among the arguments."""
        if items := _items(found):
            self._lists[call] = items

    def items(self, call: int) -> int | None:
        """How many items the list has that a call was given."""
        return self._lists.get(call)

    def read(
        self, given: Sequence[Tensor], way: Reading, told: Told | None
    ) -> Iterator[tuple[Tensor, Layout | None, bool]]:
        """Each tensor, the owners of its rows, and whether it may have samples, if the call is read so."""
        for k, tensor in enumerate(given):
            owners = self._samples.owners(tuple(tensor.shape), way.n)
            if isinstance(self._samples, Dim) and k not in way.members:
                owners = None
            may_be = told is None or k in told.multiples
            yield tensor, owners, owners is not None or (may_be and _is_flattened(tensor, way.n))

    def share(self, tensor: Tensor) -> None:
        """All samples share this tensor."""
        if not is_lazy(tensor):
            self.shared.add(memory_number(tensor))

    def remember(self, tensor: Tensor, owners: Layout, way: Reading, call: int, reading: int, *, like: Any) -> None:
        """The rows of a tensor that has samples: of one with several dimensions like theirs, and another shape than the
        first that has them (`like`), only to be compared with."""
        is_clear = tensor.shape == like or sum(size == way.n for size in tensor.shape) == 1
        if is_clear:
            self.rows.remember(tensor, owners, way.n, call, reading)
        else:
            self._unclear.remember(tensor, owners, way.n, call)

    def refuse_lists(self, calls: Collection[int], n: int, known: Collection[Edge], in_lists: set[Edge]) -> None:
        """Raise where the samples of these calls may be the items of a list, and not the rows of each item."""
        for items in (self._lists[call] for call in calls if call in self._lists):
            if not isinstance(self._samples, Dim) or n == items == 1:
                return
            if items == n or not known or not in_lists.isdisjoint(known):
                raise given_in_a_list(items)

    def refuse_other_dimensions(self, owned: Mapping[int, Owners], nodes: Sequence[Node], n: int) -> None:
        """Raise where only some inputs say whose a loss is, and another one says otherwise, along the dimension that is
        said of all."""
        for at, owners in owned.items() if self._unclear else ():
            said = None if owners[0] is None else self._unclear.owners(nodes[at], owners[0].shape)
            if said is not None and owners[0] is not None and not same(owners[0], said):
                raise coincide(owners[0].shape, n, "computes")

    def seeds(self, nodes: Sequence[Node], rows: Rows | None = None) -> dict[Edge, Layout]:
        """Places in a graph whose samples the rows of inputs tell, or copies of them."""
        found: dict[Edge, Layout] = {}
        rows = self.rows if rows is None else rows
        for node in nodes:
            if is_leaf(node):
                if (owners := rows.of(node.variable)) is not None:
                    found[node, 0] = owners
            elif len(metas := outputs_of(node)) == 1 or "Rnn" in node.name():
                owners = rows.owners(node, tuple(metas[0].shape))
                if owners is not None:
                    outs = with_states(node, [owners, *[None for _ in metas[1:]]]) or []
                    found |= {(node, k): out for k, out in enumerate(outs) if out is not None}
        return found

    def forget(self) -> None:
        """Let go of everything."""
        self.rows.forget()
        self._unclear.forget()
        self.shared.clear()


def _items(found: Sequence[tuple[Any, Tensor]]) -> int:
    """How many items the list has that the first tensor is in, if these may be samples: alike but for their sizes."""
    if not found or not (count := listed([path for path, _ in found], found[0][0], 2)):
        return 0
    path, first = found[0]
    depth = max(d for d in range(2, len(path)) if isinstance(path[d], int))
    others = [t for other, t in found if other[:depth] == path[:depth] and other[depth + 1 :] == path[depth + 1 :]]
    alike = all((t.dim(), t.dtype) == (first.dim(), first.dtype) for t in others)
    return count if alike and (first.dim() > 2 or all(t.shape[1:] == first.shape[1:] for t in others)) else 0


def _is_flattened(tensor: Tensor, n: int) -> bool:
    """Whether this may be rows of all samples after each other: the patches of images."""
    rows = tensor.shape[0] if tensor.dim() > 1 and tensor.is_floating_point() else 0
    return bool(n and rows > n and rows % n == 0 and rows != tensor.shape[1])
