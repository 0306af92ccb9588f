"""Sinks: where the records of `unsum.watch` go. A sink is a function of a record; `to=` takes one, a path, or a list.

Examples:
    >>> import tempfile, torch, unsum
    >>> path = tempfile.mkdtemp() + "/run.jsonl"
    >>> model = torch.nn.Linear(3, 1)
    >>> watch = unsum.watch(model, to=[path, lambda record: print(record.step, record.norms.tolist())])
    >>> with watch:
    ...     model(torch.ones(4, 3)).sum().backward()
    0 [2.0, 2.0, 2.0, 2.0]
    >>> with open(path) as file:
    ...     len(file.readlines())
    1
"""

from unsum.training.sinks.console import console
from unsum.training.sinks.files import jsonl, parquet
from unsum.training.sinks.loggers import mlflow, tensorboard, trackio, wandb
from unsum.training.sinks.send import Sink, Sinks

__all__ = ["Sink", "Sinks", "console", "jsonl", "mlflow", "parquet", "tensorboard", "trackio", "wandb"]
