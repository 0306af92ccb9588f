"""What a block sees of the forward: which tensors have known samples, and which module made which node."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from unsum import samples as sample_maps
from unsum import seams
from unsum.errors import BadSamples, UnknownSamples
from unsum.graph.layout import Layout
from unsum.graph.nodes import Edge, Node, is_leaf, ordered, place
from unsum.graph.replay import nested
from unsum.learn.refusals import MARK
from unsum.learn.sides import Sides
from unsum.nested import leaves, listed
from unsum.plan import memory
from unsum.plan.memory import Seen
from unsum.plan.signature import flags, sizes_of
from unsum.sites import Names
from unsum.step.calls import Begun, Look, Made, OutermostCalls, Spans, positions_of
from unsum.step.inputs import Inputs
from unsum.step.known import KnownTensors
from unsum.step.reading import Reading, chosen, forget, goes_through, readings, stay_apart, tell, told_by
from unsum.step.verify import Verification
from unsum.step.watching import Watching


class Forward:
    """Follows the calls of a model's modules."""

    # More than twelve attributes: what is known of the calls so far, of the one under way, and of the last one, which
    # may still have to be read in another way when its graph shows how.
    def __init__(
        self, names: Names, samples: sample_maps.Samples, sides: Sides, purpose: Hashable, *, verify: bool
    ) -> None:
        self._model, self._samples, self._sides, self._purpose = names.model, samples, sides, purpose
        self.verification = Verification(names.model, samples.owners) if verify else None
        self._modules, self._parameters = list(names.modules.values()), list(names.parameters.values())
        self.inputs = Inputs(samples)
        self.calls, self.spans = OutermostCalls(), Spans()
        self.call = 0  # the outermost one under way, or the last
        self._known = KnownTensors()
        self._others = KnownTensors()  # outputs of the right size that had no samples before
        self._numbers = itertools.count()
        self._under_way: Begun | None = None
        self._undecided: Begun | None = None  # the last call, as long as it is not known how it is to be read
        self._returned = KnownTensors()  # what it has returned
        self._unsure: set[int] = set()  # calls of which that was never known
        self._doubted: dict[int, Hashable] = {}  # calls that return as many rows as another tensor has
        self._shapes = ""
        self.watching = Watching(names.model, sides, purpose)
        self._seen: Seen | None = None
        self.passes = False  # whether calls inside this one need not be told
        self._n: int | None = None
        self.in_lists: set[Edge] = set()  # of these, those that may be one sample's
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
        self.call = next(self._numbers)
        self._under_way = begun = self._begun(name, found)
        self.inputs.begin(self.call, found)
        n = begun.ways[0].n if len(begun.ways) == 1 else None
        self._seen = None
        if not anew and len(begun.ways) < 2:
            # Where sizes coincide, more has to be known of a new structure than what earlier calls have shown.
            coincide = n is not None and any(shape.count(n) > 1 for shape in begun.sizes)
            self._seen = memory.known_call(self._model, begun.key(n), begun.sizes, exactly=coincide)
        self.watching.turn(self._seen is None)
        self.passes = self._seen is not None
        self._shapes = ", ".join(str(tuple(t.shape)) for t in given)
        self._sides.begin(self.call, len(begun.ways))
        for k, way in enumerate(begun.ways):
            begun.are_data.append(self._take_in(given, begun, way, k, is_whole=name == ""))
        self._n = n if begun.are_data and begun.are_data[0] else None  # positions, say: nobody's
        self.calls.note(self.call, Made(self._count(), begun.positions))

    def _begun(self, name: str, found: Sequence[tuple[Any, Tensor]]) -> Begun:
        """What is known of a call that begins with these tensors, each with its place among the arguments."""
        given = [tensor for _, tensor in found]
        dim = self._samples if isinstance(self._samples, sample_maps.Dim) else None
        k = dim.k if dim else 0
        alike = name, dim, tuple([(path, t.dim(), t.dtype) for path, t in found])
        rest = self._purpose, name, dim or sample_maps.Ids, flags(self._modules, self._parameters, given)
        told = told_by(self._model, alike)
        ways = readings(given, k, told)
        if dim is None:
            ways = ways[:1]
        positions = positions_of(given) if dim and k == 0 else None
        return Begun(self.call, ways, alike, rest, sizes_of(given), positions, told)

    def look(self, name: str, args: Any, kwargs: Any) -> Look:
        """What an outermost call is like, if samples lie along a dimension of what it is given."""
        if len(self.spans) or not isinstance(self._samples, sample_maps.Dim):
            return Look(None, (), None, None)
        begun = self._begun(name, list(leaves((args, kwargs))))
        n = begun.ways[0].n if len(begun.ways) == 1 else None
        return Look((self._samples.k, self._samples.is_said, begun.rest[-1]), begun.sizes, n, begun.positions)

    def passed(self, outputs: Sequence[Tensor], n: int, positions: int | None) -> int:
        """A call that was not followed has returned these tensors, which have n samples each. Returns its number."""
        self.call = next(self._numbers)
        self.calls.note(self.call, Made(n, positions))
        for tensor in outputs:
            owners = self._samples.owners(tuple(tensor.shape), n)
            if owners is not None:
                self.know(tensor, owners, self.call)
        return self.call

    @property
    def is_inside(self) -> bool:
        """Whether a call is under way."""
        return len(self.spans) > 0

    @property
    def is_verifying(self) -> bool:
        """Whether the model is being run again, for `verify=True`."""
        return self.verification is not None and self.verification.is_running

    def _take_in(self, given: Sequence[Tensor], begun: Begun, way: Reading, reading: int, *, is_whole: bool) -> bool:
        """Whether any of the given tensors is data, if the call is read so; if so, its rows are remembered. `is_whole`:
        the model itself is called."""
        seen, inputs = self._seen, self.inputs
        first = given[min(way.members)].shape if way.members else None
        read = list(inputs.read(given, way, begun.told))
        for tensor, _, has_samples in read:
            if seen is None:
                is_first = is_whole and tensor is given[0]
                self._sides.given(tensor, has_samples=has_samples, is_first=is_first, world=reading)
            if not has_samples and len(begun.ways) == 1:
                inputs.share(tensor)
        for tensor, owners, _ in read:
            is_data = seen.is_data if seen is not None else self._sides.is_given_data([tensor], reading)
            if owners is not None and is_data:
                inputs.remember(tensor, owners, way, self.call, reading, like=first)
        if seen is not None:
            return seen.is_data
        return not given or self._sides.is_given_data(given, reading)

    def close(self) -> None:
        """Let go of everything."""
        self.watching.turn(False)
        self.passes = False
        for known in (self._known, self._others, self._returned):
            known.clear()
        self._undecided = None
        self.spans.clear()
        self.inputs.forget()

    def after(self, output: Any) -> None:
        """A module has returned (None if it raised)."""
        self.passes = False
        if not len(self.spans):
            return
        start = self.spans.end()
        if len(self.spans):
            return
        self.calls.end(self.call, start)
        self._sides.call = None
        call = self.call
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
                is_listed = items > 0 and (items == way.n > 1 or items == self.inputs.items(call))
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
            self.watching.missed(call)
        if len(begun.ways) > 1:
            self._undecided = begun
        else:
            self._end(begun, 0)

    def _doubt(self, begun: Begun, tensor: Tensor) -> None:
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

    def _end(self, begun: Begun, which: int) -> None:
        """A call is over, and it is known how it is to be read."""
        n = self.calls.made[begun.call].n if begun.ways else None
        if (len(begun.ways) > 1 or begun.told is not None) and begun.call not in self._unsure:
            k = self._samples.k if isinstance(self._samples, sample_maps.Dim) else 0
            rows = [sizes[k] if len(sizes) > k else -1 for sizes in begun.sizes]
            tell(self._model, begun.alike, begun.ways[which], rows)
        is_known = not self.watching.saw((begun.call,))
        seen = self._seen if is_known and self._seen is not None else Seen(n is not None, begun.outputs[which])
        key = begun.key(begun.ways[which].n if begun.ways else None)
        self.watching.note(begun.call, key, begun.sizes, seen)
        if not is_known and begun.is_whole:
            memory.meet_call(self._model, key, seen)

    def decide(self, roots: Sequence[Any], nodes: Sequence[Node], names: Mapping[int, str]) -> None:
        """A backward from these roots begins: if the last call can be read in several ways, the outputs that the loss
        goes through say in which. Refuses by raising where they do not."""
        begun, unsure = self._undecided, self._unsure
        if unsure and not unsure.isdisjoint(self.calls.have_made(nodes)) and not self._known.has_marks(nodes):
            raise UnknownSamples(
                "cannot tell which samples the loss is made of: a call of the model whose inputs have different "
                "numbers of rows came before another call.",
                write=["for x, y in batches: loss_fn(model(*x), y).backward()  # backward after each call", MARK],
            )
        if begun is None:
            self._refuse_other_roles(roots, nodes, names)
            return
        if begun.call not in self.calls.have_made(nodes):
            return  # of another model, say
        found = {edge: each.owners for edge, each in self._returned.find(nodes).items() if each.call == begun.call}
        is_marked = self._known.has_marks(nodes)  # then the user has said whose it is
        is_weight = self._sides.is_weight

        def fits(way: int) -> bool:
            order = ordered([node for node, _ in map(place, roots) if node is not None])
            seeds = self.inputs.seeds(order, self.inputs.rows.as_read(begun.call, way))
            return stay_apart(roots, order, seeds, begun.ways[way].n, lambda node: self._sides.is_data_in(node, way))

        is_told = begun.told is not None
        which = 0 if is_marked else chosen(begun.ways, roots, found, names, is_weight, fits, is_told=is_told)
        self._choose(begun, which)

    def _refuse_other_roles(self, roots: Sequence[Any], nodes: Sequence[Node], names: Mapping[int, str]) -> None:
        """Raise where a call was read as earlier ones were, and what the loss uses of it has the rows of another tensor
        that it was given."""
        others = self._returned.find(nodes) if self._doubted else {}
        returned = {edge: each.owners for edge, each in (self._known.find(nodes) | others).items()}
        top = goes_through(roots, returned, names, self._sides.is_weight) if others else []
        if any(layout is each.owners for layout in top for each in others.values()):
            forget(self._model, self._doubted.get(next(iter(others.values())).call))
            raise UnknownSamples(
                "what the model returns has other samples than its input: those of another tensor than in earlier "
                "calls, or of a list. Call the model again: unsum then reads its inputs again.",
                at=f"the model was last given {self._shapes}",
                write=MARK,
            )

    def _settle(self) -> None:
        """Another call begins: the last one is read as its outputs say, or else as the first tensor says."""
        if (begun := self._undecided) is not None:
            sizes = self._returned.numbers(begun.call)
            fitting = [k for k, way in enumerate(begun.ways) if way.n in sizes]
            if len(fitting) != 1:
                self._unsure.add(begun.call)
            self._choose(begun, fitting[0] if len(fitting) == 1 else 0)

    def _choose(self, begun: Begun, which: int) -> None:
        self._undecided = None
        n = begun.ways[which].n if begun.are_data[which] else None
        self._sides.choose(which)
        self.inputs.rows.choose(begun.call, which)
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
            raise BadSamples(
                "mark_samples names a tensor whose dimension 0 is the samples; this one is a scalar.",
                write=MARK,
            )
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

    def by_evidence(self, nodes: Sequence[Node]) -> dict[Edge, Layout]:
        """Outputs of calls that were not watched, if they depend on rows of an input."""
        told = {node for node in nodes if not is_leaf(node) and self.inputs.rows.are_saved_by(node)}
        found = {**self._known.find(nodes), **self._others.find(nodes)}
        return {
            (node, output): entry.owners
            for (node, output), entry in found.items()
            if not told.isdisjoint(ordered([node]))
        }

    def mismatch(self) -> str:
        """What the model was given, for an error; and what `samples=` says of it."""
        if not self._shapes:
            return "the model was not called in this block"
        last = f"the model was last given {self._shapes}"
        if not isinstance(self._samples, sample_maps.Ids):
            return last
        return f"samples= names positions of shape {tuple(self._samples.given.shape)}; {last}"
