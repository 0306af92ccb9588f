"""The only package that registers anything with PyTorch: hooks on modules and tensors, the watching of `calls`, and the
catching of `backward`.

Everything here is undone by what it returns, or by `close`; nothing is active while no block is open.

**Which block is asked?** The blocks opened by this thread; inside a backward, those of the thread that called it, also
where torch runs backwards inside backwards on another thread, to which it carries its thread-local objects. (Only
there: what is in that store is copied for every node of every backward, of this block and of all later ones.)

**Catching backward.** `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` all end in one function,
which is replaced while a block is open. A TorchFunctionMode would also see them, but every torch call would pass
through it (up to 13 % of a step); replacing the public functions misses whoever imported them by name.

**One thread.** Torch runs the nodes of a GPU's tensors on a thread of its own. Handing Python's lock to and fro for
every hook can cost more than the hooks themselves (a step with norms took twice as long as it does now), so a backward
that a block sees runs on the thread that called it. The order of nodes and streams is the same.

**Compiled models** never call a hook that was added after compilation. While a block is open, compiled code runs
eagerly (`torch.compiler.set_stance`), unless the only block that is open runs it `aside` with taps.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from unsum.errors import UnsupportedError
from unsum.hooks.calls import NOTHING as NOTHING
from unsum.hooks.calls import Watcher as Watcher
from unsum.hooks.calls import is_compiled as is_compiled
from unsum.hooks.calls import on_calls as on_calls
from unsum.hooks.calls import unwatched
from unsum.hooks.listening import count_listening as _count_listening
from unsum.hooks.listening import listened as listened

_KEY = "unsum.blocks"
_lock = threading.Lock()
_gate = threading.RLock()  # held while a compiled model runs compiled: no other thread may open a block meanwhile
_local = threading.local()
_open: list[Block] = []  # in all threads
_undo: list[Callable[[], None]] = []
_engine: list[Callable[..., Any]] = []  # torch's own, while a block is open
_is_in_vmap, _is_in_old_vmap = torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor
_keys = itertools.count(-1, -1)  # of hooks; torch's own are not negative
_is_in_dynamo = torch.compiler.is_dynamo_compiling
_jit_state = torch._C._get_tracing_state
# To ask for functorch's own stack makes one, which every backward of this thread would then copy for every node.
_is_in_functorch = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
)
_guards = getattr(torch._guards, "_TLS", None)  # what `TracingContext` asks, in a tenth of the time


@dataclass(frozen=True)
class Backward:
    """A call of torch's engine."""

    roots: Sequence[Any]
    grads: Sequence[Tensor | None]
    inputs: Sequence[Any]  # to which alone gradients are brought; empty for all leaves
    retain_graph: bool
    create_graph: bool
    accumulates: bool  # adds to .grad, rather than returning gradients


@dataclass(frozen=True)
class Wish:
    """What a block that is alone may ask of a backward."""

    only: Sequence[Tensor] | None = None  # the leaves to which alone torch is to bring gradients
    retain_graph: bool = False  # there will be another backward through it


class Block(Protocol):
    """Something open that wants to know when a backward begins and ends."""

    def before_backward(self, call: Backward) -> Wish | None:
        """What it asks for is done if it is the only block."""
        ...

    def after_backward(self, *, failed: bool) -> None: ...


class Handle(Protocol):
    """What takes a hook away again."""

    def remove(self) -> None: ...


class Hook:
    """A hook of ours. A copy of the module, or a pickle, gets one that does nothing: it is not the user's module."""

    __slots__ = ()
    __torch_unserializable__ = True  # torch warns of other tensor hooks when a tensor is pickled

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_inert, ()


