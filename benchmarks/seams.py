"""What the ways in which unsum reaches into torch cost, beside what torch offers in public for the same.

    python benchmarks/seams.py [--quick] [--json PATH]

Each row does one thing in several ways by turns, on a small GPT or on its layers; the first way is the one that unsum
uses. The figures are microseconds, and the ratio of each way to the first, turn by turn (median and quartiles).
`docs/torch_internals.md` says what each way is for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from measuring import machine, options_of, parsed, ratios, write
from models import GPT
from unsum import seams
from unsum.kernels.kept_gates import kept_gates
from unsum.kernels.recurrence import Recurrence, begun, lstm
from unsum.seams.operators import onednn_lstm
from unsum.seams.tensors import add_to, copies
from unsum.seams.tracing import is_traced

Way = Callable[[], Any]


class Watcher:
    """Wants to know of the outermost call alone, as a block does when everything is learnt."""

    passes = False

    def before_call(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        self.passes = True
        return True

    def after_call(self, output: Any) -> None:
        self.passes = False

    def instead_of_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return seams.NOTHING


class Nothing:
    """A block that does nothing when a backward begins or ends."""

    def before_backward(self, call: seams.Backward) -> None: ...

    def after_backward(self, *, failed: bool) -> None: ...


class Passing(TorchFunctionMode):
    """Sees every call of torch, to find `backward` among them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def nothing(*args: Any) -> None: ...


def watched_forward(model: nn.Module, x: Tensor) -> Way:
    """A forward of which every call of a module is known, with the opening and closing of the watch."""

    def run() -> None:
        undo = seams.on_calls(Watcher())
        try:
            model(x)
        finally:
            undo()

    return run


def forwards(model: nn.Module, x: Tensor) -> dict[str, Way]:
    """The same, with what torch offers."""

    def hooks() -> None:
        handles: list[Any] = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(nothing, with_kwargs=True))
            handles.append(module.register_forward_hook(nothing, always_call=True))
        try:
            model(x)
        finally:
            for handle in handles:
                handle.remove()

    def everywhere() -> None:
        before = nn.modules.module.register_module_forward_pre_hook(nothing)
        after = nn.modules.module.register_module_forward_hook(nothing, always_call=True)
        try:
            model(x)
        finally:
            before.remove()
            after.remove()

    return {
        "another code for nn.Module.__call__": watched_forward(model, x),
        "nothing is watched": lambda: model(x),
        "hooks on every module": hooks,
        "hooks on all modules of the process": everywhere,
    }


def classes(model: nn.Module, x: Tensor) -> dict[str, Way]:
    """The same, with another function in the class. It makes every other way slower that runs by turns with it."""

    def attribute() -> None:
        call, watcher = nn.Module.__call__, Watcher()

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if watcher.passes or not watcher.before_call(module, args, kwargs):
                return call(module, *args, **kwargs)
            try:
                return call(module, *args, **kwargs)
            finally:
                watcher.after_call(None)

        nn.Module.__call__ = watched  # type: ignore[method-assign]
        try:
            model(x)
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    return {
        "another code for nn.Module.__call__": watched_forward(model, x),
        "nothing is watched": lambda: model(x),
        "another function in the class": attribute,
    }


def backwards(model: nn.Module, x: Tensor) -> dict[str, Way]:
    """A step whose backward is caught."""

    def step() -> None:
        model(x).square().sum().backward()

    def caught() -> None:
        block = Nothing()
        blocks = seams.open_block(block)
        try:
            step()
        finally:
            seams.close_block(block, blocks)

    def mode() -> None:
        with Passing():
            step()

    return {"another function for the engine": caught, "nothing is caught": step, "a TorchFunctionMode": mode}


def module_hooks(model: nn.Module) -> dict[str, Way]:
    """Two hooks on every linear, registered and removed."""
    linears, hook = [module for module in model.modules() if isinstance(module, nn.Linear)], seams.inert

    def ours() -> None:
        keys = [seams.on_call(module, hook, hook) for module in linears]
        for module, key in zip(linears, keys, strict=True):
            seams.off_call(module, key)

    def public() -> None:
        handles: list[Any] = []
        for module in linears:
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            handles.append(module.register_forward_hook(hook, always_call=True))
        for handle in handles:
            handle.remove()

    return {"written into the dictionaries": ours, "register_forward_hook": public}


