"""Ray: `build`, which makes the shards of an index as tasks of a cluster."""

from __future__ import annotations

import contextlib
import importlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from unsum.errors import NotInstalled, OptionError, UnsumError
from unsum.examples import is_loss_function
from unsum.index import plan, store, texts
from unsum.index.build import build as build_here
from unsum.progress import progress
from unsum.target import split, task

Make = Callable[[], Any] | str

_NOTHING = (1 << 62, (1 << 62) + 1)  # part= of a build that makes the plan, or the manifest, and no shard
_PATIENCE = 10.0  # seconds in which a batch is over, as a rule
_made: dict[str, tuple[Any, ...]] = {}  # in a worker: what `make` gave for a build, so that it is called once


def build(
    make: Make,
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    retries: int = 3,
    resources: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Build an index on a Ray cluster: one task for each shard that is missing.

    If a worker dies, Ray runs its task again in another worker, which continues with the next batch of the shard. Call
    `build` again to build the shards that are still missing. The index is the same as that of `unsum.index.build` in
    one process. If Ray is not initialized (`ray.init()`), it is started on this machine.

    Args:
        make: A function that returns (model, loss_fn, data), or (model, loss_fn, data, options) with a dict of options
            of `unsum.index.build`; or its name, "file.py:function" or "module:function". Each worker process calls it
            once.
        path: The folder, on a file system that all machines share.
        workers: How many tasks run at a time; None: as many as the cluster has room for.
        retries: How often a task is run again after its worker died.
        resources: Options of Ray's tasks, for example {"num_gpus": 1}; None: one CPU.
        options: Options of `unsum.index.build`. They take precedence over those that `make` returns.

    Examples:
        >>> import unsum
        >>> unsum.integrations.ray.build("train.py:setup", "index", resources={"num_gpus": 1})  # doctest: +SKIP
    """
    ray = _ray()
    _refuse(make, workers, retries, resources, options)
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    name, where = uuid.uuid4().hex, str(Path(path).resolve())
    given = (name, ray.put(_absolute(make)), where, ray.put(options))
    how = {"max_retries": retries, **({"num_cpus": 1} if resources is None else resources)}
    found = _answer(ray, ray.remote(_missing).options(**how).remote(*given), "the plan")
    with _ended(ray, _stop_file(where, name)) as running:
        _run(ray, ray.remote(_shard).options(**how), found, workers, given, running)
    if not _answer(ray, ray.remote(_finished).options(**how).remote(*given), "the manifest"):
        raise UnsumError(f"{path}: a shard vanished while the others were built; call build again")


# ---- in the process that calls `build` -------------------------------------------------------------------------------


def _run(
    ray: Any, run: Any, missing: list[int], workers: int | None, given: tuple[Any, ...], running: dict[Any, int]
) -> None:
    """Make all shards, so many at a time; `running` has the tasks that are not over, with their shards."""
    waiting = iter(missing)
    line: progress[Any] = progress(len(missing), "index (shards, on Ray)")
    with line:
        while True:
            while len(running) < (workers or len(missing)) and (number := next(waiting, None)) is not None:
                running[run.remote(*given, number)] = number
            if not running:
                return
            done, _ = ray.wait(list(running), num_returns=1)
            for each in done:
                _answer(ray, each, f"shard {running.pop(each)}")
                line.step()


@contextlib.contextmanager
def _ended(ray: Any, stop: Path) -> Iterator[dict[Any, int]]:
    """Where the build breaks off, the tasks that are not over end too: by a file, for which each looks before every
    batch. `ray.cancel` will not do: if a task ends in the same moment, Ray 2.60 ends the process that called it."""
    running: dict[Any, int] = {}
    try:
        yield running
    finally:
        if running:
            with contextlib.suppress(OSError):  # a full disk, say: then they make their shards
                stop.touch()
            _, alive = ray.wait(list(running), num_returns=len(running), timeout=_PATIENCE)
            if not alive:
                stop.unlink(missing_ok=True)


def _answer(ray: Any, task: Any, what: str) -> Any:
    """What a task returns. Its error is raised as in one process."""
    try:
        return ray.get(task)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UnsumError):
            raise cause from None
        raise
    except ray.exceptions.RayError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsumError(
            f"build: the worker that made {what} died, more often than retries= allows: {reason}\n"
            "  what was written stays: find out why (memory?), and call build again"
        ) from error


def _refuse(make: Any, workers: Any, retries: Any, resources: Any, options: Mapping[str, Any]) -> None:
    if not callable(make) and not isinstance(make, str):
        raise OptionError(f"make={make!r}: a function, or the name of one, such as 'train.py:setup'")
    for name, value, least in (("workers", workers, 1), ("retries", retries, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise OptionError(f"{name}={value!r}: a whole number, {least} or more")
    if retries is None:
        raise OptionError("retries=None: a whole number, 0 or more")
    if resources is not None and not isinstance(resources, Mapping):
        raise OptionError(f"resources={resources!r}: a dict of options of Ray's tasks, such as {{'num_gpus': 1}}")
    if not options.keys().isdisjoint(("shard", "part")):
        raise OptionError("build on Ray makes all shards: shard= and part= are for processes that you start yourself")


def _absolute(make: Make) -> Make:
    """Workers have other working directories."""
    if not isinstance(make, str):
        return make
    where, name = split(make)
    return f"{Path(where).resolve()}:{name}" if where.endswith(".py") else make


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise NotInstalled("unsum.integrations.ray needs ray: pip install ray") from error


# ---- in the workers --------------------------------------------------------------------------------------------------


def _missing(build: str, make: Make, path: str, options: dict[str, Any]) -> list[int]:
    """Write the plan, or compare with it; the shards that are still to be made."""
    _build(build, make, path, options, part=_NOTHING)
    known = store.read_json(Path(path), store.PLAN)
    assert known is not None
    total = known["data"]["examples"] if known["cut"]["of"] == "examples" else known["data"]["batches"]
    numbers, mark = range(-(-total // known["cut"]["size"])), plan.mark(known)
    return [k for k in numbers if texts.shard_at(Path(path), k, known, mark, every_byte=True) is None]


def _shard(build: str, make: Make, path: str, options: dict[str, Any], number: int) -> None:
    with contextlib.suppress(_Stopped):
        _build(build, make, path, options, shard=number)


def _finished(build: str, make: Make, path: str, options: dict[str, Any]) -> bool:
    _build(build, make, path, options, part=_NOTHING)
    return store.read_json(Path(path), store.MANIFEST) is not None


def _build(build: str, make: Make, path: str, options: dict[str, Any], **which: Any) -> None:
    stop = _stop_file(path, build)
    _listen(stop)
    if build not in _made:
        _made.clear()  # the model of another build
        _made[build] = task(make)
    model, loss_fn, data, more = _made[build]

    def losses(model: Any, batch: Any) -> Any:
        _listen(stop)
        return loss_fn(model, batch)

    build_here(model, losses if is_loss_function(loss_fn) else loss_fn, data, path, **(more | options | which))


def _listen(stop: Path) -> None:
    if stop.exists():
        raise _Stopped


class _Stopped(Exception):
    """The build was broken off: another task failed, or who called it was interrupted."""


# ---- in both ---------------------------------------------------------------------------------------------------------


def _stop_file(path: str, build: str) -> Path:
    """The file that ends the tasks of a build. What is left of it, the next build sweeps away."""
    return Path(path) / f".stop-{build}"
