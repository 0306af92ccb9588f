"""`WeightedSum`: Σ w_n G_n of every parameter, with weights that are given or that come from the norms (clipping)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unsum.errors import BackwardOrder, NotAvailable, OptionError, UnsupportedError, WrongCount
from unsum.factors.factors import Factors
from unsum.factors.stacked import Layers
from unsum.reducers.clipping import ClippedTap
from unsum.reducers.holding import GRADIENTS, Sizes, choose, free_memory
from unsum.reducers.norms import by_name, in_rows
from unsum.reducers.reducer import WEIGHTED_SUM, Reduction
from unsum.reducers.tap import Shape, Tap

log = logging.getLogger("unsum")


class WeightedSum(Reduction):
    """Σ w_n G_n of every parameter. `w` has shape (n,), or is a function from the norms (n,) to weights (clipping).
    Norms are known only when the backward is over. Before each backward unsum chooses for each parameter what to hold
    until then, and `chosen` shows the choice:

    - `"gradients"`: the per-sample gradients, n times the parameter, where the norms form them anyway; the fastest;
    - `"factors"`: `a` and `δ`, which takes one more product afterwards.

    If not even the factors fit, run two backwards, which hold nothing: one for `Norms`, one of the weighted losses
    ("Clipping and memory" in the docs).

    Args:
        w: Weights (n,), or a function norms -> weights.
        memory: Bytes for held gradients; factors are held where they would take more. None: half of the free memory of
            the device.
        groups: {parameter: number of its group}, for weights that differ between groups such as layers. The function
            then gets the norms of each group, (groups, n), and returns weights of that shape.

    Examples:
        >>> import unsum
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> with unsum.gradients(model, unsum.WeightedSum(torch.tensor([1.0, 0.5]))) as g:
        ...     model(torch.ones(2, 3)).sum().backward()
        >>> g[unsum.WeightedSum].sum()["weight"]
        tensor([[1.5000, 1.5000, 1.5000],
                [1.5000, 1.5000, 1.5000]])
        >>> with unsum.gradients(model, unsum.WeightedSum(lambda norms: (1 / norms).clamp(max=1))) as g:
        ...     model(torch.ones(2, 3)).sum().backward()
        >>> g[unsum.WeightedSum].chosen
        {'weight': 'factors'}
        >>> g[unsum.WeightedSum].sum()["weight"].norm().round(decimals=3)
        tensor(2.)
    """

    def __init__(
        self,
        w: Tensor | Callable[[Tensor], Tensor],
        *,
        memory: float | None = None,
        groups: Mapping[str, int] | None = None,
    ) -> None:
        if not callable(w) and (not isinstance(w, Tensor) or w.dim() != 1):
            raise OptionError("WeightedSum(w): weights of shape (n,), or a callable norms -> (n,)")
        if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int | float) or not memory >= 0):
            raise OptionError(f"WeightedSum(memory={memory!r}): bytes that may be held, 0 or more, or None")
        if groups is not None and not callable(w):
            raise OptionError("WeightedSum(groups=): weights by group come from a function of the norms")
        self._w, self._memory, self._groups = w, memory, groups
        super().__init__()

    wants, by_position = WEIGHTED_SUM, False
    reads = ("sum()", "weights")

    @property
    def clips(self) -> bool:
        """Whether the weights come from the norms."""
        return callable(self._w)

    @property
    def sums(self) -> bool:  # type: ignore[override]
        """Whether the sum over samples comes with the norms."""
        return self.clips

    @property
    def _adds(self) -> bool:  # type: ignore[override]
        return not self.clips

    def reset(self) -> None:
        super().reset()
        self._sums: dict[str, Tensor] = {}
        self._held: dict[str, Factors] = {}
        self._layers: list[Layers] = []  # the same of several parameters together
        self._squares: list[tuple[Sequence[str], Tensor]] = []  # of these parameters
        self._norms: dict[int, Tensor] = {}  # of each group of samples, if the weights come from the norms
        self.unreached: list[str] = []  # parameters to which the last backward brought nothing
        self.weights: Tensor | None = None  # of the last backward, if they come from the norms
        self.chosen: dict[str, str] = {}  # what was held of each parameter in the last backward
        self._by_factors: frozenset[str] = frozenset()  # of these, the parameters of which factors are held

    def prepare(self, sizes: Callable[[], Sizes], devices: Callable[[], Iterable[torch.device]]) -> None:
        """Choose what to hold in the backward that begins, from what the gradients of each parameter take."""
        if self.clips:
            wanted = sizes()
            budget = free_memory(devices(), wanted.needed) if self._memory is None else self._memory
            self.chosen = self._in_models_order(choose(wanted, budget))
            self._by_factors = frozenset([name for name, way in self.chosen.items() if way != GRADIENTS])
            if log.isEnabledFor(logging.INFO):
                log.info("unsum: WeightedSum holds %s", Counter(self.chosen.values()))

    def begin(self, n: int, again: bool) -> None:
        """A backward with n samples begins."""
        super().begin(n, again)
        late = any(min(self._calls[self._now]) < min(calls) for calls in self._calls)
        if not self.clips and late and not again:
            raise BackwardOrder(
                "WeightedSum(w): the weights are in the order of the forwards, and this backward comes after one of a "
                "later forward.",
                write=[
                    "for x, y in batches: loss_fn(model(x), y).backward()  # backward in the order of the forwards",
                    "unsum.WeightedSum(lambda norms: 1 / norms)  # weights as a function of the norms",
                ],
            )
        self.weights = None

    @property
    def takes_held(self) -> bool:
        """Whether `hold` and `take_layers` may be called in the place of `take`: not where a subclass has its own."""
        own = type(self)
        return self.clips and (own.take, own.take_layers) == (WeightedSum.take, WeightedSum.take_layers)

    @property
    def held_by_factors(self) -> frozenset[str]:
        """The parameters of which factors are held."""
        return self._by_factors

    def forms(self, name: str) -> bool:
        """Whether the gradients of this parameter are held multiplied out."""
        return self.clips and name not in self._by_factors

    def take(self, name: str, factors: Factors) -> None:
        """The gradients of one parameter."""
        if self.clips:
            self._hold(name, factors)
            return
        self.add(name, factors.weighted_sum(self.given(self.before_now(), factors.n)))

    def given(self, first: int, n: int) -> Tensor:
        """The weights of n samples, of which so many came before."""
        assert isinstance(self._w, Tensor)
        w = self._w[first : first + n]
        if len(w) != n:
            raise _wrong_count(len(self._w), first + n, " or more")
        return w.detach()

    def tap(self, parameters: Mapping[str, nn.Parameter]) -> Tap | None:
        """The sums leave a compiled model."""
        if self.clips:
            return ClippedTap(self, parameters, self._memory, self._groups)
        return _SumTap(self, parameters)

    def latest(self) -> dict[str, Tensor]:
        """{parameter: Σ w_n G_n} so far, whether there are more weights or not."""
        return self._sums

    def take_layers(self, layers: Layers) -> None:
        """The gradients of several parameters of one shape."""
        if self.clips:
            self._squares.append((layers.names, layers.sq_norms()))
            self._layers.append(layers)
        else:
            self._add_layers(layers, self.given(self.before_now(), layers.n))

    def _add_layers(self, layers: Layers, w: Tensor) -> None:
        for name, value in zip(layers.names, layers.weighted_sums(w).unbind(), strict=True):
            self.add(name, value)

    def _hold(self, name: str, factors: Factors) -> None:
        held = factors.formed() if self.forms(name) else factors
        self.hold(name, held.sq_norms(), held)

    def hold(self, name: str, squares: Tensor, held: Factors) -> None:
        """Squared norms (n,) of a parameter's gradients, and what is held of them until the weights are known."""
        self._squares.append(((name,), squares))
        self._held[name] = held

    def add(self, name: str, value: Tensor) -> None:
        """A part of the sum of one parameter."""
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def end(self, left: Sequence[str]) -> None:
        """The backward is over: if the weights come from the norms, here they are."""
        self.unreached = list(left)
        if not self.clips or not self._squares:
            return
        weights = self.weigh(self._sq_norms())
        while self._layers:
            layers = self._layers.pop()
            self._add_layers(layers, self._weights_of(layers.names).to(layers.parameter.device))
        for name in list(self._held):  # each is let go of as soon as it is summed
            w = weights if self._groups is None else weights[self._groups[name]]
            self._sum_up(name, self._held.pop(name), w)
        self._squares.clear()

    def weigh(self, sq_norms: Tensor) -> Tensor:
        """The weights that the function gives for the squared norms (n,), or (groups, n), of the backward under way."""
        assert callable(self._w)
        self.weights = _checked(self._w(sq_norms.sqrt()), sq_norms)
        self._norms[self._now] = (sq_norms if self._groups is None else sq_norms.sum(0)).sqrt()
        return self.weights

    def _sq_norms(self) -> Tensor:
        """(n,), or (groups, n): over the parameters of each group."""
        device = self._squares[0][1].device
        if self._groups is None:
            return torch.cat([in_rows(part.to(device)) for _, part in self._squares]).sum(0)
        names = [name for own, _ in self._squares for name in own]
        rows = torch.cat([by_name(own, part.to(device)) for own, part in self._squares])
        into = torch.tensor([self._groups[name] for name in names], device=device)
        return rows.new_zeros(max(self._groups.values()) + 1, rows.shape[1]).index_add_(0, into, rows)

    def _weights_of(self, names: Sequence[str]) -> Tensor:
        """(n,), the same for all parameters; with groups (names, n)."""
        assert self.weights is not None
        return self.weights if self._groups is None else self.weights[[self._groups[name] for name in names]]

    def _sum_up(self, name: str, factors: Factors, w: Tensor) -> None:
        if factors.is_changed():
            raise UnsupportedError(
                f"{name}: a gradient was changed in place (by a hook, perhaps) while WeightedSum held it.",
                write="tensor.register_hook(lambda grad: grad * 2)  # a hook that returns a new tensor",
            )
        self.add(name, factors.weighted_sum(w))

    def sum(self) -> dict[str, Tensor]:
        """{parameter: Σ w_n G_n}."""
        self._check()
        if isinstance(self._w, Tensor) and len(self._w) != sum(self._sizes):
            raise _wrong_count(len(self._w), sum(self._sizes))
        return self._in_models_order(self._sums)

    def norms(self) -> Tensor:
        """(n,): the norms that the weights come from, over all parameters."""
        self._check()
        if not self.clips:
            raise NotAvailable(
                "WeightedSum(w): the weights were given, so no norms were computed.",
                write="with unsum.gradients(model, unsum.WeightedSum(w), unsum.Norms()) as g: ...  # g.norms()",
            )
        return self._in_order(self._norms) if self._norms else torch.zeros(self.samples())

    def last_norms(self) -> Tensor | None:
        """(n,): those of the last backward; None if nothing came."""
        return self._norms.get(self._now)

    def taken(self) -> dict[str, Tensor]:
        """{parameter: Σ w_n G_n} of what came since this was called last; `sum()` begins anew."""
        sums, self._sums = self._sums, {}
        return sums


