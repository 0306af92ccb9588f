"""Sinks for loggers that people have: TensorBoard, Weights & Biases, MLflow, Trackio.

Each writes `record.scalars()` at `record.step`, a histogram of the samples' norms where the logger has histograms, and
the outliers with their texts where it has text. In a run of its own the names are those of `scalars()`; in a run or a
writer that was given, where your own names are, they begin with `unsum/`. Under several processes rank 0 logs.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unsum.errors import OptionError
from unsum.training.record import Record
from unsum.training.sinks.packages import package

_BATCH = 500  # MLflow takes at most 1,000 numbers at once


class Logger:
    """A sink that opens its run with the first record: only rank 0 does."""

    only_rank_0 = True

    def __init__(self, name: str, start: Callable[[], Callable[[Record], None]]) -> None:
        self._name, self._start = name, start
        self._log: Callable[[Record], None] | None = None

    def __call__(self, record: Record) -> None:
        if self._log is None:
            self._log = self._start()
        self._log(record)

    def flush(self) -> None:
        """Let the logger write what it holds back, where it has a way."""
        flush = getattr(self._log, "flush", None)
        if callable(flush):
            flush()

    def __repr__(self) -> str:
        return f"unsum.sinks.{self._name}(...)"


def tensorboard(to: str | os.PathLike[str] | Any) -> Logger:
    """A sink for TensorBoard: a folder, or a `SummaryWriter` of yours; `pip install tensorboard`.

    Examples:
        >>> watch = unsum.watch(model, to=unsum.sinks.tensorboard("runs/first"))  # doctest: +SKIP
    """
    is_folder = isinstance(to, str | os.PathLike)
    if is_folder:
        package("tensorboard", "tensorboard")
        try:
            Path(to).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"sinks.tensorboard: cannot make the folder {to}: {error.strerror}") from None
    elif not hasattr(to, "add_scalar"):
        raise OptionError(f"sinks.tensorboard: a folder or a SummaryWriter, not {type(to).__name__}")

    def start() -> Callable[[Record], None]:
        if not is_folder:
            return _TensorBoard(to, "unsum/")
        return _TensorBoard(package("torch.utils.tensorboard", "tensorboard").SummaryWriter(os.fspath(to)), "")

    return Logger("tensorboard", start)


class _TensorBoard:
    def __init__(self, writer: Any, prefix: str) -> None:
        self._writer, self._prefix = writer, prefix
        self.flush = writer.flush

    def __call__(self, record: Record) -> None:
        for name, value in record.scalars().items():
            self._writer.add_scalar(self._prefix + name, value, record.step)
        norms = _finite_norms(record)
        if norms:
            self._writer.add_histogram(f"{self._prefix}norms", package("numpy", "numpy").asarray(norms), record.step)
        lines = [f"**{key}** (norm {norm:.3g}): {text}" for key, norm, text in _outliers(record)]
        if lines:
            self._writer.add_text(f"{self._prefix}outliers", "  \n".join(lines), record.step)


def wandb(run: Any = None, **init: Any) -> Logger:
    """A sink for Weights & Biases: a run of yours, else the run of the process, else `wandb.init(**init)` with the
    first record; `pip install wandb`.

    In a run that is yours or the process's, the records' x-axis is `unsum/step`, since the run counts steps itself.

    Examples:
        >>> watch = unsum.watch(model, to=unsum.sinks.wandb(project="digits"))  # doctest: +SKIP
    """
    library = package("wandb", "wandb")
    if run is not None and not hasattr(run, "log"):
        raise OptionError(f"sinks.wandb: run={type(run).__name__}: a run that wandb.init gave, or None")
    if run is not None and init:
        raise OptionError(f"sinks.wandb: a run, or options of wandb.init ({', '.join(init)}); not both")

    def start() -> Callable[[Record], None]:
        shared = run if run is not None else None if init else library.run
        used = library.init(**init) if shared is None else shared
        if shared is not None:
            used.define_metric("unsum/step")
            used.define_metric("unsum/*", step_metric="unsum/step")

        def log(record: Record) -> None:
            values = _values(library, record)
            if shared is None:
                used.log(values, step=record.step)
            else:
                used.log({**{f"unsum/{name}": value for name, value in values.items()}, "unsum/step": record.step})

        return log

    return Logger("wandb", start)


def mlflow(run: Any = None) -> Logger:
    """A sink for MLflow: a run or a run's id, else the active run, else a new one; `pip install mlflow`.

    MLflow has no histograms. Outliers' texts are artifacts, `outliers/step-….txt`.

    Examples:
        >>> watch = unsum.watch(model, to=unsum.sinks.mlflow(), every=10)  # doctest: +SKIP
    """
    library = package("mlflow", "mlflow")
    if run is not None and not isinstance(run, str) and not hasattr(getattr(run, "info", None), "run_id"):
        raise OptionError(f"sinks.mlflow: run={type(run).__name__}: a run, a run's id, or None for the active one")

    def start() -> Callable[[Record], None]:
        shared = run if run is not None else library.active_run()
        prefix = "" if shared is None else "unsum/"
        key = _new_run(library) if shared is None else shared if isinstance(shared, str) else shared.info.run_id

        def log(record: Record) -> None:
            found = record.scalars().items()
            metrics = [(re.sub(r"[^\w\-./: ]", "_", prefix + name), value) for name, value in found]
            for first in range(0, len(metrics), _BATCH):
                library.log_metrics(dict(metrics[first : first + _BATCH]), step=record.step, run_id=key)
            lines = [f"{key}  norm {norm:.3g}  {text}\n" for key, norm, text in _outliers(record)]
            if lines:
                library.log_text("".join(lines), f"outliers/step-{record.step:08d}.txt", run_id=key)

        return log

    return Logger("mlflow", start)


def _new_run(library: Any) -> str:
    """A new run that is not the active one: code that starts a run of its own later does not find one open."""
    with library.start_run() as made:
        key: str = made.info.run_id
    client = library.MlflowClient()
    client.update_run(key, status="RUNNING")
    weakref.finalize(client, library.MlflowClient().set_terminated, key)
    _clients.append(client)
    return key


_clients: list[Any] = []  # held until the interpreter's end, when their runs end


def trackio(**init: Any) -> Logger:
    """A sink for Trackio: `trackio.init(**init)` with the first record; without options, the process's run, or one of
    project "unsum" where there is none; `pip install trackio`.

    Examples:
        >>> watch = unsum.watch(model, to=unsum.sinks.trackio(project="digits"))  # doctest: +SKIP
    """
    library = package("trackio", "trackio")

    def start() -> Callable[[Record], None]:
        shared = None if init else library.context_vars.current_run.get()
        used = library.init(**{"project": "unsum", **init}) if shared is None else shared
        prefix = "" if shared is None else "unsum/"

        def log(record: Record) -> None:
            values = _values(library, record)
            used.log({prefix + name: value for name, value in values.items()}, step=record.step)

        return log

    return Logger("trackio", start)


def _values(library: Any, record: Record) -> dict[str, Any]:
    """What wandb and trackio, which has the same classes, log of a record: numbers, a histogram, a table of texts."""
    values: dict[str, Any] = dict(record.scalars())
    norms = _finite_norms(record)
    if norms:
        values["norms"] = library.Histogram(norms)
    rows = [[str(key), norm, text] for key, norm, text in _outliers(record)]
    if rows:
        values["outlier_texts"] = library.Table(columns=["id", "norm", "text"], data=rows)
    return values


def _finite_norms(record: Record) -> list[float]:
    return [] if record.norms is None else record.norms[record.norms.isfinite()].tolist()


def _outliers(record: Record) -> list[tuple[int | str, float, str]]:
    """Id, norm and text of each outlier; only where there are texts, since numbers alone are in the scalars."""
    if not record.texts or record.norms is None:
        return []
    norms = dict(zip(record.ids, record.norms.tolist(), strict=False))
    return [(key, norms.get(key, float("nan")), record.texts.get(key, "")) for key in record.outliers]
