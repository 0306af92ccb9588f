"""State belongs to the graph under differentiation: not to the thread, not to the last batch, not to another model. A
step is right, or refused, whatever came before it."""

import copy
import itertools

import pytest
import torch
from reference import alone, per_sample_gradients
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

import unsum
from one_by_one import assert_same, norms_of, random, same, squares, step
from unsum.errors import InteractionError, UnsumError

D = 5
WAYS = pytest.mark.parametrize("kind", ["kept", "norms"])


def both(model, run, each, **options):
    """Kept and by norms, twice."""
    for kind in ("kept", "norms") * 2:
        step(model, run, each, kind, **options)


def mlp(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 6), *between, nn.Tanh(), nn.Linear(6, 4)).double()


# ---- other models -------------------------------------------------------------------------------------------------


def with_batch_norm(inputs):
    return nn.Sequential(nn.Linear(inputs, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)).double().train()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_batch_norm_of_another_model_in_the_loss_forbids_nothing(frozen):
    """A discriminator, a perceptual network: samples mix in the loss, and each has its share."""
    model, x = mlp(), random(4, D)
    critic = with_batch_norm(4).requires_grad_(not frozen)
    out = model(x)
    (at,) = torch.autograd.grad(F.softplus(-critic(out)).mean(), out)
    each = alone(model, lambda m: (m(x) * at).sum(1))
    both(model, lambda: F.softplus(-critic(model(x))).mean(), each)


def test_batch_norm_of_another_model_that_sees_the_output_and_the_data():
    model, x = mlp(), random(4, D)
    eyes = with_batch_norm(4).requires_grad_(False)
    wanted = random(4, 4)
    loss = lambda out: (eyes(out) - eyes(wanted)).square().sum() + (out - wanted).square().sum()
    out = model(x)
    (at,) = torch.autograd.grad(loss(out), out)
    each = alone(model, lambda m: (m(x) * at).sum(1))
    both(model, lambda: loss(model(x)), each)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("same_model", [False, True], ids=["another model", "a copy of this model"])
def test_batch_norm_of_a_teacher_without_gradients_forbids_nothing(same_model, when):
    model = mlp(nn.BatchNorm1d(6)).eval() if same_model else mlp()
    teacher = (
        copy.deepcopy(model).train() if same_model else nn.Sequential(with_batch_norm(D), nn.Linear(1, 4).double())
    )
    x = random(4, D)
    with torch.no_grad():
        taught = teacher(x)

    def run():
        with torch.no_grad():
            first = teacher(x) if when == "before" else None
        out = model(x)
        with torch.no_grad():
            wanted = teacher(x) if first is None else first
        return F.mse_loss(out, wanted, reduction="sum")

    each = alone(model, lambda m: (m(x) - taught).square().sum(1))
    both(model, run, each)


@pytest.mark.parametrize("model_first", [False, True])
def test_batch_norm_of_this_model_is_refused_though_another_has_it_too(model_first):
    model, critic, x = mlp(nn.BatchNorm1d(6)), with_batch_norm(4), random(4, D)
    for reducers in ((), (unsum.Norms(),)) * 2:
        with pytest.raises(InteractionError):
            with unsum.gradients(model, *reducers):
                out = model(x) if model_first else None
                other = critic(random(4, 4)).sum()
                out = model(x) if out is None else out
                (out.square().sum() + other).backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("part", [nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False), nn.LazyBatchNorm1d()])
def test_batch_norm_of_this_model_is_refused_in_training_and_right_in_evaluation(part):
    torch.manual_seed(0)
    x = random(4, D)
    model = nn.Sequential(nn.Linear(D, 6), part, nn.Linear(6, 4)).double()
    model(x)
    for training in (True, False, True, False):
        model.train(training)
        model.zero_grad()
        if training:
            with pytest.raises(InteractionError):
                with unsum.gradients(model):
                    squares(model, x).backward()
        else:
            both(model, lambda: squares(model, x), per_sample_gradients(model, squares, x))


def test_a_parameter_in_front_of_the_only_batch_norm_is_refused_and_one_behind_it_too():
    model, x = mlp(nn.BatchNorm1d(6)), random(4, D)
    for params in ("0.*", "1.*", "3.*"):
        with pytest.raises(InteractionError):
            with unsum.gradients(model, params=params):
                squares(model, x).backward()


# ---- several graphs -----------------------------------------------------------------------------------------------