def _checked(w: Any, norms: Tensor) -> Tensor:
    if not isinstance(w, Tensor) or w.shape != norms.shape:
        what = f"a tensor of shape {tuple(w.shape)}" if isinstance(w, Tensor) else repr(w)
        raise OptionError(
            f"WeightedSum: the function of the norms gave {what}, not weights of shape {tuple(norms.shape)}"
        )
    return w


def _wrong_count(weights: int, samples: int, more: str = "") -> WrongCount:
    return WrongCount(
        f"WeightedSum: {weights} weights for {samples} samples{more}.",
        write=[
            f"unsum.WeightedSum(torch.ones({samples}))  # a weight for each sample of the block",
            "unsum.WeightedSum(lambda norms: (1 / norms).clamp(max=1))  # weights for any number of samples",
        ],
    )


class _SumTap(Tap):
    """Σ w_n G_n of every parameter, with weights that are known before."""

    inputs, in_order, by_parts = 1, True, True

    def __init__(self, reducer: WeightedSum, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._to, self._parameters, self.taps = reducer, parameters, len(parameters)

    @property
    def key(self) -> Hashable:
        return "sum"

    def shapes(self, n: int, positions: int | None) -> list[Shape]:
        return [tuple(p.shape) for p in self._parameters.values()]

    def given(self, first: int, n: int, device: torch.device) -> list[Tensor]:
        return [self._to.given(first, n).to(device)]

    def size(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        return inputs[0].shape[0]

    def reducer(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> WeightedSum:
        return WeightedSum(inputs[0])

    def values(self, reducer: WeightedSum) -> list[Tensor]:
        found = reducer.latest()
        return [found[name] if name in found else torch.zeros_like(p) for name, p in self._parameters.items()]

    def receive(self, values: Sequence[Tensor], scale: Tensor | float | None) -> None:
        for name, value in zip(self._parameters, values, strict=True):
            self._to.add(name, value if scale is None else value * scale)
