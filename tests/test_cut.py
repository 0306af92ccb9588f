"""Where ownership starts: at the tensors whose samples are known, whatever the model returns, whatever the caller
drops, and whatever sizes happen to coincide."""

import functools

import pytest
import torch
from reference import alone, per_sample_gradients
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import unsum
from one_by_one import assert_right, assert_rows, random, right_or_refused, same
from unsum.errors import InteractionError, UnsumError

D = 5
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


def gpt2(**options):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=16, **options)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval()


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


# ---- sizes that coincide ------------------------------------------------------------------------------------------

STATES = {"GRU": (nn.GRU, lambda out: out[1]), "LSTM": (nn.LSTM, lambda out: out[1][0])}
READS = {
    "the output": lambda out, last: out,
    "the last state": lambda out, last: last.transpose(0, 1),
    "the last state of one layer": lambda out, last: last[-1],
    "both": lambda out, last: torch.cat([out.flatten(1), last.transpose(0, 1).flatten(1)], 1),
}


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("t", [3, 4], ids=["n = states", "n = states = T"])
@pytest.mark.parametrize("whole", [Wrapped, lambda inner: inner], ids=["inside a module", "by itself"])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", STATES)
def test_as_many_samples_as_a_recurrent_network_has_states(kind, read, whole, t):
    torch.manual_seed(0)
    make, last = STATES[kind]
    model, x = whole(make(D, 3, 2, batch_first=True, bidirectional=True)).double(), random(4, t, D)

    def loss(m, x):
        out = m(x)
        return READS[read](out[0], last(out)).square().sum()

    assert_rows(model, loss, x)


@pytest.mark.parametrize("layers", [1, 4])
def test_as_many_samples_as_states_of_one_direction(layers):
    torch.manual_seed(0)
    model, x = nn.GRU(D, 3, layers, batch_first=True).double(), random(layers, 3, D)
    assert_rows(model, lambda m, x: m(x)[0].square().sum(), x)


