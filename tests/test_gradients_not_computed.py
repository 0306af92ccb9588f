"""With grad=False torch computes no weight gradient, and the gradients of samples are the same."""

import pytest
import torch
from reference import per_sample_gradients
from torch import nn

import unsum
from unsum.learn import sides


class Tied(nn.Module):
    """An embedding whose weight is the head's too; a norm; an embedding of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(11, 6), nn.Embedding(5, 6)
        self.norm, self.fc = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, ids):
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        return self.norm(torch.tanh(self.fc(x))) @ self.table.weight.T


def made():
    torch.manual_seed(0)
    return Tied().double(), torch.randint(11, (4, 5))


def loss(model, ids):
    return (model(ids) ** 2).sum()


CHOICES = ["*", ["fc.*"], ["table.weight"], ["norm.*", "places.weight"], ["fc.bias"]]


class Rows:
    """A reducer of one's own."""

    def begin(self, n, again):
        self.found = {}

    def take(self, name, factors):
        self.found[name] = factors.per_sample().clone()

    def end(self, left):
        pass


@pytest.mark.parametrize("params", CHOICES, ids=str)
def test_gradients_of_samples_are_those_of_autograd(params):
    model, ids = made()
    truth = per_sample_gradients(model, loss, ids)
    for _ in range(4):  # learnt, then remembered
        rows = Rows()
        with unsum.gradients(model, rows, params=params, grad=False) as g:
            loss(model, ids).backward()
        assert set(rows.found) == set(g.parameters)
        for name, found in rows.found.items():
            torch.testing.assert_close(found, truth[name])
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("params", CHOICES, ids=str)
def test_torch_computes_no_gradient_of_a_parameter(params):
    model, ids = made()
    computed = []

    def step(rows):
        with unsum.gradients(model, rows, params=params, grad=False):
            total = loss(model, ids)
            nodes, seen = [total.grad_fn], set()
            while nodes:
                node = nodes.pop()
                if node in seen or node is None:
                    continue
                seen.add(node)
                nodes += [child for child, _ in node.next_functions]
                if any("AccumulateGrad" in type(child).__name__ for child, _ in node.next_functions if child):
                    kinds = ["AccumulateGrad" in type(child).__name__ for child, _ in node.next_functions]
                    node.register_hook(
                        lambda given, _, node=node, kinds=kinds: computed.extend(
                            node.name() for g, is_leaf in zip(given, kinds, strict=True) if is_leaf and g is not None
                        )
                    )
            total.backward()

    step(Rows())
    step(Rows())
    computed.clear()
    step(Rows())
    assert computed == []


def test_a_users_hook_on_a_parameter_is_called_all_the_same():
    model, ids = made()
    called = []
    model.norm.weight.register_hook(lambda grad: called.append(grad.shape))
    for _ in range(3):
        with unsum.gradients(model, Rows(), params=["fc.*"], grad=False):
            loss(model, ids).backward()
    assert called == [torch.Size([6])] * 3


def test_blocks_for_other_parameters_leave_the_forward_unwatched(monkeypatch):
    """Once a loop is known, its forward is not watched, whatever other blocks the model has been in."""
    model, ids = made()
    calls = []
    watch = sides.Sides.__torch_function__
    monkeypatch.setattr(
        sides.Sides, "__torch_function__", lambda self, *a, **k: (calls.append(1), watch(self, *a, **k))[1]
    )

    def steps(count, *reducers, **options):
        calls.clear()
        for _ in range(count):
            with unsum.gradients(model, *reducers, **options):
                loss(model, ids).backward()
        return len(calls)

    assert steps(3, unsum.Norms()) > 0
    assert steps(1, unsum.Norms()) == 0
    assert steps(3, Rows(), params=["fc.*"], grad=False) > 0  # another purpose is learnt for itself
    assert steps(1, Rows(), params=["fc.*"], grad=False) == 0
    assert steps(2, unsum.Norms()) == 0
