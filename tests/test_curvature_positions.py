"""Which positions count in a fit: padding, prompts, experts, packed documents; the reduce setting."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unsum
from brute_curvature import KINDS, block_of, ekfac, kfac, matvec, meetings, random_rows, second_moment, trainable
from curvature_checks import close, dense, distance, fitted, same
from curvature_nets import LAYERED, D, Experts, Fused, T, Transformer, classified, ids, made, mlp, numbers

LENGTHS = (3, 5, 2, 4)


def padded(prompt=0):
    """Ids and labels in one batch: sample i has LENGTHS[i] positions, the rest is padding; labels of a prompt and of
    padding are -100."""
    x, y = ids(0, len(LENGTHS), T), ids(1, len(LENGTHS), T)
    y[torch.arange(T) >= torch.tensor(LENGTHS)[:, None]] = -100
    y[:, :prompt] = -100
    return x, y


def cut_to_length(batch):
    """The same samples, each a batch of its own, without padding."""
    return [tuple(tensor[i : i + 1, :length] for tensor in batch) for i, length in enumerate(LENGTHS)]


# ---- padding and prompts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_padding_leaves_the_factors_and_their_counts(kind):
    model, batch = made(Transformer), padded()
    with_padding, without = (fitted(model, classified, data, kind) for data in ([batch], cut_to_length(batch)))
    rows = random_rows(model, 3)
    same(with_padding.matvec(rows), without.matvec(rows))
    same(with_padding.matvec(rows), matvec(KINDS[kind](model, classified, cut_to_length(batch)), rows))


def test_padding_leaves_the_factors_of_the_reduce_setting():
    model, batch = made(Transformer), padded()
    options, rows = {"setting": "reduce"}, random_rows(model, 3)
    with_padding, without = (
        fitted(model, classified, d, **options).matvec(rows) for d in ([batch], cut_to_length(batch))
    )
    same(with_padding, without)
    wanted = matvec(kfac(model, classified, cut_to_length(batch), "reduce"), rows)
    same(*(without_embeddings(found, model) for found in (with_padding, wanted)))


def without_embeddings(rows, model):
    """Without the embeddings' weights: what reduce means for counts is a choice."""
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return {name: value for name, value in rows.items() if name not in tables}


def test_what_stands_in_the_padding_does_not_matter():
    model, (x, y) = made(Transformer), padded()
    other = torch.where(torch.arange(T) >= torch.tensor(LENGTHS)[:, None], 7, x)
    rows = random_rows(model, 2)
    same(fitted(model, classified, [(other, y)]).matvec(rows), fitted(model, classified, [(x, y)]).matvec(rows))


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
def test_prompt_tokens_stay_where_attention_gives_them_gradients(kind):
    model, batch = made(Transformer), padded(prompt=1)
    counted = {
        name: sum(int((delta != 0).any(1).sum()) for _, delta in met) for name, met in _met(model, batch).items()
    }
    assert counted["tokens"] == sum(LENGTHS) and counted["head"] == sum(LENGTHS) - len(LENGTHS)
    rows = random_rows(model, 3)
    found = fitted(model, classified, [batch], kind).matvec(rows)
    same(found, matvec(KINDS[kind](model, classified, cut_to_length(batch)), rows))


def _met(model, batch):
    return meetings(model, classified, [batch])


def test_positions_without_a_label_leave_where_nothing_mixes_positions():
    model, x, y = mlp(), numbers(0, 3, 5, 4), ids(1, 3, 5, high=3)
    y[:, 3:] = -100
    rows = random_rows(model, 2)
    short = fitted(model, classified, [(x[:, :3], y[:, :3])]).matvec(rows)
    same(fitted(model, classified, [(x, y)]).matvec(rows), short)
    x[:, 3:] = 1e3
    same(fitted(model, classified, [(x, y)]).matvec(rows), short)


def test_each_factor_has_its_own_count():
    """Twice as many positions with the same inputs: A stays, G doubles."""
    model, x, y = mlp(), numbers(0, 4, 2, 4), ids(1, 4, 2, high=3)
    twice = x.repeat(1, 2, 1), y.repeat(1, 2)
    rows = random_rows(model, 2)
    once = fitted(model, classified, [(x, y)]).matvec(rows)
    same(fitted(model, classified, [twice]).matvec(rows), {name: 2 * value for name, value in once.items()})
    samples = x.repeat(2, 1, 1), y.repeat(2, 1)
    same(fitted(model, classified, [samples]).matvec(rows), once)


def test_batches_of_other_lengths():
    model = made(Transformer)
    batches = [(ids(s, n, t), ids(s + 5, n, t)) for s, n, t in ((0, 3, 5), (1, 2, 2), (2, 4, 3))]
    rows = random_rows(model, 3)
    for kind, truth in KINDS.items():
        same(fitted(model, classified, batches, kind).matvec(rows), matvec(truth(model, classified, batches), rows))


