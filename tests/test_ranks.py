"""DDP and FSDP2 over gloo: every rank finds for its samples what one process finds, and `.grad` is the mean."""

from __future__ import annotations

import tempfile

import pytest
import torch.distributed as dist
from torch import nn

import processes
import rank_checks
import unsum

pytestmark = pytest.mark.slow
Groups = dict[int, processes.Ranks]


@pytest.mark.parametrize("kind", rank_checks.WRAPPED)
@pytest.mark.parametrize("count", [2, 3])
def test_as_one_process(count: int, kind: str, ranks: Groups) -> None:
    ranks[count].run(rank_checks.check, kind)


def test_ranks_that_learn_at_other_times(ranks: Groups) -> None:
    ranks[2].run(rank_checks.check_other_sizes)


def test_ranks_with_other_numbers_of_samples(ranks: Groups) -> None:
    ranks[2].run(rank_checks.check_other_numbers)


def test_tensor_parallel_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            model = rank_checks.Net()
            mesh = init_device_mesh("cpu", (1,))
            model.head.weight = nn.Parameter(distribute_tensor(model.head.weight, mesh, [Shard(0)]))
            with pytest.raises(unsum.errors.UnsupportedError, match=r"head\.weight is a DTensor.*tensor parallel"):
                unsum.gradients(model)
        finally:
            dist.destroy_process_group()
