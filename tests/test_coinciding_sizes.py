"""Where sizes coincide, only rows of inputs say along which dimension samples lie: followed through frozen layers, and
refused by name where nothing shows it. Lists whose items may be samples, and inputs with several numbers of rows."""

import pytest
import torch
from reference import norms_of_all, per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from one_by_one import assert_both, assert_each_row
from unsum.errors import InteractionError, SamplesError, UnsumError

pytestmark = pytest.mark.usefixtures("doubles")
D = 4


class Net(nn.Module):
    """Frozen in front, trained behind."""

    def __init__(self, forward):
        super().__init__()
        self.words, self.map = nn.Embedding(9, D), nn.Linear(D, D)
        self.filter, self.norm = nn.Conv1d(D, D, 3, padding=1), nn.LayerNorm(D)
        self.cells = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True)
        for part in (self.words, self.map, self.filter, self.norm, self.cells):
            part.requires_grad_(False)
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, 2)
        self.run = forward

    def forward(self, *given):
        return self.run(self, *given)


FRONTS = {
    "an embedding": (lambda m, x: m.words(x), lambda n, t: torch.randint(9, (n, t))),
    "a linear layer": (lambda m, x: m.map(x), lambda n, t: torch.randn(n, t, D)),
    "a convolution": (lambda m, x: m.filter(x.mT).mT, lambda n, t: torch.randn(n, t, D)),
    "a norm": (lambda m, x: m.norm(x), lambda n, t: torch.randn(n, t, D)),
    "one hot": (lambda m, x: F.one_hot(x, D).double(), lambda n, t: torch.randint(D, (n, t))),
    "centred in time": (lambda m, x: x - x.mean(1, keepdim=True), lambda n, t: torch.randn(n, t, D)),
    "numbers spread out": (lambda m, x: x[..., None] * torch.arange(1.0, D + 1), lambda n, t: torch.randn(n, t)),
    "a product with a buffer": (lambda m, x: x @ torch.ones(D, D).triu(), lambda n, t: torch.randn(n, t, D)),
}
BEHIND = {
    "as it is": lambda m, h: m.b(m.a(h).tanh()),
    "time first": lambda m, h: m.b(m.a(h).tanh()).transpose(0, 1),
    "the loss alone": lambda m, h: m.b(m.a(h).tanh()).square().sum(),
    "a list of samples": lambda m, h: list(m.b(m.a(h).tanh())),
}


def total(out):
    return (
        sum(each.square().sum() for each in out) if isinstance(out, list) else out.square().sum() if out.dim() else out
    )


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("behind", BEHIND)
def test_a_frozen_front(front, behind):
    change, make = FRONTS[front]
    model = Net(lambda m, x: BEHIND[behind](m, change(m, x)))
    for n, t in ((3, 3), (3, 5), (5, 3), (4, 4), (1, 3), (3, 3)):
        x = make(n, t)
        assert_both(model, lambda x=x: total(model(x)), lambda i, x=x: total(model(x[i : i + 1])), n)


def test_heads_as_many_as_samples():
    model = Net(lambda m, x: torch.stack([m.b(m.a(m.map(x) * k)) for k in (1, 2, 3, 4)]))
    for n in (4, 3, 4):
        assert_each_row(model, lambda x: model(x).square().sum(), torch.randn(n, D))


HIDDEN = {"numpy": lambda x: torch.from_numpy(x.numpy() * 2), "fft": lambda x: torch.fft.rfft(x, dim=-1).abs()[..., :2]}


