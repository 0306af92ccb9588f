"""Builds that are killed, at any moment and again and again: nothing is lost, nothing is doubled."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import unsum

PROGRAM = """
import sys, time, torch, unsum
from curvature_nets import Examples, classified, ids, mlp, numbers
data, options = Examples(numbers(0, 400, 4), ids(1, 400, high=3)), {'project': 3, 'batch_size': 2, 'shard_size': 2}
print("begun", flush=True)
parts = [eval(part) for part in sys.argv[2:]] or [None]
for part in parts:
    unsum.index.build(mlp(), classified, data, sys.argv[1], **options, part=part)
"""


def started(path, *parts):
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": f"{here.parent / 'src'}{os.pathsep}{here}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), *map(repr, parts)], env=env, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "begun\n"
    return process


def shards(path):
    return len(list(path.glob("shard-*"))) if path.exists() else 0


def killed(process, path, draw):
    """When some more shards are there than before, or a moment later: in the middle of a write, perhaps."""
    wanted = shards(path) + draw.randint(1, 12)
    while shards(path) < wanted and process.poll() is None:
        time.sleep(0.0005)
    time.sleep(draw.random() * 0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def bytes_of(path):
    return {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith(".")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("index") / "whole"
    process = started(path)
    assert process.wait() == 0
    process.stdout.close()
    assert len(unsum.index.open(path)) == 400
    return bytes_of(path)


@pytest.mark.slow
def test_a_build_that_is_killed_again_and_again(tmp_path, whole):
    draw, path = random.Random(0), tmp_path / "i"
    for _ in range(8):
        killed(started(path), path, draw)
    process = started(path)
    assert process.wait() == 0
    process.stdout.close()
    assert bytes_of(path) == whole
    assert unsum.index.open(path).verify() == []
    assert not list(path.glob(".*.part"))


@pytest.mark.slow
def test_one_of_three_processes_is_killed(tmp_path, whole):
    draw, path = random.Random(1), tmp_path / "i"
    first = started(path, (0, 3))
    while not (path / "plan.json").exists():
        time.sleep(0.01)
    others = [started(path, (1, 3)), started(path, (2, 3))]
    killed(others[0], path, draw)
    for process in (first, others[1]):
        assert process.wait() == 0
        process.stdout.close()
    process = started(path, (1, 3), None)  # what the dead one left, and the manifest
    assert process.wait() == 0
    process.stdout.close()
    assert bytes_of(path) == whole
