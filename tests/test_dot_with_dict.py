"""`g.dot` with vectors: {parameter: tensor} and {parameter: (m, *shape)}."""

import pytest
import torch

import unsum
from brute_curvature import first, flat, per_sample, random_rows
from curvature_nets import ALL, classified, mlp, numbers, squared
from unsum.errors import UnsumError


def gathered(model, loss_fn, batch, **options):
    with unsum.gradients(model, **options) as g:
        loss_fn(model, batch).sum().backward()
    return g


@pytest.mark.parametrize("net", ALL)
def test_products_with_rows(net):
    model, loss_fn, batches = ALL[net]()
    each, rows = per_sample(model, loss_fn, batches[:1]), random_rows(model, 3)
    found = gathered(model, loss_fn, batches[0]).dot(rows)
    assert found.shape == (len(batches[0][0]), 3) and found.dtype == torch.float64
    torch.testing.assert_close(found, flat(each) @ flat(rows).T)


@pytest.mark.parametrize("net", ALL)
def test_products_with_one_vector(net):
    model, loss_fn, batches = ALL[net]()
    each, rows = per_sample(model, loss_fn, batches[:1]), random_rows(model, 1)
    found = gathered(model, loss_fn, batches[0]).dot(first(rows))
    assert found.shape == (len(batches[0][0]),)
    torch.testing.assert_close(found, flat(each) @ flat(rows)[0])


def test_products_with_gradients_are_as_before():
    model, loss_fn, batches = ALL["layer norm and scale"]()
    g, h = (gathered(model, loss_fn, batch) for batch in batches)
    torch.testing.assert_close(g.dot(h.per_sample()), g.dot(h))
    torch.testing.assert_close(g.dot(h.sum()), g.dot(h).sum(1))


def test_as_many_rows_as_a_parameter_has():
    """m = 3 is also the number of rows of a weight: what is meant follows from the number of dimensions."""
    model, batch = mlp(), (numbers(0, 3, 4), numbers(1, 3, 3))
    each, rows = per_sample(model, squared, [batch]), random_rows(model, 3)
    torch.testing.assert_close(gathered(model, squared, batch).dot(rows), flat(each) @ flat(rows).T)


def test_the_order_of_names_and_the_dtype_do_not_matter():
    model, batch = mlp(), (numbers(0, 5, 4), numbers(1, 5, 3))
    g, rows = gathered(model, squared, batch), random_rows(model, 2)
    turned = dict(reversed(rows.items()))
    torch.testing.assert_close(g.dot(turned), g.dot(rows))
    single = {name: value.float() for name, value in rows.items()}
    torch.testing.assert_close(g.dot(single), g.dot(rows), rtol=1e-5, atol=1e-5)


def test_a_tied_weight_is_found_under_any_of_its_names():
    model, loss_fn, batches = ALL["tied"]()
    g, rows = gathered(model, loss_fn, batches[0]), random_rows(model, 2)
    renamed = {"head.weight" if name == "tokens.weight" else name: value for name, value in rows.items()}
    torch.testing.assert_close(g.dot(renamed), g.dot(rows))


def test_a_tied_weight_under_both_of_its_names_does_not_count_twice():
    model, loss_fn, batches = ALL["tied"]()
    g = gathered(model, loss_fn, batches[0])
    with pytest.raises(UnsumError, match=r"tokens\.weight and head\.weight are one parameter"):
        g.dot(model.state_dict())


def test_vectors_that_do_not_fit():
    model, batch = mlp(), (numbers(0, 5, 4), numbers(1, 5, 3))
    g, rows = gathered(model, squared, batch), random_rows(model, 2)
    with pytest.raises((UnsumError, KeyError), match="nothing"):
        g.dot(rows | {"nothing": torch.zeros(2, 3)})
    with pytest.raises(UnsumError, match="0.weight"):
        g.dot(rows | {"0.weight": torch.zeros(2, 3, 9).double()})
    with pytest.raises(UnsumError, match="2.bias|rows"):
        g.dot(rows | {"2.bias": torch.zeros(5, 3).double()})


def test_chosen_parameters_alone():
    model, batch = mlp(), (numbers(0, 5, 4), numbers(1, 5, 3))
    rows, each = random_rows(model, 2), per_sample(model, squared, [batch])
    below = {name: rows[name] for name in ("0.weight", "0.bias")}
    found = gathered(model, squared, batch, params="0.*").dot(below)
    torch.testing.assert_close(found, flat({name: each[name] for name in below}) @ flat(below).T)


def test_dot_with_what_is_no_vector():
    model, loss_fn, batches = ALL["mlp"]()
    with pytest.raises((UnsumError, TypeError)):
        gathered(model, loss_fn, batches[0]).dot(classified)
