"""The blocks that are open, and the catching of `backward`.

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
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import GradientEdge

from unsum.errors import UnsupportedError
from unsum.seams.modes import exactly
from unsum.seams.modules import unwatched
from unsum.seams.tracing import refuse_capturing

_KEY = "unsum.blocks"
_lock = threading.Lock()
_gate = threading.RLock()  # held while a compiled model runs compiled: no other thread may open a block meanwhile


class _Local(threading.local):
    blocks: list[Block] | None = None  # those opened by this thread; None before the first
    depth = 0  # backwards that run inside each other
    is_narrow = False  # whether the one that runs brings gradients to some leaves alone
    stand_in: Callable[..., Any] | None = None  # what is called instead of torch's engine


_local = _Local()
_open: list[Block] = []  # in all threads
_undo: list[Callable[[], None]] = []


@dataclass(frozen=True)
class Backward:
    """A call of torch's engine."""

    roots: Sequence[Any]
    grads: Sequence[Tensor | None]
    inputs: Sequence[Any]  # to which alone gradients are brought; empty for all leaves
    retain_graph: bool
    create_graph: bool
    accumulates: bool  # adds to .grad, rather than returning gradients


class Block(Protocol):
    """Something open that wants to know when a backward begins and ends. One whose `waits_at_parameters` is False does
    not care whether torch brings gradients to parameters. One whose `sets_grad_aside` is True takes every `.grad` away
    while the backward runs, and puts it back. One whose `adds_to_grad` is True adds to it when the backward is over."""

    def before_backward(self, call: Backward) -> Sequence[Tensor | GradientEdge] | None:
        """The leaves to which alone torch is to bring gradients, if no other block waits there; None for all."""
        ...

    def after_backward(self, *, failed: bool) -> None: ...


def none_open() -> bool:
    """Whether no block is open in any thread. Something that `torch.compile` can read."""
    return not _open


def here() -> Sequence[Block]:
    """The blocks that see what happens now, in this thread."""
    own = _local.blocks or []
    if own or not torch._C._is_key_in_tls(_KEY):
        return own
    return torch._C._get_obj_in_tls(_KEY)  # type: ignore[no-any-return]


def is_alone_at_parameters(blocks: Sequence[Block]) -> bool:
    """Whether only one of these blocks cares which gradients torch brings to parameters."""
    return sum(getattr(block, "waits_at_parameters", True) for block in blocks) == 1


def are_here(blocks: Sequence[Block] | None) -> bool:
    """Whether these, as `open_block` has given them, are the blocks that see what this thread does now; None for a
    block that is closed."""
    return blocks is not None and _local.blocks is blocks


def open_block(block: Block) -> list[Block]:
    """Make `block` see what this thread does from now on. Returns the list to hand to `close_block`."""
    with _gate, _lock:
        if not _open:
            _begin()
        _open.append(block)
    if _local.blocks is None:
        _local.blocks = []
    blocks = _local.blocks
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


@contextlib.contextmanager
def inside(blocks: list[Block]) -> Iterator[None]:
    """As if `aside` had not been called: these blocks see what this thread does."""
    before, _local.blocks = _local.blocks, blocks
    try:
        yield
    finally:
        _local.blocks = before


def _begin() -> None:
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def caught(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        stand_in = _local.stand_in
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
    refuse_capturing("backward, with a block of unsum's")
    outer = torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None
    adds = bool(kwargs.get("accumulate_grad", False))
    call = Backward(roots, args[0], args[3], bool(args[1]), bool(args[2]), adds)
    begun: list[Block] = []
    failed = True
    was_narrow = is_narrow()
    _local.depth = depth = _local.depth + 1
    if depth > 1:  # torch may run backwards inside backwards on a thread of their own, if there are many
        _stash(blocks)
    try:
        for block in sorted(blocks, key=_handles_grad, reverse=True):
            begun.append(block)
            with exactly():
                only = block.before_backward(call)
            if only is not None and is_alone_at_parameters(blocks):
                args = (*args[:3], tuple(only), *args[4:])
        _local.is_narrow = bool(args[3])
        with torch.autograd.set_multithreading_enabled(False):
            result = engine(roots, *args, **kwargs)
        failed = False
        return result
    except torch.utils.checkpoint.CheckpointError as error:
        # A tensor was read twice: for a block that did not watch the forward, as one of known calls it does not.
        if "already unpacked" in str(error) and not all(getattr(block, "has_checkpoints", True) for block in begun):
            raise UnsupportedError(
                "the model runs under a checkpoint now, and did not in the steps before, so its forward was not "
                "watched: this one backward cannot be taken apart. The next step can.",
                write="model.zero_grad()  # and run the step again",
            ) from error
        raise
    finally:
        _local.is_narrow = was_narrow
        _local.depth = depth - 1
        if depth > 1:
            _stash(outer)
        _end(begun, failed=failed)


def is_narrow() -> bool:
    """Whether the backward that runs in this thread brings gradients to some leaves alone. Then nodes that are not on
    its way, and are called by hand in this thread, compute nothing."""
    return _local.is_narrow


def _handles_grad(block: Block) -> tuple[bool, bool]:
    """The order in which blocks begin; they end in reverse. The first to take `.grad` away is the last to put it back,
    and blocks that do not, read this backward's there. What a block adds to `.grad` at its end stays there."""
    return getattr(block, "adds_to_grad", False), getattr(block, "sets_grad_aside", False)


def _end(begun: Sequence[Block], *, failed: bool) -> None:
    """Tell all blocks that the backward is over, also where one of them raises. If the backward itself has raised,
    nothing takes the place of its error."""
    error: BaseException | None = None
    has_raised = failed
    for block in reversed(begun):
        try:
            with exactly():
                block.after_backward(failed=failed)
        except BaseException as own:
            failed, error = True, error or own
    if error is not None and not has_raised:
        raise error


@contextlib.contextmanager
def instead_of_backward(function: Callable[..., Any]) -> Iterator[None]:
    """In this thread, `function(roots, grads, inputs, accumulates)` is called instead of torch's engine."""
    before = _local.stand_in
    _local.stand_in = function
    try:
        yield
    finally:
        _local.stand_in = before


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