@pytest.mark.parametrize("front", HIDDEN)
def test_what_nothing_shows_is_refused_and_what_is_said_is_taken(front):
    model = Net(lambda m, x: m.b(F.pad(HIDDEN[front](x), (0, 2))[..., :D]).transpose(0, 1))
    x = torch.randn(3, 3, D)
    with pytest.raises(SamplesError, match="dimensions 0 and 1"), unsum.gradients(model):
        model(x).square().sum().backward()
    with unsum.gradients(model) as g:
        losses = model(x).transpose(0, 1).square().sum((1, 2))
        unsum.mark_samples(losses)
        losses.sum().backward()
    assert g.norms().shape == (3,)
    straight = Net(lambda m, x: m.b(F.pad(HIDDEN[front](x), (0, 2))[..., :D]))
    with unsum.gradients(straight, samples=unsum.dim(0)) as g:
        straight(x).square().sum().backward()
    wanted = [torch.autograd.grad(straight(x[i : i + 1]).square().sum(), straight.b.weight)[0] for i in range(3)]
    torch.testing.assert_close(g["b.weight"].per_sample(), torch.stack(wanted))


MOVED = {
    "sorted": lambda h: h.sort(0).values,
    "each feature elsewhere": lambda h: h.gather(0, torch.stack([torch.randperm(len(h)) for _ in range(D)], 1)),
    "rolled": lambda h: h.roll(1, 0),
}


@pytest.mark.parametrize("how", MOVED)
def test_numbers_that_change_places_behind_a_frozen_front_are_refused(how):
    model = Net(lambda m, x: m.b(MOVED[how](m.a(m.map(x)))))
    for n in (3, 5):
        with pytest.raises(UnsumError), unsum.gradients(model):
            model(torch.randn(n, D)).square().sum().backward()


RAW = {
    "a convolution along the samples": (nn.Conv1d(D, 2, 3, padding=1), lambda m, x: m(x.t()[None])[0].t()),
    "a norm over the samples": (nn.LayerNorm(3), lambda m, x: m(x.t()).t()),
    "an LSTM along the samples": (nn.LSTM(D, 2), lambda m, x: m(x[:, None])[0][:, 0]),
}


@pytest.mark.parametrize("how", RAW)
def test_a_layer_that_sees_several_samples_of_a_raw_input_is_refused(how):
    layer, run = RAW[how]

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return run(self.layer, x)

    model = Wide().double()
    for _ in range(2):
        with pytest.raises(InteractionError), unsum.gradients(model):
            model(torch.randn(3, D)).square().sum().backward()


def test_lists_of_samples_are_refused_by_name():
    model = Net(lambda m, clouds: torch.stack([m.b(m.a(cloud).amax(0)) for cloud in clouds]))
    inside = Net(lambda m, clouds: sum(m.b(m.a(cloud)).square().sum() for cloud in clouds))
    each = Net(lambda m, clouds: [m.b(m.a(cloud)) for cloud in clouds])
    for clouds in ([torch.randn(5, D)] * 3, [torch.randn(3, D) for _ in range(3)], [torch.randn(4, D)]):
        for net in (inside, each):
            with pytest.raises(SamplesError, match="list"), unsum.gradients(net):
                total(net(clouds)).backward()
    with pytest.raises(SamplesError), unsum.gradients(model):
        model([torch.randn(5, D)] * 3).square().sum().backward()
    with unsum.gradients(model) as g:  # said by the user
        losses = model([torch.randn(5, D) for _ in range(3)]).square().sum(1)
        unsum.mark_samples(losses)
        losses.sum().backward()
    assert g.norms().shape == (3,)


def test_a_batch_that_is_given_as_one_tuple():
    model = Net(lambda m, batch: F.cross_entropy(m.b(m.a(batch[0])), batch[1], reduction="sum"))
    for n in (4, 3):
        x, y = torch.randn(n, D), torch.randint(2, (n,))
        alone = lambda i, x=x, y=y: model((x[i : i + 1], y[i : i + 1]))
        assert_both(model, lambda x=x, y=y: model((x, y)), alone, n)


