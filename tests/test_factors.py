"""Rules, factors, reducers: every read against its dense twin, and plans that are never stale."""

import copy
import gc
import sys
from dataclasses import replace

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from modules import Using
from nets import IDS, IMAGES, NETS, SEQUENCES, Adapted, D, Experts, N, T, mlp, scalar
from unsum.errors import InteractionError, SamplesError, UnsupportedError
from unsum.graph import codes
from unsum.kernels import product
from unsum.rules.registry import RULES as RULES_OF
from unsum.testing import laws


def made(make, x):
    def again():
        torch.manual_seed(0)
        return make().double(), x

    return again


def conv(kind, *args, **kwargs):
    return lambda: kind(*args, bias=False, **kwargs)


VOLUMES = torch.randn(N, 2, 5, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
RULES = {
    "linear, two dimensions": ("linear.mm", lambda: nn.Linear(D, 3, bias=False), SEQUENCES[:, 0]),
    "linear, bias": ("linear.addmm", lambda: nn.Linear(D, 3), SEQUENCES),
    "Conv1D as in GPT-2": ("linear.addmm", lambda: Using((D, 3), lambda x, p: torch.addmm(p[:1].sum(0), x.flatten(0, 1), p).view(N, T, 3)), SEQUENCES),
    "transposed twice": ("linear.mm", lambda: Using((D, 3), lambda x, p: x @ p.T.contiguous().T), SEQUENCES),
    "slices of a weight": ("linear.mm", lambda: Using((9, D), lambda x, p: torch.cat([x @ p[:4].T, x @ p[4:].T.sin().asin()], -1)), SEQUENCES),
    "chunks of a weight": ("linear.mm", lambda: Using((9, D), lambda x, p: (x @ p.chunk(3)[1].T) * (x @ p.split([2, 3, 4])[2].T)[..., :3]), SEQUENCES),
    "a weight used twice": ("linear.mm", lambda: Using((D, D), lambda x, p: torch.tanh(x @ p) @ p), SEQUENCES),
    "weight on the left": ("from_the_left", lambda: Using((3, D), lambda x, p: (p @ x.flatten(0, 1).T).T.view(N, T, 3)), SEQUENCES),
    "time first": ("linear.mm", lambda: Using((D, 3), lambda x, p: (x.transpose(0, 1) @ p).transpose(0, 1)), SEQUENCES),
    "embedding": ("lookup.embedding", lambda: nn.Embedding(20, D, padding_idx=3), IDS),
    "bags of rows": ("lookup.embedding_bag", lambda: nn.EmbeddingBag(20, D, mode="sum"), IDS),
    "bags, mean": ("lookup.embedding_bag", lambda: nn.EmbeddingBag(20, D, padding_idx=3), IDS),
    "bags, weighted": ("lookup.embedding_bag", lambda: Using((20, D), lambda x, p: F.embedding_bag(x, p, mode="sum", per_sample_weights=x.double().cos())), IDS),
    "bags of other sizes": ("lookup.embedding_bag", lambda: Using((20, D), lambda x, p: F.embedding_bag(x.flatten(), p, torch.tensor([0, 1, T + 2, 2 * T])[:N])), IDS),
    "instance norm": ("elementwise.repeat", lambda: nn.InstanceNorm2d(3, affine=True), IMAGES),
    "class token, repeated": ("elementwise.repeat", lambda: Using((1, 2, D), lambda x, p: torch.cat([p.repeat(N, 1, 1), x], 1)), SEQUENCES),
    "rows, repeated": ("elementwise.repeat", lambda: Using((T, D), lambda x, p: x * p.repeat(N, 1).view(N, T, D)), SEQUENCES),
    "layer norm": ("norm.layer_norm_scale", lambda: nn.LayerNorm((T, D)), SEQUENCES),
    "RMS norm": ("", lambda: nn.RMSNorm(D), SEQUENCES),
    "group norm": ("norm.group_norm_scale", lambda: nn.GroupNorm(1, 3), IMAGES),
    "batch norm in eval mode": ("norm.batch_norm_scale", lambda: nn.BatchNorm2d(3).eval(), IMAGES),
    "gain": ("elementwise", lambda: Using((D,), lambda x, p: x * p), SEQUENCES),
    "gain before": ("elementwise", lambda: Using((1, 1, D), lambda x, p: p * x), SEQUENCES),
    "channel gain": ("elementwise", lambda: Using((3, 1, 1), lambda x, p: p * x), IMAGES),
    "scalar gain": ("elementwise", lambda: Using((), lambda x, p: x * p), SEQUENCES),
    "shift": ("elementwise", lambda: Using((T, 1), lambda x, p: x - p), SEQUENCES),
    "positions": ("elementwise", lambda: Using((1, T, D), lambda x, p: torch.add(x, p, alpha=2)), SEQUENCES),
    "class token": ("elementwise", lambda: Using((1, 1, D), lambda x, p: torch.cat([p.expand(N, 1, D), x], 1)), SEQUENCES),
    "convolution": ("convolution", conv(nn.Conv2d, 3, 4, 3, padding=1), IMAGES),
    "convolution, stride and dilation": ("convolution", conv(nn.Conv2d, 3, 4, 3, stride=2, dilation=2, padding=(1, 2)), IMAGES),
    "convolution, groups": ("convolution", conv(nn.Conv2d, 3, 6, (3, 1), groups=3), IMAGES),
    "convolution, circular": ("convolution", conv(nn.Conv2d, 3, 4, 3, padding=2, padding_mode="circular"), IMAGES),
    "convolution, same": ("convolution", conv(nn.Conv2d, 3, 4, 4, padding="same", padding_mode="reflect"), IMAGES),
    "convolution 1×1": ("convolution", conv(nn.Conv2d, 3, 4, 1, stride=2), IMAGES),
    "convolution in one dimension": ("convolution", conv(nn.Conv1d, T, 4, 3), SEQUENCES),
    "convolution in three": ("convolution", conv(nn.Conv3d, 2, 3, 2, stride=2, padding=1), VOLUMES),
    "transposed convolution": ("convolution", conv(nn.ConvTranspose2d, 3, 4, 3, stride=2, padding=1, output_padding=1), IMAGES),
    "transposed, groups": ("convolution", conv(nn.ConvTranspose2d, 3, 6, 3, groups=3, dilation=2), IMAGES),
}  # fmt: skip


def deep(layer, between=nn.Tanh, depth=3):
    return lambda: nn.Sequential(*(part for _ in range(depth) for part in (layer(), between())))


STACKS = {
    "linear": (deep(lambda: nn.Linear(D, D)), SEQUENCES),
    "linear, two dimensions": (deep(lambda: nn.Linear(D, D, bias=False)), SEQUENCES[:, 0]),
    "layer norm": (deep(lambda: nn.LayerNorm(D)), SEQUENCES),
    "layer norm over two dimensions": (deep(lambda: nn.LayerNorm((T, D))), SEQUENCES),
    "RMS norm": (deep(lambda: nn.RMSNorm(D)), SEQUENCES),
    "group norm": (deep(lambda: nn.GroupNorm(1, 3)), IMAGES),
    "gains": (deep(lambda: Using((D,), lambda x, p: x * p)), SEQUENCES),
    "shifts": (deep(lambda: Using((D,), lambda x, p: p - x)), SEQUENCES),
    "gains before": (deep(lambda: Using((1, T, 1), lambda x, p: p * x)), SEQUENCES),
}


@pytest.mark.parametrize("name", STACKS)
def test_layers_of_one_shape_are_taken_together(name):
    make, x = STACKS[name]
    laws(made(make, x))
    model, x = made(make, x)()
    truth = per_sample_gradients(model, lambda m, b: m(b).square().flatten(1).sum(1), x)
    for _ in range(2):
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms()) as g:
            model(x).square().sum().backward()
        for key, squares in g[unsum.Norms].by_parameter().items():
            torch.testing.assert_close(squares, truth[key].flatten(1).square().sum(1))
            torch.testing.assert_close(model.get_parameter(key).grad, truth[key].sum(0))
    assert max(len(names) for names, _ in g[unsum.Norms].groups()) > 1