# ---- the reduce setting ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["mlp on sequences", "convolution", "transformer", "called twice"])
def test_the_reduce_setting_sums_positions_first(net):
    model, loss_fn, batches = LAYERED[net]()
    rows = random_rows(model, 3)
    found = fitted(model, loss_fn, batches, setting="reduce").matvec(rows)
    wanted = matvec(kfac(model, loss_fn, batches, "reduce"), rows)
    same(*(without_embeddings(values, model) for values in (found, wanted)))
    default, expanded = (fitted(model, loss_fn, batches, **o).matvec(rows) for o in ({}, {"setting": "expand"}))
    same(default, expanded)


def test_corrected_eigenvalues_in_the_reduce_setting():
    """They are the mean squares of whole per-sample gradients, as in the expand setting; the basis is another one."""
    model, loss_fn, batches = LAYERED["mlp on sequences"]()  # more samples than features: one basis alone
    rows = random_rows(model, 3)
    found = fitted(model, loss_fn, batches, "ekfac", setting="reduce").matvec(rows)
    same(found, matvec(ekfac(model, loss_fn, batches, "reduce"), rows), 1e-7)


@pytest.mark.parametrize("net", ["convolution", "transformer"])
def test_corrected_eigenvalues_in_whatever_basis_the_reduce_setting_has(net):
    model, loss_fn, batches = LAYERED[net]()
    names = list(trainable(model))
    matrix = dense(fitted(model, loss_fn, batches, "ekfac", setting="reduce"), model, names)
    moment = second_moment(model, loss_fn, batches, names)
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    torch.testing.assert_close((moment @ vectors * vectors).sum(0), values, rtol=1e-6, atol=1e-8 * float(values[-1]))


def test_both_settings_are_one_where_there_is_one_position():
    model, loss_fn, batches = LAYERED["mlp"]()
    rows = random_rows(model, 2)
    reduced = fitted(model, loss_fn, batches, setting="reduce").matvec(rows)
    same(reduced, fitted(model, loss_fn, batches, setting="expand").matvec(rows))
    model, loss_fn, batches = LAYERED["mlp on sequences"]()
    names = ["0.weight", "0.bias"]
    expanded, reduced = (dense(fitted(model, loss_fn, batches, setting=s), model, names) for s in ("expand", "reduce"))
    assert distance(reduced, expanded) > 0.05


# ---- experts --------------------------------------------------------------------------------------------------------


def test_every_slice_of_fused_experts_has_factors_of_its_own():
    apart = made(lambda: Experts(bias=False))
    fused = Fused(apart)
    batches = [(numbers(s, n, T, D), ids(s, n, T, high=D)) for s, n in ((1, 4), (2, 3))]
    c = fitted(fused, classified, batches)
    assert c.parameters["up"] == "kronecker"
    truth, matrix = kfac(apart, classified, batches), dense(c, fused, ["up"]).reshape(3, D * D, 3, D * D)
    for e in range(3):
        for other in range(3):
            wanted = torch.zeros(D * D, D * D).double()
            if e == other and e < 2:  # the last gets no position
                wanted = block_of(truth, f"experts.{e}.weight").matrix
                assert wanted.norm() > 0
            torch.testing.assert_close(matrix[e, :, other], wanted, rtol=1e-7, atol=1e-10)


def test_experts_that_are_met_in_some_batches_only():
    model = made(Experts)
    x, y = numbers(1, 24, 1, D), ids(2, 24, 1, high=D)
    with torch.no_grad():
        chosen = model.gate(x[:, 0]).argmax(-1)
    order = chosen.argsort()
    first = int((chosen == 0).sum())
    assert 0 < first < 24
    sorted_batches = [(x[order[:first]], y[order[:first]]), (x[order[first:]], y[order[first:]])]
    rows = random_rows(model, 2)
    truth = matvec(kfac(model, classified, [(x, y)]), rows)
    same(fitted(model, classified, [(x, y)]).matvec(rows), truth)
    same(fitted(model, classified, sorted_batches).matvec(rows), truth)


# ---- packed documents -----------------------------------------------------------------------------------------------


def packed_loss(model, batch):
    """(documents,): one row of positions, documents one after the other."""
    x, y, starts = batch
    losses = F.cross_entropy(model(x)[0], y[0], reduction="none")
    document = torch.bucketize(torch.arange(x.shape[1]), starts, right=True) - 1
    return torch.zeros(len(starts) - 1, dtype=losses.dtype).index_add(0, document, losses)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_the_samples(kind):
    model, x, y = mlp(), numbers(0, 1, 9, 4), ids(1, 1, 9, high=3)
    starts = torch.tensor([0, 2, 3, 7, 9])
    batches = [(x, y, starts), (x[:, 2:8] + 1, y[:, 2:8], torch.tensor([0, 1, 6]))]
    apart = [(bx[:, i:j], by[:, i:j]) for bx, by, s in batches for i, j in itertools.pairwise(s)]
    c = fitted(model, packed_loss, batches, kind, samples=lambda batch: unsum.packed(batch[2]))
    rows = random_rows(model, 3)
    same(c.matvec(rows), matvec(KINDS[kind](model, classified, apart), rows))


def test_a_padded_batch_is_as_good_as_its_dense_matrix():
    """A whole block, number by number."""
    model, batch = made(Transformer), padded(prompt=1)
    block = block_of(kfac(model, classified, cut_to_length(batch)), "head.weight")
    close(dense(fitted(model, classified, [batch]), model, ["head.weight"]), block.matrix)
