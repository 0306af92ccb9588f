"""`gradients`: whose gradient is this?"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unsum import hooks
from unsum import samples as sample_maps
from unsum.errors import InteractionError, OptionError, SamplesError, UnsupportedError
from unsum.gathered import Gradients
from unsum.graph.cut import Cut, find_cut, parameters_met_outside
from unsum.graph.nodes import Edge, Node, below, is_leaf, ordered
from unsum.graph.owners import Owners, all_are_seen, sweep, where_nonzero
from unsum.graph.probe import confirm, state_set_aside
from unsum.graph.saved import Saved
from unsum.graph.sides import Sides
from unsum.graph.split import Split, unclear, wide
from unsum.inplace import Token, token
from unsum.keeping import current_scale
from unsum.nested import leaves
from unsum.sites import Names


@dataclass(frozen=True)
class Known:
    """A tensor whose samples are known, found again in the graph by its number and its token."""

    token: weakref.ref[Token]
    owners: Tensor
    call: int
    marked: bool = False  # by the user: goes before what the outputs say


class GradientsBlock:
    """The block that `unsum.gradients` makes."""

    def __init__(
        self,
        model: nn.Module,
        samples: sample_maps.Samples,
        interacting: str,
        loss_reduction: str | None,
        params: str,
        grad: bool,
        scaler: Any,
    ) -> None:
        self._names = Names(model)
        if type(model).__name__ == "OptimizedModule" or any(
            type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in model.modules()
        ):
            raise UnsupportedError("a compiled model is one opaque node: gradients by sample need the model itself")
        self._model = self._names.model
        self._samples = samples
        self._interacting = interacting
        self._options = (params, loss_reduction == "mean")
        self._grad = grad
        self._scaler = scaler
        self._open = False

    # ---- the block ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Gradients:
        if self._open:
            raise OptionError("this block is open already; make another one with unsum.gradients(...)")
        self._open = True
        params, mean = self._options
        self._found = Gradients(self._names, params, self._samples, mean=mean)
        self._known: dict[tuple[str, int, int], Known] = {}
        self._alive = 64
        self._depth = 0
        self._outer: tuple[Callable[..., Any], Any, Any] | None = None
        self._saved = Saved()
        self._learning = False
        self._calls = itertools.count()
        self._spans: list[tuple[int, int, str]] = []  # which nodes each module call has made
        self._starts: list[tuple[str, int]] = []
        self._split: Split | None = None
        self._received: dict[int, Tensor] = {}
        self._accumulates: list[bool] = []  # for each backward under way, whether it adds to .grad
        self._sides = Sides(self._model, self._saved)
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
        self._sides.__enter__()
        return self._found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sides.__exit__(kind, error, trace)
        hooks.close_block(self, self._blocks)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._known.clear()
        self._spans.clear()
        self._open = False

    def _receiver(self, parameter: nn.Parameter) -> Any:
        key = id(parameter)

        def received(grad: Tensor) -> None:
            if grad is None or self._learning or self not in hooks.here():
                return
            if self._accumulates and (self._accumulates[-1] or len(self._accumulates) == 1):
                dense = (grad.to_dense() if grad.layout != torch.strided else grad).detach().to(wide(grad.dtype))
                self._received[key] = self._received[key] + dense if key in self._received else dense.clone()

        return received

    # ---- forward --------------------------------------------------------------------------------------------------

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._learning or self._accumulates or self not in hooks.here():
            return  # in a backward, a checkpoint runs its forward again: that is not a new call
        hooks.refuse_tracing(name or "the model")
        self._starts.append((name, torch._C._autograd._get_sequence_nr()))
        self._depth += 1
        if self._depth > 1:
            return
        self._outer = (module.forward, args, kwargs)
        given = [tensor for _, tensor in leaves((args, kwargs))]
        k = self._samples.k if isinstance(self._samples, sample_maps.Dim) else 0
        self._n = next((t.shape[k] for t in given if t.dim() > k), None)
        for tensor in given:
            self._sides.given(tensor, has_samples=self._samples.owners(tuple(tensor.shape), self._n) is not None)
        if given and not self._sides.is_given_data(given):
            self._n = None  # positions, say: what comes of them belongs to nobody

    def _after(self, output: Any) -> None:
        if self._learning or self._accumulates or not self._starts or self not in hooks.here():
            return
        name, start = self._starts.pop()
        self._spans.append((start, torch._C._autograd._get_sequence_nr(), name))
        self._depth -= 1
        if self._depth:
            return
        self._found.forwards += 1
        call = next(self._calls)
        self._confirm(output)
        for _, tensor in leaves(output):
            if tensor.grad_fn is None or self._sides.is_weight(tensor.grad_fn):
                continue  # a weight that the model returns belongs to nobody
            owners = self._samples.owners(tuple(tensor.shape), self._n)
            if owners is not None:
                self._know(tensor, owners, call)

    def _confirm(self, output: Any) -> None:
        """Where an output has the size of the batch along several dimensions, see which are the samples."""
        outer, self._outer = self._outer, None
        n = self._n
        if outer is None or n is None or not isinstance(self._samples, sample_maps.Dim):
            return
        if all(list(tensor.shape).count(n) < 2 for _, tensor in leaves(output) if tensor.grad_fn is not None):
            return
        self._learning = True
        try:
            confirm(self._model, *outer, n=n, k=self._samples.k)
        finally:
            self._learning = False

    def _know(self, tensor: Tensor, owners: Tensor, call: int, *, marked: bool = False) -> None:
        node = tensor.grad_fn
        assert node is not None
        key = (node.name(), node._sequence_nr(), tensor.output_nr)
        self._known[key] = Known(weakref.ref(token(node)), owners, call, marked)
        if len(self._known) > 2 * self._alive:  # a long block: let go of graphs that are gone
            self._known = {key: known for key, known in self._known.items() if known.token() is not None}
            self._spans = self._spans[-10_000:]
            self._alive = max(len(self._known), 64)

    def mark(self, tensor: Tensor) -> None:
        """Dimension 0 of this tensor is the samples."""
        if tensor.dim() == 0:
            raise SamplesError("mark_samples names a tensor whose dimension 0 is the samples; this one is a scalar")
        owners = self._samples.owners(tuple(tensor.shape), tensor.shape[0])
        if owners is None:
            owners = sample_maps.Dim(0).owners(tuple(tensor.shape), tensor.shape[0])
        assert owners is not None
        self._know(tensor, owners, next(self._calls), marked=True)

    # ---- backward -------------------------------------------------------------------------------------------------

    def before_backward(
        self, roots: Sequence[Any], grads: Sequence[Tensor | None], *, create_graph: bool, accumulates: bool
    ) -> None:
        if self._learning:
            raise UnsupportedError(
                "a custom autograd.Function runs a backward of its own inside its backward (a reversible network, or a "
                "reentrant checkpoint): what it brings to parameters cannot be seen"
            )
        self._accumulates.append(accumulates)
        if len(self._accumulates) > 1:
            return
        self._split = None
        self._received.clear()
        if create_graph:
            raise UnsupportedError("create_graph=True: the gradients of a second backward are not those of .grad")
        self._put_back: list[tuple[nn.Parameter, Tensor | None]] = []
        self._learning = True
        try:
            with torch._C.DisableTorchFunction(), self._saved.once(), state_set_aside(self._model):
                self._learn(roots, grads)
        finally:
            self._learning = False
        if not self._grad:  # set aside, or torch would add to it in place
            self._put_back = [(p, p.grad) for p in self._names.parameters.values()]
            for parameter, _ in self._put_back:
                parameter.grad = None

    def _learn(self, roots: Sequence[Any], grads: Sequence[Tensor | None]) -> None:
        known, calls = self._find_known(roots)
        if not known:
            raise SamplesError(
                "cannot tell whose gradient this is: no tensor with known samples lies between loss and model.\n"
                "  call the model inside the block, say samples=unsum.dim(k), or unsum.mark_samples(losses)"
            )
        cut = find_cut(roots, known, self._sides.is_data)
        for node, name in parameters_met_outside(cut, self._found.by_id, self._sides.is_weight):
            raise SamplesError(
                f"{name} meets data at {node.name()}, outside the model's outputs, where the samples are unknown.\n"
                "  unsum.mark_samples(losses) says whose each loss is"
            )
        n = self._count(cut.starts)
        if self._sides.mixing and self._interacting == "error":
            raise self._interaction(self._sides.mixing[0], "")
        try:
            owners = self._owners(cut, n, known, None)
        except InteractionError:
            # Perhaps only where the loss does not look: a loss on the diagonal of n × n similarities, say.
            looked_at = where_nonzero(cut, roots, grads)
            if not all_are_seen(cut.starts, looked_at, n):
                raise
            owners = self._owners(cut, n, known, looked_at)
        self._split = Split(cut, owners, n, self._found.unique())
        self._group = frozenset(calls)
        self._split.attach()

    def _find_known(self, roots: Sequence[Any]) -> tuple[dict[Edge, Tensor], set[int]]:
        """The tensors in this graph whose samples are known, and the calls that made them."""
        tops = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
        found: dict[Edge, Known] = {}
        for node in ordered([top for top in tops if top is not None]):
            if is_leaf(node):
                continue
            for output in range(len(node._input_metadata)):
                entry = self._known.get((node.name(), node._sequence_nr(), output))
                if entry is not None and token(node) is entry.token():
                    found[node, output] = entry
        if any(entry.marked for entry in found.values()):
            found = {edge: entry for edge, entry in found.items() if entry.marked}
        return {edge: entry.owners for edge, entry in found.items()}, {entry.call for entry in found.values()}

    def _count(self, known: Mapping[Edge, Tensor]) -> int:
        if (ids := self._samples.ids) is not None:
            return len(ids)
        sizes = {int(owners.max()) + 1 if owners.numel() else 0 for owners in known.values()}
        if len(sizes) > 1:
            raise SamplesError(f"one backward crosses forwards with different numbers of samples: {sorted(sizes)}")
        return sizes.pop()

    def _owners(
        self, cut: Cut, n: int, known: Mapping[Edge, Tensor], only: Mapping[Edge, Tensor] | None
    ) -> dict[Node, Owners | None]:
        def mixed(node: Node) -> None:
            if self._interacting == "error" and self._sides.is_data(node):
                raise self._interaction(node.name(), self._module_of(node))

        def keep(node: Node) -> bool:
            """Where a parameter may be met: not between data and data, unless samples may mix there."""
            return self._interacting == "exact" or any(
                is_leaf(child) or not self._sides.is_data(child) for _, child, _ in below(node)
            )

        return sweep(cut.model, cut.starts, n, only=only, known=known, keep=keep, mixed=mixed)

    def _interaction(self, operation: str, module: str) -> InteractionError:
        where = f" in {module!r}" if module else ""
        return InteractionError(
            f"samples interact at {operation}{where}: a gradient per sample is not what the sample alone would give.\n"
            '  interacting="exact" gives the derivative of each sample\'s part of the loss all the same'
        )

    def _module_of(self, node: Node) -> str:
        number = node._sequence_nr()
        inside = [(end - start, name) for start, end, name in self._spans if start <= number < end]
        return min(inside)[1] if inside else ""

    def after_backward(self, *, failed: bool) -> None:
        if self._accumulates:
            self._accumulates.pop()
        if self._accumulates or self._split is None:
            return
        for parameter, stored in self._put_back:
            parameter.grad = stored
        split, self._split = self._split, None
        split.detach()
        self._saved.forget()
        if failed:
            return
        if split.unknown:
            raise unclear(split.unknown)
        self._check_sum(split)
        scale = None if self._scaler is None else current_scale(self._scaler)
        self._found.take_in(split, self._group, self._received, scale)

    def _check_sum(self, split: Split) -> None:
        """Σ per sample + shared must be what arrived at the parameter: else something was not seen."""
        scale = max([float(g.abs().max()) for g in self._received.values() if g.numel()], default=0.0)
        for key, received in self._received.items():
            found = torch.zeros_like(received)
            if key in split.per_sample:
                found = found + split.per_sample[key].sum(0)
            if key in split.shared:
                found = found + split.shared[key]
            missing = float((received - found).abs().max()) if received.numel() else 0.0
            if not missing <= split.rounding * scale:
                raise SamplesError(
                    f"{self._found.by_id[key]}: part of its gradient comes from where no samples are known "
                    f"({missing:.1e} of {scale:.1e}).\n  call what uses it as a module inside the block"
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
    return GradientsBlock(model, sample_maps.read(samples), interacting, loss_reduction, params, grad, scaler)
