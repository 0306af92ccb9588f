"""`influence`: which training examples lowered, or raised, the loss of a query?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unsum.check import LossFunction
from unsum.choice import exactly
from unsum.curvature import Curvature, GaussNewton
from unsum.curvature.vectors import is_number
from unsum.errors import EmptyData, NotAvailable, OptionError
from unsum.examples import (
    Examples,
    SamplesOfBatch,
    alone,
    is_loss_function,
    losses_of,
    refuse_not_finite,
    refuse_other_number,
    samples_of,
)
from unsum.gathered import Gradients
from unsum.gradients import gradients
from unsum.influence.queries import Queries, Scored, formed, held
from unsum.influence.scores import Influence
from unsum.reducers import Norms
from unsum.reducers.holding import free_memory

_NOT_EMPTY = "unsum.influence(model, loss_fn, TensorDataset(x, y), TensorDataset(query_x, query_y))"


def influence(
    model: nn.Module,
    loss_fn: LossFunction,
    train: Any,
    query: Any,
    curvature: Curvature | GaussNewton | None = None,
    score: Literal["dot", "cosine"] = "dot",
    damping: float | Mapping[str, float] | None = None,
    *,
    precondition: Curvature | None = None,
    tokens: bool = False,
    params: str | Sequence[str] | None = None,
    samples: SamplesOfBatch = None,
    batch_size: int = 32,
    memory: float | None = None,
) -> Influence:
    """How much training on each example lowers the loss of each query, to first order.

    The score of training example z for query q is ⟨∇L(q), P ∇L(z)⟩. P is the identity, or the inverse of a damped
    curvature. A positive score: training on the example lowers the query's loss. Nothing is retrained, and no gradient
    of a training example is stored.

    Args:
        model: Any module, in the state that you want to explain, usually in eval mode.
        loss_fn: `loss_fn(model, batch)` returns one loss for each sample, (n,).
        train: The training examples, in order: a DataLoader (not shuffled) or another iterable of batches, or a Dataset
            or a list of examples.
        query: The examples to explain, in the same forms.
        curvature: None; the result of `unsum.curvature.fit`; or that of `unsum.curvature.ggn` (solved by conjugate
            gradients: the most exact and the slowest).
        score: "dot", or "cosine": divided by both norms, so that examples with large gradients do not rank first for
            every query. With a curvature the norms are those of P ∇L(q) and ∇L(z), so an example does not score 1
            for itself.
        damping: The damping of the curvature: a number, {block: number}, or None for its default.
        precondition: A result of `fit`, for the conjugate gradients of `ggn`.
        tokens: True also gives a score for every position of every example.
        params: A glob of parameter names, or a list of globs; None: those of the curvature, or all.
        samples: Where the samples are, as in `unsum.gradients`, or a function of the batch (packed documents).
        batch_size: Examples per batch, where the data gives single examples.
        memory: Bytes that the queries' gradients may take at a time; with more, the training examples are read several
            times. None: half of what is free.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> examples = [(torch.randn(3), torch.tensor(k % 2)) for k in range(10)]
        >>> loss = lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1], reduction="none")
        >>> s = influence(model, loss, examples, examples[:2])
        >>> s.matrix.shape, s.top(3).ids.shape
        (torch.Size([2, 10]), torch.Size([2, 3]))
        >>> bool((s.matrix[:, :2].diag() > 0).all())  # training on the query itself lowers its loss
        True
    """
    if not is_loss_function(loss_fn):
        raise OptionError("influence needs loss_fn(model, batch), which returns one loss for each sample, (n,)")
    if curvature is not None and not isinstance(curvature, Curvature | GaussNewton):
        raise OptionError(f"curvature={curvature!r}: what unsum.curvature.fit or unsum.curvature.ggn gives, or None")
    if score not in ("dot", "cosine"):
        raise OptionError(f"score={score!r}: choose 'dot' or 'cosine'")
    if damping is not None and curvature is None:
        raise OptionError("damping is added to a curvature: give curvature= as well")
    if precondition is not None and not isinstance(curvature, GaussNewton):
        raise OptionError(
            "precondition is for the conjugate gradients of unsum.curvature.ggn: give curvature=h as well"
        )
    if not isinstance(tokens, bool):
        raise OptionError(f"tokens={tokens!r}: True or False")
    if memory is not None and (not is_number(memory) or memory <= 0):
        raise OptionError(f"memory={memory!r}: bytes, above 0, or None")
    examples = _in_order(train, batch_size, "train")
    asked = _in_order(query, batch_size, "query")
    run = _Run(model, loss_fn, curvature, damping, precondition, params, samples, memory)
    rows: list[Tensor] = []
    by_token: list[Tensor] = []
    left_out: dict[str, None] = {}
    for number, queries in enumerate(run.queries(asked)):
        if number and examples.is_once:
            raise OptionError(
                "train: the queries do not fit into memory at once, so the training examples are read several times, "
                "and this is an iterator, which gives everything once.\n  give a list, a Dataset or a DataLoader, "
                "fewer queries, or more memory="
            )
        scores, tokens_of, left = run.scored(examples, queries, cosine=score == "cosine", tokens=tokens)
        rows.append(scores)
        by_token += [] if tokens_of is None else [tokens_of]
        left_out |= left
    if not rows:
        raise EmptyData("query: the data is empty.", write=_NOT_EMPTY)
    return Influence(torch.cat(rows), torch.cat(by_token) if by_token else None, tuple(left_out))


def _in_order(data: Any, batch_size: int, what: str) -> Examples:
    examples = Examples(data, batch_size=batch_size, what=what)
    if examples.is_shuffled:
        raise OptionError(
            f"{what}: this DataLoader shuffles, so the scores could not be assigned to examples.\n"
            "  make it with shuffle=False, and no random sampler"
        )
    return examples


class _Run:
    """A model, and how the gradients of queries are turned."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, curvature: Curvature | GaussNewton | None, damping: Any,
        precondition: Curvature | None, params: str | Sequence[str] | None, samples: SamplesOfBatch,
        memory: float | None,
    ) -> None:  # fmt: skip
        self._model, self._loss_fn, self._samples = model, loss_fn, samples
        self._curvature, self._damping, self._precondition = curvature, damping, precondition
        covered = None if curvature is None else list(curvature.parameters)
        self._params = params if params is not None else ["*"] if covered is None else [exactly(n) for n in covered]
        with gradients(model, Norms(), params=self._params, grad=False) as chosen:
            self._parameters = {name: chosen.parameters[name] for name in chosen}
            of_model = chosen.names.parameters
        if not self._parameters:
            raise OptionError("influence: no parameters are trained (requires_grad=False, or params= chooses none)")
        if covered is not None and list(self._parameters) != covered:
            raise OptionError(
                f"the curvature covers {len(covered)} tensors of parameters, and {len(self._parameters)} are chosen "
                "here; fit it with the same params=, on the same model"
            )
        if curvature is not None:
            curvature.refuse_changed(self._parameters, of_model)
        devices = {p.device for p in self._parameters.values()}
        self._memory = free_memory(devices) if memory is None else memory
        self._row = sum(p.numel() * max(p.element_size(), 4) for p in self._parameters.values())  # bytes of a query

    def queries(self, asked: Examples) -> Iterator[Queries]:
        """The queries' gradients, as many at a time as fit."""
        kept: list[Gradients] = []
        first = begun = 0
        size = 0.0
        for batch in asked.shown("queries"):
            samples = samples_of(self._samples, batch)
            with alone("query"), gradients(self._model, samples=samples, params=self._params, grad=False) as g:
                losses = losses_of(self._loss_fn, self._model, batch, first, "query", are_samples=samples is None)
                if not len(losses):
                    continue
                losses.sum().backward()
            refuse_other_number(len(losses), len(g.ids), "query")
            refuse_not_finite(g.norms(), first, "query", "gradient")
            more = held(g) * 4 if self._curvature is None else len(losses) * self._row
            if kept and size + more > self._memory:
                yield from self._turned(kept, first - begun)
                kept, size, begun = [], 0.0, first
            kept.append(g)
            size += more
            first += len(losses)
        if kept:
            yield from self._turned(kept, first - begun)

    def _turned(self, kept: list[Gradients], m: int) -> Iterator[Queries]:
        """These queries; in parts, where one batch of them is more than fits."""
        if self._curvature is None:
            yield Queries(m, kept)
            return
        some = m if len(kept) > 1 else max(1, int(self._memory // self._row))
        for begin in range(0, m, some):
            rows = formed(kept, slice(begin, begin + some))
            if isinstance(self._curvature, Curvature):
                solved = self._curvature.solve(rows, self._damping)
            else:
                solved = self._curvature.solve(rows, self._damping, precondition=self._precondition)
            yield Queries(min(some, m - begin), rows=solved)

    def scored(
        self, examples: Examples, queries: Queries, *, cosine: bool, tokens: bool
    ) -> tuple[Tensor, Tensor | None, dict[str, None]]:
        """(m, examples), (m, examples, positions) if they are wanted, and which parameters have no positions."""
        scored, norms = Scored(queries, tokens=tokens), Norms()
        reducers = (scored, norms) if cosine else (scored,)
        found: list[Tensor] = []
        by_token: list[Tensor] = []
        of_queries = queries.norms() if cosine else None
        first = 0
        for batch in examples.shown("examples"):
            samples = samples_of(self._samples, batch)
            with alone("train"), gradients(self._model, *reducers, samples=samples, params=self._params, grad=False):
                losses = losses_of(self._loss_fn, self._model, batch, first, "train", are_samples=samples is None)
                if not len(losses):
                    continue
                losses.sum().backward()
            assert scored.scores is not None
            refuse_other_number(len(losses), len(scored.scores), "train")
            refuse_not_finite(scored.scores.sum(1), first, "train", "gradient")
            scores, of_tokens = scored.scores, scored.by_token
            if tokens and of_tokens is None:
                raise NotAvailable(
                    "tokens=True: no parameter has a gradient for each position of the input.",
                    write="unsum.influence(model, loss_fn, train, query)  # without tokens=True",
                )
            if of_queries is not None:
                size = norms.norms().double()[:, None] * of_queries.to(scores.device)
                scores = torch.where(size > 0, scores / size, 0.0)
                if of_tokens is not None:
                    of_tokens = torch.where(size[:, None] > 0, of_tokens / size[:, None], 0.0)
            found.append(scores.T.cpu())
            if of_tokens is not None:
                by_token.append(of_tokens.permute(2, 0, 1).cpu())
            first += len(losses)
        if not found:
            raise EmptyData("train: the data is empty.", write=_NOT_EMPTY)
        longest = max((part.shape[2] for part in by_token), default=0)
        padded = [nn.functional.pad(part, (0, longest - part.shape[2])) for part in by_token]
        return torch.cat(found, 1), torch.cat(padded, 1) if padded else None, scored.left_out
