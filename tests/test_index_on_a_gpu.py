"""An index that is built and asked on a GPU, beside one that a processor built."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unsum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class Net(nn.Module):
    """Layers of unequal width, each met once for every position."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(30, 24), nn.Linear(24, 70), nn.Linear(70, 30)

    def forward(self, ids):
        return self.down(torch.tanh(self.up(self.table(ids))))


def losses(model, ids):
    ids = ids.to(model.table.weight.device)
    out = model(ids)
    return F.cross_entropy(out[:, :-1].mT, ids[:, 1:], reduction="none").sum(1)


@pytest.fixture(scope="module")
def both():
    torch.manual_seed(0)
    model = Net()
    return model, copy.deepcopy(model).cuda(), list(torch.randint(30, (60, 9)))


def built(path, model, data, *, curvature, **options):
    own = unsum.curvature.fit(model, losses, data, kind="kfac") if curvature else None
    unsum.index.build(model, losses, data, path, dtype="float32", curvature=own, **options)
    return unsum.index.open(path)


@pytest.mark.parametrize("project", [4, 16])
def test_projected_rows_are_those_of_a_processor(project, both, tmp_path):
    here, there, data = both
    one = built(tmp_path / "cpu", here, data, curvature=False, project=project)
    other = built(tmp_path / "gpu", there, data, curvature=False, project=project)
    torch.testing.assert_close(one.rows(0, 60), other.rows(0, 60), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("score", ["dot", "cosine", "influence"])
def test_scores_with_a_curvature_are_those_of_a_processor(score, both, tmp_path):
    """Eigenvectors have any sign: scores are compared, not rows. What is kept is of unequal numbers of both sides."""
    here, there, data = both
    one = built(tmp_path / "cpu", here, data, curvature=True)
    other = built(tmp_path / "gpu", there, data, curvature=True)
    batch = torch.stack(data[:5])
    wanted = one.query(here, losses, batch, k=60, score=score)
    found = other.query(there, losses, batch, k=60, score=score)
    size = wanted.scores.abs().amax()
    ordered = [hits.scores.gather(1, hits.ids.argsort(1)) for hits in (wanted, found)]
    assert (ordered[0] - ordered[1]).abs().amax() < 2e-2 * size


def test_coordinates_are_those_of_the_gradient_in_the_eigenbasis(both, tmp_path):
    _, there, data = both
    c = unsum.curvature.fit(there, losses, data, kind="kfac")
    unsum.index.build(there, losses, data, tmp_path / "i", dtype="float32", curvature=c)
    i = unsum.index.open(tmp_path / "i")
    hits = i.query(there, losses, torch.stack(data[:4]), k=60, score="influence")
    exact = unsum.influence(there, losses, data, data[:4], curvature=c).matrix
    assert torch.corrcoef(torch.stack([hits.scores.flatten(), exact.gather(1, hits.ids).flatten()]))[0, 1] > 0.9