class Last(nn.Module):
    """A recurrent network's outputs alone."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(D, 4, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


def made(kind):
    torch.manual_seed(0)
    return mlp() if kind == "mlp" else Last().double()


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "last forward first"])
@pytest.mark.parametrize("model", ["mlp", "lstm"])
def test_two_forwards_and_then_two_backwards_give_the_samples_of_both(model, turned):
    model = made(model)
    for shapes in (((4, 3), (2, 5)), ((4, 3), (2, 5)), ((3, 3), (3, 3)), ((1, 1), (4, 2))):
        one, two = (random(*shape, D) for shape in shapes)
        first, second = (per_sample_gradients(model, squares, x) for x in (one, two))
        each = {name: torch.cat([first[name], second[name]]) for name in first}
        for reducer in (None, unsum.Norms()):
            with unsum.gradients(model, *([reducer] if reducer else [])) as g:
                losses = [squares(model, one), squares(model, two)]
                for loss in reversed(losses) if turned else losses:
                    loss.backward()
            assert_same(g, each, reducer=reducer)


def token_norms(model, x):
    """(n, t): the norm of the gradient of each token's loss, of a model that treats tokens alike."""
    each = per_sample_gradients(model, squares, x.flatten(0, 1))
    return norms_of(each).view(x.shape[:2])


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "last forward first"])
@pytest.mark.parametrize("kind", [(unsum.TokenNorms,), (unsum.Norms, unsum.TokenNorms)], ids=["alone", "with norms"])
def test_two_forwards_and_then_two_backwards_give_the_tokens_of_both(kind, turned):
    model = mlp()
    for shapes in (((4, 3), (2, 5)), ((2, 5), (4, 3)), ((4, 3), (3, 3)), ((1, 1), (4, 2))):
        one, two = (random(*shape, D) for shape in shapes)
        longest = max(one.shape[1], two.shape[1])
        wanted = torch.cat(
            [F.pad(part, (0, longest - part.shape[1])) for part in map(token_norms, [model] * 2, (one, two))]
        )
        with unsum.gradients(model, *(k() for k in kind)) as g:
            losses = [squares(model, one), squares(model, two)]
            for loss in reversed(losses) if turned else losses:
                loss.backward()
        found = g[unsum.TokenNorms]
        assert not found.left_out
        same(found.norms(), wanted, 1e-9 * float(wanted.max()), "TokenNorms")


def ask_grad(loss, x):
    return torch.autograd.grad(loss, x)[0]


def ask_backward(loss, x):
    loss.backward(inputs=[x])
    found, x.grad = x.grad, None
    return found


@WAYS
@pytest.mark.parametrize("ask", [ask_grad, ask_backward])
@pytest.mark.parametrize("n", [4, 3], ids=["as many rows", "fewer rows"])
def test_gradients_for_the_inputs_alone_bring_no_samples(n, ask, kind):
    """Adversarial examples, Langevin dynamics: steps on the input, then one on the parameters."""
    model, x = mlp(), random(4, D)

    def moved(x):
        for _ in range(3):
            x = x.detach().requires_grad_()
            x = x + 0.1 * ask(squares(model, x), x).sign()
        return x.detach()

    run = lambda: (moved(x[:n]), squares(model, moved(x)))[1]
    each = per_sample_gradients(model, squares, moved(x))
    model.zero_grad()
    for _ in range(3):
        step(model, run, each, kind)


@WAYS
def test_gradients_for_inputs_that_stay_in_the_graph_bring_no_samples(kind):
    model, x = mlp(), random(4, D)

    def run():
        given = x.clone().requires_grad_()
        loss = squares(model, given)
        torch.autograd.grad(loss, given, retain_graph=True)
        return loss

    for _ in range(3):
        step(model, run, per_sample_gradients(model, squares, x), kind)


@WAYS
def test_a_backward_that_reaches_no_chosen_parameter_brings_no_samples(kind):
    model, x, other = mlp(), random(4, D), random(3, D)
    each = {name: part for name, part in per_sample_gradients(model, squares, x).items() if name.startswith("2.")}

    def run():
        squares(model[0], other).backward()  # of '0.*' alone
        torch.autograd.grad(squares(model, other), model[0].weight)
        return squares(model, x)

    reducer = unsum.Norms() if kind == "norms" else None
    for _ in range(3):
        with unsum.gradients(model, *([reducer] if reducer else []), params="2.*") as g:
            run().backward()
        assert_same(g, each, reducer=reducer)


