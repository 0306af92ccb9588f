"""`gradients`: whose gradient is this?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unsum import hooks
from unsum import samples as sample_maps
from unsum.errors import OptionError, SamplesError, UnsupportedError
from unsum.gathered import Gradients
from unsum.graph.cut import losses_of
from unsum.graph.layout import Layout
from unsum.graph.nodes import Edge, is_leaf, ordered, place
from unsum.graph.probe import state_set_aside
from unsum.graph.saved import Saved
from unsum.graph.sides import Sides
from unsum.keeping import current_scale
from unsum.plan.forward import Forward
from unsum.plan.learn import Plan, Setting, inside, learn, number_of_samples
from unsum.plan.run import Parts, Run, unclear, wide
from unsum.sites import Names


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    samples: sample_maps.Samples
    exact: bool  # samples may interact
    verify: bool
    mean: bool  # the loss was a mean over samples
    params: str
    grad: bool
    scaler: Any


class GradientsBlock:
    """The block that `unsum.gradients` makes."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._names = Names(model)
        _refuse(model)
        self._model = self._names.model
        self._options = options
        self._open = False

    def __enter__(self) -> Gradients:
        if self._open:
            raise OptionError("this block is open already; make another one with unsum.gradients(...)")
        self._open = True
        options = self._options
        self._found = Gradients(self._names, options.params, options.samples, mean=options.mean)
        self._saved = Saved()
        self._sides = Sides(self._model, self._saved)
        self._forward = Forward(self._model, options.samples, self._sides, verify=options.verify)
        self._setting = Setting(
            self._sides, self._forward.rows, self._found.unique(), self._found.by_id, options.exact,
            self._forward.module_of,
        )  # fmt: skip
        self._learning = False
        self._backwards: list[Run | None] = []  # under way, the innermost last
        self._adding: list[bool] = []  # whether each of them adds to .grad
        self._parts: Parts | None = None
        self._received: dict[int, Tensor] = {}
        self._handles: list[hooks.Handle] = []
        for module, name in {module: name for name, module in reversed(self._names.modules.items())}.items():
            self._handles += hooks.on_call(
                module,
                lambda args, kwargs, name=name, module=module: self._before(name, module, args, kwargs),  # type: ignore[misc]
                lambda output: self._after(output),
            )
        for parameter in self._found.unique().values():
            # First, so that it sees what arrives and not what the user's own hooks make of it.
            self._handles.append(hooks.on_gradient(parameter, self._receiver(parameter), first=True))
        self._blocks = hooks.open_block(self)
        hooks.watch(self._sides)
        return self._found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hooks.unwatch(self._sides)
        hooks.close_block(self, self._blocks)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forward.forget()
        self._open = False

    def mark(self, tensor: Tensor) -> None:
        """Dimension 0 of this tensor is the samples."""
        self._forward.mark(tensor)

    # ---- forward --------------------------------------------------------------------------------------------------

    def _is_deaf(self) -> bool:
        # In a backward, a checkpoint runs its forward again: that is not a new call.
        return bool(self._learning or self._forward.trying or self._adding or self not in hooks.here())

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_deaf():
            self._forward.before(name, module, args, kwargs)

    def _after(self, output: Any) -> None:
        if not self._is_deaf():
            self._forward.after(output)
            self._found.forwards = self._forward.calls

    # ---- backward -------------------------------------------------------------------------------------------------

    def before_backward(
        self, roots: Sequence[Any], grads: Sequence[Tensor | None], *, create_graph: bool, accumulates: bool
    ) -> None:
        self._adding.append(accumulates)
        self._backwards.append(None)
        if len(self._adding) > 1:
            self._inside(roots, accumulates)
            return
        self._parts = None
        self._received.clear()
        if create_graph:
            raise UnsupportedError("create_graph=True: the gradients of a second backward are not those of .grad")
        self._put_back: list[tuple[nn.Parameter, Tensor | None]] = []
        nodes = ordered([node for root in roots if (node := place(root)[0]) is not None])
        known, self._group = self._forward.find(nodes)
        if not known and not any(is_leaf(node) and id(node.variable) in self._setting.wanted for node in nodes):
            return  # of another model
        with self._learn():
            plan = self._plan(roots, grads, known)
        self._parts = Parts(plan.n)
        self._start(plan)
        if not self._options.grad:  # set aside, or torch would add to it in place
            self._put_back = [(p, p.grad) for p in self._names.parameters.values()]
            for parameter, _ in self._put_back:
                parameter.grad = None

    @contextlib.contextmanager
    def _learn(self) -> Iterator[None]:
        """Nodes are called by hand, and nothing of the model's is changed."""
        self._learning = True
        try:
            with (
                torch._C.DisableTorchFunction(),
                self._saved.once(keep=list(hooks.here()) == [self]),
                state_set_aside(self._model),
            ):
                yield
        finally:
            self._learning = False

    def _plan(self, roots: Sequence[Any], grads: Sequence[Tensor | None], known: Mapping[Edge, Layout]) -> Plan:
        if not known and len(self._forward.sizes) == 1:  # no output can be cut: losses, one for each sample
            known = losses_of(roots, *self._forward.sizes)
            self._group = self._forward.last_call()
        if not known:
            raise SamplesError(
                "cannot tell whose gradient this is: no tensor with known samples lies between loss and model.\n"
                "  call the model inside the block, say samples=unsum.dim(k), or unsum.mark_samples(losses)"
            )
        ids = self._options.samples.ids
        return learn(roots, grads, known, self._setting, number_of_samples if ids is None else lambda _: len(ids))

    def _inside(self, roots: Sequence[Any], accumulates: bool) -> None:
        """A node runs a backward of its own inside its backward: a reentrant checkpoint, a reversible network."""
        outer = next((run for run in reversed(self._backwards) if run is not None), None)
        if outer is None or not accumulates or self._parts is None:
            return
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        waiting = outer.plan.hidden.get(node)
        if waiting:
            with self._learn():
                plan = inside(roots, waiting.pop(0), self._parts.n, self._setting)
            self._start(plan)

    def _start(self, plan: Plan) -> None:
        assert self._parts is not None
        run = Run(plan, self._setting, self._parts)
        self._backwards[-1] = run
        run.attach()

    def after_backward(self, *, failed: bool) -> None:
        if self._adding:
            self._adding.pop()
            run = self._backwards.pop()
            if run is not None:
                run.detach()
        if self._adding:
            return
        if self._parts is None:
            if self._received and not failed:
                self._check_sum(Parts(0))
            return
        for parameter, stored in self._put_back:
            parameter.grad = stored
        parts, self._parts = self._parts, None
        self._saved.forget()
        if failed:
            return
        if parts.unknown:
            raise unclear(parts.unknown)
        self._check_sum(parts)
        scale = None if self._options.scaler is None else current_scale(self._options.scaler)
        self._found.take_in(parts, self._group, self._received, scale)

    def _receiver(self, parameter: nn.Parameter) -> Any:
        key = id(parameter)

        def received(grad: Tensor) -> None:
            if grad is None or self._learning or self not in hooks.here():
                return
            if self._adding and (self._adding[-1] or len(self._adding) == 1):
                dense = (grad.to_dense() if grad.layout != torch.strided else grad).detach().to(wide(grad.dtype))
                self._received[key] = self._received[key] + dense if key in self._received else dense.clone()

        return received

    def _check_sum(self, parts: Parts) -> None:
        """Σ per sample + shared must be what arrived at the parameter: else something was not seen."""
        finite = {key: torch.where(g.isfinite(), g, 0) for key, g in self._received.items()}
        scale = max([float(g.abs().max()) for g in finite.values() if g.numel()], default=0.0)
        for key, received in self._received.items():
            found = torch.zeros_like(received)
            if key in parts.per_sample:
                found = found + parts.per_sample[key].sum(0)
            if key in parts.shared:
                found = found + parts.shared[key]
            missing = torch.where(
                received.isfinite(), (received - found).abs(), torch.where(found.isfinite(), torch.inf, 0.0)
            )
            worst = float(missing.abs().max()) if received.numel() else 0.0
            if not worst <= parts.rounding * scale:
                raise SamplesError(
                    f"{self._found.by_id[key]}: part of its gradient comes from where no samples are known "
                    f"({worst:.1e} of {scale:.1e}).\n  call what uses it as a module inside the block"
                )


