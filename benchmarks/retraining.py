"""Many trainings at once, of one model on different subsets, and the linear datamodeling score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

Data = tuple[Tensor, ...]
Losses = Callable[[nn.Module, Data], Tensor]  # one loss for each example, (n,)


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, alike on everything and on a subset."""

    epochs: int
    lr: float
    batch: int | None = None  # None: all of them in every step
    momentum: float = 0.0
    weight_decay: float = 0.0
    adam: bool = False
    drop_last: bool = False
    seeds: int = (
        1  # trainings on each subset, from other initialisations and in other orders; their losses are averaged
    )

    def optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.Adam(parameters, lr=self.lr, weight_decay=self.weight_decay)
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def __str__(self) -> str:
        rest = [f"momentum {self.momentum}"] if self.momentum else []
        rest += [f"weight decay {self.weight_decay}"] if self.weight_decay else []
        size = "all examples" if self.batch is None else f"batches of {self.batch}"
        return ", ".join(["Adam" if self.adam else "SGD", f"lr {self.lr}", f"{self.epochs} epochs", size, *rest])


def half_subsets(examples: int, count: int, seed: int = 1) -> Tensor:
    """(count, examples // 2): numbers of examples."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(examples, generator=generator)[: examples // 2] for _ in range(count)])


def trained(make: Callable[[], nn.Module], losses: Losses, data: Data, recipe: Recipe, rows: Tensor, seed: int) -> Any:
    """Models trained on each row's examples, as stacked parameters {name: (rows, *shape)}.

    All begin alike. One optimizer holds all, which is the same as one for each: it treats every number by itself."""
    torch.manual_seed(seed)
    model = make()
    start = {name: p.detach() for name, p in model.named_parameters()}
    stacked = {name: p.expand(len(rows), *p.shape).clone().requires_grad_() for name, p in start.items()}
    optimizer = recipe.optimizer(list(stacked.values()))
    each = vmap(lambda parameters, batch: calls(model, losses, parameters, batch).mean())
    generator, size = torch.Generator().manual_seed(seed), recipe.batch or rows.shape[1]
    whole = tuple(t[rows] for t in data) if recipe.batch is None else ()
    for _ in range(recipe.epochs):
        order = rows
        if recipe.batch is not None:
            shuffled = [torch.randperm(rows.shape[1], generator=generator) for _ in range(len(rows))]
            order = rows.gather(1, torch.stack(shuffled))
        for chosen in order.split(size, 1):
            if recipe.drop_last and chosen.shape[1] < size:
                continue
            optimizer.zero_grad()
            each(stacked, whole or tuple(t[chosen] for t in data)).sum().backward()
            optimizer.step()
    return {name: p.detach() for name, p in stacked.items()}


def calls(model: nn.Module, losses: Losses, parameters: dict[str, Tensor], batch: Data) -> Tensor:
    """The losses of a batch with other parameters than the model's own."""
    return losses(lambda *inputs: functional_call(model, parameters, inputs), batch)  # type: ignore[arg-type]


def measured(
    make: Callable[[], nn.Module], losses: Losses, train: Data, query: Data, recipe: Recipe, subsets: Tensor,
    at_once: int = 10, seed: int = 0,
) -> Tensor:  # fmt: skip
    """(subsets, queries): the queries' losses after training on each subset, in float64, the mean over seeds."""
    model, query = make().double(), tuple(t.double() if t.is_floating_point() else t for t in query)
    each = vmap(lambda parameters: calls(model, losses, parameters, query))
    found = []
    with torch.no_grad():
        for rows in subsets.split(at_once):
            total = torch.zeros(())
            for k in range(recipe.seeds):
                with torch.enable_grad():
                    stacked = trained(make, losses, train, recipe, rows, seed + k)
                total = total + each({name: p.double() for name, p in stacked.items()})
            found.append(total / recipe.seeds)
    return torch.cat(found)


def lds(scores: Tensor, subsets: Tensor, outcome: Tensor) -> Tensor:
    """(queries,): Spearman's correlation, over subsets, of what a subset's scores foretell with what came out.

    `scores` are (queries, examples), added up over the subset's examples, and positive where training on the example
    lowers the query's loss; `outcome` are losses (subsets, queries)."""
    scores = scores.detach().double().cpu()
    member = torch.zeros(len(subsets), scores.shape[1], dtype=torch.float64).scatter_(1, subsets, 1.0)
    a, b = ranks(-(member @ scores.T)), ranks(outcome.double())
    a, b = a - a.mean(0), b - b.mean(0)
    return (a * b).sum(0) / (a.norm(dim=0) * b.norm(dim=0))


def ranks(values: Tensor) -> Tensor:
    """Along dimension 0. Ties (a score of zero throughout) get the mean of their ranks."""
    below = (values[:, None] > values).double().sum(1)
    same = (values[:, None] == values).double().sum(1)
    return below + (same - 1) / 2