class _Hook(Hook):
    """One that calls a function."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def inert(*args: Any) -> None:
    """What is left of a hook of ours in a copy of the module."""


def _get_inert() -> Callable[..., None]:
    return inert


def on_call(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> list[Handle]:
    """Call `before(args, kwargs)` and `after(output)` around every call of the module, also one that raises (with
    None); a result that is not None takes the place of the arguments or the output."""
    return [
        module.register_forward_pre_hook(_Hook(lambda _, args, kwargs: before(args, kwargs)), with_kwargs=True),
        module.register_forward_hook(_Hook(lambda _, args, output: after(output)), always_call=True),
    ]


def on_plain_call(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> int:
    """Call `before(module, args, kwargs)` and `after(module, args, output)`, both a `Hook`, as torch calls hooks;
    `after` also where the module raises (with None). Returns a key for `off_plain_call`.

    Torch's own registering takes several times as long, for every linear in every step."""
    key = next(_keys)
    module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key] = before, True
    module._forward_hooks[key], module._forward_hooks_always_called[key] = after, True
    return key


def off_plain_call(module: nn.Module, key: int) -> None:
    """Undo `on_plain_call`."""
    module._forward_pre_hooks.pop(key, None)
    module._forward_pre_hooks_with_kwargs.pop(key, None)
    module._forward_hooks.pop(key, None)
    module._forward_hooks_always_called.pop(key, None)


@contextlib.contextmanager
def alone(block: Block) -> Iterator[bool]:
    """Whether no other block is open, in any thread; none is opened within."""
    with _gate:
        yield _open == [block]


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """As if no block were open, for the only one that is: compiled code runs compiled, or is compiled."""
    blocks, _local.blocks = _local.blocks, []
    stance = torch.compiler.set_stance("default")
    try:
        with unwatched():  # what torch compiles must not go through what watches
            yield
    finally:
        stance.__exit__(None, None, None)
        _local.blocks = blocks


class _OnTensor:
    """A hook on a tensor."""

    __slots__ = ("hooks_dict_ref", "key")

    def __init__(self, hooks: OrderedDict[int, Any], key: int) -> None:
        self.hooks_dict_ref, self.key = weakref.ref(hooks), key

    def remove(self) -> None:
        hooks = self.hooks_dict_ref()
        if hooks is not None:
            hooks.pop(self.key, None)


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], Tensor | None], *, first: bool = False) -> Handle:
    """Call `hook` with the gradient of `tensor`, whenever a backward has computed it; first of all hooks on it."""
    # Reading grad_fn renews the graph of a view that was changed through an alias; without it torch crashes here.
    node: Any = tensor.grad_fn
    ours = hook if isinstance(hook, Hook) else _Hook(hook)
    if node is not None and type(tensor) is Tensor and tensor._backward_hooks is None:
        # What `Tensor.register_hook` does with the first hook of a tensor, in a third of the time.
        hooks: OrderedDict[int, Any] = OrderedDict()
        tensor._backward_hooks = hooks
        node._register_hook_dict(tensor)
        key = next(_keys)
        hooks[key] = ours
        return _OnTensor(hooks, key)
    handle = tensor.register_hook(ours)  # type: ignore[no-untyped-call]
    if first:
        registered: Any = tensor._backward_hooks
        for key in [key for key in registered if key != handle.id]:  # torch goes by the order of insertion
            registered[key] = registered.pop(key)
    return handle


def on_node(node: Any, hook: Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...] | None]) -> Handle:
    """Call `hook` with the gradients that arrive at a node of the graph, before it runs."""
    handle: Handle = node.register_prehook(_exactly(hook) if _autocasts() else hook)
    return handle


def on_nodes(nodes: Iterable[Any], hooks: Iterable[Callable[..., Any]]) -> list[Handle]:
    """`on_node` for many nodes, each with its own hook."""
    if _autocasts():
        hooks = map(_exactly, hooks)
    return [node.register_prehook(hook) for node, hook in zip(nodes, hooks, strict=True)]


def _autocasts() -> tuple[str, ...]:
    """The kinds of device on which a backward inside `torch.autocast` would round what we compute."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return ()
    return tuple(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    """What is computed within is not rounded by a `torch.autocast` of the user's."""
    kinds = _autocasts()
    if not kinds:
        yield
        return
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _exactly(hook: Callable[..., Any]) -> Callable[..., Any]:
    def exact(*args: Any) -> Any:
        with exactly():
            return hook(*args)

    return exact


