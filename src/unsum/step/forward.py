"""What a block sees of the forward: which tensors have known samples, and which module made which node."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unsum import samples as sample_maps
from unsum import seams
from unsum.errors import SamplesError
from unsum.graph.layout import Layout
from unsum.graph.nodes import Edge, Node, is_leaf, ordered
from unsum.graph.replay import nested
from unsum.learn.rows import Rows
from unsum.learn.sides import Sides
from unsum.nested import leaves
from unsum.plan import memory
from unsum.plan.memory import Seen, told_by
from unsum.plan.signature import flags, sizes_of
from unsum.seams.nodes import next_number, outputs_of
from unsum.sites import Names
from unsum.step.known import KnownTensors
from unsum.step.verify import Verification


@dataclass(frozen=True)
class Look:
    """What can be told of a call before it is made."""

    rest: Hashable  # flags, dtypes
    sizes: tuple[tuple[int, ...], ...]  # of the tensors that it is given
    n: int | None
    positions: int | None


@dataclass(frozen=True)
class Made:
    """An outermost call that was made."""

    n: int | None  # how many samples it was given, if any
    positions: int | None  # how many tokens each of them has, if it was given tokens


class Forward:
    """Follows the calls of a model's modules."""

    def __init__(self, names: Names, samples: sample_maps.Samples, sides: Sides, *, verify: bool) -> None:
        self._model, self._samples, self._sides = names.model, samples, sides
        self.verification = Verification(names.model, samples.owners) if verify else None
        self._modules, self._parameters = list(names.modules.values()), list(names.parameters.values())
        self.rows = Rows()
        self.made: dict[int, Made] = {}  # outermost calls, by their numbers
        self._waiting: dict[int, None] = {}  # those that had no backward yet
        self._call = 0  # the one under way, or the last
        self._known = KnownTensors()
        self._others = KnownTensors()  # outputs of the right size that had no samples before
        self._starts: list[tuple[str, int]] = []
        self._spans: list[tuple[int, int, str]] = []  # which nodes each module call has made: from, to, name
        self._numbers = itertools.count()
        self._key: Hashable = None
        self._given: Hashable = ()  # the sizes of what the call under way was given
        self._tensors: Sequence[Tensor] = []  # that it was given
        self._alike: Hashable = None  # what such calls have in common, whatever the sizes
        self._shapes = ""
        self._watching = False
        self._seen: Seen | None = None
        self._found: dict[int, tuple[Hashable, Hashable, Seen]] = {}  # of calls: flags, sizes, what was seen of them
        self._unwatched: set[int] = set()  # calls that were not watched
        self.passes = False  # whether calls inside this one need not be told
        self._n: int | None = None
        self.is_marked = False  # whether the user has said whose the tensors are that were found last

    def before(self, name: str, module: nn.Module, args: Any, kwargs: Any, *, anew: bool = False) -> None:
        """A module is about to be called; `anew` if it will run other operations than before."""
        seams.refuse_tracing(name or "the model")
        self._starts.append((name, next_number()))
        if len(self._starts) > 1:
            return
        if self.verification is not None:
            self.verification.begin(module, args, kwargs)
        given = [tensor for _, tensor in leaves((args, kwargs))]
        if any(tensor.is_nested for tensor in given):
            self._starts.clear()
            raise nested(name or "the model")
        dim = self._samples if isinstance(self._samples, sample_maps.Dim) else None
        kind, k = dim or sample_maps.Ids, dim.k if dim else 0
        self._tensors = given
        self._alike = name, kind, tuple([(t.dim(), t.dtype) for t in given])
        self._n = _number(given, k, told_by(self._model, self._alike))
        self._key = name, kind, flags(self._modules, self._parameters, given), self._n == 1
        self._given = sizes_of(given)
        self._seen = None if anew else memory.known_call(self._model, self._key, self._given)
        self._watch(self._seen is None)
        self.passes = self._seen is not None
        self._shapes = ", ".join(str(tuple(t.shape)) for t in given)
        self._call = self.rows.call = next(self._numbers)
        self._sides.begin(self._call)
        if not self._is_data(given, is_whole=name == ""):
            self._n = None  # positions, say: what comes of them belongs to nobody
        self._note(Made(self._count(), _positions(given) if dim and k == 0 else None))

    def look(self, name: str, args: Any, kwargs: Any) -> Look:
        """What an outermost call is like, if samples lie along a dimension of what it is given."""
        given = [tensor for _, tensor in leaves((args, kwargs))]
        rest = flags(self._modules, self._parameters, given)
        if self._starts or not isinstance(self._samples, sample_maps.Dim):
            return Look(None, (), None, None)
        k = self._samples.k
        alike = name, self._samples, tuple([(t.dim(), t.dtype) for t in given])
        n = _number(given, k, told_by(self._model, alike))
        return Look((k, rest), sizes_of(given), n, _positions(given) if k == 0 else None)

    def unwatch(self) -> None:
        """A call whose graph is known begins."""
        self._watch(False)

    def watched_by(self) -> Sides:
        """What watches torch's calls while a model is learnt."""
        return self._sides

    def passed(self, outputs: Sequence[Tensor], n: int, positions: int | None) -> int:
        """A call that was not followed has returned these tensors, which have n samples each. Returns its number."""
        self._call = next(self._numbers)
        self._note(Made(n, positions))
        for tensor in outputs:
            owners = self._samples.owners(tuple(tensor.shape), n)
            if owners is not None:
                self.know(tensor, owners, self._call)
        return self._call

    def _note(self, made: Made) -> None:
        self.made[self._call] = made
        self._waiting[self._call] = None
        while len(self._waiting) > 1000:  # calls without a backward, in a long block
            self._waiting.pop(next(iter(self._waiting)))

    def pending(self) -> frozenset[int]:
        """The calls whose backward may come: those since the last one, or else the last call."""
        return frozenset(self._waiting or ([self._call] if self.made else []))

    def number_of_samples(self, calls: Collection[int]) -> int | None:
        """How many samples these calls were given, if all were given as many."""
        found = {made.n for call in calls if (made := self.made.get(call)) is not None and made.n is not None}
        return found.pop() if len(found) == 1 else None

    def positions(self, calls: Collection[int]) -> int | None:
        """How many tokens each sample of these calls has, if that is known."""
        found = {made.positions for call in calls if (made := self.made.get(call)) is not None}
        return found.pop() if len(found) == 1 else None

    @property
    def is_inside(self) -> bool:
        """Whether a call is under way."""
        return bool(self._starts)

    @property
    def is_verifying(self) -> bool:
        """Whether the model is being run again, for `verify=True`."""
        return self.verification is not None and self.verification.is_running

    def _is_data(self, given: Sequence[Tensor], *, is_whole: bool) -> bool:
        """Whether any of these is data; if so, its rows are remembered. `is_whole`: the model itself is called."""
        owners = [self._samples.owners(tuple(tensor.shape), self._n) for tensor in given]
        if self._seen is None:
            for tensor, layout in zip(given, owners, strict=True):
                has_samples = layout is not None or self._is_flattened(tensor)
                self._sides.given(tensor, has_samples=has_samples, is_first=is_whole and tensor is given[0])
        for tensor, layout in zip(given, owners, strict=True):
            is_data = self._sides.is_given_data([tensor]) if self._seen is None else self._seen.is_data
            is_clear = tensor.shape == given[0].shape or sum(size == self._n for size in tensor.shape) == 1
            if layout is not None and is_data and is_clear and not self.rows.holds(tensor):
                self.rows.remember(tensor, layout)
                if self._seen is None:
                    self.rows.take_prints(tensor, layout)
        return self._seen.is_data if self._seen is not None else not given or self._sides.is_given_data(given)

    def _is_flattened(self, tensor: Tensor) -> bool:
        """Whether this may be rows of all samples after each other: the patches of images."""
        rows = tensor.shape[0] if tensor.dim() > 1 and tensor.is_floating_point() else 0
        return bool(self._n and rows > self._n and rows % self._n == 0 and rows != tensor.shape[1])

    def open(self) -> None:
        """A block begins. What it computes is watched until a forward is known."""
        self._watch(not memory.is_in_a_loop(self._model))

    def close(self) -> None:
        """Let go of everything."""
        self._watch(False)
        self.passes = False
        self._known.clear()
        self._others.clear()
        self._spans.clear()
        self._starts.clear()
        self.rows.forget()

    def learnt(self, structure: Hashable | None, calls: Collection[int]) -> None:
        """The graph of these calls has this structure; None if it cannot be remembered."""
        for call in calls:
            key, sizes, seen = self._found.get(call, (None, None, None))
            if seen is None:
                continue
            if structure is None:
                memory.forget_call(self._model, key)
            else:
                memory.know_call(self._model, key, sizes, seen, structure)

    def always_watch(self, calls: Collection[int]) -> None:
        """The graph of these calls did not follow from what is known of such calls."""
        for call in calls:
            if call in self._found:
                key, _, seen = self._found[call]
                memory.always_watch(self._model, key, seen)

    def was_watched(self, calls: Collection[int]) -> bool:
        """Whether these calls were."""
        return self._unwatched.isdisjoint(calls)

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._watching:
            seams.watch(self._sides)
        elif self._watching and not wanted:
            seams.unwatch(self._sides)
        self._watching = wanted

    def after(self, output: Any) -> None:
        """A module has returned (None if it raised)."""
        self.passes = False
        if not self._starts:
            return
        name, start = self._starts.pop()
        self._spans.append((start, next_number(), name))
        if self._starts:
            return
        self._sides.call = None
        call = self._call
        if self.verification is not None:
            self.verification.ask(output, self._count())
        tensors = [tensor for _, tensor in leaves(output)]
        given, self._tensors = self._tensors, []
        self._reconsider(given, tensors)
        outputs = tuple(self._has_samples(k, tensor) for k, tensor in enumerate(tensors))
        for tensor, has_samples in zip(tensors, outputs, strict=True):
            owners = self._samples.owners(tuple(tensor.shape), self._n)
            if owners is not None and has_samples:
                self.know(tensor, owners, call)
            elif owners is not None and self._seen is not None and tensor.grad_fn is not None:
                self._others.add(tensor, owners, call)
        if self._seen is not None:
            self._unwatched.add(call)
        seen = self._seen or Seen(self._n is not None, outputs)
        self._found[call] = self._key, self._given, seen
        if self._seen is None and output is not None and call not in self._unwatched:
            memory.meet_call(self._model, self._key, seen)

    def _reconsider(self, given: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Which of the given tensors has the samples is a guess as long as they differ in size: what the model returns
        says it. If the guess was wrong, the call counts as one that was not watched, since another tensor was."""
        if not isinstance(self._samples, sample_maps.Dim) or self._n is None:
            return
        k = self._samples.k
        returned = {t.shape[k] for t in outputs if t.grad_fn is not None and t.dim() > k}
        sizes = [t.shape[k] if t.dim() > k else -1 for t in given]
        if len(set(sizes)) == 1 or not returned:
            return
        if self._n not in returned:
            better = next((size for size in sizes if size in returned), None)
            if better is None:
                return
            self._n = better
            self.rows.drop(self._call)
            for tensor in given:
                owners = self._samples.owners(tuple(tensor.shape), better)
                if owners is not None and self._sides.is_no_weight(tensor):
                    self.rows.remember(tensor, owners)
            self._note(Made(better, self.made[self._call].positions))
            self._seen = None
            self._unwatched.add(self._call)
        memory.tell(self._model, self._alike, sizes.index(self._n))

    def _has_samples(self, place: int, tensor: Tensor) -> bool:
        if tensor.grad_fn is None:
            return False
        if self._seen is not None and place < len(self._seen.outputs):
            return self._seen.outputs[place]
        return not self._sides.is_weight(tensor.grad_fn)  # a weight that the model returns belongs to nobody

    def _count(self) -> int | None:
        ids = self._samples.ids
        return self._n if ids is None else len(ids)

    def know(self, tensor: Tensor, owners: Layout, call: int, *, marked: bool = False) -> None:
        """The samples of a tensor are known."""
        if self._known.add(tensor, owners, call, marked=marked):
            self._spans = self._spans[-10_000:]

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
        found = self._known.find(nodes)
        self.is_marked = any(entry.marked for entry in found.values())
        if self.is_marked:
            found = {edge: entry for edge, entry in found.items() if entry.marked}
        calls = frozenset(entry.call for entry in found.values())
        return {edge: entry.owners for edge, entry in found.items()}, calls

    def seeds(self, nodes: Sequence[Node]) -> dict[Edge, Layout]:
        """Places in a graph whose samples the rows of inputs tell, or copies of them."""
        found: dict[Edge, Layout] = {}
        for node in nodes:
            if is_leaf(node):
                if (owners := self.rows.of(node.variable)) is not None:
                    found[node, 0] = owners
            elif len(outputs_of(node)) == 1:
                shape = tuple(outputs_of(node)[0].shape)
                owners = self.rows.owners(node, shape) or self.rows.by_prints(node, shape)
                if owners is not None:
                    found[node, 0] = owners
        return found

    def by_evidence(self, nodes: Sequence[Node]) -> dict[Edge, Layout]:
        """Outputs of calls that were not watched, if they depend on rows of an input."""
        told = {node for node in nodes if not is_leaf(node) and self.rows.are_saved_by(node)}
        found = {**self._known.find(nodes), **self._others.find(nodes)}
        return {
            (node, output): entry.owners
            for (node, output), entry in found.items()
            if not told.isdisjoint(ordered([node]))
        }

    def had_backward(self, calls: Collection[int]) -> None:
        """A backward of these calls begins."""
        for call in calls:
            self._waiting.pop(call, None)

    def mismatch(self) -> str:
        """A line that says that `samples=` does not fit what the model was given; empty if it may."""
        if not isinstance(self._samples, sample_maps.Ids) or not self._shapes:
            return ""
        said = tuple(self._samples.given.shape)
        return f"  samples= names positions of shape {said}; the model was last given {self._shapes}\n"

    def module_of(self, number: int) -> str:
        """The innermost module during whose call the node with this number was made."""
        ends = [end for _, end, _ in self._spans]  # calls end in order, inner ones first
        for start, end, name in self._spans[bisect.bisect_right(ends, number) :]:
            if start <= number < end:
                return name
        return ""


def _number(given: Sequence[Tensor], k: int, told: int | None) -> int | None:
    """How many samples there are: the size of that dimension of the tensor that told it before, or else of the first
    that has it. But one row is no batch where more of the tensors have another number of rows (positions come first,
    say); and where the first may be rows of all samples after each other (patches of images), and token ids say how
    many samples, they are right. What the model returns is asked afterwards."""
    if told is not None and told < len(given) and given[told].dim() > k:
        return int(given[told].shape[k])
    sizes = [t.shape[k] for t in given if t.dim() > k]
    if not sizes:
        return None
    n: int = sizes[0]
    if n == 1:
        n = max(dict.fromkeys(sizes), key=sizes.count)  # the first of those that are as many
    first = next(t for t in given if t.dim() > k)
    ids = [t.shape[k] for t in given if t.dim() == 2 and not t.is_floating_point() and t.shape[0] != t.shape[1]]
    if k == 0 and first.is_floating_point() and len(ids) > 1 and len(set(ids)) == 1 and 0 < ids[0] < n:
        return ids[0] if n % ids[0] == 0 else n
    return n


def _positions(given: Sequence[Tensor]) -> int | None:
    """How many tokens a sample has, if the first tensor of two dimensions or more is token ids or rows of vectors."""
    first = next((t for t in given if t.dim() > 1), None)
    if first is None:
        return None
    is_ids = first.dim() == 2 and not first.is_floating_point()
    return int(first.shape[1]) if is_ids or first.dim() == 3 else None