@WAYS
def test_a_backward_of_another_model_brings_no_samples(kind):
    model, other, x = mlp(), with_batch_norm(D), random(4, D)

    def run():
        squares(other, random(3, D)).backward()
        return squares(model, x)

    for _ in range(3):
        step(model, run, per_sample_gradients(model, squares, x), kind)


# ---- steps that were refused, or failed ---------------------------------------------------------------------------


class Moody(nn.Module):
    """What is done to hidden activations is decided step by step."""

    def __init__(self, mood=None):
        super().__init__()
        self.a, self.b = nn.Linear(D, 6), nn.Linear(6, 4)
        self.mood = mood

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.b(h if self.mood is None else self.mood(h))


def centred(h):
    return h - h.mean(0)


def broken_hook(h):
    h.register_hook(lambda grad: 1 / 0)
    return h


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in backward")


def broken_forward(h):
    raise ZeroDivisionError("in forward")


MOODS = {
    "refused": (centred, InteractionError),
    "a hook that fails": (broken_hook, ZeroDivisionError),
    "a node that fails": (Broken.apply, ZeroDivisionError),
    "a forward that fails": (broken_forward, ZeroDivisionError),
}


def moody(mood=None):
    torch.manual_seed(0)
    return Moody(mood).double()


@WAYS
@pytest.mark.parametrize("mood", MOODS)
@pytest.mark.parametrize("before", [0, 1, 4])
def test_a_step_that_failed_leaves_the_next_as_if_it_had_not_been(before, mood, kind):
    model, x = moody(), random(4, D)
    each = per_sample_gradients(model, squares, x)
    bad, error = MOODS[mood]
    for _ in range(before):
        step(model, lambda: squares(model, x), each, kind)
    for _ in range(2):
        model.zero_grad()
        model.mood = bad
        with pytest.raises(error):
            with unsum.gradients(model, *([unsum.Norms()] if kind == "norms" else [])):
                squares(model, x).backward()
        if error is InteractionError:
            assert all(p.grad is None for p in model.parameters())
        model.mood = None
        for _ in range(2):
            step(model, lambda: squares(model, x), each, kind)


@WAYS
@pytest.mark.parametrize("mood", MOODS)
def test_a_backward_that_failed_leaves_the_next_of_the_same_block_as_if_it_had_not_been(mood, kind):
    model, x, bad_x = moody(), random(4, D), random(3, D)
    bad, error = MOODS[mood]
    each = per_sample_gradients(model, squares, x)
    reducer = unsum.Norms() if kind == "norms" else None
    for _ in range(2):
        with unsum.gradients(model, *([reducer] if reducer else [])) as g:
            model.mood = bad
            with pytest.raises(error):
                squares(model, bad_x).backward()
            model.mood = None
            squares(model, x).backward()
        assert_same(g, each, reducer=reducer)


@WAYS
@pytest.mark.parametrize("when", [lambda i: i == 6, lambda i: i % 4 == 3, lambda i: i >= 5], ids=["6", "4th", "from 5"])
def test_a_penalty_that_appears_later_belongs_to_nobody(when, kind):
    model, x = mlp(), random(4, D)
    each = per_sample_gradients(model, squares, x)
    weight, bias = model[2].weight, model[0].bias
    shared = {"2.weight": 0.2 * weight.detach(), "0.bias": 0.4 * bias.detach()}
    penalty = lambda: 0.1 * weight.square().sum() + 0.2 * bias.square().sum()
    for i in range(12):
        run = (lambda: squares(model, x) + penalty()) if when(i) else (lambda: squares(model, x))
        step(model, run, each, kind, shared=shared if when(i) else None)


@WAYS
def test_a_penalty_inside_the_model_that_appears_later_belongs_to_nobody(kind):
    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.calls = mlp(), 0

        def forward(self, x):
            self.calls += 1
            return self.net(x), (0.1 * self.net[2].weight.square().sum() if self.calls % 4 == 3 else None)

    model, x = Penalised(), random(4, D)
    each = alone(model, lambda m: m.net(x).square().sum(1))
    shared = {"net.2.weight": 0.2 * model.net[2].weight.detach()}

    def run():
        out, penalty = model(x)
        return out.square().sum() + (0 if penalty is None else penalty)

    for i in range(12):
        step(model, run, each, kind, shared=shared if i % 4 == 2 else None)


