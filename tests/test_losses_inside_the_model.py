"""Losses that the model computes itself: plainly, in chunks, fused with the head; the caller may drop all else."""

import functools

import pytest
import torch
from reference import alone, per_sample_gradients
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import unsum
from one_by_one import assert_right, assert_rows, assert_same
from small_nets import D, gpt2
from unsum.errors import UnsumError

IGNORED = -100


# ---- the loss is computed inside the model ------------------------------------------------------------------------


class Tagger(nn.Module):
    """Labels for tokens, and the mean of their losses. `give` decides what is returned."""

    def __init__(self, labels=7, give=lambda loss, logits: loss):
        super().__init__()
        self.tokens, self.body, self.head = nn.Embedding(11, D), nn.Linear(D, D), nn.Linear(D, labels)
        self.give = give

    def hidden(self, ids):
        return torch.tanh(self.body(self.tokens(ids))).cumsum(1)

    def forward(self, ids, labels):
        logits = self.head(self.hidden(ids))
        return self.give(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


GIVEN = {
    "the loss alone": lambda loss, logits: loss,
    "the loss in a tuple": lambda loss, logits: (loss,),
    "logits": lambda loss, logits: (loss, logits),
    "logits in float32": lambda loss, logits: (loss, logits.float()),
    "all in float32": lambda loss, logits: (loss.float(), logits.float()),
    "logits cloned": lambda loss, logits: {"loss": loss, "logits": logits.clone()},
    "logits as rows": lambda loss, logits: (loss, logits.view(-1, logits.shape[-1])),
    "logits as rows, cloned": lambda loss, logits: (loss, logits.view(-1, logits.shape[-1]).clone()),
    "classes before time": lambda loss, logits: (loss, logits.transpose(1, 2)),
    "time first": lambda loss, logits: (loss, logits.transpose(0, 1)),
    "logits of the last token": lambda loss, logits: (loss, logits[:, -1]),
    "probabilities": lambda loss, logits: (loss, logits.softmax(-1)),
    "logits detached": lambda loss, logits: (loss, logits.detach()),
    "how many are right": lambda loss, logits: (loss, (logits.argmax(-1) == 1).sum()),
}
SIZES = {
    "no sizes coincide": (4, 3, 7),
    "n = T": (4, 4, 7),
    "n = labels": (4, 3, 4),
    "n = T = labels = width": (5, 5, 5),
}


def loss_of(given):
    return given if isinstance(given, torch.Tensor) else given["loss"] if isinstance(given, dict) else given[0]


def tokens_and_labels(n, t, labels):
    ids, wanted = torch.randint(11, (n, t)), torch.randint(labels, (n, t))
    wanted[0, 0] = wanted[-1, -1] = wanted[-1, 0] = IGNORED
    return ids, wanted


def mean_over_tokens(model, ids, labels):
    """Each sample's part of a mean over the tokens of all."""
    counts = (labels != IGNORED).sum(1)
    for i, count in enumerate(counts):
        yield loss_of(model(ids[i : i + 1], labels[i : i + 1])) * count / counts.sum()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("given", GIVEN)
def test_the_loss_is_computed_inside_and_the_logits_are_returned_in_any_form(given, sizes):
    torch.manual_seed(0)
    n, t, v = SIZES[sizes]
    model, (ids, labels) = Tagger(v, GIVEN[given]).double(), tokens_and_labels(n, t, v)
    each = alone(model, lambda m: mean_over_tokens(m, ids, labels))
    tolerance = 1e-6 if given == "all in float32" else 1e-9  # the truth's weights of samples are rounded there
    assert_right(model, lambda: loss_of(model(ids, labels)), each, tolerance=tolerance)


def test_a_loss_that_was_computed_inside_may_be_scaled_and_penalised_by_the_caller():
    torch.manual_seed(0)
    model, (ids, labels) = Tagger().double(), tokens_and_labels(4, 3, 7)
    each = alone(model, lambda m: (part / 8 for part in mean_over_tokens(m, ids, labels)))
    shared = {"head.bias": 0.2 * model.head.bias.detach()}
    run = lambda: model(ids, labels) / 8 + 0.1 * model.head.bias.square().sum()
    assert_right(model, run, each, shared=shared)


def test_a_loss_of_each_token_and_a_mask_inside_the_model():
    class Masked(Tagger):
        def forward(self, ids, labels):
            mask = (labels != IGNORED).flatten()
            logits = self.head(self.hidden(ids)).flatten(0, 1)
            losses = F.cross_entropy(logits, labels.flatten().clamp(0), reduction="none")
            return (losses * mask).sum() / mask.sum()

    torch.manual_seed(0)
    model, (ids, labels) = Masked().double(), tokens_and_labels(4, 3, 7)
    each = alone(model, lambda m: mean_over_tokens(m, ids, labels))
    assert_right(model, lambda: model(ids, labels), each)


def test_logits_of_the_wanted_positions_alone_inside_the_model():
    class Selected(Tagger):
        def forward(self, ids, labels):
            wanted = labels != IGNORED
            return F.cross_entropy(self.head(self.hidden(ids)[wanted]), labels[wanted])

    torch.manual_seed(0)
    model, (ids, labels) = Selected().double(), tokens_and_labels(4, 3, 7)
    each = alone(model, lambda m: mean_over_tokens(m, ids, labels))
    assert_right(model, lambda: model(ids, labels), each)


def in_float32(forward, autocast):
    """What accelerate makes of a model's forward under mixed precision."""

    @functools.wraps(forward)
    def wrapped(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            given = forward(*args, **kwargs)
        return torch.utils._pytree.tree_map(lambda t: t.float() if torch.is_tensor(t) else t, given)

    return wrapped


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_wrapped_forward_that_turns_outputs_into_float32(weights, sizes):
    torch.manual_seed(0)
    n, t, v = SIZES[sizes]
    model, (ids, labels) = Tagger(v, GIVEN["logits"]).to(weights), tokens_and_labels(n, t, v)
    each = alone(model, lambda m: mean_over_tokens(m, ids, labels))
    model.forward = in_float32(model.forward, autocast=weights == torch.float32)
    assert_right(model, lambda: model(ids, labels)[0], each, tolerance=0.05)


# ---- the caller drops everything but the loss ---------------------------------------------------------------------


def sentences(n, t):
    ids = torch.randint(1, 40, (n, t))
    labels = ids.clone()
    labels[0, :2] = labels[-1, 3:] = IGNORED
    return ids, labels


def mean_over_next_tokens(model, ids, labels):
    counts = (labels[:, 1:] != IGNORED).sum(1)
    for i, count in enumerate(counts):
        yield model(ids[i : i + 1], labels=labels[i : i + 1]).loss * count / counts.sum()


@pytest.mark.parametrize(("n", "t"), [(3, 6), (6, 6), (5, 6)], ids=["no sizes coincide", "n = T", "n = T - 1"])
def test_only_the_loss_of_a_language_model_is_kept(n, t):
    model = gpt2().double()
    ids, labels = sentences(n, t)
    each = alone(model, lambda m: mean_over_next_tokens(m, ids, labels))
    run = lambda: model(ids, labels=labels).loss  # of logits in float32
    assert_right(model, run, each, tolerance=1e-5)


def test_only_the_loss_of_a_language_model_is_kept_and_it_counts_the_tokens_of_many_batches():
    model = gpt2().double()
    ids, labels = sentences(3, 6)
    loss = lambda m, ids, labels: m(ids, labels=labels, num_items_in_batch=50).loss
    assert_rows(model, loss, ids, labels, tolerance=1e-5)


@pytest.mark.parametrize(("n", "t"), [(3, 6), (6, 6)], ids=["no sizes coincide", "n = T"])
def test_only_the_loss_of_a_language_model_is_kept_under_autocast(n, t):
    model = gpt2()
    ids, labels = sentences(n, t)
    each = alone(model, lambda m: mean_over_next_tokens(m, ids, labels))

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return model(ids, labels=labels).loss

    assert_right(model, run, each, tolerance=0.05)


@pytest.mark.parametrize(("n", "t"), [(3, 6), (6, 6)], ids=["no sizes coincide", "n = T"])
def test_only_the_loss_of_a_language_model_is_kept_whose_forward_is_wrapped(n, t):
    model = gpt2()
    ids, labels = sentences(n, t)
    each = alone(model, lambda m: mean_over_next_tokens(m, ids, labels))
    model.forward = in_float32(model.forward, autocast=True)
    assert_right(model, lambda: model(ids, labels=labels).loss, each, tolerance=0.05)


# ---- a loss in chunks ---------------------------------------------------------------------------------------------


class Chunked(Tagger):
    """The head is applied to a few tokens at a time, so that all logits are never there at once."""

    def __init__(self, cut, recompute=False, logits_first=False):
        super().__init__()
        self.cut, self.recompute, self.logits_first = cut, recompute, logits_first

    def summed(self, h, labels):
        logits = h if self.logits_first else self.head(h)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")

    def forward(self, ids, labels):
        h, loss = self.hidden(ids), 0.0
        h = self.head(h) if self.logits_first else h
        for part, wanted in self.cut(h, labels):
            if self.recompute:
                loss = loss + checkpoint(self.summed, part, wanted, use_reentrant=False)
            else:
                loss = loss + self.summed(part, wanted)
        return loss / (labels != IGNORED).sum()


def cut_tokens(size):
    return lambda h, labels: zip(h.flatten(0, 1).split(size), labels.flatten().split(size), strict=True)


CUTS = {
    "tokens, by 5": cut_tokens(5),
    "tokens, as many as there are samples": cut_tokens(4),
    "tokens, one by one": cut_tokens(1),
    "tokens, by sentences": cut_tokens(3),
    "time": lambda h, labels: zip(h.split(2, 1), labels.split(2, 1), strict=True),
    "samples": lambda h, labels: zip(h.split(3), labels.split(3), strict=True),
}


@pytest.mark.parametrize("logits_first", [False, True], ids=["hidden states", "logits"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_loss_in_chunks_inside_the_model(cut, logits_first):
    torch.manual_seed(0)
    model, (ids, labels) = Chunked(CUTS[cut], logits_first=logits_first).double(), tokens_and_labels(4, 3, 7)
    each = alone(model, lambda m: mean_over_tokens(m, ids, labels))
    assert_right(model, lambda: model(ids, labels), each)


@pytest.mark.parametrize("cut", ["tokens, by 5", "tokens, as many as there are samples", "time"])
def test_a_loss_in_chunks_that_are_computed_again(cut):
    torch.manual_seed(0)
    model, (ids, labels) = Chunked(CUTS[cut], recompute=True).double(), tokens_and_labels(4, 3, 7)
    each = alone(model, lambda m: mean_over_tokens(m, ids, labels))
    assert_right(model, lambda: model(ids, labels), each)


# ---- a loss that is fused with the head ---------------------------------------------------------------------------


def head_gradients(h, weight, labels, scale):
    """Losses, and their gradients for h and weight, each token's times its scale."""
    logits = h @ weight.T
    kept = (labels != IGNORED).to(h.dtype)
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
    at = (logits.softmax(-1) - F.one_hot(labels.clamp(0), len(weight))) * (kept * scale)[:, None]
    return losses, at @ weight, at.T @ h


class FusedLoss(torch.autograd.Function):
    """The mean over tokens; gradients are computed in forward, as Liger's kernel does."""

    @staticmethod
    def forward(ctx, h, weight, labels):
        count = int((labels != IGNORED).sum())
        losses, *grads = head_gradients(h, weight, labels, 1 / count)
        ctx.save_for_backward(*grads)
        return losses.sum() / count

    @staticmethod
    def backward(ctx, grad):
        for_h, for_weight = ctx.saved_tensors
        return for_h * grad, for_weight * grad, None


class FusedLosses(torch.autograd.Function):
    """A loss for each token."""

    @staticmethod
    def forward(ctx, h, weight, labels):
        ctx.save_for_backward(h, weight, labels)
        return head_gradients(h, weight, labels, 1.0)[0]

    @staticmethod
    def backward(ctx, grad):
        h, weight, labels = ctx.saved_tensors
        return *head_gradients(h, weight, labels, grad)[1:], None


class Fused(Tagger):
    def __init__(self, labels=7):
        super().__init__()
        self.head = nn.Linear(D, labels, bias=False)

    def forward(self, ids, labels):
        return FusedLoss.apply(self.hidden(ids).flatten(0, 1), self.head.weight, labels.flatten())


class FusedByToken(Fused):
    def __init__(self, labels=7, inside=True):
        super().__init__(labels)
        self.inside = inside

    def forward(self, ids, labels):
        losses = FusedLosses.apply(self.hidden(ids).flatten(0, 1), self.head.weight, labels.flatten())
        return losses.sum() / (labels != IGNORED).sum() if self.inside else losses


@pytest.mark.parametrize("sizes", SIZES)
def test_a_fused_loss_gives_the_gradients_of_the_body(sizes):
    torch.manual_seed(0)
    n, t, v = SIZES[sizes]
    model, (ids, labels) = Fused(v).double(), tokens_and_labels(n, t, v)
    each = alone(model, lambda m: mean_over_tokens(m, ids, labels))
    del each["head.weight"]
    assert_right(model, lambda: model(ids, labels), each, params=["tokens.*", "body.*"])


@pytest.mark.parametrize("reducers", [(), (unsum.Norms,)], ids=["kept", "norms"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_fused_loss_has_summed_the_gradient_of_its_weight_and_is_refused_by_that_name(sizes, reducers):
    torch.manual_seed(0)
    n, t, v = SIZES[sizes]
    model, (ids, labels) = Fused(v).double(), tokens_and_labels(n, t, v)
    for _ in range(3):
        with pytest.raises(UnsumError, match=r"head\.weight"):
            with unsum.gradients(model, *(kind() for kind in reducers)):
                model(ids, labels).backward()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("inside", [True, False], ids=["mean inside the model", "losses of tokens returned"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_fused_loss_of_each_token_is_right_for_all_parameters(sizes, inside):
    torch.manual_seed(0)
    n, t, v = SIZES[sizes]
    model, (ids, labels) = FusedByToken(v, inside).double(), tokens_and_labels(n, t, v)
    whole = lambda m, ids, labels: m(ids, labels) if inside else m(ids, labels).sum() / (labels != IGNORED).sum()
    each = alone(model, lambda m: mean_over_tokens(functools.partial(whole, m), ids, labels))
    assert_right(model, lambda: whole(model, ids, labels), each)


class Copying(nn.Module):
    """Returns its loss and a copy of the logits in another dtype, as accelerate makes models do; ends are frozen."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)
        self.embed.requires_grad_(False), self.head.requires_grad_(False)

    def forward(self, x, y):
        logits = self.head(torch.tanh(self.middle(self.embed(x))))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), logits.float()


def test_a_copy_of_the_logits_tells_whose_they_are():
    torch.manual_seed(0)
    model = Copying().double()
    for n, t in ((4, 6), (3, 6), (4, 5), (5, 7)):
        x, y = torch.randint(20, (2, n, t))
        each = per_sample_gradients(model, lambda m, x, y: m(x, y)[0], x, y)
        with unsum.gradients(model) as g:
            model(x, y)[0].backward()
        assert_same(g, each)
