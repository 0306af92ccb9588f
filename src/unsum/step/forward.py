"""What a block sees of the forward: which tensors have known samples, and which module made which node."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from unsum import samples as sample_maps
from unsum import seams
from unsum.errors import SamplesError
from unsum.graph.layout import Layout, same
from unsum.graph.nodes import Edge, Node, is_leaf, ordered, place
from unsum.graph.owners import Owners
from unsum.graph.replay import nested
from unsum.learn.cut import find_cut
from unsum.learn.refusals import coincide
from unsum.learn.rows import Rows
from unsum.learn.sides import Sides
from unsum.nested import leaves, listed
from unsum.plan import memory
from unsum.plan.memory import Seen
from unsum.plan.signature import flags, sizes_of
from unsum.seams.nodes import outputs_of
from unsum.seams.tensors import memory_number
from unsum.sites import Names
from unsum.step.calls import Calls, Made, Spans
from unsum.step.known import KnownTensors
from unsum.step.reading import Reading, Told, chosen, forget, goes_through, readings, tell, told_by
from unsum.step.verify import Verification
from unsum.travel import Journey
from unsum.travel.climb import climb
from unsum.travel.walk import walk, with_states


@dataclass(frozen=True)
class Look:
    """What can be told of a call before it is made."""

    rest: Hashable  # flags, dtypes
    sizes: tuple[tuple[int, ...], ...]  # of the tensors that it is given
    n: int | None
    positions: int | None


@dataclass(eq=False)
class _Begun:
    """An outermost call that has begun."""

    call: int
    ways: list[Reading]  # in which it may be read
    alike: Hashable  # what such calls have in common, whatever the sizes
    rest: tuple[Hashable, ...]  # its name and flags
    sizes: tuple[tuple[int, ...], ...]  # of what it was given
    positions: int | None  # how many tokens each sample has, if it was given tokens
    told: Told | None  # by earlier calls: the first of the ways
    are_data: list[bool] = field(default_factory=list)  # whether it was given any data, read in each way
    outputs: list[tuple[bool, ...]] = field(default_factory=list)  # which of them may have samples, read in each way
    is_whole: bool = False  # whether it has returned

    def key(self, n: int | None) -> Hashable:
        """What such calls are remembered by."""
        return *self.rest, n == 1


class Forward:
    """Follows the calls of a model's modules."""

    def __init__(self, names: Names, samples: sample_maps.Samples, sides: Sides, *, verify: bool) -> None:
        self._model, self._samples, self._sides = names.model, samples, sides
        self.verification = Verification(names.model, samples.owners) if verify else None
        self._modules, self._parameters = list(names.modules.values()), list(names.parameters.values())
        self.rows = Rows()
        self.calls, self.spans = Calls(), Spans()
        self._call = 0  # the one under way, or the last
        self._known = KnownTensors()
        self._others = KnownTensors()  # outputs of the right size that had no samples before
        self._numbers = itertools.count()
        self._under_way: _Begun | None = None
        self._undecided: _Begun | None = None  # the last call, as long as it is not known how it is to be read
        self._returned = KnownTensors()  # what it has returned
        self._unsure: set[int] = set()  # calls of which that was never known
        self._doubted: dict[int, Hashable] = {}  # calls that return as many rows as another tensor has
        self._shapes = ""
        self._watching = False
        self._seen: Seen | None = None
        self._found: dict[int, tuple[Hashable, Hashable, Seen]] = {}  # of calls: flags, sizes, what was seen of them
        self._unwatched: set[int] = set()  # calls that were not watched
        self.passes = False  # whether calls inside this one need not be told
        self._n: int | None = None
        self.in_lists: set[Edge] = set()  # of these, those that may be one sample's
        self.shared: set[int] = set()  # memory of inputs that have no samples
        self._unclear = Rows()  # of inputs that have several dimensions like the samples'
        self._lists: dict[int, int] = {}  # of calls that were given lists: how many items, which may be samples
        self.is_marked = False  # whether the user has said whose the tensors are that were found last

    def before(self, name: str, module: nn.Module, args: Any, kwargs: Any, *, anew: bool = False) -> None:
        """A module is about to be called; `anew` if it will run other operations than before."""
        seams.refuse_tracing(name or "the model")
        self.spans.begin(name)
        if len(self.spans) > 1:
            return
        if self.verification is not None:
            self.verification.begin(module, args, kwargs)
        found = list(leaves((args, kwargs)))
        given = [tensor for _, tensor in found]
        if any(tensor.is_nested for tensor in given):
            self.spans.clear()
            raise nested(name or "the model")
        self._settle()
        self._call = next(self._numbers)
        self._under_way = begun = self._begun(name, found)
        if items := _items(found):
            self._lists[self._call] = items
        n = begun.ways[0].n if len(begun.ways) == 1 else None
        self._seen = None
        if not anew and len(begun.ways) < 2:
            # Where sizes coincide, more has to be known of a new structure than what earlier calls have shown.
            coincide = n is not None and any(shape.count(n) > 1 for shape in begun.sizes)
            self._seen = memory.known_call(self._model, begun.key(n), begun.sizes, exactly=coincide)
        self._watch(self._seen is None)
        self.passes = self._seen is not None
        self._shapes = ", ".join(str(tuple(t.shape)) for t in given)
        self._sides.begin(self._call, len(begun.ways))
        for k, way in enumerate(begun.ways):
            begun.are_data.append(self._take_in(given, begun, way, k, is_whole=name == ""))
        self._n = n if begun.are_data and begun.are_data[0] else None  # positions, say: nobody's
        self.calls.note(self._call, Made(self._count(), begun.positions))

    def _begun(self, name: str, found: Sequence[tuple[Any, Tensor]]) -> _Begun:
        """What is known of a call that begins with these tensors, each with its place among the arguments."""
        given = [tensor for _, tensor in found]
        dim = self._samples if isinstance(self._samples, sample_maps.Dim) else None
        k = dim.k if dim else 0
        alike = name, dim, tuple([(path, t.dim(), t.dtype) for path, t in found])
        rest = name, dim or sample_maps.Ids, flags(self._modules, self._parameters, given)
        told = told_by(self._model, alike)
        ways = readings(given, k, told)
        if dim is None:
            ways = ways[:1]
        positions = _positions(given) if dim and k == 0 else None
        return _Begun(self._call, ways, alike, rest, sizes_of(given), positions, told)

    def look(self, name: str, args: Any, kwargs: Any) -> Look:
        """What an outermost call is like, if samples lie along a dimension of what it is given."""
        found = list(leaves((args, kwargs)))
        rest = flags(self._modules, self._parameters, [tensor for _, tensor in found])
        if len(self.spans) or not isinstance(self._samples, sample_maps.Dim):
            return Look(None, (), None, None)
        begun = self._begun(name, found)
        n = begun.ways[0].n if len(begun.ways) == 1 else None
        return Look((self._samples.k, rest), begun.sizes, n, begun.positions)

    def unwatch(self) -> None:
        """A call whose graph is known begins."""
        self._watch(False)

    def watched_by(self) -> Sides:
        """What watches torch's calls while a model is learnt."""
        return self._sides

    def passed(self, outputs: Sequence[Tensor], n: int, positions: int | None) -> int:
        """A call that was not followed has returned these tensors, which have n samples each. Returns its number."""
        self._call = next(self._numbers)
        self.calls.note(self._call, Made(n, positions))
        for tensor in outputs:
            owners = self._samples.owners(tuple(tensor.shape), n)
            if owners is not None:
                self.know(tensor, owners, self._call)
        return self._call

    @property
    def is_inside(self) -> bool:
        """Whether a call is under way."""
        return len(self.spans) > 0

    @property
    def is_verifying(self) -> bool:
        """Whether the model is being run again, for `verify=True`."""
        return self.verification is not None and self.verification.is_running

    def _take_in(self, given: Sequence[Tensor], begun: _Begun, way: Reading, reading: int, *, is_whole: bool) -> bool:
        """Whether any of the given tensors is data, if the call is read so; if so, its rows are remembered. `is_whole`:
        the model itself is called."""
        owners = [self._samples.owners(tuple(tensor.shape), way.n) for tensor in given]
        if isinstance(self._samples, sample_maps.Dim):
            owners = [layout if k in way.members else None for k, layout in enumerate(owners)]
        if self._seen is None:
            for at, (tensor, layout) in enumerate(zip(given, owners, strict=True)):
                may_be = begun.told is None or at in begun.told.multiples
                has_samples = layout is not None or (may_be and _is_flattened(tensor, way.n))
                is_first = is_whole and tensor is given[0]
                self._sides.given(tensor, has_samples=has_samples, is_first=is_first, world=reading)
                if not has_samples and len(begun.ways) == 1 and not is_lazy(tensor):
                    self.shared.add(memory_number(tensor))
        elif isinstance(self._samples, sample_maps.Dim):
            self.shared |= {memory_number(t) for t, layout in zip(given, owners, strict=True) if layout is None}
        first = given[min(way.members)].shape if way.members else None
        for tensor, layout in zip(given, owners, strict=True):
            is_clear = tensor.shape == first or sum(size == way.n for size in tensor.shape) == 1
            if layout is None or not is_clear:
                if layout is not None:  # along the dimension that is said of all inputs
                    self._unclear.remember(tensor, layout, self._call)
                continue
            if self._seen is not None and not self._seen.is_data:
                continue
            if self._seen is None and not self._sides.is_given_data([tensor], reading):
                continue
            self.rows.remember(tensor, layout, self._call, reading)
        if self._seen is not None:
            return self._seen.is_data
        return not given or self._sides.is_given_data(given, reading)

    def open(self) -> None:
        """A block begins. What it computes is watched until a forward is known."""
        self._watch(not memory.is_in_a_loop(self._model))

    def close(self) -> None:
        """Let go of everything."""
        self._watch(False)
        self.passes = False
        for known in (self._known, self._others, self._returned):
            known.clear()
        self._undecided = None
        self.spans.clear()
        self.rows.forget()
        self._unclear.forget()
        self.shared.clear()

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
        if not len(self.spans):
            return
        start = self.spans.end()
        if len(self.spans):
            return
        self.calls.end(self._call, start)
        self._sides.call = None
        call = self._call
        if self.verification is not None:
            self.verification.ask(output, self._count())
        returned = list(leaves(output))
        tensors, paths = [tensor for _, tensor in returned], [path for path, _ in returned]
        begun, self._under_way = self._under_way, None
        assert begun is not None
        begun.is_whole = output is not None
        for which in range(max(len(begun.ways), 1)):
            begun.outputs.append(tuple(self._has_samples(k, tensor, which) for k, tensor in enumerate(tensors)))
        for way, outputs in zip(begun.ways, begun.outputs, strict=False):
            for path, tensor, has_samples in zip(paths, tensors, outputs, strict=True):
                items = listed(paths, path)
                is_listed = items > 0 and (items == way.n > 1 or items == self._lists.get(call))
                owners = None if tensor.grad_fn is None else self._samples.owners(tuple(tensor.shape), way.n)
                if owners is None:
                    if has_samples and len(begun.ways) == 1:
                        self._doubt(begun, tensor)
                elif len(begun.ways) > 1:
                    if has_samples:
                        self._returned.add(tensor, owners, call, is_listed=is_listed)
                elif has_samples and (self._n is not None or self._samples.ids is not None):
                    self.know(tensor, owners, call, is_listed=is_listed)
                elif self._seen is not None:
                    self._others.add(tensor, owners, call)
        if self._seen is not None:
            self._unwatched.add(call)
        if len(begun.ways) > 1:
            self._undecided = begun
        else:
            self._end(begun, 0)

    def _doubt(self, begun: _Begun, tensor: Tensor) -> None:
        """A call that was read in the one way that earlier ones have told returns this tensor: perhaps with the rows of
        another one that it was given."""
        if not begun.ways or not isinstance(self._samples, sample_maps.Dim) or tensor.dim() <= (k := self._samples.k):
            return
        size = int(tensor.shape[k])
        rows = [sizes[k] for sizes in begun.sizes if len(sizes) > k]
        is_list = begun.ways[0].n == 1 and size == len(begun.sizes)  # of samples, perhaps
        if size != begun.ways[0].n and (size in rows or is_list):
            owners = self._samples.owners(tuple(tensor.shape), size)
            assert owners is not None
            self._returned.add(tensor, owners, begun.call)
            self._doubted[begun.call] = begun.alike

    def _end(self, begun: _Begun, which: int) -> None:
        """A call is over, and it is known how it is to be read."""
        n = self.calls.made[begun.call].n if begun.ways else None
        if (len(begun.ways) > 1 or begun.told is not None) and begun.call not in self._unsure:
            k = self._samples.k if isinstance(self._samples, sample_maps.Dim) else 0
            rows = [sizes[k] if len(sizes) > k else -1 for sizes in begun.sizes]
            tell(self._model, begun.alike, begun.ways[which], rows)
        is_known = begun.call in self._unwatched
        seen = self._seen if is_known and self._seen is not None else Seen(n is not None, begun.outputs[which])
        key = begun.key(begun.ways[which].n if begun.ways else None)
        self._found[begun.call] = key, begun.sizes, seen
        if not is_known and begun.is_whole:
            memory.meet_call(self._model, key, seen)

    def decide(self, roots: Sequence[Any], nodes: Sequence[Node], names: Mapping[int, str]) -> None:
        """A backward from these roots begins: if the last call can be read in several ways, the outputs that the loss
        goes through say in which. Refuses by raising where they do not."""
        begun, unsure = self._undecided, self._unsure
        if unsure and not unsure.isdisjoint(self.calls.have_made(nodes)) and not self._known.has_marks(nodes):
            raise SamplesError(
                "cannot tell whose gradient this is: a call of the model whose inputs have different numbers of rows "
                "came before another call.\n  call backward after each, or unsum.mark_samples(losses)"
            )
        if begun is None:
            self._refuse_other_roles(roots, nodes, names)
            return
        if begun.call not in self.calls.have_made(nodes):
            return  # of another model, say
        found = {edge: each.owners for edge, each in self._returned.find(nodes).items() if each.call == begun.call}
        is_marked = self._known.has_marks(nodes)  # then the user has said whose it is
        is_weight = self._sides.is_weight
        fits = lambda way: self._fits(begun.ways[way].n, roots, nodes, begun.call, way)
        is_told = begun.told is not None
        which = 0 if is_marked else chosen(begun.ways, roots, found, names, is_weight, fits, is_told=is_told)
        self._choose(begun, which)

    def _fits(self, n: int, roots: Sequence[Any], nodes: Sequence[Node], call: int, way: int) -> bool:
        """Whether samples stay apart in a loss whose samples only the inputs say, if a call is read in this way."""
        is_data = lambda node: self._sides.is_data_in(node, way)
        order = ordered([node for node, _ in map(place, roots) if node is not None])
        cut = find_cut(roots, climb(order, self.seeds(order, self.rows.as_read(call, way)), n), is_data)
        is_loss = all(not len(meta.shape) for node in cut.loss for meta in outputs_of(node))
        return bool(cut.starts) and is_loss and not walk(cut.model, cut.starts, Journey(n), is_data).mixing

    def _refuse_other_roles(self, roots: Sequence[Any], nodes: Sequence[Node], names: Mapping[int, str]) -> None:
        """Raise where a call was read as earlier ones were, and what the loss uses of it has the rows of another tensor
        that it was given."""
        others = self._returned.find(nodes) if self._doubted else {}
        returned = {edge: each.owners for edge, each in (self._known.find(nodes) | others).items()}
        top = goes_through(roots, returned, names, self._sides.is_weight) if others else []
        if any(layout is each.owners for layout in top for each in others.values()):
            forget(self._model, self._doubted.get(next(iter(others.values())).call))
            raise SamplesError(
                "what the model returns has other samples than what it was given: those of another tensor than in "
                "earlier calls (then call it again: it is read anew), or of a list.\n  unsum.mark_samples(losses) says "
                "whose each loss is"
            )

    def _settle(self) -> None:
        """Another call begins: the last one is read as its outputs say, or else as the first tensor says."""
        if (begun := self._undecided) is not None:
            sizes = self._returned.numbers(begun.call)
            fitting = [k for k, way in enumerate(begun.ways) if way.n in sizes]
            if len(fitting) != 1:
                self._unsure.add(begun.call)
            self._choose(begun, fitting[0] if len(fitting) == 1 else 0)

    def _choose(self, begun: _Begun, which: int) -> None:
        self._undecided = None
        n = begun.ways[which].n if begun.are_data[which] else None
        self._sides.choose(which)
        self.rows.choose(begun.call, which)
        self.calls.made[begun.call] = Made(n, begun.positions)
        self._returned.hand_over(self._known, begun.call, n)
        self._end(begun, which)

    def _has_samples(self, place: int, tensor: Tensor, way: int) -> bool:
        if tensor.grad_fn is None:
            return False
        if self._seen is not None and place < len(self._seen.outputs):
            return self._seen.outputs[place]
        return not self._sides.is_shared(tensor.grad_fn, way)  # a weight that the model returns belongs to nobody

    def _count(self) -> int | None:
        ids = self._samples.ids
        return self._n if ids is None else len(ids)

    def know(self, tensor: Tensor, owners: Layout, call: int, *, marked: bool = False, is_listed: bool = False) -> None:
        """The samples of a tensor are known."""
        if self._known.add(tensor, owners, call, marked=marked, is_listed=is_listed):
            self.spans.shorten()

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
        self.in_lists = {edge for edge, entry in found.items() if entry.is_listed}
        return {edge: entry.owners for edge, entry in found.items()}, calls

    def may_be_one(self, edge: Edge) -> bool:
        """Whether an output may be that of one sample, in a list."""
        return edge in self.in_lists

    def refuse_lists(self, calls: Collection[int], n: int, known: Collection[Edge]) -> None:
        """Raise where the samples of these calls may be the items of a list, and not the rows of each item."""
        for items in (self._lists[call] for call in calls if call in self._lists):
            if self.is_marked or not isinstance(self._samples, sample_maps.Dim) or n == items == 1:
                return
            if items == n or not known or not self.in_lists.isdisjoint(known):
                raise SamplesError(
                    f"the model is given a list of {items} tensors: whether each is a sample, or has a row of every "
                    "sample, cannot be told.\n  unsum.mark_samples(losses) says whose each loss is"
                )

    def refuse_other_dimensions(self, owned: Mapping[int, Owners], nodes: Sequence[Node], n: int) -> None:
        """Raise where only some inputs say whose a loss is, and another one says otherwise, along the dimension that is
        said of all."""
        for at, owners in owned.items() if self._unclear and not self.is_marked else ():
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
                    found[node, 0] = owners
                if owners is not None and len(metas) > 1:
                    outs = with_states(node, [owners, *[None for _ in metas[1:]]]) or []
                    found |= {(node, k): out for k, out in enumerate(outs) if out is not None}
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

    def mismatch(self) -> str:
        """A line that says that `samples=` does not fit what the model was given; empty if it may."""
        if not isinstance(self._samples, sample_maps.Ids) or not self._shapes:
            return ""
        said = tuple(self._samples.given.shape)
        return f"  samples= names positions of shape {said}; the model was last given {self._shapes}\n"