def after_node(node: Any, hook: Callable[[tuple[Tensor | None, ...], Any], None]) -> Handle:
    """Call `hook` with the gradients that a node of the graph hands on (and those it got), after it has run."""
    handle: Handle = node.register_hook(hook)
    return handle


def is_dead(handle: Handle) -> bool:
    """Whether the tensor of a handle is gone, and its graph with it."""
    hooks = getattr(handle, "hooks_dict_ref", None)
    return hooks is not None and hooks() is None


def is_batched(tensor: Tensor) -> bool:
    """Whether this is a tensor inside a vmap, which means nothing outside."""
    return _is_in_vmap(tensor) or _is_in_old_vmap(tensor)  # type: ignore[no-any-return]


def none_open() -> bool:
    """Whether no block is open in any thread. Something that `torch.compile` can read."""
    return not _open


def here() -> Sequence[Block]:
    """The blocks that see what happens now, in this thread."""
    own: list[Block] = getattr(_local, "blocks", [])
    if own or not torch._C._is_key_in_tls(_KEY):
        return own
    return torch._C._get_obj_in_tls(_KEY)  # type: ignore[no-any-return]


def are_here(blocks: Sequence[Block] | None) -> bool:
    """Whether these, as `open_block` has given them, are the blocks that see what this thread does now; None for a
    block that is closed."""
    return blocks is not None and getattr(_local, "blocks", None) is blocks


def open_block(block: Block) -> list[Block]:
    """Make `block` see what this thread does from now on. Returns the list to hand to `close_block`."""
    with _gate, _lock:
        if not _open:
            _begin()
        _open.append(block)
    if not hasattr(_local, "blocks"):
        _local.blocks = []
    blocks: list[Block] = _local.blocks
    blocks.append(block)
    return blocks


def close_block(block: Block, blocks: list[Block]) -> None:
    """Undo `open_block`, from any thread and in any order."""
    blocks.remove(block)
    with _lock:
        _open.remove(block)
        if not _open:
            while _undo:
                _undo.pop()()


def count_listening() -> Callable[[], None]:
    """Count from now on how often the user listens (`listened`). Returns what ends it."""
    return _count_listening(_Hook)


