"""What a block sees of the forward: which tensors have known samples, and which module made which node."""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unsum import hooks
from unsum import samples as sample_maps
from unsum.errors import SamplesError
from unsum.graph.layout import Layout
from unsum.graph.nodes import Edge, Node, is_leaf
from unsum.graph.probe import confirm, refuse_mixing
from unsum.graph.rows import Rows
from unsum.graph.sides import Sides
from unsum.inplace import Token, token
from unsum.nested import leaves
from unsum.plan.memory import Seen, forget_call, is_in_a_loop, know_call, known_call
from unsum.plan.signature import flags, sizes_of
from unsum.sites import Names


@dataclass(frozen=True)
class Known:
    """A tensor whose samples are known, found again in the graph by its number and its token."""

    token: weakref.ref[Token]
    owners: Layout
    call: int
    marked: bool = False  # by the user: goes before what the outputs say


@dataclass(frozen=True)
class Look:
    """What can be told of a call before it is made."""

    rest: Hashable  # flags, dtypes
    sizes: tuple[tuple[int, ...], ...]  # of the tensors that it is given
    n: int | None
    positions: int | None


class Forward:
    """Follows the calls of a model's modules."""

    def __init__(self, names: Names, samples: sample_maps.Samples, sides: Sides, *, verify: bool) -> None:
        self._model, self._samples, self._sides, self._verify = names.model, samples, sides, verify
        self._modules, self._parameters = list(names.modules.values()), list(names.parameters.values())
        self.rows = Rows()
        self.positions: int | None = None  # of the input of the last call, if it is tokens
        self.calls = 0  # outermost ones
        self.sizes: dict[int, None] = {}  # the numbers of samples that they were given
        self.trying = False  # the model is being run for our own sake
        self._known: dict[tuple[str, int, int], Known] = {}
        self._alive = 64
        self._starts: list[tuple[str, int]] = []
        self._spans: list[tuple[int, int, str]] = []  # which nodes each module call has made: from, to, name
        self._numbers = itertools.count()
        self._outer: tuple[Callable[..., Any], Any, Any] | None = None
        self._key: Hashable = None
        self._given: Hashable = ()  # the sizes of what the call under way was given
        self._shapes = ""
        self._watching = False
        self._seen: Seen | None = None
        self._since: dict[tuple[Hashable, Hashable], Seen] = {}  # the calls since the last backward, with their sizes
        self.passes = False  # whether calls inside this one need not be told
        self.watched = True  # whether all forwards since the last backward were
        self._n: int | None = None
        self.is_marked = False  # whether the user has said whose the tensors are that were found last

    def before(self, name: str, module: nn.Module, args: Any, kwargs: Any, *, anew: bool = False) -> None:
        """A module is about to be called; `anew` if it will run other operations than before."""
        hooks.refuse_tracing(name or "the model")
        self._starts.append((name, torch._C._autograd._get_sequence_nr()))
        if len(self._starts) > 1:
            return
        # Hooks may change the arguments: then the module is tried with them, else by itself.
        self._outer = (module if module._forward_pre_hooks else module.forward, args, kwargs)
        given = [tensor for _, tensor in leaves((args, kwargs))]
        kind = self._samples if isinstance(self._samples, sample_maps.Dim) else sample_maps.Ids
        self._key, self._given = (name, kind, flags(self._modules, self._parameters, given)), sizes_of(given)
        self._seen = None if anew else known_call(self._model, self._key, self._given)
        self._watch(self._seen is None)
        self.passes = self._seen is not None
        k = self._samples.k if isinstance(self._samples, sample_maps.Dim) else 0
        self._n = _number(given, k)
        self._shapes = ", ".join(str(tuple(t.shape)) for t in given)
        self.positions = next((_positions(t) for t in given if t.dim() > 1), None) if k == 0 else None
        if not self._is_data(given):
            self._n = None  # positions, say: what comes of them belongs to nobody

    def look(self, name: str, args: Any, kwargs: Any) -> Look:
        """What an outermost call is like, if samples lie along a dimension of what it is given."""
        given = [tensor for _, tensor in leaves((args, kwargs))]
        rest = flags(self._modules, self._parameters, given)
        if self._starts or not isinstance(self._samples, sample_maps.Dim):
            return Look(None, (), None, None)
        k = self._samples.k
        positions = next((_positions(t) for t in given if t.dim() > 1), None) if k == 0 else None
        return Look((k, rest), sizes_of(given), _number(given, k), positions)

    def unwatch(self) -> None:
        """A call whose graph is known begins."""
        self._watch(False)

    def watched_by(self) -> Sides:
        """What watches torch's calls while a model is learnt."""
        return self._sides

    def passed(self, outputs: Sequence[Tensor], n: int, positions: int | None) -> int:
        """A call that was not followed has returned these tensors, which have n samples each. Returns its number."""
        call = next(self._numbers)
        self.calls += 1
        self.sizes[n] = None
        self.positions = positions
        for tensor in outputs:
            owners = self._samples.owners(tuple(tensor.shape), n)
            if owners is not None:
                self.know(tensor, owners, call)
        return call

    @property
    def is_inside(self) -> bool:
        """Whether a call is under way."""
        return bool(self._starts)

    def _is_data(self, given: Sequence[Tensor]) -> bool:
        owners = [self._samples.owners(tuple(tensor.shape), self._n) for tensor in given]
        if self._seen is None:
            for tensor, layout in zip(given, owners, strict=True):
                self._sides.given(tensor, has_samples=layout is not None or self._is_flattened(tensor))
        for tensor, layout in zip(given, owners, strict=True):
            is_data = self._sides.is_given_data([tensor]) if self._seen is None else self._seen.is_data
            if layout is not None and is_data:
                self.rows.remember(tensor, layout)
        return self._seen.is_data if self._seen is not None else not given or self._sides.is_given_data(given)

    def _is_flattened(self, tensor: Tensor) -> bool:
        """Whether this may be rows of all samples after each other: the patches of images."""
        rows = tensor.shape[0] if tensor.dim() > 1 and tensor.is_floating_point() else 0
        return bool(self._n and rows > self._n and rows % self._n == 0 and rows != tensor.shape[1])

    def open(self) -> None:
        """A block begins. What it computes is watched until a forward is known."""
        self._watch(not is_in_a_loop(self._model))

    def close(self) -> None:
        """Let go of everything."""
        self._watch(False)
        self.passes = False
        self._known.clear()
        self._spans.clear()
        self._starts.clear()
        self.rows.forget()

    def learnt(self, structure: Hashable | None) -> None:
        """The graph of the forwards so far has this structure; None if it cannot be remembered."""
        for (key, sizes), seen in self._since.items():
            if structure is None:
                forget_call(self._model, key)
            else:
                know_call(self._model, key, sizes, seen, structure)
        self._since.clear()
        self.watched = True

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._watching:
            hooks.watch(self._sides)
        elif self._watching and not wanted:
            hooks.unwatch(self._sides)
        self._watching = wanted

    def after(self, output: Any) -> None:
        """A module has returned (None if it raised)."""
        self.passes = False
        if not self._starts:
            return
        name, start = self._starts.pop()
        self._spans.append((start, torch._C._autograd._get_sequence_nr(), name))
        if self._starts:
            return
        self.calls += 1
        call = next(self._numbers)
        if (n := self._count()) is not None:
            self.sizes[n] = None
        self._try(output)
        tensors = [tensor for _, tensor in leaves(output)]
        outputs = tuple(self._has_samples(k, tensor) for k, tensor in enumerate(tensors))
        for tensor, has_samples in zip(tensors, outputs, strict=True):
            owners = self._samples.owners(tuple(tensor.shape), self._n) if has_samples else None
            if owners is not None:
                self.know(tensor, owners, call)
        self.watched = self.watched and self._seen is None
        self._since[self._key, self._given] = self._seen or Seen(self._n is not None, outputs)

    def _has_samples(self, place: int, tensor: Tensor) -> bool:
        if tensor.grad_fn is None:
            return False
        if self._seen is not None and place < len(self._seen.outputs):
            return self._seen.outputs[place]
        return not self._sides.is_weight(tensor.grad_fn)  # a weight that the model returns belongs to nobody

    def _count(self) -> int | None:
        ids = self._samples.ids
        return self._n if ids is None else len(ids)

    def _try(self, output: Any) -> None:
        """Run the model again where sizes coincide, or where the user asks for it."""
        outer, self._outer, n = self._outer, None, self._count()
        if outer is None or n is None or output is None:
            return
        sizes = [list(tensor.shape).count(n) for _, tensor in leaves(output) if tensor.grad_fn is not None]
        self.trying = True
        try:
            if self._verify:
                refuse_mixing(self._model, *outer, self._samples.owners, n)
            elif self._seen is None and isinstance(self._samples, sample_maps.Dim) and max(sizes, default=0) > 1:
                confirm(self._model, *outer, n=n, k=self._samples.k)
        finally:
            self.trying = False

    def know(self, tensor: Tensor, owners: Layout, call: int, *, marked: bool = False) -> None:
        """The samples of a tensor are known."""
        node = tensor.grad_fn
        assert node is not None
        self._known[node.name(), node._sequence_nr(), tensor.output_nr] = Known(
            weakref.ref(token(node)), owners, call, marked
        )
        self.rows.remember(tensor, owners)
        if len(self._known) > 2 * self._alive:  # a long block: let go of graphs that are gone
            self._known = {key: known for key, known in self._known.items() if known.token() is not None}
            self._spans = self._spans[-10_000:]
            self._alive = max(len(self._known), 64)

    def mark(self, tensor: Tensor) -> None:
        """Dimension 0 of this tensor is the samples."""
        if tensor.dim() == 0:
            raise SamplesError("mark_samples names a tensor whose dimension 0 is the samples; this one is a scalar")
        shape = tuple(tensor.shape)
        owners = self._samples.owners(shape, shape[0]) or sample_maps.Dim(0).owners(shape, shape[0])
        assert owners is not None
        self.know(tensor, owners, next(self._numbers), marked=True)

    def find(self, nodes: Sequence[Node]) -> tuple[dict[Edge, Layout], frozenset[int]]:
        """Those of these nodes whose samples are known, and the calls that made them."""
        alive = [key for key, known in self._known.items() if known.token() is not None]
        numbers = {number for _, number, _ in alive}
        found: dict[Edge, Known] = {}
        for node in nodes:
            if node._sequence_nr() not in numbers or is_leaf(node):
                continue
            for output in range(len(node._input_metadata)):
                entry = self._known.get((node.name(), node._sequence_nr(), output))
                if entry is not None and token(node) is entry.token():
                    found[node, output] = entry
            if len(found) == len(alive):  # as a rule near the roots: the model's output
                break
        self.is_marked = any(entry.marked for entry in found.values())
        if self.is_marked:
            found = {edge: entry for edge, entry in found.items() if entry.marked}
        calls = frozenset(entry.call for entry in found.values())
        return {edge: entry.owners for edge, entry in found.items()}, calls

    def mismatch(self) -> str:
        """A line that says that `samples=` does not fit what the model was given; empty if it may."""
        if not isinstance(self._samples, sample_maps.Ids) or not self._shapes:
            return ""
        said = tuple(self._samples.given.shape)
        return f"  samples= names positions of shape {said}; the model was last given {self._shapes}\n"

    def last_call(self) -> frozenset[int]:
        """The last call, for a loss that comes from no output that could be cut."""
        return frozenset([self.calls - 1])

    def module_of(self, number: int) -> str:
        """The innermost module during whose call the node with this number was made."""
        ends = [end for _, end, _ in self._spans]  # calls end in order, inner ones first
        for start, end, name in self._spans[bisect.bisect_right(ends, number) :]:
            if start <= number < end:
                return name
        return ""


def _number(given: Sequence[Tensor], k: int) -> int | None:
    """How many samples there are: the size of that dimension of the first tensor that has it. But where that may be
    rows of all samples after each other (patches of images), and token ids say how many samples, they are right."""
    first = next((t for t in given if t.dim() > k), None)
    if first is None:
        return None
    n: int = first.shape[k]
    ids = [t.shape[k] for t in given if t.dim() == 2 and not t.is_floating_point() and t.shape[0] != t.shape[1]]
    if k == 0 and first.is_floating_point() and len(ids) > 1 and len(set(ids)) == 1 and 0 < ids[0] < n:
        return ids[0] if n % ids[0] == 0 else n
    return n


def _positions(tensor: Tensor) -> int | None:
    """How many tokens a sample has, if this is token ids or a row of vectors."""
    is_ids = tensor.dim() == 2 and not tensor.is_floating_point()
    return int(tensor.shape[1]) if is_ids or tensor.dim() == 3 else None