def _items(found: Sequence[tuple[Any, Tensor]]) -> int:
    """How many items the list has that the first tensor is in, if these may be samples: alike but for their sizes."""
    if not found or not (count := listed([path for path, _ in found], found[0][0], 2)):
        return 0
    first = found[0][1]
    depth = max(d for d in range(2, len(found[0][0])) if isinstance(found[0][0][d], int))
    others = [
        t for path, t in found if path[:depth] == found[0][0][:depth] and path[depth + 1 :] == found[0][0][depth + 1 :]
    ]
    alike = all((t.dim(), t.dtype) == (first.dim(), first.dtype) for t in others)
    return count if alike and (first.dim() > 2 or all(t.shape[1:] == first.shape[1:] for t in others)) else 0


def _is_flattened(tensor: Tensor, n: int) -> bool:
    """Whether this may be rows of all samples after each other: the patches of images."""
    rows = tensor.shape[0] if tensor.dim() > 1 and tensor.is_floating_point() else 0
    return bool(n and rows > n and rows % n == 0 and rows != tensor.shape[1])


def _positions(given: Sequence[Tensor]) -> int | None:
    """How many tokens a sample has, if the first tensor of two dimensions or more is token ids or rows of vectors."""
    first = next((t for t in given if t.dim() > 1), None)
    if first is None:
        return None
    is_ids = first.dim() == 2 and not first.is_floating_point()
    return int(first.shape[1]) if is_ids or first.dim() == 3 else None
