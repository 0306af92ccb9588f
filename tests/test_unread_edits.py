"""An edited value that neither what the model returns nor a loss depends on gives a warning; others are silent."""

import warnings

import pytest
import torch
from torch import nn

import unsum
from unsum.errors import UnreadEdit


class Attends(nn.Module):
    """Attention whose weights are returned by the layer, and by the model only if asked."""

    def __init__(self, returns_weights=False):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc = nn.Linear(8, 3)
        self.returns_weights = returns_weights
        self.held = []

    def forward(self, x):
        y, weights = self.attn(x, x, x)
        return {"out": self.fc(y), "weights": weights} if self.returns_weights else self.fc(y)


class HoldsWeights(Attends):
    """The weights go into a loss of their own, which the caller adds later."""

    def forward(self, x):
        y, weights = self.attn(x, x, x)
        self.held = [weights.square().sum()]
        return self.fc(y)


def x():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


WEIGHTS = {"attn:output[1]": unsum.zero()}


def warned(run):
    """The unread edits that a run warns of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in told if each.category is UnreadEdit]


def forward(net, edits):
    with unsum.edit(net, edits):
        net(x())


def with_backward(net, edits):
    with unsum.edit(net, edits):
        net(x()).sum().backward()


def opened(net, edits):
    block = unsum.edit(net, edits)
    block.open()
    net(x())
    block.close()


@pytest.mark.parametrize("run", [forward, with_backward, opened])
def test_attention_weights_that_the_model_drops_are_named(run):
    net = Attends()
    (told,) = warned(lambda: run(net, WEIGHTS))
    assert told.startswith("edited and never read: attn:output[1].")
    before = net(x())
    with warnings.catch_warnings(), unsum.edit(net, WEIGHTS):
        warnings.simplefilter("ignore", UnreadEdit)  # as the message says
        assert torch.equal(net(x()), before)  # it is true: the edit had no effect


def test_the_warning_points_at_the_users_line():
    net = Attends()
    with pytest.warns(UnreadEdit) as told:
        forward(net, WEIGHTS)
    assert told[0].filename == __file__


def test_a_glob_over_layers_is_one_warning_that_names_some_of_them():
    net = nn.Sequential(*(Attends() for _ in range(2)))
    for one in net:
        one.fc = nn.Linear(8, 8)
    (told,) = warned(lambda: forward(net, {"*.attn:output[1]": unsum.zero()}))
    assert "0.attn:output[1], 1.attn:output[1]" in told


READ = {
    "the other output": (Attends(), {"attn:output[0]": unsum.zero()}),
    "an input": (Attends(), {"fc:input": unsum.scale(2.0), "attn:input": unsum.scale(2.0)}),
    "the model's own output": (Attends(), {":output": unsum.zero()}),
    "returned to the caller in a dict": (Attends(returns_weights=True), WEIGHTS),
    "in a loss that the model holds": (HoldsWeights(), WEIGHTS),
    "gradients": (Attends(), {"fc:grad_output": unsum.scale(2.0)}),
}


@pytest.mark.parametrize("case", READ)
def test_a_value_that_somebody_can_read_gives_no_warning(case):
    net, edits = READ[case]

    def run():
        with unsum.edit(net, edits):
            out = net(x())
            out = out["out"] if isinstance(out, dict) else out
            (out.sum() + sum(net.held)).backward()

    assert not warned(run)


def test_a_loss_that_is_differentiated_after_the_block_is_a_reader():
    net = HoldsWeights()
    assert not warned(lambda: forward(net, WEIGHTS))  # its graph is alive: the caller may still use it
    net.held[0].backward()


def test_a_site_that_is_read_in_one_of_several_calls_is_read():
    net = Attends()

    def run():
        with unsum.edit(net, {"fc:output": unsum.scale(2.0)}):
            net.fc(x())  # thrown away
            net(x()).sum().backward()

    assert not warned(run)


def test_a_mark_whose_result_is_thrown_away_is_named():
    def run(used):
        weight = torch.ones(3, requires_grad=True)
        with unsum.edit(None, {"y:output": unsum.zero()}):
            y = weight * 2
            if used:
                y = unsum.mark(y, "y")
            else:
                unsum.mark(y, "y")
            y.sum().backward()

    assert not warned(lambda: run(used=True))
    (told,) = warned(lambda: run(used=False))
    assert "y:output" in told


def test_without_gradients_nothing_can_be_told_and_nothing_is_said():
    with torch.no_grad():
        assert not warned(lambda: forward(Attends(), WEIGHTS))
    assert not warned(lambda: forward(Attends().requires_grad_(False), WEIGHTS))


def test_an_exception_in_the_block_is_not_joined_by_a_warning():
    def run():
        with pytest.raises(KeyError), unsum.edit(Attends(), WEIGHTS):
            raise KeyError

    assert not warned(run)


def test_no_hook_is_left_on_the_model():
    net = Attends()
    warned(lambda: forward(net, WEIGHTS))
    assert not net._forward_hooks and not net._forward_pre_hooks


def test_attention_of_transformers():
    """GPT-2 drops the weights of its attention unless the caller asks for them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=20, n_positions=16)
    config._attn_implementation = "eager"
    gpt, ids = transformers.GPT2LMHeadModel(config), torch.arange(6)[None]
    edits = {"transformer.h.0.attn:output[1]": unsum.zero()}

    def run(**options):
        with unsum.edit(gpt, edits):
            gpt(ids, labels=ids, **options).loss.backward()

    (told,) = warned(run)
    assert "transformer.h.0.attn:output[1]" in told
    assert not warned(lambda: run(output_attentions=True))
