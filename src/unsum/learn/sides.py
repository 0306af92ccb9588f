"""Which nodes depend on data, and which on weights alone.

In the graph both look alike: `W.T` and `x.T` are the same node. So the forward is watched, call by call. A tensor is
`weight` (parameters, buffers, and what is computed of them), `made` (by a factory: `zeros`, `randn`, `arange`), `data`
(what the model is given, and what is computed of it), `ids` (whole numbers from the inputs: a token's id carries data
to the embedding that it looks up) or `choice` (whole numbers from floats, such as an argmax: a weight that data has
*chosen* is still a weight).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from unsum.graph.nodes import Node, below, is_leaf, ordered
from unsum.graph.saved import Saved, memory_of, saved_by
from unsum.learn.rows import Rows
from unsum.nested import leaves
from unsum.seams.nodes import next_number, number_of
from unsum.seams.tensors import base_of

# Data may leave torch within a call and come back: as lists, arrays or single numbers.
_LEAVE = {"tolist", "numpy", "__array__", "item", "__float__", "__dlpack__", "__iter__"}
_RETURN = {"tensor", "as_tensor", "asarray", "new_tensor", "from_numpy", "frombuffer", "from_dlpack"}
_CONVERT = {"long", "int", "short", "to", "type", "char", "byte", "floor", "round", "trunc", "ceil", "bool"}
_ELEMENTWISE = {"to", "float", "double", "half", "bfloat16", "type", "contiguous", "clone", "add", "sub", "mul", "div",
                "true_divide", "__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__", "neg", "clamp",
                "log", "log1p", "exp", "sqrt", "tanh", "abs"}  # fmt: skip
_LIKE_THE_FIRST = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
_PASSED_OVER = {"__set__", "backward", "register_hook", "size", "dim", "stride", "numel", "is_floating_point"}


class Sides(TorchFunctionMode):
    """Watches what is computed while it is entered, and knows the data-side nodes."""

    def __init__(self, model: nn.Module, saved: Saved) -> None:
        super().__init__()
        self._saved = saved
        self.mixing: list[tuple[str, int, int]] = []  # what mixes samples without a trace: what, when, in which call
        self.call: int | None = None  # the outermost call under way
        self._kinds: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
        self._token = object()
        self.is_blind = False  # whether the last forward was not watched
        self._model: nn.Module | None = model
        self._parameters: set[int] = set()
        self._opened = next_number()  # nodes with a lower number were made before
        self._has_left = False  # whether data has left torch in the call under way
        self.rows: Rows | None = None  # of inputs, to be found again in what is made of them number by number

    def _prepare(self) -> None:
        """What hangs on modules is a weight. Looked up when the first call is seen: most blocks watch none."""
        if self._model is not None:
            for module in self._model.modules():
                for tensor in _tensors(dict(vars(module))):
                    self._kinds.setdefault(tensor, "weight")
            self._parameters = set(map(id, self._model.parameters()))
            self._model = None

    def is_data(self, node: Node) -> bool:
        """Whether what flows through this node depends on data."""
        return self._token in node.metadata.get("unsum.data", ())

    def may_be_data(self, node: Node) -> bool:
        """Whether it was not seen that this node does not depend on data."""
        return self.is_blind or self.is_data(node)

    def is_weight(self, node: Node) -> bool:
        """Whether it was seen that what flows through this node depends on parameters alone."""
        return self._token in node.metadata.get("unsum.weight", ())

    def _note(self, node: Node, side: str) -> None:
        # Noted in the node: to hold the nodes would hold the graph.
        node.metadata.setdefault(f"unsum.{side}", set()).add(self._token)

    def begin(self, call: int) -> None:
        """An outermost call begins."""
        self.call, self._has_left = call, False

    def given(self, tensor: Tensor, *, has_samples: bool, is_first: bool) -> None:
        """A tensor is handed to the model. Positions (`arange(T)`) are no data, even if T is the number of samples,
        unless they are the first thing that the model is given."""
        self._prepare()
        if tensor not in self._kinds and not is_first and not _is_real(tensor) and _counts(tensor):
            self._kinds[tensor] = "positions"  # made before anybody watched
        if self._kinds.get(tensor) not in ("weight", "positions"):
            self._kinds[tensor] = ("data" if _is_real(tensor) else "ids") if has_samples else "made"

    def is_no_weight(self, tensor: Tensor) -> bool:
        """Whether this tensor is neither a parameter, nor computed of parameters, nor positions."""
        return self._kinds.get(tensor) not in ("weight", "positions")

    def is_given_data(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any of these is data."""
        return any(self._kind(tensor) in ("data", "ids") for tensor in tensors)

    def _kind(self, tensor: Tensor) -> str:
        known = self._kinds.get(tensor)
        if known is None:
            known = "data" if _is_real(tensor) else "ids"
            if tensor.grad_fn is not None and self._is_of_parameters(tensor.grad_fn):
                known = self._kinds[tensor] = "weight"  # computed before this block, not handed to the model: cached
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
        name = getattr(func, "__name__", "")
        if name in _PASSED_OVER:
            return func(*args, **kwargs)
        self._prepare()
        inputs = list(_tensors((args, kwargs)))
        kinds = self._kinds_of(name, inputs)
        # Inside a custom Function's forward torch may hold a lock while it asks for the very grad_fn: do not read it.
        records = torch.is_grad_enabled()
        at = {t.grad_fn: self._kind(t) == "data" for t in inputs if t.grad_fn is not None} if records else {}
        for node, is_data in at.items():
            if is_data and (isinstance(node, BackwardCFunction) or node.name().endswith("CopySlices")):
                self._note(node, "data")  # made by something that is not seen
        memory = {memory_of(t) for t in inputs if self._kind(t) in ("data", "ids")} - {None}
        with self._saved.over_checkpoint():
            result = func(*args, **kwargs)
        if name in _LEAVE and self.call is not None and kinds & {"data", "ids"}:
            self._has_left = True
        is_like = name in _ELEMENTWISE and bool(inputs) and isinstance(result, Tensor)
        if self.rows is not None and is_like and not result.requires_grad:
            self.rows.follow(inputs[0], result)
        self._note_written(name, inputs, kinds)
        self._note_mixing(name, args, kwargs, kinds, result)
        for tensor in _tensors(result):
            if isinstance(tensor, nn.Parameter):
                continue
            kind = self._result_kind(name, kinds, tensor)
            self._kinds[tensor] = kind
            if not records or tensor.grad_fn is None or tensor.grad_fn in at:
                continue
            if kind == "data":
                self._note_data(tensor.grad_fn, at, memory)
            elif kind == "weight":
                for node in ordered([tensor.grad_fn], stop=lambda n: n in at or is_leaf(n)):
                    if node not in at and not is_leaf(node):
                        self._note(node, "weight")
        return result

    def _result_kind(self, name: str, kinds: set[str], tensor: Tensor) -> str:
        is_real = _is_real(tensor)
        if not is_real and (name == "arange" or kinds == {"positions"}):
            return "positions"
        if name in _RETURN and not kinds - {"made"} and self._has_left and tensor.numel() > 1:
            return "data" if is_real else "ids"
        if is_real and kinds & {"data", "ids"}:
            return "data"
        if is_real and "choice" in kinds and name in _CONVERT:
            return "data"  # a mask, as numbers
        if is_real or not kinds & {"data", "choice", "ids"}:
            return "weight" if kinds == {"weight"} else "made"
        if "data" in kinds and tensor.dtype != torch.bool and name in _CONVERT:
            return "ids"
        return "choice" if kinds & {"data", "choice"} else "ids"

    def _kinds_of(self, name: str, inputs: list[Tensor]) -> set[str]:
        if name.endswith("_like") or name.startswith("new_"):
            return set()  # `new_tensor` too: what it is given is a list, or a copy of what left
        return {self._kind(t) for t in (inputs[:1] if name in _LIKE_THE_FIRST else inputs)}

    def _note_data(self, top: Node, at: dict[Node, bool], memory: set[int | None]) -> None:
        """The nodes that one call has made: data if they lead to a data argument, or saved a view of one."""
        self._note(top, "data")
        inner = ordered([top], stop=lambda n: n in at or is_leaf(n))
        data = {node for node, is_data in at.items() if is_data}
        for node in reversed(inner):
            if node in at or is_leaf(node):
                continue
            if any(child in data for _, child, _ in below(node)) or _saved(node) & memory:
                data.add(node)
                self._note(node, "data")

    def _note_written(self, name: str, inputs: list[Tensor], kinds: set[str]) -> None:
        """What is written into becomes data, if data is written: `buffer[:] = x`, `buffer.copy_(x)`."""
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if not writes or not inputs or not (kinds & {"data", "ids"} or (self._has_left and kinds == {"made"})):
            return
        for target in (inputs[0], base_of(inputs[0])):
            if target is not None and not isinstance(target, nn.Parameter):
                self._kinds[target] = "data" if _is_real(target) else "choice"

    def _note_mixing(self, name: str, args: Any, kwargs: Any, kinds: set[str], result: Any) -> None:
        """Batch norm in training that leaves no node in the graph. Noted within calls of the model alone: what another
        model does in the loss's code is not this one's."""
        if "batch_norm" not in name or self.call is None or "data" not in kinds:
            return
        trains = next((given for given in (*args, *kwargs.values()) if isinstance(given, bool)), False)
        if bool(kwargs.get("training", trains)) and all(t.grad_fn is None for t in _tensors(result)):
            self.mixing.append(("batch_norm in training", next_number(), self.call))


def _counts(tensor: Tensor) -> bool:
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
