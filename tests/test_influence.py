"""`unsum.influence`: scores of training examples for queries, against inner products of gradients that are computed one
sample at a time."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import unsum
from brute_curvature import (
    KINDS,
    categorical_loss,
    flat,
    gauss_newton,
    per_sample,
    scores,
    solve,
    unflat,
)
from curvature_checks import close, fitted
from curvature_nets import ALL, LAYERED, Batches, Examples, Transformer, classified, forward, ids, made, mlp, numbers
from unsum.errors import UnsumError


def data_of(net):
    """model, loss_fn, training batches, query batches."""
    model, loss_fn, batches = ALL[net]()
    return model, loss_fn, batches, [tuple(tensor[:3] for tensor in batches[1])]


def scored(model, loss_fn, train, query, **options):
    return unsum.influence(model, loss_fn, Batches(*train), Batches(*query), **options)


def gradients_of(model, loss_fn, train, query):
    return per_sample(model, loss_fn, query), per_sample(model, loss_fn, train)


# ---- the scores -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", ALL)
def test_dot_products_of_gradients(net):
    model, loss_fn, train, query = data_of(net)
    q, t = gradients_of(model, loss_fn, train, query)
    found = scored(model, loss_fn, train, query, score="dot")
    assert found.matrix.shape == (len(flat(q)), len(flat(t)))
    close(found.matrix.double(), scores(q, t))
    close(scored(model, loss_fn, train, query).matrix.double(), scores(q, t))  # the default


@pytest.mark.parametrize("net", ALL)
def test_cosines_of_gradients(net):
    model, loss_fn, train, query = data_of(net)
    q, t = gradients_of(model, loss_fn, train, query)
    wanted = F.normalize(flat(q), dim=1) @ F.normalize(flat(t), dim=1).T
    close(scored(model, loss_fn, train, query, score="cosine").matrix.double(), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", [net for net in LAYERED if net != "experts"])
def test_scores_with_a_fitted_curvature(net, kind):
    model, loss_fn, train, query = data_of(net)
    q, t = gradients_of(model, loss_fn, train, query)
    c, blocks = fitted(model, loss_fn, train, kind), KINDS[kind](model, loss_fn, train)
    for damping in (None, 0.03):
        found = scored(model, loss_fn, train, query, curvature=c, damping=damping)
        wanted = scores(q, t, lambda rows, d=damping: solve(blocks, rows, d))
        torch.testing.assert_close(found.matrix.double(), wanted, rtol=1e-6, atol=1e-7 * float(wanted.abs().max()))


@pytest.mark.parametrize("net", ["tied transformer", "fused experts", "recurrent", "multi-head attention"])
def test_scores_are_those_of_the_curvatures_own_solves(net):
    model, loss_fn, train, query = data_of(net)
    q, t = gradients_of(model, loss_fn, train, query)
    c = fitted(model, loss_fn, train, "ekfac")
    in_order = lambda rows: {name: rows[name] for name in q}
    wanted = scores(q, t, lambda rows: in_order(c.solve(rows, damping=0.1)))
    close(scored(model, loss_fn, train, query, curvature=c, damping=0.1).matrix.double(), wanted)


def test_scores_with_the_exact_gauss_newton_matrix():
    model, loss_fn, train, query = data_of("layer norm and scale")
    q, t = gradients_of(model, loss_fn, train, query)
    h = unsum.curvature.ggn(model, Batches(*train), unsum.curvature.categorical(forward))
    matrix = gauss_newton(model, forward, train, categorical_loss)
    damped = matrix + 0.05 * torch.eye(len(matrix)).double()
    wanted = scores(q, t, lambda rows: unflat(torch.linalg.solve(damped, flat(rows).T).T, model))
    found = scored(model, loss_fn, train, query, curvature=h, damping=0.05).matrix.double()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


# ---- the sign -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "kfac", "ekfac"])
def test_positive_means_that_a_step_on_the_example_lowers_the_querys_loss(kind):
    model, loss_fn, train, query = data_of("mlp")
    c = kind and fitted(model, loss_fn, train, kind)
    found = scored(model, loss_fn, train, query, curvature=c, damping=0.1 if kind else None).matrix.double()
    assert (found > 0).any() and (found < 0).any()
    before, rate = loss_fn(model, query[0]).detach(), 1e-6
    each = per_sample(model, loss_fn, train)
    for example in range(found.shape[1]):
        step = {name: value[example] for name, value in each.items()}
        step = c.solve(step, damping=0.1) if kind else step
        trained = copy.deepcopy(model)
        with torch.no_grad():
            for name, p in trained.named_parameters():
                p -= rate * step[name]
        lowered = (before - loss_fn(trained, query[0]).detach()) / rate
        torch.testing.assert_close(lowered, found[:, example], rtol=1e-3, atol=1e-4 * float(found.abs().max()))


def test_an_example_is_a_good_example_of_itself():
    model, loss_fn, train, _ = data_of("mlp")
    c = fitted(model, loss_fn, train, "ekfac")
    for options in ({}, {"curvature": c}, {"score": "cosine"}):
        diagonal = scored(model, loss_fn, train, train, **options).matrix.diagonal()
        assert (diagonal > 0).all()
    torch.testing.assert_close(diagonal.double(), torch.ones(len(diagonal)).double())


# ---- the best -------------------------------------------------------------------------------------------------------


def test_top_gives_the_best_examples_of_every_query():
    model, loss_fn, train, query = data_of("mlp")
    found = scored(model, loss_fn, train, query)
    for k in (1, 4, 10):
        best = found.top(k)
        assert best.ids.shape == best.scores.shape == (3, k)
        wanted, which = found.matrix.sort(1, descending=True)
        assert torch.equal(best.ids.cpu(), which[:, :k])
        torch.testing.assert_close(best.scores, wanted[:, :k])


# ---- the data -------------------------------------------------------------------------------------------------------


def rows_of(batch):
    return [tuple(tensor[i] for tensor in batch) for i in range(len(batch[0]))]


TRAIN = (numbers(0, 10, 4), ids(1, 10, high=3))
QUERY = (numbers(2, 5, 4), ids(3, 5, high=3))

DATA = {
    "data set": (lambda batch: Examples(*batch), {"batch_size": 4}),
    "data set, one batch size for all": (lambda batch: Examples(*batch), {}),
    "list of examples": (rows_of, {"batch_size": 3}),
    "list of examples, one by one": (rows_of, {"batch_size": 1}),
    "loader": (lambda batch: torch.utils.data.DataLoader(Examples(*batch), batch_size=4), {}),
    "batches": (lambda batch: Batches(tuple(t[:3] for t in batch), tuple(t[3:] for t in batch)), {}),
    "generator of batches": (
        lambda batch: (tuple(t[i : i + 2] for t in batch) for i in range(0, len(batch[0]), 2)),
        {},
    ),
}


@pytest.mark.parametrize("kind", [None, "kfac"])
@pytest.mark.parametrize("data", DATA)
def test_examples_are_in_the_order_of_the_data(data, kind):
    model, (make, options) = mlp(), DATA[data]
    q, t = gradients_of(model, classified, [TRAIN], [QUERY])
    wanted, curvature = scores(q, t), {}
    if kind:
        wanted = scores(q, t, lambda rows: solve(KINDS[kind](model, classified, [TRAIN]), rows, 0.1))
        curvature = {"curvature": fitted(model, classified, [TRAIN], kind), "damping": 0.1}
    close(unsum.influence(model, classified, make(TRAIN), make(QUERY), **options, **curvature).matrix.double(), wanted)


SHUFFLED = {
    "shuffle=True": lambda data: {"shuffle": True},
    "a random subset": lambda data: {"sampler": SubsetRandomSampler(range(len(data)))},
    "by weights": lambda data: {"sampler": WeightedRandomSampler([1.0] * len(data), len(data))},
    "of several processes": lambda data: {"sampler": DistributedSampler(data, 1, 0)},
    "in batches": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 2, False)},
}


@pytest.mark.parametrize("how", SHUFFLED)
def test_a_loader_that_shuffles_is_refused(how):
    data, model = TensorDataset(*TRAIN), mlp()
    loader = DataLoader(data, **SHUFFLED[how](data))
    with pytest.raises(UnsumError, match="train: this DataLoader shuffles"):
        unsum.influence(model, classified, loader, Examples(*QUERY))
    with pytest.raises(UnsumError, match="query: this DataLoader shuffles"):
        unsum.influence(model, classified, Examples(*QUERY), loader)
    in_order = DataLoader(data, sampler=DistributedSampler(data, 1, 0, shuffle=False))
    assert unsum.influence(model, classified, in_order, Examples(*QUERY)).matrix.shape == (5, 10)


def test_batches_may_be_dictionaries():
    model = mlp()
    by_name = lambda batch: {"x": batch[0], "y": batch[1]}
    loss_fn = lambda model, batch: classified(model, (batch["x"], batch["y"]))
    q, t = gradients_of(model, classified, [TRAIN], [QUERY])
    close(scored(model, loss_fn, [by_name(TRAIN)], [by_name(QUERY)]).matrix.double(), scores(q, t))
    examples = [[by_name(row) for row in rows_of(batch)] for batch in (TRAIN, QUERY)]
    close(unsum.influence(model, loss_fn, *examples, batch_size=4).matrix.double(), scores(q, t))


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_unequal_lengths(kind):
    model = made(Transformer)
    train = [(ids(s, n, t), ids(s + 7, n, t)) for s, n, t in ((0, 3, 5), (1, 2, 2), (2, 2, 4))]
    query = [(ids(s, 2, t), ids(s + 7, 2, t)) for s, t in ((3, 3), (4, 5))]
    q, t = gradients_of(model, classified, train, query)
    if kind is None:
        close(scored(model, classified, train, query).matrix.double(), scores(q, t))
        return
    blocks = KINDS[kind](model, classified, train)
    found = scored(model, classified, train, query, curvature=fitted(model, classified, train, kind), damping=0.1)
    close(found.matrix.double(), scores(q, t, lambda rows: solve(blocks, rows, 0.1)))


def test_padding_has_no_influence():
    model, x, y = made(Transformer), ids(0, 3, 5), ids(1, 3, 5)
    lengths = (3, 5, 2)
    y[torch.arange(5) >= torch.tensor(lengths)[:, None]] = -100
    apart = [tuple(tensor[i : i + 1, :k] for tensor in (x, y)) for i, k in enumerate(lengths)]
    q, t = gradients_of(model, classified, apart, apart)
    close(scored(model, classified, [(x, y)], [(x, y)]).matrix.double(), scores(q, t))


def packed_loss(model, batch):
    """(documents,): one row of positions, documents one after the other."""
    x, y, starts = batch
    losses = F.cross_entropy(model(x)[0], y[0], reduction="none")
    document = torch.bucketize(torch.arange(x.shape[1]), starts, right=True) - 1
    return torch.zeros(len(starts) - 1, dtype=losses.dtype).index_add(0, document, losses)


def test_packed_documents_are_the_examples():
    model = mlp()
    train = (numbers(0, 1, 9, 4), ids(1, 1, 9, high=3), torch.tensor([0, 2, 3, 7, 9]))
    query = (numbers(2, 1, 5, 4), ids(3, 1, 5, high=3), torch.tensor([0, 4, 5]))
    apart = [
        [(x[:, i:j], y[:, i:j]) for i, j in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
        for x, y, starts in (train, query)
    ]
    q, t = gradients_of(model, classified, *apart)
    found = scored(model, packed_loss, [train], [query], samples=lambda batch: unsum.packed(batch[2]))
    close(found.matrix.double(), scores(q, t))


def test_scores_of_tokens_add_up_to_those_of_examples():
    model = mlp()
    train, query = (numbers(0, 4, 3, 4), ids(1, 4, 3, high=3)), (numbers(2, 2, 3, 4), ids(3, 2, 3, high=3))
    found = scored(model, classified, [train], [query], tokens=True)
    assert found.tokens.shape == (2, 4, 3)
    close(found.tokens.sum(2).double(), found.matrix.double())
    q = per_sample(model, classified, [query])
    tokens = [tuple(tensor[:, i : i + 1] for tensor in train) for i in range(3)]  # nothing mixes positions
    for i, batch in enumerate(tokens):
        close(found.tokens[..., i].double(), scores(q, per_sample(model, classified, [batch])))
    cosines = scored(model, classified, [train], [query], tokens=True, score="cosine")
    close(cosines.tokens.sum(2).double(), cosines.matrix.double())


@pytest.mark.parametrize("width", [1, 3])
def test_scores_of_tokens_where_a_parameter_is_a_single_number(width):
    """It meets every number of its input: of one number at each position the share is known, of more it is left out."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(4, width), nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return self.layer(x) * self.scale

    model, loss = made(Scaled), lambda model, batch: model(batch[0]).tanh().sum((1, 2))
    found = scored(model, loss, [(numbers(0, 4, 5, 4),)], [(numbers(2, 2, 5, 4),)], tokens=True)
    q = per_sample(model, loss, [(numbers(2, 2, 5, 4),)])
    assert found.left_out == (() if width == 1 else ("scale",))
    for i in range(5):
        t = per_sample(model, loss, [(numbers(0, 4, 5, 4)[:, i : i + 1],)])
        parts = [{name: each[name] for name in each if name not in found.left_out} for each in (q, t)]
        close(found.tokens[..., i].double(), scores(*parts))