def test_a_rule_that_says_wrongly_that_layers_can_be_taken_together_is_found(monkeypatch):
    true = RULES_OF["NativeLayerNormBackward0", 1]
    monkeypatch.setitem(
        RULES_OF,
        ("NativeLayerNormBackward0", 1),
        replace(
            true,
            make=lambda call: true.make(
                replace(call, delta=call.delta.roll(len(call.delta) // 3, 0)) if call.by.n > N else call
            ),
        ),
    )
    model, x = made(deep(lambda: nn.LayerNorm(D)), SEQUENCES)()
    with pytest.raises(UnsupportedError, match=r"norm.layer_norm_scale does not give the same for layers together"):
        for _ in range(2):
            with unsum.gradients(model, unsum.Norms()):
                model(x).square().sum().backward()


@pytest.mark.parametrize("name", RULES)
def test_every_read_and_reducer_of_a_rule(name):
    rule, make, x = RULES[name]
    laws(made(make, x), None if name.startswith(("slices", "Conv1D")) else rule)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["rows last", "channels last"])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": (1, 2)}, {"dilation": 2, "padding": 3}, {"kernel_size": 1, "stride": 2}],
    ids=str,
)
def test_windows_with_channels_last(options, memory, monkeypatch):
    """As on a GPU."""
    layer = nn.Conv2d(3, 5, bias=False, **({"kernel_size": (3, 2)} | options)).double()
    x = IMAGES.contiguous(memory_format=memory)
    truth = per_sample_gradients(layer, scalar, x)["weight"]
    with unsum.gradients(layer) as g:
        scalar(layer, x).backward()
    (kind,) = g["weight"]._shares[0].kinds
    monkeypatch.setattr("unsum.kernels.costs.cheaper", lambda *shape, **options: "gram")
    torch.testing.assert_close(kind._on_a_gpu(want_sum=True)[0], truth.flatten(1).square().sum(1))
    monkeypatch.setattr("unsum.kernels.costs.cheaper", lambda *shape, **options: "product")
    squares, total = kind._on_a_gpu(want_sum=True)
    torch.testing.assert_close(squares, truth.flatten(1).square().sum(1))
    torch.testing.assert_close(total, truth.sum(0))


