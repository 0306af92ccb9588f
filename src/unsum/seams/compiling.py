"""Compiled modules: with what the user has compiled them."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_HOOKS_IN_PLACE = importlib.util.find_spec("torch._higher_order_ops.register_hook") is not None  # as in torch 2.13
dynamic_of: Callable[[Any], bool | None] = attrgetter("_dynamic")  # whether sizes may change


def allow_in_graph(function: Callable[..., Any]) -> None:
    """Torch writes down a call of this function as it is, and does not look inside."""
    torch._dynamo.allow_in_graph(function)


def run_as_it_is(function: Callable[..., Any]) -> None:
    """Torch does not compile calls of this function by itself; inside what it compiles, it reads the function."""
    torch._dynamo.eval_frame.skip_code(function.__code__)


def comparing_hooks() -> contextlib.AbstractContextManager[Any]:
    """What torch compiles for a module runs for others that are alike, whatever hooks they have; not within this."""
    return torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)  # type: ignore[no-any-return, attr-defined]


def uses_cuda_graphs() -> bool:
    """Whether torch's own backend is set to record CUDA graphs."""
    inductor: Any = sys.modules.get("torch._inductor.config")
    return inductor is not None and bool(inductor.triton.cudagraphs)


def records_cuda_graphs(backend: Any) -> bool:
    """Whether this is torch's backend `cudagraphs`, which records all of a graph at once."""
    return getattr(backend, "compiler_name", None) == "cudagraphs"


def call_uncompiled(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a module as if `module.compile()` had not been called."""
    return module._call_impl(*args, **kwargs)


def is_compiled_graph(node: Any) -> bool:
    """Whether a node of the autograd graph is a whole graph that torch has compiled."""
    return bool(node.name() == "CompiledFunctionBackward")


def is_too_often(error: BaseException) -> bool:
    """Whether torch refuses to compile a function once more, for other sizes or values."""
    errors: Any = sys.modules.get("torch._dynamo.exc")
    return errors is not None and isinstance(error, errors.FailOnRecompileLimitHit)


def is_graph_break(error: BaseException) -> bool:
    """Whether torch cannot compile a model as one graph."""
    errors: Any = sys.modules.get("torch._dynamo.exc")
    return errors is not None and isinstance(error, errors.Unsupported | errors.UserError)


def apart() -> dict[str, Any]:
    """An option for torch.compile: what it compiles of functions does not count for others who compile them too."""
    known = inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if "isolate_recompiles" in known else {}


def flattened(arguments: Any) -> tuple[list[Any], str]:
    """All values in nested arguments, as torch's compiler finds them, and how they are nested."""
    values, nesting = pytree.tree_flatten(arguments)
    return values, str(nesting)


def backend_of(context: Any) -> Any:
    """The backend with which the user has compiled."""
    inner = context.callback
    while hasattr(inner, "_torchdynamo_orig_backend"):
        inner = inner._torchdynamo_orig_backend
    return inner


def compiler_of(module: nn.Module) -> Any | None:
    """Torch's own object with which the user has compiled a module: backend and options; None if it is not found."""
    found = module.__dict__.get("dynamo_ctx")
    compiled: Any = module._compiled_call_impl
    if found is None and compiled is not None:
        cells = [cell.cell_contents for cell in compiled.__closure__ or () if _is_full(cell)]
        found = next((each for each in cells if hasattr(each, "callback") and hasattr(each, "_dynamic")), None)
    return found


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def registers_hook(node: torch.fx.Node) -> bool:
    """Whether a node of a graph that torch compiles registers a hook on a tensor, and hands the tensor on."""
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name in ("register_hook", "_register_hook_trampoline")


def may_stand_for_hook(node: torch.fx.Node) -> bool:
    """Whether a node may stand for a hook that the model has put on a tensor. Before 2.13 torch writes such a hook down
    as a function that returns its argument, where the tensor is made: whoever read the tensor before reads the
    function's result as well."""
    applied: Any = node.args[0] if node.target is operator.getitem else None
    if _HOOKS_IN_PLACE or getattr(getattr(applied, "target", None), "__name__", "") != "autograd_function_apply":
        return False
    body: Any = getattr(node.graph.owning_module, applied.args[0].target)
    called = {each.target for each in body.graph.nodes if each.op.startswith("call")}
    return called <= {"view_as", torch._C._set_grad_enabled}


@dataclass(frozen=True)
class Found:
    """A size in a graph that torch compiles: as the graph has it, and where to read it from the graph's inputs."""

    value: Any  # a number, or a symbol
    where: int | tuple[int, int]  # the number itself, or which input and which of its dimensions


def size_among(graph: torch.fx.GraphModule, size: int) -> Found | None:
    """The symbol for a size among those of a graph's inputs; the number itself where it has none. None if several
    symbols stand for that number now, and it cannot be told which is meant."""
    given = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    found: dict[Any, Found] = {}
    for k, value in enumerate(given):
        for dim, each in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(each, torch.SymInt) and each.node.hint == size:
                found.setdefault(each.node.expr, Found(each, (k, dim)))
    return next(iter(found.values()), Found(size, size)) if len(found) < 2 else None


@dataclass
class Shapes:
    """Shapes of tensors in a graph that torch compiles, as functions of the sizes of the graph's inputs."""

    _shapes: Sequence[tuple[Any, ...]]  # numbers, and expressions of symbols
    _where: Mapping[Any, tuple[int, int | None]]  # of each symbol, the input that shows it, and which of its dimensions
    _known: dict[tuple[int, ...], list[tuple[int, ...]]]  # by the sizes

    @staticmethod
    def among(graph: torch.fx.GraphModule, shapes: Sequence[Sequence[Any]]) -> Shapes | None:
        """None if a size is not known before the graph runs."""
        found: dict[Any, tuple[int, int | None]] = {}
        for k, node in enumerate(graph.graph.find_nodes(op="placeholder")):
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymInt):
                found.setdefault(value.node.expr, (k, None))
            for dim, each in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(each, torch.SymInt):
                    found.setdefault(each.node.expr, (k, dim))
        told = [tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in shape) for shape in shapes]
        symbols = {symbol for shape in told for size in shape for symbol in getattr(size, "free_symbols", ())}
        return Shapes(told, {s: found[s] for s in symbols}, {}) if symbols <= found.keys() else None

    def of(self, given: Sequence[Any]) -> list[tuple[int, ...]]:
        """The shapes for these inputs."""
        sizes = tuple(given[k] if dim is None else given[k].shape[dim] for k, dim in self._where.values())
        if sizes not in self._known:
            values = dict(zip(self._where, sizes, strict=True))
            number = lambda size: size if isinstance(size, int) else int(size.xreplace(values))
            while len(self._known) >= 64:
                del self._known[next(iter(self._known))]
            self._known[sizes] = [tuple(map(number, shape)) for shape in self._shapes]
        return self._known[sizes]