def test_cosines_with_a_curvature_are_of_the_solved_query_and_the_example():
    model, loss_fn, train, query = data_of("mlp")
    q, t = gradients_of(model, loss_fn, train, query)
    c = fitted(model, loss_fn, train, "ekfac")
    wanted = F.normalize(flat(c.solve(q)), dim=1) @ F.normalize(flat(t), dim=1).T
    close(scored(model, loss_fn, train, query, score="cosine", curvature=c).matrix.double(), wanted)


def test_influence_leaves_the_model_as_it_was():
    model, loss_fn, train, query = data_of("layer norm and scale")
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    scored(model, loss_fn, train, query)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and torch.equal(torch.get_rng_state(), random)


class Counted(Batches):
    """Batches that count how often they are read."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


@pytest.mark.parametrize("score", ["dot", "cosine"])
def test_one_batch_of_queries_that_is_more_than_memory_is_taken_in_parts(score):
    model, loss_fn, batches = LAYERED["mlp"]()
    c, query = fitted(model, loss_fn, batches, "ekfac"), tuple(tensor[:5] for tensor in batches[0])
    whole, train = scored(model, loss_fn, batches, [query], curvature=c, score=score), Counted(*batches)
    two = 2 * 8 * sum(p.numel() for p in model.parameters())  # bytes of two queries
    parts = unsum.influence(model, loss_fn, train, Batches(query), c, score, memory=two)
    close(parts.matrix, whole.matrix)
    assert train.reads == 3
