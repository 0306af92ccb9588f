"""An index that is built on a Ray cluster: the same bytes as of one process, also when a worker is killed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import unsum
from index_checks import bytes_of, left_over
from unsum.errors import NotInstalled, OptionError, SamplesError, UnsumError

TASK = """
import os, pathlib, time
import torch
from curvature_nets import Examples, classified, ids, mlp, numbers

torch.set_num_threads(1)
here, size = pathlib.Path(__file__).parent, 60
data = Examples(numbers(0, size, 4), ids(1, size, high=3))
options = {"project": 3, "batch_size": 2, "shard_size": 6, "text": lambda example: str(example[1])}

def losses(model, batch):
    time.sleep(float((here / "pause").read_text()))
    return classified(model, batch)

def setup():
    with (here / "workers").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    return mlp(), losses, data, options

def broken():
    bad = Examples(data.tensors[0].clone(), data.tensors[1])
    bad.tensors[0][31] = torch.nan
    return mlp(), losses, bad, options

def deadly():
    def die(model, batch):
        if (batch[0] == data.tensors[0][20]).all(1).any():
            os.kill(os.getpid(), 9)
        return losses(model, batch)
    return mlp(), die, data, options
"""


def test_where_ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NotInstalled, match="pip install ray"):
        unsum.integrations.ray.build("train.py:setup", "index")


def test_ray_is_imported_when_it_is_used() -> None:
    program = "import sys, unsum, unsum.integrations; unsum.integrations.ray; assert 'ray' not in sys.modules"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent / "src")}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)


has_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
# Ray ends a process that loses its cluster, so the tests of a cluster have a process of their own.
OWN = "UNSUM_TESTS_OF_RAY"
pytest_ray = pytest.mark.skipif(OWN not in os.environ, reason="runs in the process of test_on_a_cluster")


@pytest.mark.slow
@has_ray
def test_on_a_cluster() -> None:
    here = Path(__file__).parent
    env = os.environ | {OWN: "1", "PYTHONPATH": f"{here.parent / 'src'}{os.pathsep}{here}"}
    # -s: what Ray says when it ends the process would be lost with what pytest has captured
    command = [sys.executable, "-m", "pytest", "-sp", "no:xdist", "-m", "slow", "-k", "not test_on_a_cluster", __file__]
    done = subprocess.run(command, env=env, cwd=here.parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    here = Path(__file__).parent
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    path = f"{here.parent / 'src'}{os.pathsep}{here}"
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "pause").write_text("0")
    (tmp_path / "workers").write_text("")
    return f"{tmp_path / 'task.py'}:setup"


def alone(task: str, path: Path) -> dict[str, bytes]:
    from unsum.target import task as made

    model, loss_fn, data, options = made(task)
    unsum.index.build(model, loss_fn, data, path, **options)
    return bytes_of(path)


def workers(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "workers").read_text().split()]


@pytest.mark.slow
@pytest_ray
def test_a_worker_is_killed(cluster: None, task: str, tmp_path: Path) -> None:
    wanted = alone(task, tmp_path / "alone")
    (tmp_path / "workers").write_text("")
    (tmp_path / "pause").write_text("0.1")
    path, killed = tmp_path / "i", []

    def kill() -> None:
        while len(list(path.glob("shard-*"))) < 3 or not list(path.glob(".shard-*.rows")):
            time.sleep(0.005)
        killed.append(workers(tmp_path)[-1])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    unsum.integrations.ray.build(task, path, workers=2)
    killer.join(10)
    assert bytes_of(path) == wanted and left_over(path) == []
    found = workers(tmp_path)
    assert killed and len(found) == len(set(found)) > 2  # another one took its place; none made its model twice
    unsum.integrations.ray.build(task, path)  # all there: nothing is made
    assert bytes_of(path) == wanted


@pytest.mark.slow
@pytest_ray
def test_a_shard_that_fails_ends_the_others(cluster: None, task: str, tmp_path: Path) -> None:
    """However often: Ray ends a process that calls ray.cancel while a task ends by itself."""
    for k in range(20):
        with pytest.raises(SamplesError, match="example 31"):
            unsum.integrations.ray.build(task.replace("setup", "broken"), tmp_path / f"i{k}")
    (tmp_path / "pause").write_text("0.1")
    with pytest.raises(SamplesError, match="example 31"):
        unsum.integrations.ray.build(task.replace("setup", "broken"), tmp_path / "slow")
    there = len(list((tmp_path / "slow").glob("shard-*.safetensors")))
    assert there < 9  # of ten shards nine can be made: those after the broken one were not begun, or were broken off
    time.sleep(0.5)
    assert len(list((tmp_path / "slow").glob("shard-*.safetensors"))) == there  # nobody works on
    assert not list((tmp_path / "slow").glob(".stop-*"))


@pytest.mark.slow
@pytest_ray
def test_what_fails_is_told_as_in_one_process(cluster: None, task: str, tmp_path: Path) -> None:
    with pytest.raises(SamplesError, match="example 31"):
        unsum.integrations.ray.build(task.replace("setup", "broken"), tmp_path / "i")
    with pytest.raises(UnsumError, match=r"the worker that made shard 3 died, more often than retries= allows"):
        unsum.integrations.ray.build(task.replace("setup", "deadly"), tmp_path / "j", retries=1)
    unsum.integrations.ray.build(task, tmp_path / "j")  # goes on with what is there
    assert bytes_of(tmp_path / "j") == alone(task, tmp_path / "alone")
    for bad in ({"workers": 0}, {"retries": -1}, {"retries": None}, {"resources": 3}, {"part": (0, 2)}):
        with pytest.raises(OptionError):
            unsum.integrations.ray.build(task, tmp_path / "k", **bad)
    with pytest.raises(OptionError, match="make="):
        unsum.integrations.ray.build(3, tmp_path / "k")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="must return"):
        unsum.integrations.ray.build(lambda: 3, tmp_path / "k")
