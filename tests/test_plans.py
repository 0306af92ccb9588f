"""Plans that must not be used again: rows that stay in place in the first batch, and move or mix in a later one, by
means that the graph does not show. And backwards that fail, or reach only some parameters."""

import pytest
import torch
from reference import alone, per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from unsum.errors import InteractionError, OptionError, SamplesError, UnsupportedError
from unsum.plan.signature import survey

N = 4


class Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order):
        ctx.save_for_backward(order)
        return x[order]

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        out = torch.empty_like(grad)
        out[order] = grad
        return out, None


class Add(torch.autograd.Function):  # named like an operation of torch's
    @staticmethod
    def forward(ctx, x, order):
        ctx.shift = int(order[0]) if bool((order.diff() % N == 1).all()) else -int(order[0])
        return x.roll(ctx.shift, 0)

    @staticmethod
    def backward(ctx, grad):
        return grad.roll(-ctx.shift, 0), None


def one_hot(order):
    return F.one_hot(order, N).double()


def written(h, order):
    whole = torch.zeros(N, 2, h.shape[1]).double()
    whole[:, 0][order] = h
    return whole[:, 0]


WAYS = {
    "a custom Function": Take.apply,
    "a number on ctx": Add.apply,
    "a write to part of a tensor": written,
    "a mask and a sum": lambda h, order: (one_hot(order)[:, :, None] * h[None]).sum(1),
    "a mask on what was expanded": lambda h, order: (one_hot(order)[:, :, None] * h[None].expand(N, N, -1)).sum(1),
    "a mask on what was repeated": lambda h, order: (one_hot(order)[:, :, None] * h[None].repeat(N, 1, 1)).sum(1),
    "a sparse product": lambda h, order: torch.sparse.mm(one_hot(order).to_sparse(), h),
    "a product with a vector": lambda h, order: torch.stack([torch.mv(one_hot(order), c) for c in h.T], 1),
    "a convolution over samples": lambda h, order: F.conv1d(h[None], one_hot(order)[:, :, None])[0],
    "a bag of samples": lambda h, order: F.embedding_bag(order[:, None], h, mode="sum"),
    "an index": lambda h, order: h[order],
    "a scatter": lambda h, order: torch.zeros_like(h).index_add(0, order.argsort(), h),
}


class Moving(nn.Module):
    def __init__(self, move):
        super().__init__()
        self.a, self.b, self.move = nn.Linear(3, 3), nn.Linear(3, 2), move

    def forward(self, x, order):
        return self.move(self.b(torch.tanh(self.move(self.a(x), order))), order.argsort())


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_move_later(way):
    torch.manual_seed(0)
    model, x = Moving(WAYS[way]).double(), torch.randn(N, 3).double()
    for order in (torch.arange(N), torch.tensor([1, 2, 3, 0]), torch.arange(N)):
        losses = model(x, order).square().sum(1)
        truth = torch.stack([torch.autograd.grad(loss, model.b.weight, retain_graph=True)[0] for loss in losses])
        for reducers in ((), (unsum.Norms(),)):
            with unsum.gradients(model, *reducers) as g:
                model(x, order).square().sum().backward()
            found = g[unsum.Norms].by_parameter()["b.weight"] if reducers else g["b.weight"].sq_norms()
            torch.testing.assert_close(found, truth.flatten(1).square().sum(1))


def test_rows_that_fit_a_move_by_chance():
    class Flipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x, order):
            h = torch.tanh(self.a(x).flatten(0, 1)[order]).flip(0)
            return torch.tanh(self.c(h)).flip(0)[order.argsort()].view_as(x)

    torch.manual_seed(0)
    model = Flipped().double()
    for order in ([0, 2, 3, 1], [0, 2, 1, 3]):
        order, x = torch.tensor(order), torch.randn(2, 2, 3).double()
        with unsum.gradients(model) as g:
            model(x, order).square().sum().backward()
        losses = model(x, order).square().sum((1, 2))
        truth = torch.stack([torch.autograd.grad(loss, model.c.weight, retain_graph=True)[0] for loss in losses])
        torch.testing.assert_close(g["c.weight"].per_sample(), truth)


