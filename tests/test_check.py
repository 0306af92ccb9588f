"""`unsum.check`, and the check that each block makes by itself: green on what is right, red on a planted fault."""

import copy
import dataclasses
import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import unsum
from nets import IMAGES, SEQUENCES, mlp, scalar
from unsum.errors import OptionError, SamplesError


def test_check_is_green_on_what_is_right_and_leaves_the_model_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)).double().eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = copy.deepcopy(model.state_dict())
    found = unsum.check(model, lambda m, x: m(x).square().sum(1), IMAGES)
    assert found.ok and found.worst.error <= 1e-9
    assert "ok" in str(found) and "0.weight" in str(found)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    assert (model[0].weight.grad == 1).all() and model[0].bias.grad is None
    model.train()
    found = unsum.check(model, lambda m, x: m(x).square().sum(1), IMAGES)
    assert not found.ok and "interact" in str(found)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    with pytest.raises(SamplesError, match=r"shape \(n,\)"):
        unsum.check(model, lambda m, x: m(x).sum(), IMAGES)


def test_check_takes_samples_and_names_what_is_frozen():
    model = mlp()
    ids = torch.tensor([5, 5, 9, 9])
    losses = lambda m, x: m(x).flatten(1).square().sum(1).view(2, 2).sum(1)
    assert unsum.check(model, losses, SEQUENCES, samples=ids).ok
    with pytest.raises(SamplesError, match="2 losses for 4 samples"):
        unsum.check(model, losses, SEQUENCES)
    with pytest.raises(SamplesError, match="frozen"):
        unsum.check(model.requires_grad_(False), losses, SEQUENCES)


def test_check_is_red_when_an_owner_is_shifted(monkeypatch):
    from unsum.factors.outer import Outer
    from unsum.step import collect

    real = collect.Collector.meet

    def shifted(self, parameter, meetings, kind):
        if isinstance(kind, Outer):
            kind = dataclasses.replace(kind, a=kind.a.roll(1, 0), delta=kind.delta.roll(1, 0))
        real(self, parameter, meetings, kind)

    monkeypatch.setattr(collect.Collector, "meet", shifted)
    found = unsum.check(mlp(), lambda m, x: m(x).flatten(1).square().sum(1), SEQUENCES)
    assert not found.ok and "WRONG" in str(found)


def test_a_part_that_was_not_seen_is_an_error(monkeypatch):
    from unsum.step import collect

    real = collect.Collector.meet
    monkeypatch.setattr(collect.Collector, "meet", lambda self, p, met, kind: real(self, p, met, kind.times(0.5)))
    for engine in ("auto", "graph"):
        with pytest.raises(SamplesError, match="part of its gradient"):
            with unsum.gradients(mlp(), engine=engine) as g:
                scalar(g.names.model, SEQUENCES).backward()


def test_a_loss_that_marks_its_samples_can_be_checked():
    model = nn.Linear(3, 2)
    marked = lambda m, x: unsum.mark_samples(m(x).square().sum(1))
    assert unsum.check(model, marked, torch.randn(4, 3)).ok


def test_swapped_arguments_are_told():
    with pytest.raises(OptionError, match=r"unsum.check\(model, loss_fn, batch\)"):
        unsum.check(lambda m, x: m(x), nn.Linear(3, 2), torch.randn(4, 3))


class Labelled(nn.Module):
    """Takes a dict, and averages over the batch itself, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, input_ids, labels=None):
        logits = self.out(self.embed(input_ids))
        return SimpleNamespace(loss=logits.mean(), logits=logits)


def test_a_loss_that_a_model_computes_itself_is_refused_with_code_that_works():
    torch.manual_seed(0)
    model, ids = Labelled(), torch.randint(7, (3, 5))
    labels = ids.clone()
    labels[1, 3:] = -100
    batch = {"input_ids": ids, "labels": labels}
    for loss_fn in (lambda m, b: m(**b), lambda m, b: m(**b).loss):
        with pytest.raises(SamplesError, match="one number for the whole batch") as raised:
            unsum.check(model, loss_fn, batch)
        body = textwrap.indent(textwrap.dedent(" " * 9 + str(raised.value).split("write: ")[1]), "    ")
        scope = {"torch": torch}
        exec(f"def pasted(model, batch):\n{body}", scope)
        logits = model(ids).logits
        truth = [
            sum(-logits[k, t].log_softmax(0)[labels[k, t + 1]] for t in range(4) if labels[k, t + 1] >= 0)
            for k in range(3)
        ]
        torch.testing.assert_close(scope["pasted"](model, batch), torch.stack(truth))
        assert unsum.check(model, scope["pasted"], batch).ok
    with pytest.raises(
        SamplesError, match=r'cross_entropy\(model\(\*\*inputs\).logits, batch\["labels"\], reduction="none"'
    ):
        unsum.check(model, lambda m, b: m(**b).loss, {"input_ids": ids, "labels": ids[:, 0]})


@pytest.mark.parametrize("call", [unsum.check, unsum.report])
def test_arguments_that_are_swapped_or_a_criterion_in_the_place_of_a_loss_function(call, tmp_path):
    model, batch = nn.Linear(3, 2), (torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(OptionError, match="loss_fn is a tuple|then a loss function; got Linear and tuple"):
        call(model, batch, lambda m, b: m(b[0]).sum(1))
    for criterion in (nn.functional.cross_entropy, nn.CrossEntropyLoss()):
        with pytest.raises(OptionError, match=r"loss_fn\(model, batch\) failed|then a loss function"):
            call(model, criterion, batch)
    with pytest.raises(TypeError) as raised:
        call(model, lambda m: m, batch)
    assert "with the model and the batch" in raised.value.__notes__[0]