def test_running_statistics_may_change_before_factors_are_read():
    layer = nn.BatchNorm2d(3).double().eval()
    layer.running_mean.normal_()
    truth = per_sample_gradients(layer, scalar, IMAGES)
    for _ in range(2):  # what is learnt in the first is known in the second
        with unsum.gradients(layer) as g:
            scalar(layer, IMAGES).backward()
    layer.train()(IMAGES + 1)
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)


@pytest.mark.parametrize("name", NETS)
def test_every_read_and_reducer_of_whole_networks(name):
    if name == "complex":
        pytest.skip("reads of complex parameters are formed")
    make, x = NETS[name]
    laws(made(make, x))


@pytest.mark.parametrize(
    "samples",
    [unsum.packed(torch.tensor([0, 5, 6, 17, 24])), torch.tensor([7, 3, 7, -1]), torch.arange(N * T).view(N, T) // 5 - 1],
    ids=["packed", "groups", "documents"],
)  # fmt: skip
def test_every_read_of_unequal_samples(samples):
    x = SEQUENCES.reshape(1, -1, D) if isinstance(samples, unsum.samples.Ids) else SEQUENCES
    laws(made(lambda: nn.Sequential(nn.Linear(D, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)), x), samples=samples)
    model = mlp()
    with unsum.gradients(model, samples=samples) as g:
        model(x).square().sum().backward()
    f = g["0.weight"]
    assert f.a.shape[:2] == f.delta.shape[:2] == (len(g.ids), int(f.lengths.max()))


def test_the_seeds_example():
    layer = nn.Linear(3, 2, bias=False).double()
    with unsum.gradients(layer) as g:
        out = layer(torch.tensor([[3.0, 4.0, 5.0]]).double())
        out.backward(torch.tensor([[1.0, 2.0]]).double())
    f = g["weight"]
    assert f.delta.tolist() == [[1, 2]] and f.a.tolist() == [[3, 4, 5]]
    assert f.per_sample()[0].flatten().tolist() == torch.kron(f.delta[0], f.a[0]).tolist() == [3, 4, 5, 6, 8, 10]
    torch.testing.assert_close(f.sum(), layer.weight.grad)
    wide = nn.Linear(4096, 4096, bias=False)
    with unsum.gradients(wide) as g:
        wide(torch.randn(2, 4096)).sum().backward()
    assert "8,192 of 16,777,216" in g.coverage()


def test_weight_gradients_come_from_the_same_product():
    """With Norms, torch is spared the products of weights; `.grad` and all who listen get them all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 3))
    plain, x, heard = copy.deepcopy(model), SEQUENCES.float(), []
    model[2].weight.register_hook(lambda g: heard.append("tensor"))
    model[4].weight.register_post_accumulate_grad_hook(lambda p: heard.append("accumulated"))
    for _ in range(3):
        heard.clear()
        with unsum.gradients(model, unsum.Norms()) as g:
            scalar(model, x).backward()
        scalar(plain, x).backward()  # added to what is there
        assert sorted(heard) == ["accumulated", "tensor"]
        for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, wanted.grad, rtol=1e-4, atol=1e-6)
    before = [p.grad.clone() for p in model.parameters()]
    with unsum.gradients(model, unsum.Norms(), grad=False) as h:
        scalar(model, x).backward()
    assert all(torch.equal(p.grad, kept) for p, kept in zip(model.parameters(), before, strict=True))
    torch.testing.assert_close(h[unsum.Norms].norms(), g[unsum.Norms].norms())


def test_with_reducers_nothing_is_kept_unless_asked():
    model = mlp()
    with unsum.gradients(model, unsum.Norms()) as g:
        scalar(model, SEQUENCES).backward()
    with pytest.raises(SamplesError, match="keep=True"):
        g["0.weight"]
    with pytest.raises(SamplesError, match="keep=True"):
        g.norms()
    with pytest.raises(KeyError, match="Norms"):
        g[unsum.Project]
    with unsum.gradients(model, unsum.Norms(), keep=True) as g:
        scalar(model, SEQUENCES).backward()
    torch.testing.assert_close(g[unsum.Norms].norms(), g.norms())
    with pytest.raises(unsum.errors.OptionError, match="no reducer"):
        unsum.gradients(model, unsum.Norms)
    norms = unsum.Norms()
    with unsum.gradients(model, norms):
        loss = scalar(model, SEQUENCES)
        loss.backward(retain_graph=True)
        with pytest.raises(SamplesError, match="second backward"):
            loss.backward()


def test_reducers_over_micro_batches_and_a_reducer_of_ones_own():
    class Largest:
        """The largest entry of each sample's gradient."""

        def begin(self, n, again):
            self.found = torch.zeros(n, dtype=torch.float64)

        def take(self, name, factors):
            self.found = torch.maximum(self.found, factors.per_sample().flatten(1).abs().amax(1))

        def end(self, left):
            self.left = left

    model = mlp()
    truth = per_sample_gradients(model, scalar, SEQUENCES)
    largest, norms, project = Largest(), unsum.Norms(), unsum.Project(2)
    with unsum.gradients(model, norms, project, largest) as g:
        for part in SEQUENCES.split(2):
            scalar(model, part).backward()
    flat = torch.cat([t.flatten(1) for t in truth.values()], 1)
    torch.testing.assert_close(g[norms].norms(), flat.norm(dim=1))
    torch.testing.assert_close(g[largest].found, flat[2:].abs().amax(1))
    assert g[project].matrix().shape == (N, 4 * 3 + 3) and largest.left == []


def test_projections_keep_inner_products_on_average():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 30), nn.Tanh(), nn.Linear(30, 3)).double()
    sums = []
    for seed in range(300):
        with unsum.gradients(model, unsum.Project(k=3, seed=seed), keep=True) as g:
            scalar(model, SEQUENCES).backward()
        p = g[unsum.Project].matrix()
        sums.append(p @ p.T)
    mean, wanted = torch.stack(sums).mean(0), g.dot(g)
    assert (mean - wanted).norm() < 0.15 * wanted.norm()


