"""An index that several processes build together (torch.distributed over gloo): the same bytes as of one process."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import index_checks
import processes
import unsum
from index_checks import bytes_of, left_over

pytestmark = pytest.mark.slow
Groups = dict[int, processes.Ranks]

ALONE = {"plain": "plain", "ddp": "plain", "fsdp2, float64": "net, float64", "fsdp2, float32": "net, float32"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What one process builds, of each kind of model."""
    found = {}
    for kind, plain in ALONE.items():
        path = tmp_path_factory.mktemp("alone") / "i"
        index_checks.build(0, plain, path)
        found[kind] = bytes_of(path)
    return found


@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.parametrize("count", [2, 3])
def test_as_one_process(count: int, kind: str, ranks: Groups, tmp_path: Path, alone: dict) -> None:
    ranks[count].run(index_checks.build, kind, tmp_path / "i")
    assert bytes_of(tmp_path / "i") == alone[kind] and left_over(tmp_path / "i") == []
    assert unsum.index.open(tmp_path / "i").info["audit"] < 1e-6


@pytest.mark.parametrize("kind", ALONE)
def test_any_number_of_ranks_resumes_another_run(kind: str, ranks: Groups, tmp_path: Path, alone: dict) -> None:
    told = ranks[3].run(index_checks.build_or_error, kind, tmp_path / "begun", 26)
    assert all("example 26 cannot be read" in text for text in told)
    some = len(list((tmp_path / "begun").glob("shard-*")))
    assert 0 < some < 11
    for count in (2, 1):
        path = tmp_path / str(count)
        shutil.copytree(tmp_path / "begun", path)
        if count == 1:
            index_checks.build(0, ALONE[kind], path)
        else:
            ranks[count].run(index_checks.build, kind, path)
        assert bytes_of(path) == alone[kind] and left_over(path) == []


def test_ranks_without_work_wait_for_nobody(ranks: Groups, tmp_path: Path) -> None:
    """DDP would send buffers around in the first forward; here only one rank has any."""
    ranks[3].run(index_checks.build, "ddp, buffers", tmp_path / "i")
    index_checks.build(0, "plain, buffers", tmp_path / "alone")
    whole = bytes_of(tmp_path / "alone")
    assert bytes_of(tmp_path / "i") == whole
    for left in ([0], [10], [0, 4]):
        for number in left:
            (tmp_path / "i" / f"shard-{number:06d}.safetensors").unlink()
        ranks[3].run(index_checks.build, "ddp, buffers", tmp_path / "i", seconds=60)
        assert bytes_of(tmp_path / "i") == whole


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2, float64"])
def test_an_error_on_one_rank_ends_all_with_its_message(kind: str, ranks: Groups, tmp_path: Path) -> None:
    told = ranks[3].run(index_checks.build_not_finite, kind, tmp_path / "i", 18, seconds=60)
    own = [text for text in told if text.startswith("NotFinite: build: example 18")]
    others = [text for text in told if text.startswith("UnsumError: build: rank ")]
    # A rank that has finished takes a shard over, and may meet the same example before it hears of the failure.
    assert own and len(own) + len(others) == 3, told
    assert all("of 3 failed: NotFinite: build: example 18" in text for text in others)
    assert ".failed" not in left_over(tmp_path / "i")


def test_ranks_with_other_data_are_told(ranks: Groups, tmp_path: Path) -> None:
    told = ranks[2].run(index_checks.build_other, tmp_path / "i", seconds=60)
    assert all("the ranks do not ask for the same index. Rank 1 beside rank 0: the data differs" in t for t in told)


def test_a_second_run_is_refused_on_every_rank(ranks: Groups, tmp_path: Path) -> None:
    from unsum.index import locks

    (tmp_path / "i").mkdir()
    with locks.building(tmp_path / "i", alone=False):  # a rank of an earlier run that is still alive
        told = ranks[3].run(index_checks.build_or_error, "plain", tmp_path / "i", seconds=60)
    assert all("several processes build shards of it" in text for text in told)


# ---- started as torchrun starts them ---------------------------------------------------------------------------------

BROKEN_OFF = """
import sys
import torch.distributed as dist
import index_checks

dist.init_process_group("gloo")
index_checks.build_broken_off(sys.argv[1])
"""

PROGRAM = """
import os, pathlib, sys, time
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import unsum
from curvature_nets import Examples, classified, ids, mlp, numbers

dist.init_process_group("gloo")
path = pathlib.Path(sys.argv[1])
pathlib.Path(f"{path}.{dist.get_rank()}").write_text(str(os.getpid()))
data, slow = Examples(numbers(0, 240, 4), ids(1, 240, high=3)), float(sys.argv[2])
def losses(model, batch):
    time.sleep(slow)
    return classified(model, batch)
model = mlp()
if sys.argv[3:] == ["fsdp2"]:
    fully_shard(model)
unsum.index.build(model, losses, data, path, project=3, batch_size=2, shard_size=4)
dist.destroy_process_group()
"""


def started(path: Path, count: int, pause: float = 0.0, *more: str, text: str = PROGRAM) -> subprocess.Popen[str]:
    program, here = path.parent / "program.py", Path(__file__).parent
    program.write_text(text)
    env = os.environ | {
        "PYTHONPATH": f"{here.parent / 'src'}{os.pathsep}{here}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--master-addr", "127.0.0.1",
        "--master-port", str(processes.free_port()), str(program), str(path), str(pause), *more,
    ]  # fmt: skip
    return subprocess.Popen(torchrun, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


def test_one_rank_of_three_is_killed(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole", tmp_path / "i"
    code, out = ended(started(whole, 1))
    assert code == 0, out
    draw = random.Random(3)
    for victim, more in ((2, []), (0, []), (1, ["fsdp2"])):
        process = started(path, 3, 0.03, *more)
        wanted = len(list(path.glob("shard-*"))) + 6
        while len(list(path.glob("shard-*"))) < wanted and process.poll() is None:
            time.sleep(0.001)
        time.sleep(draw.random() * 0.05)
        os.kill(int(Path(f"{path}.{victim}").read_text()), signal.SIGKILL)
        code, out = ended(process)
        assert code != 0 and not (path / "manifest.json").exists(), out
    code, out = ended(started(path, 2))
    assert code == 0, out
    assert bytes_of(path) == bytes_of(whole) and left_over(path) == []


def test_a_forward_that_breaks_off_under_fully_shard(tmp_path: Path) -> None:
    """The others wait for parameters that never come: they end when the process that failed does."""
    code, out = ended(started(tmp_path / "i", 3, text=BROKEN_OFF))
    assert code != 0 and "in the middle of a forward" in out
    assert len(list((tmp_path / "i").glob("shard-*"))) > 0
