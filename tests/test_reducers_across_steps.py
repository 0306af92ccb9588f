"""Reducers keep their results and their subclasses' methods from step to step."""

import pytest
import torch
from reference import per_sample_gradients
from torch.nn import functional as F

import unsum
from changing_nets import ENDS, centred, moody, token_norms
from one_by_one import assert_same, norms_of, random, same, squares
from small_nets import D, mlp
from unsum.errors import UnsumError


def counted(kind):
    """A reducer of this kind that writes down the names it is given."""

    class Counted(kind):
        def take(self, name, factors):
            self.names.append(name)
            super().take(name, factors)

    reducer = Counted()
    reducer.names = []
    return reducer


@pytest.mark.parametrize("again", [True, False], ids=["one reducer", "a new one in every step"])
@pytest.mark.parametrize("kind", [unsum.Norms, unsum.TokenNorms, unsum.SecondMoment, unsum.Kronecker])
def test_a_reducer_that_overrides_take_is_called_in_every_step(kind, again):
    model, x = mlp(), random(4, 3, D)
    reducer = counted(kind)
    for i in range(6):
        reducer = reducer if again else counted(kind)
        reducer.names = []
        with unsum.gradients(model, reducer) as g:
            squares(model, x).backward()
        assert sorted(reducer.names) == sorted(name for name, _ in model.named_parameters()), f"step {i}"
        if kind is unsum.Norms:
            assert_same(g, per_sample_gradients(model, squares, x), reducer=reducer)


def test_what_a_subclass_takes_may_be_changed():
    class OfWeights(unsum.Norms):
        def take(self, name, factors):
            if name.endswith("weight"):
                super().take(name, factors)

    model, x = mlp(), random(4, D)
    each = {name: part for name, part in per_sample_gradients(model, squares, x).items() if name.endswith("weight")}
    for _ in range(6):
        with unsum.gradients(model, reducer := OfWeights()) as g:
            squares(model, x).backward()
        same(g[reducer].norms(), norms_of(each), 1e-9 * float(norms_of(each).max()), "norms of weights")


READS = {
    "Norms": (unsum.Norms, lambda r: {"norms": r.norms(), **r.by_parameter()}),
    "TokenNorms": (unsum.TokenNorms, lambda r: {"norms": r.norms()}),
    "SecondMoment": (unsum.SecondMoment, lambda r: r.sum_squares()),
    "Project": (lambda: unsum.Project(k=2, seed=0), lambda r: {"matrix": r.matrix()}),
    "WeightedSum": (lambda: unsum.WeightedSum(lambda norms: 1 / norms), lambda r: r.sum()),
    "Kronecker": (
        unsum.Kronecker,
        lambda r: {f"{name}.{k}": f for name, two in r.factors().items() for k, f in enumerate(two)},
    ),
}


@pytest.mark.parametrize("shapes", [((4, 3), (2, 5)), ((4, 3), (4, 3))], ids=["other shapes", "the same shapes"])
@pytest.mark.parametrize("name", READS)
def test_a_reducer_in_a_second_block_leaves_the_results_of_the_first(name, shapes):
    model = mlp()
    make, read = READS[name]
    reducer, blocks = make(), []
    batches = [random(*shape, D) for shape in shapes]
    for x in batches:
        with unsum.gradients(model, reducer) as g:
            squares(model, x).backward()
        blocks.append(g)
    for x, g in zip(batches, blocks, strict=True):
        with unsum.gradients(model, fresh := make()) as other:
            squares(model, x).backward()
        wanted = read(other[fresh])
        for key in (reducer, type(reducer)):
            found = read(g[key])
            assert found.keys() == wanted.keys()
            for part, value in wanted.items():
                same(found[part], value, 1e-9, f"{name}: {part}")
    if name == "Norms":
        for x, g in zip(batches, blocks, strict=True):
            assert_same(g, per_sample_gradients(model, squares, x), reducer=reducer)


def test_a_block_that_fails_leaves_the_results_of_the_one_before():
    model, x, norms = moody(), random(4, D), unsum.Norms()
    each = per_sample_gradients(model, squares, x)
    with unsum.gradients(model, norms) as g:
        squares(model, x).backward()
    model.mood = centred
    with pytest.raises(UnsumError):
        with unsum.gradients(model, norms):
            squares(model, random(3, D)).backward()
    assert_same(g, each, reducer=norms)


@pytest.mark.parametrize("rows", [True, False], ids=["one row", "no rows"])
@pytest.mark.parametrize("kinds", [(unsum.TokenNorms,), (unsum.Norms, unsum.TokenNorms)], ids=["alone", "with norms"])
def test_norms_of_the_tokens_of_packed_documents(kinds, rows):
    torch.manual_seed(1)
    model = mlp()
    for ends in ENDS:
        x, cu = random(ends[-1], D), torch.tensor(ends)
        by_token = token_norms(model, x[None])[0]
        longest = int(cu.diff().max())
        wanted = torch.stack([F.pad(part, (0, longest - len(part))) for part in by_token.split(cu.diff().tolist())])
        for _ in range(2):
            with unsum.gradients(model, *(k() for k in kinds), samples=unsum.packed(cu)) as g:
                squares(model, x[None] if rows else x).backward()
            assert not g[unsum.TokenNorms].left_out
            same(g[unsum.TokenNorms].norms(), wanted, 1e-9 * float(wanted.max()), f"TokenNorms {ends}")
