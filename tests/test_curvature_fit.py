"""`unsum.curvature.fit` against dense matrices that are computed one sample at a time (`brute_curvature.py`)."""

import copy

import pytest
import torch
from torch import nn

import unsum
from brute_curvature import (
    KINDS,
    block_of,
    first,
    matvec,
    meetings,
    per_sample,
    random_rows,
    second_moment,
    solve,
    trainable,
)
from curvature_checks import close, dense, fitted, same
from curvature_nets import ALL, LAYERED, Batches, Examples, classified, made, mlp, numbers, squared


def in_batch(rows):
    """{name: (1, *shape)} of {name: tensor}."""
    return {name: value.unsqueeze(0) for name, value in rows.items()}


# ---- against dense matrices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", LAYERED)
def test_products_and_solves_equal_dense_ones(net, kind):
    model, loss_fn, batches = LAYERED[net]()
    c, blocks = fitted(model, loss_fn, batches, kind), KINDS[kind](model, loss_fn, batches)
    rows = random_rows(model, 3)
    same(c.matvec(rows), matvec(blocks, rows))
    same(c.solve(rows, damping=0.05), solve(blocks, rows, 0.05))
    if net != "experts":  # one of them is never met: no damping follows from its eigenvalues
        same(c.solve(rows), solve(blocks, rows))


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_come_as_tensors_as_rows_and_as_gradients(kind):
    model, loss_fn, batches = LAYERED["layer norm and scale"]()
    c, blocks = fitted(model, loss_fn, batches, kind), KINDS[kind](model, loss_fn, batches)
    rows = random_rows(model, 4)
    wanted = solve(blocks, rows, 0.1)
    same(c.solve(rows, damping=0.1), wanted)
    alone = c.solve(first(rows), damping=0.1)
    assert all(alone[name].shape == p.shape for name, p in model.named_parameters())
    same(in_batch(alone), in_batch(first(wanted)))
    same(in_batch(c.matvec(first(rows))), in_batch(first(matvec(blocks, rows))))
    with unsum.gradients(model) as g:
        loss_fn(model, batches[0]).sum().backward()
    each = per_sample(model, loss_fn, batches[:1])
    same(c.solve(g, damping=0.1), solve(blocks, each, 0.1))
    same(c.matvec(g), matvec(blocks, each))


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_data_and_the_size_of_batches_do_not_matter(kind):
    model, batch = mlp(), (numbers(0, 10, 4), numbers(1, 10, 3))
    blocks, rows = KINDS[kind](model, squared, [batch]), random_rows(model, 2)
    wanted = matvec(blocks, rows)
    examples = [tuple(tensor[i] for tensor in batch) for i in range(10)]
    for data, options in (
        (Batches(batch), {}),
        (Batches(tuple(t[:3] for t in batch), tuple(t[3:] for t in batch)), {}),
        (Examples(*batch), {"batch_size": 4}),
        (examples, {"batch_size": 4}),
        (examples, {}),
        (torch.utils.data.DataLoader(Examples(*batch), batch_size=3), {}),
    ):
        same(unsum.curvature.fit(model, squared, data, kind=kind, **options).matvec(rows), wanted)


def test_a_generator_of_batches_is_enough_for_one_pass():
    model, loss_fn, batches = LAYERED["mlp"]()
    rows = random_rows(model, 2)
    for kind in ("kfac", "diagonal"):
        c = unsum.curvature.fit(model, loss_fn, (batch for batch in batches), kind=kind)
        same(c.matvec(rows), matvec(KINDS[kind](model, loss_fn, batches), rows))


# ---- which parameters, and how --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", ALL)
def test_every_parameter_is_covered(net, kind):
    model, loss_fn, batches = ALL[net]()
    c = fitted(model, loss_fn, batches, kind)
    assert sorted(c.parameters) == sorted(trainable(model))
    assert set(c.parameters.values()) <= {"kronecker", "diagonal"}
    if kind == "diagonal":
        assert set(c.parameters.values()) == {"diagonal"}
    elif net in LAYERED:
        layers = set(meetings(model, loss_fn, batches))
        for name, how in c.parameters.items():
            if not name.startswith("experts.2"):  # which is never met
                assert how == ("kronecker" if name.rpartition(".")[0] in layers else "diagonal"), name
    else:
        assert [how for name, how in c.parameters.items() if name.startswith(("tokens", "head"))].count("diagonal") == 0
    rows = random_rows(model, 2)
    solved = c.solve(rows, damping=0.1)
    assert all(value.isfinite().all() and value.abs().sum() > 0 for value in solved.values())


def test_attention_and_its_like_are_kronecker():
    for net, name in (
        ("multi-head attention", "attn.in_proj_weight"),
        ("multi-head attention", "attn.out_proj.weight"),
    ):
        assert fitted(*ALL[net]()).parameters[name] == "kronecker"


def test_frozen_parameters_are_left_out():
    model, loss_fn, batches = LAYERED["mlp"]()
    model[0].requires_grad_(False)
    c = fitted(model, loss_fn, batches)
    assert sorted(c.parameters) == ["2.bias", "2.weight"]
    rows = random_rows(model, 2)
    same(c.matvec(rows), matvec(KINDS["kfac"](model, loss_fn, batches), rows))