def test_kronecker_and_token_norms_leave_padding_and_odd_positions_out():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.fc, self.places = nn.Embedding(20, D), nn.Linear(D, 4), nn.Parameter(torch.randn(1, T, D))

        def forward(self, ids):
            return self.fc(self.table(ids) + self.places)

    model = Padded().double()
    mask = torch.arange(T) < torch.tensor([3, 6, 1, 4])[:, None]
    kron, tokens = unsum.Kronecker(), unsum.TokenNorms()
    with (
        unsum.gradients(model, kron, tokens, keep=True),
        unsum.capture(model, "fc:input", "fc:grad_output") as got,
    ):
        (model(IDS).square().sum(-1) * mask).sum().backward()
    a, delta = got["fc:input"][mask], got["fc:grad_output"][mask]
    torch.testing.assert_close(kron.factors()["fc.weight"], (a.T @ a, delta.T @ delta))
    assert set(kron.left_out) == {"table.weight", "places", "fc.bias"}
    assert tokens.left_out == ["places"] and tokens.norms().shape == (N, T)
    assert ((tokens.norms() > 0) == mask).all()


# ---- plans --------------------------------------------------------------------------------------------------------


def learnings(monkeypatch):
    """Counts how often a graph is learnt."""
    block = sys.modules["unsum.step.planner"]
    counted, real = [], block.learn
    monkeypatch.setattr(block, "learn", lambda *args, **options: counted.append(1) or real(*args, **options))
    return counted