@pytest.mark.parametrize("way", ["a sparse product", "a mask and a sum", "a convolution over samples"])
def test_samples_that_begin_to_interact(way):
    mixed = {
        "a sparse product": lambda h, w: torch.sparse.mm(w.to_sparse(), h),
        "a mask and a sum": lambda h, w: (w[:, :, None] * h[None]).sum(1),
        "a convolution over samples": lambda h, w: F.conv1d(h[None], w[:, :, None])[0],
    }[way]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x, w):
            return self.b(mixed(torch.tanh(self.a(x)), w))

    model, x = Net().double(), torch.randn(N, 3).double()
    for _ in range(3):
        with unsum.gradients(model):
            model(x, torch.eye(N).double()).square().sum().backward()
    with pytest.raises(InteractionError):
        with unsum.gradients(model):
            model(x, torch.ones(N, N).double()).square().sum().backward()


@pytest.mark.parametrize("reducers", [(unsum.Norms,), ()], ids=["norms", "kept"])
def test_a_hook_that_changes_a_gradient_in_place_is_refused(reducers):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

        def forward(self, x):
            for layer in self.layers:
                skip = x * 1
                if skip.requires_grad:
                    skip.register_hook(lambda g: g.mul_(0.5))
                x = layer(x) + skip
            return x

    torch.manual_seed(0)
    model, x = Residual().double(), torch.randn(4, 6).double()
    with pytest.raises((UnsupportedError, SamplesError)):
        for _ in range(3):
            with unsum.gradients(model, *(kind() for kind in reducers)) as g:
                model(x).square().sum().backward()
            g.per_sample() if not reducers else None


def test_reducers_forget_a_backward_that_failed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    bad, x = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    reducers = (
        unsum.Norms(),
        unsum.SecondMoment(),
        unsum.Kronecker(),
        unsum.Project(2),
        unsum.WeightedSum(torch.ones(4)),
    )
    with unsum.gradients(model, *reducers) as g:
        hidden = model[0](bad)
        hidden.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model[2](model[1](hidden)).square().sum().backward()
        model(x).square().sum().backward()
    with unsum.gradients(model) as kept:
        model(x).square().sum().backward()
    assert g.ids.tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(g[unsum.Norms].norms(), kept.norms())
    each = kept["2.weight"].per_sample()
    torch.testing.assert_close(g[unsum.SecondMoment].sum_squares()["2.weight"], each.square().sum(0))
    torch.testing.assert_close(g[unsum.WeightedSum].sum()["2.weight"], each.sum(0))
    assert g[unsum.Project].matrix().shape[0] == 4


def test_reducers_count_what_a_backward_was_asked_for():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(4, 3).double()
    for _ in range(3):
        with unsum.gradients(model, unsum.Norms(), keep=True) as g:
            model(x).square().sum().backward(inputs=[model[0].weight])
        torch.testing.assert_close(g[unsum.Norms].norms(), g.norms())
        torch.testing.assert_close(g.norms(), g["0.weight"].sq_norms().sqrt())


def test_what_is_nobodys_is_not_known_inside_a_backward():
    class Reading:
        def begin(self, n, again): ...
        def take(self, name, factors):
            factors.shared()

        def end(self, left): ...

    model = nn.Linear(3, 2)
    with pytest.raises(SamplesError, match="belongs to no sample"):
        with unsum.gradients(model, Reading()):
            (model(torch.randn(4, 3)).sum() + model.weight.square().sum()).backward()


def test_second_moments_of_complex_parameters():
    model = nn.Linear(3, 2, bias=False, dtype=torch.complex128)
    x = torch.randn(4, 3, dtype=torch.complex128)
    with unsum.gradients(model, unsum.SecondMoment(), keep=True) as g:
        model(x).abs().square().sum().backward()
    found = g[unsum.SecondMoment].sum_squares()["weight"]
    torch.testing.assert_close(found, g["weight"].per_sample().abs().square().sum(0))


class Narrow(nn.Module):
    """A parameter of another dtype than what it meets."""

    def __init__(self, dtype):
        super().__init__()
        self.first, self.scale = nn.Linear(6, 8).double(), nn.Parameter(torch.randn(5, dtype=dtype))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.scale, n=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float16])