def mlp(outputs=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


@pytest.mark.parametrize("inside", [False, True], ids=["loss outside", "loss inside"])
def test_as_many_samples_as_labels(inside):
    class Labelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(4)

        def forward(self, x, y):
            out = self.net(x)
            return F.binary_cross_entropy_with_logits(out, y) if inside else out

    model, x, y = Labelled(), random(4, D), torch.rand(4, 4).double().round()
    loss = lambda m, x, y: m(x, y) if inside else F.binary_cross_entropy_with_logits(m(x, y), y)
    each = alone(model, lambda m: (loss(m, x[i : i + 1], y[i : i + 1]) / 4 for i in range(4)))
    assert_right(model, lambda: loss(model, x, y), each)


def test_as_many_samples_as_classes_that_come_first_is_right_or_refused():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(4)

        def forward(self, x):
            return self.net(x).T

    model, x, y = Turned(), random(4, D), torch.tensor([2, 0, 3, 1])
    loss = lambda m, x, y: F.cross_entropy(m(x).T, y, reduction="sum")
    right_or_refused(model, lambda: loss(model, x, y), per_sample_gradients(model, loss, x, y))


@pytest.mark.parametrize("penalised", ["2.bias", "2.weight", "0.weight"])
@pytest.mark.parametrize("inside", [False, True], ids=["penalty outside", "penalty inside"])
def test_as_many_samples_as_a_penalised_parameter_has_rows(inside, penalised):
    class Penalised(nn.Sequential):
        def forward(self, x):
            loss = super().forward(x).square().sum()
            return loss + self.get_parameter(penalised).square().sum() if inside else loss

    model = Penalised(*mlp(4))
    wanted = model.get_parameter(penalised)
    x = random(len(wanted), D)
    each = per_sample_gradients(model, lambda m, x: nn.Sequential.forward(m, x).square().sum(), x)
    run = lambda: model(x) if inside else model(x) + wanted.square().sum()
    assert_right(model, run, each, shared={penalised: 2 * wanted.detach()})
    with unsum.gradients(model) as g:
        run().backward()
    same(g[penalised].shared(), 2 * wanted.detach(), 1e-9, "shared")


@pytest.mark.parametrize("inside", [False, True], ids=["penalty outside", "penalty inside"])
def test_as_many_samples_as_rows_in_a_penalty_on_a_product_of_weights(inside):
    class Orthogonal(nn.Sequential):
        def penalty(self):
            w = self[2].weight
            return (w @ w.T - torch.eye(len(w)).double()).square().sum(1)  # as many as there are samples

        def forward(self, x):
            out = super().forward(x)
            return out.square().sum() + self.penalty().sum() if inside else out

    model, x = Orthogonal(*mlp(4)), random(4, D)
    each = per_sample_gradients(model, lambda m, x: nn.Sequential.forward(m, x).square().sum(), x)
    shared = {"2.weight": torch.autograd.grad(model.penalty().sum(), model[2].weight)[0]}
    run = lambda: model(x) if inside else model(x).square().sum() + model.penalty().sum()
    assert_right(model, run, each, shared=shared)


class Vae(nn.Module):
    """`reduce`: how the terms of samples and latents, (n, latents), become one number."""

    def __init__(self, reduce=None, latents=4):
        super().__init__()
        self.encode, self.decode = nn.Linear(D, 2 * latents), nn.Linear(latents, D)
        self.reduce = reduce

    def forward(self, x, noise):
        mean, log_variance = self.encode(x).chunk(2, 1)
        out = self.decode(mean + noise * (log_variance / 2).exp())
        return self.loss(x, out, mean, log_variance) if self.reduce else (out, mean, log_variance)

    def loss(self, x, out, mean, log_variance, reduce=None):
        far = (mean.square() + log_variance.exp() - 1 - log_variance) / 2
        return (reduce or self.reduce)(far) + (out - x).square().sum()


REDUCED = {
    "all at once": lambda far: far.sum(),
    "latents, then samples": lambda far: far.sum(1).sum(),
    "samples, then latents": lambda far: far.sum(0).sum(),
    "means of latents": lambda far: far.mean(0).sum() * len(far),
}


@pytest.mark.parametrize("inside", [False, True], ids=["loss outside", "loss inside"])
@pytest.mark.parametrize("reduced", REDUCED)
def test_as_many_samples_as_latents(reduced, inside):
    torch.manual_seed(0)
    reduce = REDUCED[reduced]
    model, x, noise = Vae(reduce if inside else None).double(), random(4, D), random(4, 4)
    loss = lambda m, x, noise: m(x, noise) if inside else m.loss(x, *m(x, noise), reduce)
    assert_rows(model, loss, x, noise)


UNUSED = {
    "the mean of the batch": lambda self, h: h.mean(0),
    "the mean of the batch, as many features as samples": lambda self, h: h[:, :4].mean(0),
    "similarities of all pairs": lambda self, h: h @ h.T,
    "a sorted batch": lambda self, h: h.sort(0).values,
    "a number": lambda self, h: h.mean(),
    "batch norm": lambda self, h: F.batch_norm(h, None, None, training=True),
    "a weight": lambda self, h: self.b.weight,
    "the norm of a weight's rows": lambda self, h: self.b.weight.norm(dim=1),
    "time first": lambda self, h: h.view(4, 3, 2).transpose(0, 1),
    "half of the batch": lambda self, h: h[:2],
    "nothing": lambda self, h: h[:0],
}


@pytest.mark.parametrize("first", [False, True], ids=["used first", "unused first"])
@pytest.mark.parametrize("unused", UNUSED)
def test_an_output_that_is_not_used_cannot_forbid_one_that_is(unused, first):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(D, 6), nn.Linear(6, 4)

        def forward(self, x):
            h = torch.tanh(self.a(x))
            given = [self.b(h), UNUSED[unused](self, h)]
            return tuple(reversed(given)) if first else tuple(given)

    torch.manual_seed(0)
    model, x = Two().double(), random(4, D)
    each = alone(model, lambda m: m(x)[int(first)].square().sum(1))
    assert_right(model, lambda: model(x)[int(first)].square().sum(), each)


SUMMED = {
    "sums of classes": lambda out: out.sum(0),
    "means of classes": lambda out: out.mean(0) * len(out),
    "a product with ones": lambda out: torch.ones(len(out)).double() @ out,
    "squares": lambda out: out.square().sum(0),
}


class Returning(nn.Module):
    """What is made of the outputs inside the model, if anything is."""

    def __init__(self, finish):
        super().__init__()
        self.net, self.finish = mlp(4), finish

    def forward(self, x):
        return self.finish(self.net(x))


@pytest.mark.parametrize("inside", [False, True], ids=["summed outside", "summed inside"])
@pytest.mark.parametrize("summed", SUMMED)
def test_sums_of_as_many_classes_as_there_are_samples_are_not_their_losses(summed, inside):
    sums = SUMMED[summed]
    model = Returning((lambda out: sums(out).sum()) if inside else (lambda out: out))
    x = random(4, D)
    assert_rows(model, (lambda m, x: m(x)) if inside else (lambda m, x: sums(m(x)).sum()), x)


def shares(rows, loss):
    """(n,): that part of the loss which enters at each row, as a function of the row alone."""
    (at,) = torch.autograd.grad(loss(rows), rows, retain_graph=True)
    return (rows * at).flatten(1).sum(1)


MIXED = {
    "squares of class sums": lambda out: out.sum(0).square(),
    "logarithms of class means": lambda out: -(out.softmax(1).mean(0)).log(),
    "variances of classes": lambda out: out.var(0),
    "all pairs": lambda out: (out @ out.T).logsumexp(0),
}


@pytest.mark.parametrize("place", ["all outside", "vector returned", "all inside"])
@pytest.mark.parametrize("mixed", MIXED)
def test_a_loss_that_mixes_samples_in_as_many_numbers_is_shared_out_or_refused(mixed, place):
    mix = MIXED[mixed]
    finish = {"all outside": lambda out: out, "vector returned": mix, "all inside": lambda out: mix(out).sum()}[place]
    model, x = Returning(finish), random(4, D)
    each = alone(model, lambda m: shares(m.net(x), lambda out: mix(out).sum()))
    run = lambda: (mix(model(x)) if place == "all outside" else model(x)).sum()
    right_or_refused(model, run, each)


# ---- the user's word ----------------------------------------------------------------------------------------------


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
    model = mlp(features)
    rows, apart = together(random(4, D), random(4, D))
    assert_marked(model, lambda m: 1 - F.cosine_similarity(*apart(m(rows)), dim=1))


def test_marked_losses_of_pairs_that_are_compared_with_all_others():
    model = mlp(3)
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
    model, rows = mlp(features), random(12, D)

    def losses(m):
        three = m(rows).chunk(3) if calls == 1 else [m(part) for part in rows.chunk(3)]
        return F.triplet_margin_loss(*three, margin=5.0, reduction="none")

    assert_marked(model, losses)


def test_marked_losses_of_an_anchor_and_several_candidates():
    model, anchors, candidates = mlp(3), random(4, D), random(4, 5, D)

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
    model, x = mlp(3), random(9, D)
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
    model, x = mlp(3), random(8, D)
    each = alone(model, lambda m: m(x).square().view(4, 2, 3).sum((1, 2)))
    assert_right(model, lambda: unsum.mark_samples(model(x).view(4, 2, 3)).square().sum(), each)


def test_marked_losses_inside_the_model():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(3)

        def forward(self, one, two):
            a, b = self.net(torch.cat([one, two])).chunk(2)
            return unsum.mark_samples((a - b).square().sum(1)).sum()

    model, one, two = Inside(), random(4, D), random(4, D)
    assert_rows(model, lambda m, one, two: m(one, two), one, two)