def test_a_layout_is_learnt_once(monkeypatch):
    counted, model = learnings(monkeypatch), mlp()
    for step in range(4):
        x = torch.randn(N + step % 2, T, D, dtype=torch.float64)
        truth = per_sample_gradients(model, scalar, x)
        with unsum.gradients(model) as g:
            scalar(model, x).backward()
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)
    assert len(counted) == 1  # whatever the size of the batch
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True)
    for p in model.parameters():
        p.requires_grad_()
    truth = per_sample_gradients(model, scalar, SEQUENCES)
    with unsum.gradients(model) as g:
        scalar(model, SEQUENCES).backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)
    model[0].weight.requires_grad_(False)
    with unsum.gradients(model) as g:
        scalar(model, SEQUENCES).backward()
    torch.testing.assert_close(g["0.bias"].per_sample(), truth["0.bias"])


class Shuffled(nn.Module):
    """Samples change places inside: by a permutation, by sorting, by a roll whose shift changes."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how, self.step = nn.Linear(D, D), nn.Linear(D, 3), how, 0

    def forward(self, x):
        self.step += 1
        h = torch.tanh(self.a(x))
        if self.how == "roll":
            return self.b(h.roll(self.step, 0)).roll(-self.step, 0)
        order = torch.randperm(len(x)) if self.how == "permuted" else x[:, 0, 0].argsort()
        if self.how == "one-hot":
            dispatch = F.one_hot(torch.randperm(len(x)), len(x)).to(h)
            return torch.einsum("nm,mtd->ntd", dispatch.T, self.b(torch.einsum("nm,mtd->ntd", dispatch, h)))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        if self.how == "gathered":
            index = order[:, None, None].expand_as(h)
            return self.b(h.gather(0, index))[back]
        return self.b(h[order])[back]


@pytest.mark.parametrize("how", ["roll", "permuted", "sorted", "gathered", "one-hot", "experts", "adapter"])
def test_a_plan_is_never_stale(how):
    torch.manual_seed(0)
    model = {"experts": Experts, "adapter": lambda: nn.Sequential(Adapted(), Adapted())}.get(
        how, lambda: Shuffled(how)
    )().double()
    for step in range(4):
        x = torch.randn(N, T, D, dtype=torch.float64)
        if isinstance(model, Shuffled):
            model.step = 0
        truth = per_sample_gradients(model, scalar, x)
        if isinstance(model, Shuffled):
            model.step = step
        with unsum.gradients(model) as g:
            scalar(model, x).backward()
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted, msg=f"{name}, step {step}")
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)


class Routed(nn.Module):
    """Tokens are sorted by what some number says of them, gated, and sent back, twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.gate = nn.ModuleList(nn.Linear(D, 1) for _ in range(2))
        self.keys = [0, 0]  # by which feature
        self.lost = False  # on the way back

    def forward(self, x):
        h = x.flatten(0, 1)
        for inner, gate, key in zip(self.inner, self.gate, self.keys, strict=True):
            order = x.flatten(0, 1)[:, key].argsort()
            weight = gate(h).flatten()[order].sigmoid()
            back = order if self.lost else order.argsort()
            h = h + (torch.tanh(inner(h[order])) * weight[:, None])[back]
        return h.view_as(x)


