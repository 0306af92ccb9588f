"""Which nodes depend on data, and which on weights alone.

In the graph both look alike: `W.T` and `x.T` are the same node. So the forward is watched, call by call. A tensor is
`weight` (parameters, buffers, and what is computed of them), `made` (by a factory: `zeros`, `randn`, `arange`), `data`
(what the model is given, and what is computed of it), `ids` (whole numbers from the inputs: a token's id carries data
to the embedding that it looks up) or `choice` (whole numbers from floats, such as an argmax: a weight that data has
*chosen* is still a weight).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from unsum.graph.nodes import Node, below, is_leaf, ordered
from unsum.graph.saved import Saved, memory_of, saved_by
from unsum.learn.rows import Rows
from unsum.nested import leaves
from unsum.seams.modes import WatchingMode
from unsum.seams.nodes import next_number, number_of
from unsum.seams.tensors import base_of

# Data may leave torch within a call and come back: as lists, arrays or single numbers.
_LEAVE = {"tolist", "numpy", "__array__", "item", "__float__", "__dlpack__", "__iter__"}
_RETURN = {"tensor", "as_tensor", "asarray", "new_tensor", "from_numpy", "frombuffer", "from_dlpack"}
_CONVERT = {"long", "int", "short", "to", "type", "char", "byte", "floor", "round", "trunc", "ceil", "bool"}
_LIKE_THE_FIRST = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
_PASSED_OVER = {"__set__", "backward", "register_hook", "size", "dim", "stride", "numel", "is_floating_point"}


class _World:
    """What each tensor is, if these of the given tensors are data. As long as it is not known which of them has the
    samples, there is a world for each that may."""

    def __init__(self, kinds: MutableMapping[Tensor, str] | None = None) -> None:
        self.kinds: MutableMapping[Tensor, str] = WeakIdKeyDictionary(kinds)
        self.token = object()  # put down in the nodes that are data here
        self.mixing: list[tuple[str, str, int]] = []  # what mixes samples without a trace, in which module and call
        self.has_left = False  # whether data has left torch in the call under way


class Sides(WatchingMode):
    """Watches what is computed while it is entered, and knows the data-side nodes."""

    def __init__(self, model: nn.Module, saved: Saved) -> None:
        super().__init__()
        self._saved = saved
        self.call: int | None = None  # the outermost call under way
        self._worlds = [_World()]
        self._tokens = {self._worlds[0].token}
        self.mixing = self._worlds[0].mixing
        self._weight = object()  # put down in nodes that depend on parameters alone
        self.is_blind = False  # whether the last forward was not watched
        self.where: Callable[[], str] = str  # the name of the module whose call is under way
        self._model: nn.Module | None = model
        self._parameters: set[int] = set()
        self._own: set[int] = set()  # ids of parameters and buffers
        self._opened = next_number()  # nodes with a lower number were made before
        self.rows: Rows | None = None  # of inputs, to be found again in what is made of them

    def _prepare(self) -> None:
        """What hangs on modules is a weight. Looked up when the first call is seen: most blocks watch none."""
        if self._model is not None:
            for module in self._model.modules():
                for tensor in _tensors(dict(vars(module))):
                    for world in self._worlds:
                        world.kinds.setdefault(tensor, "weight")
            self._parameters = set(map(id, self._model.parameters()))
            self._own = self._parameters | set(map(id, self._model.buffers()))
            self._model = None

    def is_data(self, node: Node) -> bool:
        """Whether what flows through this node depends on data."""
        return not self._tokens.isdisjoint(node.metadata.get("unsum.data", ()))

    def is_data_in(self, node: Node, world: int) -> bool:
        """The same, if the last call is read in this way."""
        return self.is_data(node) or self._worlds[world].token in node.metadata.get("unsum.data", ())

    def is_weight(self, node: Node) -> bool:
        """Whether it was seen that what flows through this node depends on parameters alone."""
        return self._weight in node.metadata.get("unsum.weight", ())

    def is_shared(self, node: Node, world: int = 0) -> bool:
        """Whether it was seen that what flows through this node depends on nothing that has samples, if the last call
        is read so."""
        shared = node.metadata.get("unsum.shared", ())
        return self.is_weight(node) or self._worlds[world].token in shared or not self._tokens.isdisjoint(shared)

    def begin(self, call: int, worlds: int = 1) -> None:
        """An outermost call begins. It may be read in so many ways: `choose` says in which."""
        self.call = call
        if worlds > 1:
            self._prepare()
            self._worlds = [_World(self._worlds[0].kinds) for _ in range(worlds)]
        for world in self._worlds:
            world.has_left = False

    def choose(self, which: int) -> None:
        """The last call that could be read in several ways is to be read in this one."""
        self._worlds = [self._worlds[which]]
        self._tokens.add(self._worlds[0].token)
        self.mixing += self._worlds[0].mixing
        self._worlds[0].mixing = self.mixing

    def given(self, tensor: Tensor, *, has_samples: bool, is_first: bool, world: int = 0) -> None:
        """A tensor is handed to the model. Positions (`arange(T)`) are no data, even if T is the number of samples,
        unless they are the first thing that the model is given."""
        self._prepare()
        kinds = self._worlds[world].kinds
        if kinds.get(tensor) == "weight" and id(tensor) not in self._own and not tensor.requires_grad:
            del kinds[tensor]  # a model may keep what it was given
        if tensor not in kinds and not is_first and not _is_real(tensor) and counts(tensor):
            kinds[tensor] = "positions"  # made before anybody watched
        if kinds.get(tensor) not in ("weight", "positions"):
            kinds[tensor] = ("data" if _is_real(tensor) else "ids") if has_samples else "made"

    def is_same(self, copy: Tensor, tensor: Tensor) -> None:
        """A copy (with gradients) that was made unseen is what the tensor is, and so is its node. A tensor that was
        itself made unseen is a weight if it is a view of one."""
        self._prepare()
        node: Node = tensor.grad_fn
        other: Node = copy.grad_fn
        for world in self._worlds:
            if tensor not in world.kinds and self._is_view_of_parameter(node):
                world.kinds[tensor] = "weight"
                _note(node, "weight", self._weight)
            if tensor in world.kinds:
                world.kinds[copy] = world.kinds[tensor]
        for side in ("unsum.data", "unsum.weight", "unsum.shared"):
            if side in node.metadata:
                other.metadata[side] = set(node.metadata[side])

    def _is_view_of_parameter(self, node: Node) -> bool:
        """Whether nothing but a parameter and numbers went into this node's result."""
        while not is_leaf(node):
            nexts = below(node)
            if len(nexts) != 1 or any(True for _ in saved_by(node)):
                return False
            node = nexts[0][1]
        return id(node.variable) in self._parameters

    def is_given_data(self, tensors: Iterable[Tensor], world: int = 0) -> bool:
        """Whether any of these is data."""
        return any(self._kind(tensor, self._worlds[world]) in ("data", "ids") for tensor in tensors)

    def _kind(self, tensor: Tensor, world: _World) -> str:
        known = world.kinds.get(tensor)
        if known is None:
            known = "data" if _is_real(tensor) else "ids"
            if tensor.grad_fn is not None and self._is_of_parameters(tensor.grad_fn):
                known = world.kinds[tensor] = "weight"  # computed before this block, not handed to the model: cached
            elif tensor.grad_fn is None and not is_lazy(tensor) and not tensor.dim():
                known = "made"  # one number, of a scripted function, say
        return known

    def _is_of_parameters(self, top: Node) -> bool:
        if number_of(top) >= self._opened:
            return False  # made since the block began, by something that is not seen: a custom Function, a thread
        leaves = [node for node in ordered([top]) if is_leaf(node)]
        return bool(leaves) and all(id(leaf.variable) in self._parameters for leaf in leaves)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_over:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _PASSED_OVER:
            if name == "__set__" and getattr(getattr(func, "__self__", None), "__name__", "") == "data":
                self._note_replaced(*args)
            return func(*args, **kwargs)
        self._prepare()
        inputs = list(_tensors((args, kwargs)))
        # Inside a custom Function's forward torch may hold a lock while it asks for the very grad_fn: do not read it.
        records = torch.is_grad_enabled()
        before = [self._before(name, inputs, world, records) for world in self._worlds]
        with self._saved.over_checkpoint():
            result = func(*args, **kwargs)
        if self.rows is not None and inputs:
            out = kwargs.get("out")
            for tensor in _tensors(out) if out is not None else inputs[:1] if _writes(name) else ():
                self.rows.written(name if out is None else "", tensor, [t for t in inputs if t is not tensor])
        made = result[0] if name == "_pack_padded_sequence" else result
        if self.rows is not None and inputs and isinstance(made, Tensor) and not made.requires_grad:
            self.rows.follow(func, name, args, kwargs, made)
        if self.rows is not None and records:
            at = before[0][1]
            tops = [tensor.grad_fn for tensor in _tensors(result) if tensor.grad_fn is not None]
            made = functools.partial(_made_by, [top for top in tops if top not in at], at)
            self.rows.find_copies(inputs, made)
        for world, (kinds, at, memory) in zip(self._worlds, before, strict=True):
            if name in _LEAVE and self.call is not None and kinds & {"data", "ids"}:
                world.has_left = True
            written = self._note_written(name, inputs, kinds, world)
            if written is not None and records and written.grad_fn is not None and written.grad_fn not in at:
                self._note_data(written.grad_fn, at, memory, world)
            self._note_mixing(name, args, kwargs, kinds, result, world)
            self._note_result(name, result, kinds, at, memory, world, records)
        return result

    def _before(
        self, name: str, inputs: list[Tensor], world: _World, records: bool
    ) -> tuple[set[str], dict[Node, bool], set[int | None]]:
        """What is to be known before a call is made: the kinds of its inputs, their nodes (and whether these are data),
        and where data lies."""
        kinds = self._kinds_of(name, inputs, world)
        at = {t.grad_fn: self._kind(t, world) == "data" for t in inputs if t.grad_fn is not None} if records else {}
        for node, is_data in at.items():
            if is_data and (isinstance(node, BackwardCFunction) or node.name().endswith("CopySlices")):
                _note(node, "data", world.token)  # made by something that is not seen
        return kinds, at, {memory_of(t) for t in inputs if self._kind(t, world) in ("data", "ids")} - {None}

    def _note_result(
        self, name: str, result: Any, kinds: set[str], at: dict[Node, bool], memory: set[int | None],
        world: _World, records: bool,
    ) -> None:  # fmt: skip
        for tensor in _tensors(result):
            if isinstance(tensor, nn.Parameter):
                continue
            kind = self._result_kind(name, kinds, tensor, world)
            world.kinds[tensor] = kind
            if not records or tensor.grad_fn is None or tensor.grad_fn in at:
                continue
            if kind == "data":
                self._note_data(tensor.grad_fn, at, memory, world)
            elif kind == "made":
                _note(tensor.grad_fn, "shared", world.token)
            elif kind == "weight":
                for node in ordered([tensor.grad_fn], stop=lambda n: n in at or is_leaf(n)):
                    if node not in at and not is_leaf(node):
                        _note(node, "weight", self._weight)

    def _result_kind(self, name: str, kinds: set[str], tensor: Tensor, world: _World) -> str:
        is_real = _is_real(tensor)
        if not is_real and (name == "arange" or kinds == {"positions"}):
            return "positions"
        if name in _RETURN and not kinds - {"made"} and world.has_left and tensor.numel() > 1:
            return "data" if is_real else "ids"
        if is_real and kinds & {"data", "ids"}:
            return "data"
        if is_real and "choice" in kinds and (name in _CONVERT or "weight" not in kinds):
            return "data"  # a mask, as numbers; but a weight that was chosen stays one
        if is_real or not kinds & {"data", "choice", "ids"}:
            return "weight" if kinds == {"weight"} else "made"
        if "data" in kinds and tensor.dtype != torch.bool and name in _CONVERT:
            return "ids"
        return "choice" if kinds & {"data", "choice"} else "ids"

    def _kinds_of(self, name: str, inputs: list[Tensor], world: _World) -> set[str]:
        if name.endswith("_like") or name.startswith("new_"):
            return set()  # `new_tensor` too: what it is given is a list, or a copy of what left
        return {self._kind(t, world) for t in (inputs[:1] if name in _LIKE_THE_FIRST else inputs)}

    def _note_data(self, top: Node, at: dict[Node, bool], memory: set[int | None], world: _World) -> None:
        """The nodes that one call has made: data if they lead to a data argument, or saved a view of one. An argument
        that requires gradients, and was not computed, is a leaf."""
        _note(top, "data", world.token)
        inner = ordered([top], stop=lambda n: n in at or is_leaf(n))
        data = {node for node, is_data in at.items() if is_data}
        # A parameter is no data, and FSDP2's have no memory at times.
        leaves = [node for node in inner if is_leaf(node) and not isinstance(node.variable, nn.Parameter)]
        data |= {node for node in leaves if (where := memory_of(node.variable)) and where in memory}
        for node in reversed(inner):
            if node in at or is_leaf(node):
                continue
            if any(child in data for _, child, _ in below(node)) or _saved(node) & memory:
                data.add(node)
                _note(node, "data", world.token)

    def _note_replaced(self, target: Tensor, value: Tensor) -> None:
        """`target.data = value`: the one is now what the other is."""
        for world in self._worlds:
            if not isinstance(target, nn.Parameter):
                world.kinds[target] = self._kind(value, world)

    def _note_written(self, name: str, inputs: list[Tensor], kinds: set[str], world: _World) -> Tensor | None:
        """What is written into becomes data, if data is written: `buffer[:] = x`, `buffer.copy_(x)`. Returns it."""
        if not _writes(name) or not inputs or not (kinds & {"data", "ids"} or (world.has_left and kinds == {"made"})):
            return None
        for target in (inputs[0], base_of(inputs[0])):
            if target is not None and not isinstance(target, nn.Parameter):
                world.kinds[target] = "data" if _is_real(target) else "ids" if "ids" in kinds else "choice"
        return inputs[0]

    def _note_mixing(self, name: str, args: Any, kwargs: Any, kinds: set[str], result: Any, world: _World) -> None:
        """Batch norm in training that leaves no node in the graph. Noted within calls of the model alone: what another
        model does in the loss's code is not this one's."""
        if "batch_norm" not in name or self.call is None or "data" not in kinds:
            return
        trains = next((given for given in (*args, *kwargs.values()) if isinstance(given, bool)), False)
        if bool(kwargs.get("training", trains)) and all(t.grad_fn is None for t in _tensors(result)):
            world.mixing.append(("batch_norm in training", self.where(), self.call))


def _writes(name: str) -> bool:
    """Whether a function writes to its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _made_by(tops: list[Node], at: Container[Node]) -> list[Node]:
    """The nodes that a call has made: from these down to those of its arguments."""
    inner = ordered(tops, stop=lambda node: node in at or is_leaf(node))
    return [node for node in inner if node not in at and not is_leaf(node)]


def _note(node: Node, side: str, token: object) -> None:
    """Noted in the node: to hold the nodes would hold the graph."""
    node.metadata.setdefault(f"unsum.{side}", set()).add(token)


def counts(tensor: Tensor) -> bool:
    """Whether these are whole numbers in order, as `arange` makes them."""
    if tensor.dtype == torch.bool or not tensor.dim() or tensor.numel() < 2:
        return False
    return torch.equal(tensor, torch.arange(tensor.numel(), device=tensor.device).to(tensor).view(tensor.shape))


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _tensors(value: Any) -> Iterator[Tensor]:
    return (tensor for _, tensor in leaves(value))


def _saved(node: Node) -> set[int | None]:
    """Where the tensors lie that a node has saved."""
    return {memory_of(tensor) for tensor in saved_by(node)} - {None}