MIXING = {
    "centred": centred,
    "scaled by the batch": lambda h: h / h.norm(),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
    "attention over the batch": lambda h: (h @ h.T).softmax(1) @ h,
}


@WAYS
@pytest.mark.parametrize("mixing", MIXING)
@pytest.mark.parametrize("every", [4, 3])
def test_samples_that_interact_in_every_few_steps_are_refused_in_each_of_these(every, mixing, kind):
    torch.manual_seed(0)
    model, x = moody(), random(4, D)
    each = per_sample_gradients(model, squares, x)
    for counter in range(12):
        model.mood = MIXING[mixing] if counter % every == every - 1 else None
        if model.mood is None:
            step(model, lambda: squares(model, x), each, kind)
            continue
        model.zero_grad()
        with pytest.raises(InteractionError):
            with unsum.gradients(model, *([unsum.Norms()] if kind == "norms" else [])):
                squares(model, x).backward()
        assert all(p.grad is None for p in model.parameters())


@WAYS
def test_samples_that_interact_in_one_step_of_a_long_loop_are_refused_in_that_one(kind):
    class Counting(Moody):
        calls = 0

        def forward(self, x):
            self.calls += 1
            self.mood = centred if self.calls == 9 else None
            return super().forward(x)

    torch.manual_seed(0)
    model = Counting().double()
    x = random(4, D)
    each = per_sample_gradients(moody(), squares, x)
    for i in range(12):
        if i == 8:
            with pytest.raises(InteractionError):
                with unsum.gradients(model, *([unsum.Norms()] if kind == "norms" else [])):
                    squares(model, x).backward()
        else:
            step(model, lambda: squares(model, x), each, kind)


# ---- shapes that change -------------------------------------------------------------------------------------------

SHAPES = [(1, 1), (4, 6), (4, 6), (6, 4), (3, 3), (3, 3), (5, 2), (2, 7), (4, 6), (1, 5)]  # rows, positions


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1, groups=2), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.relu(self.a(x)))).mean((2, 3)))


class Experts(nn.Module):
    """Each token goes to one expert, chosen by the largest weight."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 3), nn.ModuleList(nn.Linear(D, 4) for _ in range(3))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights = self.gate(flat).softmax(1)
        chosen, out = weights.argmax(1), flat.new_zeros(len(flat), 4)
        for e, expert in enumerate(self.experts):
            rows = (chosen == e).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(flat.index_select(0, rows)) * weights[rows, e, None])
        return out.unflatten(0, x.shape[:2])


class Recurrent(nn.Module):
    """Sequences of different lengths, in any order."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(D, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


def gpt2():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=16)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    return transformers.GPT2LMHeadModel(config).eval()


def lengths_up_to(n, t):
    return torch.randint(1, t + 1, (n,))


def masked_text(n, t):
    mask = (torch.arange(t) < lengths_up_to(n, t)[:, None]).long()
    return torch.randint(20, (n, t)), mask if n % 2 else mask.flip(1)  # padded on the right, or on the left


def text_loss(model, ids, mask):
    logits = model(input_ids=ids, attention_mask=mask).logits
    return (logits.logsumexp(-1).square() * mask).sum()


CHANGING = {
    "mlp": (mlp, lambda n, t: (random(n, D),), squares),
    "mlp on tokens": (mlp, lambda n, t: (random(n, t, D),), squares),
    "convolutions": (Convolutions, lambda n, t: (random(n, 2, t, t + 1),), squares),
    "lstm": (Last, lambda n, t: (random(n, t, D),), squares),
    "experts": (Experts, lambda n, t: (random(n, t, D),), squares),
    "gpt2": (gpt2, masked_text, text_loss),
}


@WAYS
@pytest.mark.parametrize("name", CHANGING)
def test_rows_positions_masks_and_routes_change_in_every_step(name, kind):
    torch.manual_seed(1)
    make, batch, loss = CHANGING[name]
    model = make().double()
    for shape in SHAPES:
        given = batch(*shape)
        step(model, lambda given=given: loss(model, *given), per_sample_gradients(model, loss, *given), kind)


@WAYS
def test_lengths_change_in_every_step(kind):
    torch.manual_seed(1)
    model = Recurrent().double()
    for n, t in SHAPES:
        x, lengths = random(n, t, D), lengths_up_to(n, t)
        loss = lambda m, x, lengths: sum(row[:k].square().sum() for row, k in zip(m(x, lengths), lengths, strict=True))
        each = per_sample_gradients(model, loss, x, lengths)
        step(model, lambda loss=loss, x=x, lengths=lengths: loss(model, x, lengths), each, kind)