def _refuse(model: nn.Module) -> None:
    """Models of which no sample's gradient can be told."""
    for name, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise UnsupportedError(
                f"{name or 'the model'} is a compiled model, one opaque node: gradients by sample need the model itself"
            )
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise UnsupportedError(
                f"{name} is a DTensor, spread over several processes (tensor parallel or fully sharded): gradients by "
                "sample need whole parameters"
            )


def mark_samples(tensor: Tensor) -> Tensor:
    """Say that dimension 0 of this tensor is the samples, for the open `gradients` blocks. Returns the tensor.

    Examples:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> holder = nn.ParameterList([weight])
        >>> with gradients(holder) as g:
        ...     losses = mark_samples(torch.tensor([[1.0, 2.0], [3.0, 4.0]]) @ weight)
        ...     losses.sum().backward()
        >>> g["0"].per_sample()
        tensor([[1., 2.],
                [3., 4.]])
    """
    if not isinstance(tensor, Tensor) or tensor.grad_fn is None:
        raise SamplesError("mark_samples names a tensor that was computed from parameters")
    for block in hooks.here():
        if isinstance(block, GradientsBlock):
            block.mark(tensor)
    return tensor


def gradients(
    model: nn.Module,
    *,
    samples: sample_maps.Samples | Tensor | None = None,
    engine: Literal["auto", "graph"] = "auto",
    interacting: Literal["error", "exact"] = "error",
    verify: bool = False,
    loss_reduction: Literal["mean"] | None = None,
    params: str = "*",
    grad: bool = True,
    scaler: Any = None,
) -> GradientsBlock:
    """The gradient of every sample, for every parameter of any model, from the graph that `backward` walks.

    Args:
        model: Any module that is called inside the block.
        samples: Where the samples are: dimension 0 (None), `unsum.dim(k)`, `unsum.packed(cu_seqlens)`, or ids of shape
            (rows,) or (rows, positions), -1 for nobody's.
        engine: "graph" calls the graph's own nodes again, needs no rule, and is exact on anything; "auto" is the same
            today.
        interacting: "error" refuses models in which samples interact; "exact" gives the derivative of each sample's
            part of the loss all the same.
        verify: True runs the model some times more without gradients, with other samples' inputs, and refuses samples
            that interact though the graph shows no trace of it (detached statistics of the batch, mixup).
        loss_reduction: "mean" says that the loss was a mean over samples, and gives the gradients of each sample's own.
        params: A glob that chooses parameters by name.
        grad: False leaves every `.grad` as it was.
        scaler: A GradScaler whose scale is to be taken out.

    Examples:
        >>> model = nn.Linear(3, 1, bias=False)
        >>> with gradients(model) as g:
        ...     model(torch.eye(3)).sum().backward()
        >>> g["weight"].per_sample().shape
        torch.Size([3, 1, 3])
        >>> g.norms()
        tensor([1., 1., 1.], dtype=torch.float64)
    """
    if engine not in ("auto", "graph"):
        raise OptionError(f"engine={engine!r}: choose 'auto' or 'graph'")
    if interacting not in ("error", "exact"):
        raise OptionError(f"interacting={interacting!r}: choose 'error' or 'exact'")
    if loss_reduction not in (None, "mean"):
        raise OptionError(f"loss_reduction={loss_reduction!r}: None or 'mean'")
    return GradientsBlock(
        model,
        Options(
            samples=sample_maps.read(samples), exact=interacting == "exact", verify=verify,
            mean=loss_reduction == "mean", params=params, grad=grad, scaler=scaler,
        ),
    )  # fmt: skip