def test_rows_that_go_elsewhere_in_every_batch_need_no_new_plan(monkeypatch):
    model, learnt = Routed().double(), []
    block = sys.modules["unsum.step.planner"]
    learn = block.learn
    monkeypatch.setattr(block, "learn", lambda *args, **options: learnt.append(1) or learn(*args, **options))
    for step in range(5):
        x = torch.randn(N, T, D, dtype=torch.float64)
        model.keys = [0, min(step, 2)]  # the two ways were the same when the plan was made
        truth = per_sample_gradients(model, scalar, x)
        for reducers in ((), (unsum.Norms(),)):
            with unsum.gradients(model, *reducers) as g:
                scalar(model, x).backward()
            for name, wanted in truth.items():
                if reducers:
                    squares = g[unsum.Norms].by_parameter()[name]
                    torch.testing.assert_close(squares, wanted.flatten(1).square().sum(1), msg=f"{name}, step {step}")
                else:
                    torch.testing.assert_close(g[name].per_sample(), wanted, msg=f"{name}, step {step}")
    assert len(learnt) == 1
    model.lost = True
    with pytest.raises(InteractionError):
        with unsum.gradients(model):
            scalar(model, torch.randn(N, T, D, dtype=torch.float64)).backward()
    assert len(learnt) == 2


def test_one_sample_at_a_time_is_learnt_once(monkeypatch):
    model, learnt = mlp(), []
    block = sys.modules["unsum.step.planner"]
    learn = block.learn
    monkeypatch.setattr(block, "learn", lambda *args, **options: learnt.append(1) or learn(*args, **options))
    for k in range(N):
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms()) as g:
            scalar(model, SEQUENCES[k : k + 1]).backward()
        wanted = sum(p.grad.square().sum() for p in model.parameters())
        torch.testing.assert_close(g[unsum.Norms].sq_norms(), wanted[None])
    assert len(learnt) == 1


def test_rows_in_bfloat16_whose_smallest_numbers_are_blurred():
    owner = torch.tensor([[3, 3, 3, 3, -2, 3, 3, 3], [1, -2, -2, -2, -2, 1, 1, 1], [0, 1, -2, 0, 0, 0, 0, 0]])
    assert codes._by_rows(owner).tolist() == [[3] * 8, owner[1].tolist(), owner[2].tolist()]


def test_another_loss_after_a_forward_that_is_known():
    model = mlp()
    truth = per_sample_gradients(model, lambda m, x: m(x).abs().sum(), SEQUENCES)
    for _ in range(3):
        with unsum.gradients(model):
            scalar(model, SEQUENCES).backward()
    for _ in range(3):
        with unsum.gradients(model) as g:
            model(SEQUENCES).abs().sum().backward()
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)


def test_an_interaction_is_found_after_plans_were_made():
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(T), nn.Linear(D, 3)).double().eval()
    for _ in range(2):
        with unsum.gradients(model):
            scalar(model, SEQUENCES).backward()
    model.train()
    with pytest.raises(InteractionError):
        with unsum.gradients(model):
            scalar(model, SEQUENCES).backward()


def test_a_rule_that_is_wrong_is_found_out(monkeypatch):
    from unsum.rules import registry

    right = registry.RULES["AddmmBackward0", 2]
    wrong = registry.Rule("linear.addmm", right.features, lambda call: right.make(call).times(2.0))
    monkeypatch.setitem(registry.RULES, ("AddmmBackward0", 2), wrong)
    model = mlp()
    truth = per_sample_gradients(model, scalar, SEQUENCES)
    with pytest.raises(UnsupportedError, match=r"linear\.addmm.*AddmmBackward0"):
        with unsum.gradients(model, strict=True):
            scalar(model, SEQUENCES).backward()
    with pytest.warns(UserWarning, match=r"linear\.addmm.*torch"), unsum.gradients(model) as g:
        scalar(model, SEQUENCES).backward()
    torch.testing.assert_close(g["0.weight"].per_sample(), truth["0.weight"])
    assert "replay" in g.coverage()