def test_a_loss_alone_beside_an_input_that_all_samples_share():
    model = Net(lambda m, places, x: m.b((m.a(x) + m.a(places)).tanh()).square().sum())
    for n, t in ((3, 5), (4, 4), (1, 3), (2, 4), (4, 1)):
        if (n, t) != (1, 1):
            with pytest.raises(UnsumError), unsum.gradients(model):
                model(torch.randn(t, D), torch.randn(n, t, D)).backward()


# ---- recurrent kernels, which are others in float32 ---------------------------------------------------------------


def lstm(**options):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.r, self.o = nn.LSTM(D, D, **options), nn.Linear(D * (2 if options.get("bidirectional") else 1), 2)

        def forward(self, x):
            out, states = self.r(x if options.get("batch_first") else x.transpose(0, 1))
            return self.o(out), *states

    return Recurrent().float()


READ = {
    "all": lambda out, h, c: out.square().sum(),
    "states": lambda out, h, c: h.square().sum() + c.square().sum(),
    "both": lambda out, h, c: out.square().sum() + h.square().sum(),
}


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["batch first", "time first"])
@pytest.mark.parametrize("read", READ)
def test_recurrent_kernels(options, first, read):
    model = lstm(batch_first=first, **options)
    for n, t in ((3, 5), (4, 3), (1, 3), (3, 5), (5, 5)):
        x = torch.randn(n, t, D, dtype=torch.float32)
        alone = lambda i, x=x: READ[read](*model(x[i : i + 1]))
        assert_both(model, lambda x=x: READ[read](*model(x)), alone, n, tolerance=1e-4)


def test_a_recurrent_kernel_with_as_many_steps_as_samples():
    model = lstm()
    for n, t in ((4, 4), (3, 5), (3, 3)):
        x = torch.randn(n, t, D, dtype=torch.float32)
        alone = lambda i, x=x: model(x[i : i + 1])[0].square().sum()
        assert_both(model, lambda x=x: model(x)[0].square().sum(), alone, n, tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("front", ["raw", "scaled", "trained", "frozen", "with gradients"])
def test_a_recurrent_layer_along_the_samples_is_refused(dtype, kind, front):
    class Mistaken(nn.Module):
        """`batch_first` is forgotten."""

        def __init__(self):
            super().__init__()
            self.f, self.r, self.o = nn.Linear(D, D), kind(D, D), nn.Linear(D, 2)
            self.f.requires_grad_(front == "trained")

        def forward(self, x):
            x = {"scaled": lambda: x / 2, "trained": lambda: self.f(x), "frozen": lambda: self.f(x)}.get(
                front, lambda: x
            )()
            return self.o(self.r(x)[0])

    model = Mistaken().to(dtype)
    for n, t in ((3, 5), (3, 5), (4, 4), (2, 6)):
        with pytest.raises(UnsumError), unsum.gradients(model, unsum.Norms()):
            x = torch.randn(n, t, D, dtype=dtype, requires_grad=front == "with gradients")
            model(x).square().sum().backward()


class Reader(nn.Module):
    """Copies what it is given time first, with a node if that requires gradients."""

    def __init__(self, kind):
        super().__init__()
        self.r, self.o = kind(D, D, batch_first=True), nn.Linear(D, 3)

    def forward(self, x):
        return self.o(self.r(x)[0]).flatten(1)


INPUTS = {
    "a function": (lambda: nn.Sequential(nn.Tanh(), nn.Linear(D, 3)), (D,), 3),
    "a copy": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(2 * D, 3)), (2, D), 3),
    "padding": (lambda: nn.Sequential(nn.Conv1d(D, 2, 3, padding=1, padding_mode="reflect"), nn.Flatten()), (D, 6), 12),
    "a GRU": (lambda: Reader(nn.GRU), (2, D), 6),
    "an RNN": (lambda: Reader(nn.RNN), (2, D), 6),
    "an LSTM": (lambda: Reader(nn.LSTM), (2, D), 6),
}


