"""Builds that are killed, at any moment and again and again: nothing is lost, nothing is doubled."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import unsum
from index_checks import bytes_of, left_over
from killed_builds import COUNT, POINTS

pytestmark = pytest.mark.slow
CASES = ("rows", "token budget", "rows for tokens", "texts", "curvature")
KILLS = 10  # of each case: at every point, and at random moments


class Builds:
    """Builds in forks of one process."""

    def __init__(self):
        here = Path(__file__).parent
        env = os.environ | {
            "PYTHONPATH": f"{here.parent / 'src'}{os.pathsep}{here}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, str(here / "killed_builds.py")],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._answer() == "ready"

    def _answer(self):
        return self.process.stdout.readline().strip()

    def start(self, case, path, point=None, at=0, cut=0.5, part=None):
        asked = {"case": case, "path": str(path), "point": point, "at": at, "cut": cut, "part": part}
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        return int(self._answer())

    def wait(self, pid):
        print(pid, file=self.process.stdin, flush=True)
        return int(self._answer())

    def run(self, *args, after=None):
        """How a build ends; one that is killed so many seconds after its start, if that is given."""
        pid = self.start(*args)
        if after is not None:
            time.sleep(after)
            os.kill(pid, signal.SIGKILL)
        return self.wait(pid)

    def end(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def builds():
    found = Builds()
    yield found
    found.end()


@pytest.mark.parametrize("case", CASES)
def test_a_build_that_is_killed_again_and_again(case, builds, tmp_path):
    began = time.monotonic()
    assert builds.run(case, tmp_path / "whole") == 0
    whole, seconds = bytes_of(tmp_path / "whole"), time.monotonic() - began
    assert unsum.index.open(tmp_path / "whole").info["examples"] == COUNT
    draw = random.Random(f"{case} 0")
    moments = [*POINTS, *[None] * (KILLS - len(POINTS))]
    draw.shuffle(moments)
    path, finished = tmp_path / "0", 0
    while moments:
        if moments[-1] is None:
            code = builds.run(case, path, after=draw.random() * seconds * 0.5)
        else:
            code = builds.run(case, path, moments[-1], draw.randint(1, 9), draw.random())
        if code == -signal.SIGKILL:
            moments.pop()
        else:  # it came to its end before: another one
            assert code == 0 and bytes_of(path) == whole and left_over(path) == []
            finished += 1
            path = tmp_path / str(finished)
    assert builds.run(case, path) == 0
    assert bytes_of(path) == whole and left_over(path) == []
    assert unsum.index.open(path).verify() == []


def test_one_of_three_processes_is_killed(builds, tmp_path):
    assert builds.run("texts", tmp_path / "whole") == 0
    whole, draw, path = bytes_of(tmp_path / "whole"), random.Random(1), tmp_path / "i"
    for kill in range(6):
        victim = kill % 3
        for lost in range(victim, COUNT // 5, 6):  # it has something to do in each round
            (path / f"shard-{lost:06d}.safetensors").unlink(missing_ok=True)
        point = draw.choice(("before rename", "in a file", "in a journal"))
        dies = point, draw.randint(3, 5), draw.random()  # the plan may be its own, and then the first shards
        pids = [builds.start("texts", path, *(dies if k == victim else (None, 0, 0)), (k, 3)) for k in range(3)]
        assert [builds.wait(pid) for pid in pids] == [-signal.SIGKILL if k == victim else 0 for k in range(3)]
    for k in range(3):
        assert builds.run("texts", path, None, 0, 0, (k, 3)) == 0
    assert bytes_of(path) == whole and left_over(path) == []
