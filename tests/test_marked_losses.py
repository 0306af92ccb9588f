"""Losses that the user has marked as samples: of pairs, triplets, bags of rows, graphs and tokens."""

import pytest
import torch
from reference import alone
from torch import nn
from torch.nn import functional as F

import unsum
from one_by_one import assert_right, assert_rows, random
from small_nets import D, gpt2, mlp
from unsum.errors import InteractionError


def assert_marked(model, losses, **options):
    """`losses(model)` are marked as the samples; their mean is differentiated."""
    each = alone(model, lambda m: losses(m) / len(losses(m)))
    assert_right(model, lambda: unsum.mark_samples(losses(model)).mean(), each, **options)


def pairs_first(one, two):
    return torch.cat([one, two]), lambda z: z.chunk(2)


def pairs_side_by_side(one, two):
    return torch.stack([one, two], 1).flatten(0, 1), lambda z: z.unflatten(0, (-1, 2)).unbind(1)


@pytest.mark.parametrize("features", [3, 4], ids=["no sizes coincide", "as many pairs as features"])
@pytest.mark.parametrize("together", [pairs_first, pairs_side_by_side])
def test_marked_losses_of_pairs_of_rows(together, features):
    model = mlp(outputs=features)
    rows, apart = together(random(4, D), random(4, D))
    assert_marked(model, lambda m: 1 - F.cosine_similarity(*apart(m(rows)), dim=1))


def test_marked_losses_of_pairs_that_are_compared_with_all_others():
    model = mlp(outputs=3)
    rows, _ = pairs_first(random(4, D), random(4, D))

    def losses(m):
        z = F.normalize(m(rows), dim=1)
        alike = (z @ z.T).masked_fill(torch.eye(8, dtype=torch.bool), -torch.inf)
        return F.cross_entropy(alike, torch.arange(8).roll(4), reduction="none").view(2, 4).sum(0)

    assert_marked(model, losses, interacting="exact")
    with pytest.raises(InteractionError):
        with unsum.gradients(model):
            unsum.mark_samples(losses(model)).mean().backward()


@pytest.mark.parametrize("t", [6, 4], ids=["no sizes coincide", "as many pairs as tokens"])
@pytest.mark.parametrize("together", [pairs_first, pairs_side_by_side])
def test_marked_losses_of_preferences(together, t):
    """As in DPO: an answer that was chosen and one that was rejected, in one batch."""
    model = gpt2().double()
    rows, apart = together(torch.randint(1, 40, (4, t)), torch.randint(1, 40, (4, t)))

    def losses(m):
        logp = m(rows).logits[:, :-1].log_softmax(-1).gather(2, rows[:, 1:, None]).sum((1, 2))
        better, worse = apart(logp)
        return -F.logsigmoid(0.5 * (better - worse))

    assert_marked(model, losses)


@pytest.mark.parametrize("features", [3, 4], ids=["no sizes coincide", "as many triplets as features"])
@pytest.mark.parametrize("calls", [1, 3])
def test_marked_losses_of_triplets(calls, features):
    model, rows = mlp(outputs=features), random(12, D)

    def losses(m):
        three = m(rows).chunk(3) if calls == 1 else [m(part) for part in rows.chunk(3)]
        return F.triplet_margin_loss(*three, margin=5.0, reduction="none")

    assert_marked(model, losses)


def test_marked_losses_of_an_anchor_and_several_candidates():
    model, anchors, candidates = mlp(outputs=3), random(4, D), random(4, 5, D)

    def losses(m):
        score = torch.einsum("nd,nkd->nk", m(anchors), m(candidates.flatten(0, 1)).unflatten(0, (4, 5)))
        return F.cross_entropy(score, torch.tensor([0, 4, 2, 1]), reduction="none")

    assert_marked(model, losses)


BAGS = torch.tensor([2, 0, 1, 0, 2, 2, 1, 0, 0])  # whose each row is


