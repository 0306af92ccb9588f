"""Loops over experts send another number of rows to each in every batch. The plan of such a batch follows from that of
another in which all else had the same sizes. Against gradients computed one sample at a time in float64."""

from collections import Counter

import pytest
import torch
from reference import each_of
from torch import nn
from torch.nn import functional as F

import unsum
from unsum.errors import InteractionError, SamplesError
from unsum.travel.trail import Trail

E, D, H = 4, 6, 10


class Experts(nn.Module):
    """Rows go to an expert each, and come back to their places; what an expert does is `inside`."""

    def __init__(self, inside):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)
        self.up, self.down = (nn.ModuleList(nn.Linear(a, b) for _ in range(E)) for a, b in ((D, H), (H, D)))
        self.norms, self.scale = nn.ModuleList(nn.LayerNorm(H) for _ in range(E)), nn.Parameter(torch.randn(E, H))
        self.inside = inside

    def forward(self, x, chosen):
        rows, chosen = self.first(x).flatten(0, 1), chosen.flatten()
        return self.last(x + self.inside(self, rows, chosen).view_as(x))


def looped(expert):
    def inside(model, rows, chosen):
        out = torch.zeros_like(rows)
        for e in range(E):
            taken = (chosen == e).nonzero()[:, 0]
            out = out.index_add(0, taken, model.down[e](expert(model, e, rows[taken])))
        return out

    return inside


def by_numbers_of_the_batch(model, e, rows):
    """How many rows there are decides a power, a shift and bounds: numbers that nodes save, and no tensor holds."""
    count = len(rows)
    return (model.up[e](rows) ** (2 + count % 2)).roll(count % 3, 1).clamp(-1 - count, 1 + count) / (1 + count)


def spread(model, e, rows):
    """A number for each row, beside rows."""
    h = model.up[e](rows)
    return h.tanh() * h.mean(1, keepdim=True) + h.norm(dim=1)[:, None]


def split(model, rows, chosen):
    order = chosen.argsort(stable=True)
    parts = rows[order].split(torch.bincount(chosen, minlength=E).tolist())
    return torch.cat([model.down[e](model.up[e](part).relu()) for e, part in enumerate(parts)])[order.argsort()]


INSIDES = {
    "tanh": looped(lambda model, e, rows: model.up[e](rows).tanh()),
    "norms and softmax": looped(lambda model, e, rows: F.gelu(h := model.norms[e](model.up[e](rows))) * h.softmax(-1)),
    "numbers of rows": looped(spread),
    "a scale": looped(lambda model, e, rows: model.up[e](rows).sin() * model.scale[e]),
    "numbers of the batch": looped(by_numbers_of_the_batch),
    "split": split,
}


@pytest.fixture
def followed(monkeypatch):
    """How often owners were followed through a whole graph."""
    counts, follow = Counter(), Trail.follow
    monkeypatch.setattr(Trail, "follow", lambda *given: counts.update(["follow"]) or follow(*given))
    return lambda: counts["follow"]