class Ordered(nn.Module):
    """Rows are put in another order and back; with `sort`, by a number that is computed."""

    def __init__(self, sort):
        super().__init__()
        self.a, self.b, self.sort = nn.Linear(D, 6), nn.Linear(6, 4), sort

    def forward(self, x, order):
        h = torch.tanh(self.a(x))
        order = h.sum(1).argsort() if self.sort else order
        return self.b(h[order])[order.argsort()]


@WAYS
@pytest.mark.parametrize("sort", [False, True], ids=["given", "sorted"])
def test_the_order_of_rows_inside_the_model_changes_in_every_step(sort, kind):
    torch.manual_seed(1)
    model = Ordered(sort).double()
    for n in (1, 4, 4, 4, 6, 4, 3, 3):
        x, order = random(n, D), torch.randperm(n)
        each = alone(model, lambda m, x=x, order=order: m(x, order).square().sum(1))
        step(model, lambda x=x, order=order: model(x, order).square().sum(), each, kind)


ENDS = [[0, 1], [0, 3, 4, 10], [0, 3, 4, 10], [0, 5, 7, 10], [0, 2, 4, 6, 8, 10], [0, 4, 4, 9], [0, 7], [0, 1, 2, 3]]


@WAYS
@pytest.mark.parametrize("rows", [True, False], ids=["one row", "no rows"])
def test_packed_documents_change_in_every_step(rows, kind):
    torch.manual_seed(1)
    model = mlp()
    for ends in ENDS:
        x = random(ends[-1], D)
        each = alone(model, lambda m, x=x, ends=ends: (squares(m, x[a:b]) for a, b in itertools.pairwise(ends)))
        given = x[None] if rows else x
        packed = unsum.packed(torch.tensor(ends))
        step(model, lambda given=given: squares(model, given), each, kind, samples=packed)