@pytest.mark.parametrize("what", INPUTS)
def test_inputs_that_require_gradients(what):
    """What is computed of them has nodes: the walk comes to the inputs themselves."""
    make, shape, coinciding = INPUTS[what]
    model = make()
    for n in (coinciding, 5, coinciding):  # as many samples as an output has numbers
        x = torch.randn(n, *shape)
        x = (x.mT.contiguous().mT if x.dim() > 2 else x).requires_grad_()
        assert_each_row(model, lambda x: model(x).sin().sum(), x)


@pytest.mark.parametrize("kind", ["raw", "with gradients"])
def test_an_image_without_a_batch_is_refused(kind):
    """(5, 6) is one sequence of five channels for the layer, which sees all of them at once."""
    model = nn.Sequential(nn.Conv1d(5, 5, 3, padding=1))
    for length in (6, 6, 5):
        with pytest.raises(InteractionError, match="Convolution"), unsum.gradients(model, unsum.Norms()):
            model(torch.randn(5, length, requires_grad=kind == "with gradients")).square().sum().backward()


@pytest.mark.parametrize("kind", ["raw", "with gradients"])
def test_rows_that_change_places_are_refused(kind):
    model = nn.Linear(D, 2)
    turned = lambda x: model(x.roll(1, 0))
    turning = nn.ModuleDict({"a": model})
    turning.forward = turned
    with pytest.raises(SamplesError, match="another order"), unsum.gradients(turning):
        turning(torch.randn(5, D, requires_grad=kind == "with gradients")).square().sum().backward()


NORMS = {
    "group norm": lambda: nn.GroupNorm(2, D),
    "instance norm": lambda: nn.InstanceNorm1d(D),
    "instance norm that is trained": lambda: nn.InstanceNorm1d(D, affine=True),
    "layer norm": lambda: nn.LayerNorm(5),
    "response norm": lambda: nn.LocalResponseNorm(2),
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_layer_in_front(norm):
    model = nn.Sequential(NORMS[norm](), nn.Flatten(), nn.Linear(5 * D, 3))
    for n in (3, 5, 3):
        assert_each_row(model, lambda x: model(x).sin().sum(), torch.randn(n, D, 5))


# ---- by name or right, never a crash ------------------------------------------------------------------------------


def test_clusters_with_one_target():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.loss = nn.Linear(D, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 9, [3, 6])

        def forward(self, x, y):
            return self.loss(self.a(x), y)[0]

    model = Model()
    for y in ([0, 1, 4, 2, 1], [0, 7, 4, 8, 1], [1, 1, 2, 0, 2]):
        assert_each_row(model, lambda x, y: -model(x, y).sum(), torch.randn(5, D), torch.tensor(y))


def test_layers_that_are_made_by_their_first_forward():
    model = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(2))
    x = torch.randn(4, D)
    with unsum.gradients(model, unsum.Norms()) as g:
        model(x).square().sum().backward()
    wanted = [torch.autograd.grad(model(x[i : i + 1]).square().sum(), list(model.parameters())) for i in range(4)]
    squares = torch.stack([sum(each.square().sum() for each in grads) for grads in wanted])
    torch.testing.assert_close(g[unsum.Norms].sq_norms(), squares)


@pytest.mark.parametrize("k", [1.0, "a", None, True, -1])
def test_a_dimension_is_a_whole_number(k):
    with pytest.raises(SamplesError, match="dim"):
        unsum.dim(k)


@pytest.mark.parametrize("where", ["the forward", "the whole step"])
def test_as_many_samples_as_outputs_under_autocast(where):
    """Autocast copies the input in another dtype before the first layer sees it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    for _ in range(5):
        x = torch.randn(4, 5, 8)
        with unsum.gradients(model, unsum.Norms()) as g:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().sum()
                if where == "the whole step":
                    loss.backward()
            if where == "the forward":
                loss.backward()
        each = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
        wanted = norms_of_all(each)
        torch.testing.assert_close(g[unsum.Norms].norms().double(), wanted, rtol=3e-2, atol=0)