def batches(count, n=3, t=8):
    """Of one size, with other numbers of rows for each expert, and none without any."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        chosen = torch.randint(E, (n, t), generator=generator)
        chosen[0, :E] = torch.arange(E)
        yield torch.randn(n, t, D, generator=generator, dtype=torch.float64), chosen


def losses_of(model, x, chosen):
    return model(x, chosen).square().flatten(1).sum(1)


def squares_of(truth):
    return sum(each.flatten(1).square().sum(1) for each in truth.values())


def clip(norms):
    return 1 / norms


@pytest.mark.parametrize("inside", list(INSIDES))
def test_batches_in_which_experts_get_other_numbers_of_rows(inside):
    torch.manual_seed(0)
    model = Experts(INSIDES[inside]).double()
    for step, (x, chosen) in enumerate(batches(12)):
        truth = each_of(model, (losses_of(model, x, chosen)[k] for k in range(len(x))))
        if step % 3 == 0:
            with unsum.gradients(model) as g:
                losses_of(model, x, chosen).sum().backward()
            for name, each in truth.items():
                torch.testing.assert_close(g[name].per_sample(), each)
        elif step % 3 == 1:
            model.zero_grad()
            with unsum.gradients(model, unsum.Norms()) as g:
                losses_of(model, x, chosen).sum().backward()
            torch.testing.assert_close(g[unsum.Norms].sq_norms(), squares_of(truth))
            for name, each in truth.items():
                grad = model.get_parameter(name).grad
                torch.testing.assert_close(torch.zeros_like(each[0]) if grad is None else grad, each.sum(0))
        else:
            with unsum.gradients(model, unsum.WeightedSum(clip), grad=False) as g:
                losses_of(model, x, chosen).sum().backward()
            weights = clip(squares_of(truth).sqrt())
            for name, found in g[unsum.WeightedSum].sum().items():
                torch.testing.assert_close(found, torch.einsum("n,n...->...", weights, truth[name]))


def test_other_numbers_of_rows_are_not_followed_through_the_whole_graph(followed):
    torch.manual_seed(0)
    model = Experts(INSIDES["tanh"]).double()
    for step, (x, chosen) in enumerate(batches(12)):
        if step == 4:
            before = followed()
        with unsum.gradients(model, unsum.Norms()):
            losses_of(model, x, chosen).sum().backward()
    assert followed() == before <= 3


def test_another_size_of_batch_is_followed_anew(followed):
    torch.manual_seed(0)
    model = Experts(INSIDES["tanh"]).double()
    for n, t in ((3, 8), (3, 8), (4, 6), (4, 6), (2, 8), (3, 8), (2, 8)):
        for x, chosen in batches(2, n, t):
            truth = each_of(model, (losses_of(model, x, chosen)[k] for k in range(n)))
            with unsum.gradients(model, unsum.Norms()) as g:
                losses_of(model, x, chosen).sum().backward()
            torch.testing.assert_close(g[unsum.Norms].sq_norms(), squares_of(truth))
    assert followed() <= 5


class Scaled(nn.Module):
    """All rows in another order meet a matrix times a number of the batch, beside rows that go to one expert."""

    def __init__(self):
        super().__init__()
        self.first, self.bias, self.matrix = (
            nn.Linear(D, D),
            nn.Parameter(torch.randn(D)),
            nn.Parameter(torch.randn(D, D)),
        )
        self.expert = nn.Linear(D, D)

    def forward(self, x, chosen):
        rows, order = self.first(x).flatten(0, 1), chosen.flatten().argsort(stable=True)
        h = torch.addmm(self.bias, rows[order], self.matrix, alpha=1 + int(chosen[-1, 0])).sin()
        taken = (chosen.flatten() == 1).nonzero()[:, 0]
        out = torch.zeros_like(rows).index_add(0, taken, self.expert(rows[taken]).cos())
        return (out + h[order.argsort()]).view_as(x)


def test_numbers_that_nodes_have_saved_are_those_of_the_batch():
    torch.manual_seed(0)
    model = Scaled().double()
    for step, (x, chosen) in enumerate(batches(12)):
        chosen[-1, 0] = step // 6  # the same until recordings are there, and then another
        truth = each_of(model, (losses_of(model, x, chosen)[k] for k in range(len(x))))
        with unsum.gradients(model, unsum.Norms()) as g:
            losses_of(model, x, chosen).sum().backward()
        torch.testing.assert_close(g[unsum.Norms].sq_norms(), squares_of(truth))


class Sent(nn.Module):
    """Rows are taken from some places, and what comes of them is added at others."""

    def __init__(self):
        super().__init__()
        self.first, self.expert = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, taken, put):
        rows = self.first(x).flatten(0, 1)
        return torch.zeros(len(x) * 8, D, dtype=x.dtype).index_add(0, put, self.expert(rows[taken])).view(len(x), 8, D)


def other_places(taken):
    return taken.roll(1)


def the_same_numbers(taken):
    return taken.clone()


@pytest.mark.parametrize("later", [other_places, the_same_numbers])
def test_rows_that_go_back_to_other_samples_are_refused_in_later_batches(later):
    """In the first batches the very tensor says where rows are taken from and where they go."""
    torch.manual_seed(0)
    model, x = Sent().double(), torch.randn(3, 8, D, dtype=torch.float64)

    def norms_of(taken, put):
        with unsum.gradients(model, unsum.Norms()) as g:
            model(x, taken, put).square().sum().backward()
        return g[unsum.Norms].sq_norms()

    for _ in range(4):
        taken = torch.randperm(24)[:12]
        norms_of(taken, taken)
    taken = torch.arange(0, 24, 2)
    if later is other_places:
        with pytest.raises((InteractionError, SamplesError)):
            norms_of(taken, later(taken))
    truth = each_of(model, model(x, taken, taken).square().flatten(1).sum(1))
    torch.testing.assert_close(norms_of(taken, the_same_numbers(taken)), squares_of(truth))


def test_rows_that_are_taken_from_longer_samples_than_they_go_to_are_refused_in_later_batches():
    torch.manual_seed(0)
    model, taken = Sent().double(), torch.arange(12)
    for x in (torch.randn(3, 8, D).double(), torch.randn(3, 8, D).double(), torch.randn(3, 8, D).double()):
        with unsum.gradients(model, unsum.Norms()):
            model(x, taken, taken).square().sum().backward()
    with pytest.raises((InteractionError, SamplesError)), unsum.gradients(model, unsum.Norms()):
        model(torch.randn(3, 16, D).double(), taken, taken).square().sum().backward()