class Attending(nn.Module):
    """Attention inside each document, by a mask."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, 3)

    def forward(self, x, of):
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = (of[:, :, None] == of[:, None, :]) & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@WAYS
def test_packed_documents_that_a_mask_keeps_apart_change_in_every_step(kind):
    torch.manual_seed(1)
    model = Attending().double()
    for ends in ENDS:
        x, cu = random(1, ends[-1], D), torch.tensor(ends)
        of = torch.repeat_interleave(torch.arange(len(ends) - 1), cu.diff())[None]
        loss = lambda m, x=x, of=of: m(x, of).square().sum(-1)[0]
        each = alone(model, lambda m, ends=ends, loss=loss: (loss(m)[a:b].sum() for a, b in itertools.pairwise(ends)))
        step(model, lambda loss=loss: loss(model).sum(), each, kind, samples=unsum.packed(cu))


@WAYS
def test_ids_of_rows_change_in_every_step(kind):
    torch.manual_seed(1)
    model = mlp()
    for ids in ([3], [7, 7, 3, 7], [7, 3, 3, 7], [0, 1, 2, 3], [5, 5, 5, 5], [2, 9, 2], [1, 0, 1, 0, 4, 0]):
        x, given = random(len(ids), 2, D), torch.tensor(ids)
        each = alone(model, lambda m, x=x, given=given: (squares(m, x[given == i]) for i in given.unique()))
        step(model, lambda x=x: squares(model, x), each, kind, samples=given)


@WAYS
def test_ids_of_positions_change_in_every_step(kind):
    torch.manual_seed(1)
    model = mlp()
    for n, t in SHAPES:
        x, ids = random(n, t, D), torch.randint(0, 4, (n, t))
        each = alone(model, lambda m, x=x, ids=ids: (squares(m, x[ids == i]) for i in ids.unique()))
        step(model, lambda x=x: squares(model, x), each, kind, samples=ids)


@WAYS
@pytest.mark.parametrize("name", ["mlp", "convolutions"])
@pytest.mark.parametrize("first", [True, False], ids=["the first batch", "a later batch"])
def test_a_batch_without_samples(first, name, kind):
    torch.manual_seed(1)
    make, batch, loss = CHANGING[name]
    model = make().double()
    for n in ([] if first else [4, 4, 4]) + [0, 3, 0, 0, 3]:
        given = batch(n, 3)
        if n:
            step(model, lambda given=given: loss(model, *given), per_sample_gradients(model, loss, *given), kind)
            continue
        reducer = unsum.Norms()
        with unsum.gradients(model, *([reducer] if kind == "norms" else [])) as g:
            loss(model, *given).backward()
        assert (g[reducer].norms() if kind == "norms" else g.norms()).shape == (0,)
        if kind == "kept":
            assert all(g[name].per_sample().shape == (0, *p.shape) for name, p in model.named_parameters())


class Rolled(nn.Module):
    """`back`: rows are rolled along the samples and back; else the rolled rows are added to the others."""

    def __init__(self, back):
        super().__init__()
        self.a, self.b, self.shift, self.back = nn.Linear(D, 6), nn.Linear(6, 4), 0, back

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.b(h.roll(self.shift, 0)).roll(-self.shift, 0) if self.back else self.b(h + h.roll(self.shift, 0))


@WAYS
def test_a_roll_along_the_samples_and_back_by_another_shift_in_every_step(kind):
    torch.manual_seed(1)
    model, x = Rolled(True).double(), random(4, D)
    each = per_sample_gradients(model, squares, x)
    for shift in (0, 0, 1, 2, 1, -1, 3, 0, 4):
        model.shift = shift
        step(model, lambda: squares(model, x), each, kind)


@WAYS
@pytest.mark.parametrize("shifts", [(0, 0, 0, 1, 0, 2, 4, 3), (1, 0, 0, 0, 0, 1)], ids=["apart first", "mixed first"])
def test_a_roll_that_makes_samples_interact_is_refused_in_the_steps_in_which_it_does(shifts, kind):
    torch.manual_seed(1)
    model, x = Rolled(False).double(), random(4, D)
    each = per_sample_gradients(model, squares, x)
    for shift in shifts:
        model.shift = shift
        if shift % 4:
            with pytest.raises(InteractionError):
                with unsum.gradients(model, *([unsum.Norms()] if kind == "norms" else [])):
                    squares(model, x).backward()
        else:
            step(model, lambda: squares(model, x), each, kind)


class Aside(nn.Module):
    """An auxiliary branch of some of the rows. `give` decides what becomes of it."""

    def __init__(self, give):
        super().__init__()
        self.a, self.b, self.aside, self.give = nn.Linear(D, 6), nn.Linear(6, 4), nn.Linear(6, 4), give
        self.rows = (0, 0)

    def forward(self, x):
        h, (begin, end) = torch.tanh(self.a(x)), self.rows
        return self.give(self.b(h), self.aside(h[begin:end]).exp(), begin, end)


def padded(out, aside, begin, end):
    return out + F.pad(aside, (0, 0, begin, len(out) - end))


def joined(out, aside, begin, end):
    return torch.cat([out[:begin], out[begin:end] + aside, out[end:]])


def written(out, aside, begin, end):
    out = out.clone()
    out[begin:end] += aside
    return out


def inside(out, aside, begin, end):
    return out.square().sum() + aside.sum()


def apart(out, aside, begin, end):
    return out, aside


def aside_losses(model, x):
    """(n,), whatever the model gives."""
    h, (begin, end) = torch.tanh(model.a(x)), model.rows
    if model.give in (inside, apart):
        each = model.b(h).square().sum(1)
        return each + F.pad(model.aside(h[begin:end]).exp().sum(1), (begin, len(x) - end))
    return padded(model.b(h), model.aside(h[begin:end]).exp(), begin, end).square().sum(1)


SLICES = {
    "the first rows": [(0, 2), (0, 2), (0, 2), (0, 3), (0, 1), (0, 4), (0, 2), (0, 0)],
    "two rows anywhere": [(0, 2), (0, 2), (1, 3), (2, 4), (1, 3), (0, 2), (2, 4)],
}


@WAYS
@pytest.mark.parametrize("give", [padded, joined, written, inside, apart])
@pytest.mark.parametrize("slices", SLICES)
def test_a_branch_of_other_rows_in_every_step(slices, give, kind):
    torch.manual_seed(1)
    model, x = Aside(give).double(), random(4, D)

    def run():
        out = model(x)
        return out if give is inside else out[0].square().sum() + out[1].sum() if give is apart else out.square().sum()

    for rows in SLICES[slices]:
        model.rows = rows
        step(model, run, alone(model, lambda m: aside_losses(m, x)), kind)


# ---- reducers -----------------------------------------------------------------------------------------------------


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