def test_a_parameter_that_is_narrower_than_the_rest_rounds_what_arrives(dtype):
    model, x = Narrow(dtype), torch.randn(N, 3, 6).double()
    loss = lambda x: model(x).square().sum()
    with unsum.gradients(model) as g:
        loss(x).backward()
    for name, parameter in model.named_parameters():
        truth = torch.stack([torch.autograd.grad(loss(x[i : i + 1]), parameter)[0] for i in range(N)])
        close = 1e-2 if dtype is torch.float16 else 1e-5
        torch.testing.assert_close(g[name].per_sample(), truth, rtol=close, atol=close, check_dtype=False)


class Segments(nn.Module):
    """All rows have one type. A layer norm and an embedding on a CPU add their gradients up in the model's dtype."""

    def __init__(self):
        super().__init__()
        self.types, self.norm, self.last = nn.Embedding(2, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.hooked = False

    def forward(self, x):
        x = x + self.types(torch.zeros(x.shape[:2], dtype=torch.long))
        scale = self.norm.weight
        if self.hooked:
            scale = scale * 1
            scale.register_hook(lambda grad: 2 * grad)
        return self.last(nn.functional.layer_norm(x, (6,), scale, self.norm.bias).tanh())


def test_sums_over_many_rows_that_torch_rounds_to_bfloat16():
    torch.manual_seed(0)
    model, x = Segments().bfloat16(), torch.randn(4, 900, 6).bfloat16()
    loss = lambda model, x: model(x).sin().sum()
    truth = per_sample_gradients(model, loss, x)
    with unsum.gradients(model) as g:
        loss(model, x).backward()
    for name, wanted in truth.items():
        assert (g[name].per_sample().double() - wanted).norm() < 2e-2 * wanted.norm(), name
    far = (model.norm.bias.grad.double() - truth["norm.bias"].sum(0)).norm()
    assert far > 0.1 * truth["norm.bias"].sum(0).norm()  # torch's own sum, or this test would say nothing


def test_rounded_sums_do_not_hide_what_a_hook_adds():
    torch.manual_seed(0)
    model, x = Segments().bfloat16(), torch.randn(4, 9, 6).bfloat16()
    model.hooked = True
    with pytest.raises(SamplesError, match=r"norm\.weight: part of its gradient"), unsum.gradients(model):
        model(x).sin().sum().backward()


def test_a_model_all_of_whose_numbers_are_complex():
    model = nn.Sequential(nn.Linear(6, 8, dtype=torch.complex64), nn.Linear(8, 3, dtype=torch.complex64))
    x = torch.randn(N, 6, dtype=torch.complex64)
    loss = lambda x: model(x).abs().square().sum()
    with unsum.gradients(model) as g:
        loss(x).backward()
    for name, parameter in model.named_parameters():
        truth = torch.stack([torch.autograd.grad(loss(x[i : i + 1]), parameter)[0] for i in range(N)])
        torch.testing.assert_close(g[name].per_sample(), truth, rtol=1e-5, atol=1e-4, check_dtype=False)


class Normed(nn.Module):
    """As many rows in a weight that is normed as there are samples; single tokens take another way."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, N), nn.utils.parametrizations.weight_norm(nn.Linear(N, N))

    def forward(self, x):
        h = self.first(x)
        return self.last(h.tanh() if x.shape[1] > 1 else h.sigmoid())


def test_norms_of_a_weight_are_no_data_in_a_later_graph_of_another_form():
    model = Normed().double()
    for n, length in ((3, 3), (N, 3), (N, 1)):
        x = torch.randn(n, length, 3).double()
        with unsum.gradients(model) as g:
            model(x).square().sum().backward()
        truth = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
        for name in g:
            torch.testing.assert_close(g[name].per_sample(), truth[name])


def test_indices_among_the_inputs_are_no_rows():
    model, x, order = nn.Linear(3, 3).double(), torch.randn(N, 3).double(), torch.tensor([2, 0, 3, 1])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = model

        def forward(self, x, order):
            return self.a(x[order])[order.argsort()]

    x.requires_grad_()
    net = Net()
    with unsum.gradients(net) as g:
        net(x, order).square().sum().backward()
    losses = net(x, order).square().sum(1)
    truth = torch.stack([torch.autograd.grad(loss, model.weight, retain_graph=True)[0] for loss in losses])
    torch.testing.assert_close(g["a.weight"].per_sample(), truth)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda m: unsum.gradients(m, unsum.Project(k=2.5)), OptionError),
        (lambda m: unsum.gradients(m, grad="no"), OptionError),
        (lambda m: unsum.gradients(m, *[unsum.Norms()] * 2), OptionError),
        (lambda m: unsum.gradients(m, samples=torch.tensor([0, -2])), SamplesError),
        (lambda m: unsum.packed(torch.tensor([0.0, 2.0])), SamplesError),
    ],
)
def test_bad_options(make, kind):
    with pytest.raises(kind):
        make(nn.Linear(2, 1))


def test_bad_reads():
    model = nn.Linear(3, 2)
    with unsum.gradients(model) as g:
        model(torch.randn(4, 3)).sum().backward()
    with pytest.raises(OptionError, match="weighted_sum"):
        g["weight"].weighted_sum([1.0, 2.0, 3.0, 4.0])
    with pytest.raises(OptionError, match="dot"):
        g["weight"].dot([torch.zeros(2, 3)])
    with pytest.raises(SamplesError, match="shape"):
        g["weight"].dot(torch.zeros(3, 2))
    with pytest.raises(OptionError, match="project"):
        g["weight"].project(0, 0)
    with pytest.raises(OptionError, match="gave 0.5"):
        with unsum.gradients(model, unsum.WeightedSum(lambda norms: 0.5)):
            model(torch.randn(4, 3)).sum().backward()
    with unsum.gradients(model, unsum.WeightedSum(torch.ones(6))) as g:
        model(torch.randn(4, 3)).sum().backward()
    with pytest.raises(SamplesError, match="6 weights for 4 samples"):
        g[unsum.WeightedSum].sum()


def test_the_signature_of_a_graph_tells_its_parts():
    """Nodes of the same kinds, in the same order: what differs is an edge, a number, a shape, a dtype, a name."""
    a, b = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)

    def signed(make, first=a, second=b, names=("a", "b")):
        result = make(first * 2, second * 3)
        return survey([result.grad_fn], dict(zip((id(first), id(second)), names, strict=True))).signature

    def summed(h, k):
        return (h + k) + ((h - k) + h)

    ordinary = signed(summed)
    assert signed(summed) == ordinary
    double, wide = (
        [t.detach().to(dtype).expand(shape).clone().requires_grad_() for t in (a, b)]
        for dtype, shape in ((torch.float64, (2, 2)), (torch.float32, (5, 2, 2)))
    )
    others = [
        signed(lambda h, k: (h + k) + ((h - k) + k)),
        signed(lambda h, k: (h + k) + torch.add(h - k, h, alpha=2)),
        signed(lambda h, k: (h + k) + ((h - k) - h)),
        signed(summed, names=("a", "c")),
        signed(summed, *double),
        signed(summed, *wide),
    ]
    assert len({ordinary, *others}) == 1 + len(others)


# ---- zeros say nothing ----------------------------------------------------------------------------------------------


class FromZero(nn.Module):
    """A layer whose input is zero at first, with as many outputs as there are samples."""

    def __init__(self, how):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 10)
        self.gate = nn.Parameter(torch.zeros(())) if how == "a gate" else None
        if how == "a layer":
            nn.init.zeros_(self.first.weight)
            nn.init.zeros_(self.first.bias)

    def forward(self, x):
        h = self.first(x).tanh()
        return self.last(h if self.gate is None else h * self.gate)


@pytest.mark.parametrize("how", ["a layer", "a gate", "the input"])
def test_what_was_zero_when_it_was_learnt_is_right_when_it_wakes(how):
    torch.manual_seed(0)
    model = FromZero(how).double()
    loss = lambda model, x: model(x).logsumexp(1).sum()
    for step in range(5):
        x = torch.randn(10, 6, dtype=torch.float64) * (how != "the input" or step > 1)
        truth = per_sample_gradients(model, loss, x)
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms()) as g:
            loss(model, x).backward()
        for name, each in g[unsum.Norms].by_parameter().items():
            torch.testing.assert_close(each, truth[name].reshape(len(x), -1).square().sum(1))
        with unsum.gradients(model, grad=False) as g:
            loss(model, x).backward()
        for name in g:
            torch.testing.assert_close(g[name].per_sample(), truth[name])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad


class Hides(nn.Module):
    """Samples that change places behind zeros."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.gate = nn.Linear(6, 6), nn.Linear(6, 4), 0.0

    def forward(self, x):
        h = self.first(x)
        return self.last(h.sin() + self.gate * h.tanh().flip(0))


def test_samples_that_change_places_behind_zeros_are_seen_when_these_are_gone():
    model = Hides().double()
    x = torch.randn(5, 6, dtype=torch.float64)
    for _ in range(4):
        with unsum.gradients(model, unsum.Norms()):
            model(x).square().sum().backward()
    model.gate = 0.5
    with pytest.raises((SamplesError, InteractionError)):
        with unsum.gradients(model, unsum.Norms()):
            model(x).square().sum().backward()


def test_a_call_without_gradients_in_between_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    for k in range(5):
        x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        with unsum.gradients(model, unsum.Norms()) as g:
            out = model(x)
            with torch.no_grad():
                model(x)
            out.square().sum().backward()
        truth = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
        for name, each in g[unsum.Norms].by_parameter().items():
            torch.testing.assert_close(each, truth[name].reshape(len(x), -1).square().sum(1))


def test_autocast_does_not_round_what_is_computed_in_the_backward():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(4, 6)
    clip = lambda norms: (1 / norms).clamp_max(1)
    for memory in (None, 0, 1e9):
        with unsum.gradients(model, unsum.WeightedSum(clip, memory=memory)) as g, torch.autocast("cpu", torch.bfloat16):
            model(x).square().sum().backward()
        assert {value.dtype for value in g[unsum.WeightedSum].sum().values()} == {torch.float32}


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [("LSTM", torch.bfloat16), ("GRU", torch.bfloat16), ("linear", torch.bfloat16), ("linear", torch.float16)],
)
def test_a_backward_inside_autocast(layer, dtype):
    torch.manual_seed(0)
    model = {"LSTM": nn.LSTM(4, 5, batch_first=True), "GRU": nn.GRU(4, 5), "linear": nn.Linear(4, 7)}[layer]
    output = lambda m, x: m(x) if isinstance(m, nn.Linear) else m(x)[0]
    for _ in range(5):
        x = 20 * torch.randn(3, 6, 4) if isinstance(model, nn.Linear) else torch.randn(3, 6, 4)
        samples = unsum.dim(0 if not isinstance(model, nn.GRU) else 1)
        truth = alone(model, lambda m, x=x: output(m, x.double()).square().sum((0, 1, 2), keepdim=True).flatten())
        moments, clipped = unsum.SecondMoment(), unsum.WeightedSum(lambda norms: (1 / norms).clamp_max(1))
        for block in (
            unsum.gradients(model, moments, clipped, samples=samples),
            unsum.clip_per_sample(model, max_norm=1.0, samples=samples),
        ):
            model.zero_grad()
            with block, torch.autocast("cpu", dtype):
                output(model, x).float().square().sum().backward()
        with unsum.gradients(model, samples=samples) as g, torch.autocast("cpu", dtype):
            output(model, x).float().square().sum().backward()
        torch.testing.assert_close(g.norms(), clipped.norms().double(), rtol=2e-2, atol=0)
        for name, wanted in truth.items():
            assert (g[name].sum() - wanted[0]).norm() < 0.03 * wanted[0].norm()
            squares = g[name].per_sample().square().sum(0)
            assert squares.isfinite().all()
            torch.testing.assert_close(
                moments.sum_squares()[name], squares, rtol=2e-2, atol=1e-2 * float(squares.max())
            )


def test_norms_of_no_samples():
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)).double()
    for n in (3, 0, 3, 0):
        with unsum.gradients(model, unsum.Norms()) as g:
            model(torch.randn(n, 4, dtype=torch.float64)).sum().backward()
        assert g[unsum.Norms].norms().shape == (n,)
        assert {each.shape for each in g[unsum.Norms].by_parameter().values()} == {(n,)}
