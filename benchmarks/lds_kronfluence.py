"""kronfluence's scores for the problems of lds.py, damped by its own heuristic: 0.1 times the mean eigenvalue."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

# losses of a batch, one for each example: with its labels, or with labels drawn from the model
Losses = Callable[[nn.Module, Any], Tensor]


def scores(
    strategy: str, model: nn.Module, losses: Losses, drawn: Losses, train: Dataset[Any], query: Dataset[Any],
    batch: int, mask: Callable[[Any], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """(queries, examples), positive where training on the example lowers the query's loss; of linear layers alone."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Sums(Task):  # its own fit draws labels (`sample=True`) unless it is told not to
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            return (drawn if sample else losses)(model, batch).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return losses(model, batch).sum()

        def get_attention_mask(self, batch: Any) -> Tensor | None:
            return mask(batch) if mask else None

    logging.getLogger("kronfluence").setLevel(logging.ERROR)
    task = Sums()
    wrapped = prepare_model(copy.deepcopy(model), task)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer(
            "lds", wrapped, task, cpu=True, disable_tqdm=True, output_dir=folder, disable_model_save=True
        )
        analyzer.fit_all_factors(
            "factors", train, per_device_batch_size=batch, factor_args=FactorArguments(strategy=strategy)
        )
        analyzer.compute_pairwise_scores(
            "scores", "factors", query, train,
            per_device_query_batch_size=batch, per_device_train_batch_size=batch,
            score_args=ScoreArguments(damping_factor=None),
        )  # fmt: skip
        return analyzer.load_pairwise_scores("scores")["all_modules"]