def test_the_bias_is_the_last_column():
    model = made(lambda: nn.Sequential(nn.Linear(3, 2)))
    x, y = numbers(0, 20, 3), numbers(1, 20, 2)
    c = fitted(model, squared, [(x, y)])
    a = torch.cat([x, torch.ones(20, 1).double()], 1)
    delta = model(x).detach() - y
    A, G = a.T @ a / 20, delta.T @ delta / 20
    v = numbers(2, 2, 4)
    found = c.matvec({"0.weight": v[:, :3], "0.bias": v[:, 3]})
    torch.testing.assert_close(torch.cat([found["0.weight"], found["0.bias"][:, None]], 1), G @ v @ A)
    bias_alone = c.solve({"0.weight": torch.zeros(2, 3).double(), "0.bias": v[:, 3]}, damping=0.1)
    assert bias_alone["0.weight"].abs().max() > 1e-3


# ---- damping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_damping_is_a_tenth_of_the_mean_eigenvalue_of_each_block(kind):
    model, loss_fn, batches = LAYERED["layer norm and scale"]()
    c, blocks = fitted(model, loss_fn, batches, kind), KINDS[kind](model, loss_fn, batches)
    assert len(c.damping) == len(blocks)
    for block in blocks:  # a block is known by its weight
        assert float(c.damping[block.names[0]]) == pytest.approx(block.default_damping(), rel=1e-8), block.names
    rows = random_rows(model, 2)
    same(c.solve(rows), solve(blocks, rows))


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_wins_over_the_default_damping(kind):
    model, loss_fn, batches = LAYERED["mlp"]()
    c, blocks = fitted(model, loss_fn, batches, kind), KINDS[kind](model, loss_fn, batches)
    rows, before = random_rows(model, 2), dict(c.damping)
    for damping in (1e-3, 1.0, 1e6):
        same(c.solve(rows, damping=damping), solve(blocks, rows, damping))
    assert dict(c.damping) == before


# ---- what does not depend on how tied weights are pooled ------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", ALL)
def test_a_damped_solve_undoes_the_damped_product(net, kind):
    model, loss_fn, batches = ALL[net]()
    c, rows = fitted(model, loss_fn, batches, kind), random_rows(model, 3)
    solved = c.solve(rows, damping=0.02)
    product = c.matvec(solved)
    same({name: product[name] + 0.02 * solved[name] for name in rows}, rows, 1e-7)
    matrix = dense(c, model, list(rows))
    close(matrix, matrix.T)
    assert torch.linalg.eigvalsh(matrix)[0] >= -1e-9 * matrix.trace()


def test_a_solve_with_next_to_no_damping_is_the_inverse():
    model, batches = mlp(), [(numbers(0, 60, 4), numbers(1, 60, 3))]
    rows = random_rows(model, 2)
    for kind in ("kfac", "ekfac"):
        c = fitted(model, squared, batches, kind)
        same(c.solve(c.matvec(rows), damping=1e-13), rows, 1e-6)


@pytest.mark.parametrize("net", ALL)
def test_corrected_eigenvalues_are_the_second_moments_in_their_own_eigenbasis(net):
    model, loss_fn, batches = ALL[net]()
    c = fitted(model, loss_fn, batches, "ekfac")
    names = list(trainable(model))
    matrix = dense(c, model, names)
    moment = second_moment(model, loss_fn, batches, names)
    assert float(matrix.trace()) == pytest.approx(float(moment.trace()), rel=1e-8)
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    torch.testing.assert_close((moment @ vectors * vectors).sum(0), values, rtol=1e-6, atol=1e-8 * float(values[-1]))


@pytest.mark.parametrize("net", ["tied", "tied transformer"])
def test_a_tied_weight_is_one_kronecker_product(net):
    model, loss_fn, batches = ALL[net]()
    c = fitted(model, loss_fn, batches, "kfac")
    assert c.parameters["tokens.weight"] == "kronecker"
    assert "head.weight" not in c.damping or "tokens.weight" not in c.damping
    v, d = model.tokens.weight.shape
    matrix = dense(c, model, ["tokens.weight"]).reshape(v, d, v, d)
    by_side = matrix.permute(0, 2, 1, 3).reshape(v * v, d * d)  # of rank 1 if the matrix is G ⊗ A
    singular = torch.linalg.svdvals(by_side)
    assert singular[0] > 0 and singular[1] <= 1e-8 * singular[0]


# ---- beside the numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_fit_leaves_the_model_as_it_was(kind):
    model, loss_fn, batches = LAYERED["layer norm and scale"]()
    model.train()
    model.fc.eval()
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    likelihood = unsum.curvature.categorical(lambda model, batch: model(batch[0]))
    for options in ({}, {"likelihood": likelihood}):
        fitted(model, loss_fn, batches, kind, **options)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training and not model.fc.training
    assert torch.equal(model.fc.weight.grad, torch.ones_like(model.fc.weight))
    assert all(p.grad is None and p.requires_grad for name, p in model.named_parameters() if name != "fc.weight")
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_float32(kind):
    model, batches = mlp(), [(numbers(0, 30, 4), torch.arange(30) % 3)]
    blocks, rows = KINDS[kind](model, classified, batches), random_rows(model, 2)
    single = copy.deepcopy(model).float()
    c = fitted(single, classified, [(x.float(), y) for x, y in batches], kind)
    ours = c.solve({name: value.float() for name, value in rows.items()}, damping=0.05)
    assert all(value.dtype == torch.float32 for value in ours.values())
    same(ours, solve(blocks, rows, 0.05), 1e-4)


def test_a_fit_knows_its_blocks_after_the_data_are_gone():
    model, loss_fn, batches = LAYERED["mlp"]()
    c = fitted(model, loss_fn, batches)
    block = block_of(KINDS["kfac"](model, loss_fn, batches), "0.weight")
    batches.clear()
    assert float(c.damping["0.weight"]) == pytest.approx(block.default_damping())