class Bags(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.a, self.score, self.b, self.pool = nn.Linear(D, 6), nn.Linear(6, 1), nn.Linear(6, 2), pool

    def forward(self, x, bags):
        h = torch.tanh(self.a(x))
        return self.b(self.pool(h, self.score(h).exp(), bags, int(bags.max()) + 1))


def pool_sum(h, score, bags, count):
    return torch.zeros(count, h.shape[1]).double().index_add(0, bags, h * score)


def pool_attention(h, score, bags, count):
    total = torch.zeros(count, 1).double().index_add(0, bags, score)
    return pool_sum(h, score / total[bags], bags, count)


def pool_scatter(h, score, bags, count):
    return torch.zeros(count, h.shape[1]).double().scatter_add(0, bags[:, None].expand_as(h), h * score)


@pytest.mark.parametrize("mixed", [False, True], ids=["sorted", "not sorted"])
@pytest.mark.parametrize("pool", [pool_sum, pool_attention, pool_scatter])
def test_marked_losses_of_bags_of_rows(pool, mixed):
    torch.manual_seed(0)
    model, x = Bags(pool).double(), random(9, D)
    bags = BAGS if mixed else BAGS.sort().values
    alone_in = lambda m: [m(x[bags == b], torch.zeros_like(bags[bags == b])).square().sum() for b in range(3)]
    each = alone(model, lambda m: [loss / 3 for loss in alone_in(m)])
    run = lambda: unsum.mark_samples(model(x, bags).square().sum(1)).mean()
    assert_right(model, run, each)


def test_marked_losses_of_bags_that_the_loss_has_pooled():
    model, x = mlp(outputs=3), random(9, D)
    assert_marked(model, lambda m: torch.zeros(3, 3).double().index_add(0, BAGS, m(x)).square().sum(1))


class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(D, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x, edges, graph):
        source, target = edges
        for layer in (self.a, self.b):
            h = layer(x)
            x = torch.tanh(h.index_add(0, target, h[source]))
        return self.head(torch.zeros(int(graph.max()) + 1, x.shape[1]).double().index_add(0, graph, x))


@pytest.mark.parametrize("mixed", [False, True], ids=["graph after graph", "nodes in any order"])
def test_marked_losses_of_graphs(mixed):
    torch.manual_seed(0)
    graph = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 8, 7], [1, 2, 0, 4, 3, 6, 7, 5, 8]])
    if mixed:
        order = torch.randperm(9)
        graph, edges = graph[order], order.argsort()[edges]
    model, x = Graphs().double(), random(9, D)
    assert_marked(model, lambda m: m(x, edges, graph).square().sum(1))


@pytest.mark.parametrize(("n", "t"), [(4, 3), (4, 4)], ids=["no sizes coincide", "n = T"])
def test_marked_losses_of_tokens(n, t):
    model, x, y = mlp(), random(n, t, D), torch.randint(4, (n * t,))
    assert_marked(model, lambda m: F.cross_entropy(m(x).flatten(0, 1), y, reduction="none"))
    assert_marked(model, lambda m: m(x).square().sum(-1).view(-1))
    assert_marked(model, lambda m: m(x).square().sum(-1).t().reshape(-1))  # time first


@pytest.mark.parametrize(("n", "t"), [(3, 5), (5, 5)], ids=["no sizes coincide", "n = T"])
def test_marked_losses_of_tokens_that_look_back(n, t):
    model, ids = gpt2().double(), torch.randint(1, 40, (n, t))
    losses = lambda m: m(ids).logits.logsumexp(-1).square().flatten()
    assert_marked(model, losses, interacting="exact")


class TimeFirst(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(6, 2)

    def forward(self, x):
        h = self.inner(x)
        return self.head(h[0] if isinstance(h, tuple) else h)


@pytest.mark.parametrize("t", [3, 4], ids=["no sizes coincide", "n = T"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(6, 6),
        lambda: nn.GRU(6, 3, 2, bidirectional=True),
        lambda: nn.Linear(6, 6),
        lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0),
    ],
    ids=["lstm", "gru", "linear", "attention"],
)
def test_marked_losses_where_time_is_first(make, t):
    torch.manual_seed(0)
    model, x = TimeFirst(make()).double(), random(t, 4, 6)
    each = alone(model, lambda m: (m(x[:, i : i + 1]).square().sum() / 4 for i in range(4)))
    assert_right(model, lambda: unsum.mark_samples(model(x).square().sum((0, 2))).mean(), each)


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [2, 0, 3, 1], [1, 3]], ids=["turned", "shuffled", "chosen"])
def test_marked_losses_are_samples_in_their_own_order(order):
    model, x = mlp(), random(4, D)
    assert_marked(model, lambda m: m(x).square().sum(1)[order])


def test_marked_rows_need_not_be_losses():
    model, x = mlp(outputs=3), random(8, D)
    each = alone(model, lambda m: m(x).square().view(4, 2, 3).sum((1, 2)))
    assert_right(model, lambda: unsum.mark_samples(model(x).view(4, 2, 3)).square().sum(), each)


def test_marked_losses_inside_the_model():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(outputs=3)

        def forward(self, one, two):
            a, b = self.net(torch.cat([one, two])).chunk(2)
            return unsum.mark_samples((a - b).square().sum(1)).sum()

    model, one, two = Inside(), random(4, D), random(4, D)
    assert_rows(model, lambda m, one, two: m(one, two), one, two)