def with_inputs(
    graph: torch.fx.GraphModule,
    tensors: Sequence[tuple[Sequence[Any], torch.dtype, bool]],
    device: torch.device,
    taken_by: Callable[..., Any],
) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """A copy of a graph (torch reads its own once more) with further inputs: their shapes, dtypes, and whether they
    have gradients. The function that takes them is called before all else; what it returns is the last output. Also
    returns stand-ins for the inputs."""
    mode: Any = torch._guards.detect_fake_mode()  # of the compilation under way
    with mode:
        given = [_stand_in(tuple(shape), dtype, device, needs=needs) for shape, dtype, needs in tensors]
        taken = torch.empty(1, dtype=given[0].dtype, device=device)
    made = copied(graph)
    nodes = list(made.graph.nodes)
    with made.graph.inserting_before(next(node for node in nodes if node.op != "placeholder")):
        added = [made.graph.placeholder(f"unsum_tap_{k}") for k in range(len(given))]
        call = made.graph.call_function(taken_by, tuple(added))
    for node, value in zip((*added, call), (*given, taken), strict=True):
        node.meta["example_value"] = value
        node._dynamo_source = None  # type: ignore[attr-defined]
    nodes[-1].args = ((*nodes[-1].args[0], call),)
    made.recompile()
    return made, given


def _stand_in(shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device, *, needs: bool) -> torch.Tensor:
    """Of a further input. What has gradients is a tap: one number, spread over its shape, and compiled code may ask how
    it lies in memory."""
    if not needs:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty((), dtype=dtype, device=device).expand(shape).requires_grad_()


def copied(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same graph, with what dynamo has noted of it."""
    whole, places = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    whole.output(whole.graph_copy(graph.graph, places))
    for before, after in places.items():
        if hasattr(before, "_dynamo_source"):
            after._dynamo_source = before._dynamo_source  # type: ignore[attr-defined]
    made = torch.fx.GraphModule(graph, whole)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(graph, name):
            setattr(made, name, getattr(graph, name))
    return made