def _begin() -> None:
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward
    _engine[:] = [engine]

    def caught(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        stand_in = getattr(_local, "stand_in", None)
        if stand_in is not None:
            return stand_in(roots, args[0], args[3], bool(kwargs.get("accumulate_grad", False)))
        return _backward(engine, roots, args, kwargs)

    def restore() -> None:
        if autograd._engine_run_backward is caught:
            autograd._engine_run_backward = engine

    autograd._engine_run_backward = caught
    _undo.append(restore)
    if "torch._dynamo" in sys.modules:
        stance = torch.compiler.set_stance("force_eager")
        stance.__enter__()
        _undo.append(lambda: stance.__exit__(None, None, None))


def _backward(engine: Callable[..., Any], roots: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the engine; a backward inside a backward (reentrant checkpoints) belongs to the outer one."""
    blocks = list(here())
    if not blocks:
        return engine(roots, *args, **kwargs)
    outer = torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None
    adds = bool(kwargs.get("accumulate_grad", False))
    call = Backward(roots, args[0], args[3], bool(args[1]), bool(args[2]), adds)
    begun: list[Block] = []
    failed = True
    _local.depth = depth = getattr(_local, "depth", 0) + 1
    if depth > 1:  # torch may run backwards inside backwards on a thread of their own, if there are many
        _stash(blocks)
    try:
        for block in blocks:
            begun.append(block)
            with exactly():
                wish = block.before_backward(call)
            if wish is not None and len(blocks) == 1:
                inputs = args[3] if wish.only is None else tuple(wish.only)
                args = (args[0], call.retain_graph or wish.retain_graph, args[2], inputs, *args[4:])
        with torch.autograd.set_multithreading_enabled(False):
            result = engine(roots, *args, **kwargs)
        failed = False
        return result
    finally:
        _local.depth = depth - 1
        if depth > 1:
            _stash(outer)
        for block in begun:
            with exactly():
                block.after_backward(failed=failed)


def unseen_backward(
    edges: Sequence[Any], grads: Sequence[Tensor], inputs: Sequence[Any], *, retain_graph: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of `inputs`, by a backward of ours that no block of this thread sees; no `.grad` is touched. Hooks
    on tensors in between fire."""
    own, _local.blocks = getattr(_local, "blocks", []), []
    try:
        with torch.autograd.set_multithreading_enabled(False):
            return _engine[0](  # type: ignore[no-any-return]
                tuple(edges), tuple(grads), retain_graph, False, tuple(inputs),
                allow_unreachable=True, accumulate_grad=False,
            )  # fmt: skip
    finally:
        _local.blocks = own


@contextlib.contextmanager
def instead_of_backward(function: Callable[..., Any]) -> Iterator[None]:
    """In this thread, `function(roots, grads, inputs, accumulates)` is called instead of torch's engine."""
    before = getattr(_local, "stand_in", None)
    _local.stand_in = function
    try:
        yield
    finally:
        _local.stand_in = before


def watch(mode: TorchFunctionMode) -> None:
    """Let a mode see every torch call of this thread. It goes below the user's own modes, so that these may be left
    while it is on."""
    above = [_pop_mode() for _ in range(_len_torch_function_stack())]
    for each in (mode, *reversed(above)):
        _push_mode(each)


def unwatch(mode: TorchFunctionMode) -> None:
    """Undo `watch`."""
    above = [_pop_mode() for _ in range(_len_torch_function_stack())]
    for each in reversed(above):
        if each is not mode:
            _push_mode(each)


def _stash(blocks: Sequence[Block] | None) -> None:
    """Put the blocks where torch carries them to the threads that run this backward; None takes them away."""
    if blocks is None and hasattr(torch._C, "_remove_obj_from_tls"):
        # Torch warns that an object left there when a thread ends can deadlock. (2.11 cannot take it away.)
        torch._C._remove_obj_from_tls(_KEY)
        return
    kept: Sequence[Block] = () if blocks is None else blocks
    if _stash_borrows():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    torch._C._stash_obj_in_tls(_KEY, kept)


@functools.cache
def _stash_borrows() -> bool:
    """Whether torch forgets to count the reference that it keeps (2.11 does), and later gives back one too many."""
    probe = object()
    before = sys.getrefcount(probe)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    torch._C._stash_obj_in_tls(f"{_KEY}.probe", probe)
    return sys.getrefcount(probe) == before + 1


def _context() -> Any:
    """What torch knows of the compilation or export that this thread is in."""
    return torch._guards.TracingContext.try_get() if _guards is None else _guards.__dict__.get("tracing_context")


def is_traced() -> bool:
    """Whether a hook would be baked into a trace now, or would see tensors that mean nothing afterwards."""
    return (
        _is_in_dynamo()  # first: torch may be reading these lines
        or _is_in_functorch()
        or _jit_state() is not None
        or _context() is not None
        or ((fx := sys.modules.get("torch.fx._symbolic_trace")) is not None and fx.is_fx_symbolic_tracing())
    )


def refuse_tracing(name: str) -> None:
    """Raise where a hook would be baked into a trace, or would see tensors that mean nothing afterwards."""
    if not is_traced():
        return
    what = None
    if not _is_in_dynamo() and _is_in_functorch():
        what = "a torch.func transform (vmap, grad, jvp, ...)"
    elif _jit_state() is not None:
        what = "torch.jit.trace"
    elif _is_in_dynamo() or _context() is not None:
        what = "a model that is being compiled or exported"
    elif (fx := sys.modules.get("torch.fx._symbolic_trace")) is not None and fx.is_fx_symbolic_tracing():
        what = "torch.fx tracing"
    if what is not None:
        raise UnsupportedError(
            f"{name}: called inside {what}, where what flows cannot be captured or edited.\n"
            "  leave the transform outside the block, or call the model itself inside it"
        )