def tensor_hooks() -> dict[str, Way]:
    """The first hook on each of a hundred tensors, registered and removed; the tensors are made in both ways."""
    x, hook = torch.ones(2, requires_grad=True), seams.inert

    def ours() -> None:
        for handle in [seams.on_gradient(x + 1, hook) for _ in range(100)]:
            handle.remove()

    def public() -> None:
        for handle in [(x + 1).register_hook(hook) for _ in range(100)]:
            handle.remove()

    return {
        "_register_hook_dict": ours,
        "register_hook": public,
        "no hook, the tensors alone": lambda: [x + 1 for _ in range(100)],
    }


def sums() -> dict[str, Way]:
    """A hundred small gradients added to others, and copied."""
    mine, theirs = [torch.ones(64) for _ in range(100)], [torch.ones(64) for _ in range(100)]

    def ours() -> None:
        add_to(mine, theirs)
        copies(theirs)

    def public() -> None:
        for one, other in zip(mine, theirs, strict=True):
            one.add_(other)
        [one.clone() for one in theirs]

    return {"_foreach_add_, _foreach_clone": ours, "add_ and clone, one by one": public}


def questions() -> dict[str, Way]:
    """Whether this thread is in a trace, asked a hundred times."""
    context, symbolic = torch._guards.TracingContext.try_get, torch.fx._symbolic_trace.is_fx_symbolic_tracing
    ways: list[Callable[[], Any]] = [
        torch.compiler.is_compiling, torch._C._functorch.peek_interpreter_stack, torch.jit.is_tracing, context, symbolic
    ]  # fmt: skip

    def plainly() -> None:
        for _ in range(100):
            any(way() for way in ways)

    return {"is_traced": lambda: [is_traced() for _ in range(100)], "torch's own questions": plainly}


def gates() -> dict[str, Way]:
    """The gradient at the gates of an LSTM (T=64, B=16, 256 units), from gates that are read and checked against the
    states, and from gates that are computed again."""
    units, (times, batch) = 256, (64, 16)
    x, first, cell = torch.randn(times, batch, units), torch.zeros(batch, units), torch.zeros(batch, units)
    weights = torch.randn(4 * units, units) / 16, torch.randn(4 * units, units) / 16
    biases = torch.randn(4 * units), torch.randn(4 * units)
    found = onednn_lstm(x, weights, biases, first, cell, is_reversed=False)
    if found is None:
        return {}
    states, workspace = found
    layer, arrived = Recurrence(x, begun(states, first, is_reversed=False), weights, biases), torch.randn_like(states)

    def read() -> None:
        kept = kept_gates(workspace, states, is_reversed=False)
        assert kept is not None
        lstm(replace(layer, kept=kept), cell, arrived, None, None)

    return {
        "gates read where oneDNN keeps them": read,
        "gates computed again": lambda: lstm(layer, cell, arrived, None, None),
    }


def rows() -> dict[str, dict[str, Way]]:
    torch.manual_seed(0)
    model = GPT(width=32, depth=4, heads=2, vocabulary=50, length=8)
    x = torch.randint(50, (2, 8))
    return {
        "a forward, every call of a module known": forwards(model, x),
        "the same beside another function in the class": classes(model, x),
        "a step, its backward caught": backwards(model, x),
        "two hooks on every linear": module_hooks(model),
        "hooks on 100 tensors": tensor_hooks(),
        "100 sums and copies": sums(),
        "100 times: is this a trace?": questions(),
        **({"the backward of an LSTM through time": ways} if (ways := gates()) else {}),
    }


def measured(ways: dict[str, Way], seconds: float) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(5):
            way()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(ways))]) < 20:
        for name, way in ways.items():
            began = time.process_time()
            way()
            times[name].append(time.process_time() - began)
    first = next(iter(ways))
    return {
        name: {"us": round(statistics.median(taken) * 1e6, 1), "over_ours": ratios(times, name, first)}
        for name, taken in times.items()
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", metavar="NAME", help="rows whose name contains this")
    options = parsed(parser)
    report: dict[str, Any] = {"machine": machine("cpu"), "rows": {}}
    for name, ways in rows().items():
        if options.only and options.only not in name:
            continue
        found = report["rows"][name] = measured(ways, options.seconds or (2 if options.quick else 10))
        print(f"{name}\n{'':<45}{'µs':>10}{'over the first':>16}{'quartiles':>16}")
        for way, row in found.items():
            ratio = row["over_ours"]
            print(f"    {way:<41}{row['us']:>10.1f}{ratio['median']:>16.3f}{ratio['low']:>10.3f}{ratio['high']:>8.3f}")
        write(options.json, report)


if __name__ == "__main__":
    main()