def test_a_nan_in_one_sample_leaves_the_others_right():
    model, x = mlp(), SEQUENCES.clone()
    truth = per_sample_gradients(model, scalar, x)
    for _ in range(2):
        x[2, 1, 3] = torch.nan
        with unsum.gradients(model) as g:
            scalar(model, x).backward()
        assert g.norms()[2].isnan() and g.norms()[[0, 1, 3]].isfinite().all()
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample()[[0, 1, 3]], wanted[[0, 1, 3]])


def test_memory_is_flat_over_many_steps_of_two_layouts():
    model = mlp()
    live = []
    for step in range(200):
        with unsum.gradients(model, unsum.Norms()):
            scalar(model, SEQUENCES[: 2 + step % 2]).backward()
        if step in (20, 199):
            gc.collect()
            live.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    assert live[1] <= live[0]


class Grouped(nn.Module):
    """Experts whose tokens are sorted, and one product for all of them."""

    def __init__(self, turned):
        super().__init__()
        self.gate, self.turned = nn.Linear(D, 3), turned
        self.w = nn.Parameter(torch.randn(3, D, D))

    def forward(self, x):
        flat = x.reshape(-1, D)
        score, chosen = self.gate(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=3).cumsum(0).to(torch.int32)
        w = self.w.transpose(1, 2) if self.turned else self.w
        out = F.grouped_mm(flat[order], w, offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return (out[back] * score[:, None]).view_as(x)


@pytest.mark.parametrize("turned", [False, True])
def test_experts_in_one_product(turned):
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    torch.manual_seed(0)
    model = Grouped(turned)
    for _ in range(3):
        x = torch.randn(N, T, D)
        with unsum.gradients(model) as g:
            losses = model(x).flatten(1).square().sum(1)
            losses.sum().backward(retain_graph=True)
        assert "batched.grouped_mm" in g.coverage() and "replay " not in g.coverage()
        for name, p in model.named_parameters():
            wanted = torch.stack([torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in losses])
            torch.testing.assert_close(g[name].per_sample(), wanted, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(g[name].sq_norms(), wanted.flatten(1).square().sum(1), rtol=1e-3, atol=1e-3)


BLOCKS = {
    "bmm": ("batched.bmm", lambda x, p: torch.bmm(x.reshape(-1, 2, 4).transpose(0, 1), p).transpose(0, 1).reshape(N, T, -1)),
    "einsum": ("batched.bmm", lambda x, p: torch.einsum("nthi,hio->ntho", x.unflatten(-1, (2, 4)), p).flatten(2)),
    "baddbmm": ("batched.baddbmm", lambda x, p: torch.baddbmm(torch.ones(2, 1, 3).double(), x.reshape(-1, 2, 4).transpose(0, 1), p, alpha=2.0).transpose(0, 1).reshape(N, T, -1)),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_block_diagonal_layers(name):
    rule, use = BLOCKS[name]
    laws(made(lambda: Using((2, 4, 3), use), SEQUENCES), rule)
    if name == "baddbmm":
        bias = lambda x, p: torch.baddbmm(p, x.reshape(-1, 2, 4).transpose(0, 1), torch.ones(2, 4, 3).double())
        laws(
            made(lambda: Using((2, 1, 3), lambda x, p: bias(x, p).transpose(0, 1).reshape(N, T, -1)), SEQUENCES),
            "baddbmm_bias",
        )


# ---- what many models have shown ----------------------------------------------------------------------------------


ODD = {
    "underflow": lambda x, p: torch.exp((x - 760.0) * 1.0) @ p + x @ p,
    "dead rows of a masked softmax": lambda x, p: (
        (x @ p @ x.mT).masked_fill(DEAD, -torch.inf).softmax(-1).masked_fill(DEAD, 0.0) @ x
    ),
    "a maximum over the batch, for stability": lambda x, p: ((s := x @ p @ x.mT) - s.max()).softmax(-1) @ x,
    "gradients that vanish": lambda x, p: torch.tanh(torch.tanh(x @ p) * 1e-100) @ p * 1e-150,
}
DEAD = torch.zeros(N, T, T, dtype=torch.bool)
DEAD[1, 2:] = True


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore")
def test_odd_numbers_are_no_interaction(name):
    torch.manual_seed(0)
    model = Using((D, D), ODD[name]).double()
    for engine in ("graph", "auto", "auto"):
        with unsum.gradients(model, engine=engine) as g:
            losses = model(SEQUENCES).flatten(1).square().sum(1)
            losses.sum().backward(retain_graph=True)
        wanted = torch.stack([torch.autograd.grad(loss, model.p, retain_graph=True)[0] for loss in losses])
        assert (g["p"].per_sample() - wanted).norm() <= 1e-9 * wanted.norm()


def test_rows_of_all_samples_after_each_other():
    class Patches(nn.Module):
        def __init__(self, mixes):
            super().__init__()
            self.words, self.patch, self.mixes = nn.Embedding(20, D), nn.Linear(D, D), mixes

        def forward(self, pixels, ids, mask):
            q = self.patch(pixels)
            if self.mixes:
                q = (q @ q.T).softmax(-1) @ q
            return self.words(ids) * mask[..., None] + q.view(N, -1, D).mean(1, keepdim=True)

    pixels, mask = SEQUENCES.reshape(-1, D), torch.ones_like(IDS)
    model = Patches(False).double()
    with unsum.gradients(model) as g:
        losses = model(pixels, IDS, mask).flatten(1).square().sum(1)
        losses.sum().backward(retain_graph=True)
    for name, p in model.named_parameters():
        wanted = torch.stack([torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in losses])
        torch.testing.assert_close(g[name].per_sample(), wanted)
    model = Patches(True).double()
    with pytest.raises(InteractionError):
        with unsum.gradients(model):
            model(pixels, IDS, mask).square().sum().backward()


def test_nested_tensors_are_refused_by_name():
    model = nn.Linear(D, D)
    holder = Using(
        (1,),
        lambda x, p: (
            torch.nested.to_padded_tensor(model(torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged)), 0.0)
            * p
        ),
    )
    holder.inner = model
    with pytest.raises(UnsupportedError, match="nested tensor"):
        with unsum.gradients(holder):
            holder(torch.randn(2, T, D)).square().sum().backward()


def test_costs_that_were_measured_are_used(tmp_path, monkeypatch):
    from unsum.kernels import costs

    monkeypatch.setenv("UNSUM_CACHE", str(tmp_path))
    costs.weights.cache_clear()
    shape = (128, 256, 768, "cpu")
    assert costs.cheaper(*shape, want_sum=True) == "product"
    costs.tuned().parent.mkdir(parents=True)
    costs.tuned().write_text('{"cpu": {"product": 9.0, "pass": 1.0, "gram": 0.1, "plain": 1.0}}')
    costs.weights.cache_clear()
    assert costs.cheaper(*shape, want_sum=True) == "gram"
    costs.weights.cache_clear()


@pytest.mark.parametrize("reducers", [(), (unsum.Norms,), (unsum.Norms, unsum.Project)], ids=len)
def test_nothing_waits_for_the_garbage_collector(reducers):
    """A circle of references would hold the graph of a step, and its memory, into the next."""
    model, x = made(deep(lambda: nn.Linear(D, D)), SEQUENCES)()

    def step():
        with unsum.gradients(model, *(kind() for kind in reducers)) as g:
            model(x).square().sum().backward()
        g.sq_norms() if not reducers else g[unsum.Norms].sq_norms()

    for _ in range(4):
        step()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        step()
        gc.collect()
        left = [type(thing).__name__ for thing in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("n", "o", "i"), [(3, 40, 50), (5, 300, 900), (9, 700, 800), (3, 1100, 1000)])
def test_gradients_of_all_sizes_on_a_processor(n, o, i, threads):
    """All at once, some at once, one by one."""
    generator = torch.Generator().manual_seed(0)
    a, delta = (torch.randn(n, 3, size, dtype=torch.float64, generator=generator) for size in (i, o))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        squares, total = product.norms_and_sum(a, delta, want_sum=True)
    finally:
        torch.set_num_threads(before)
    each = torch.einsum("nto,nti->noi", delta, a)
    torch.testing.assert_close(squares, each.square().sum((1, 2)))
    torch.testing.assert_close(total, each.sum(0))
