"""The report: its numbers against plain torch, its flags on networks with one planted fault each, its words."""

import html
import json
import math
import re

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from unsum.errors import OptionError, SamplesError
from unsum.report.flags import outliers


def squares(model, batch):
    x, y = batch
    return (model(x) - y).square().sum(1)


def data_of(path):
    """What the page carries as JSON."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.S)
    return json.loads(found[1])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(n=12):
    torch.manual_seed(1)
    return torch.randn(n, 6), torch.randn(n, 2)


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(F.gelu(self.mix(x + x.cumsum(1))))


def next_token(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").sum(1)


IDS = torch.randint(11, (5, 7), generator=torch.Generator().manual_seed(3))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_the_page_has_the_statistics_that_plain_torch_gives(tmp_path):
    model, given = net(), batch()
    made = unsum.report(model, squares, given, tmp_path / "r.html")
    first = model[0](given[0])
    hidden = torch.tanh(first)
    first.retain_grad(), hidden.retain_grad()
    (model[4](torch.tanh(model[2](hidden))) - given[1]).square().sum().backward()
    for name, value, grad in (("0", first, first.grad), ("1", hidden, hidden.grad)):
        row = next(layer for layer in data_of(tmp_path / "r.html")["layers"] if layer["name"] == name)
        for told, truth in ((row["activation"], value.detach()), (row["gradient"], grad)):
            assert told["shape"] == list(truth.shape) and told["nan"] == told["inf"] == 0
            expected = {"mean": truth.mean(), "std": truth.std(correction=0), "min": truth.min(), "max": truth.max()}
            expected |= {"norm": truth.norm(), "zeros": (truth == 0).double().mean()}
            for key, number in expected.items():
                assert told[key] == pytest.approx(float(number), rel=1e-4, abs=1e-7), (name, key)
            counted = torch.histc(truth, len(told["histogram"]), float(truth.min()), float(truth.max()))
            assert sum(told["histogram"]) == truth.numel()
            assert (torch.tensor(told["histogram"]) - counted).abs().sum() <= 4  # at the edges of bins they may differ
    assert made.layers[0].weight_norm == pytest.approx(
        math.hypot(*(float(p.detach().norm()) for p in model[0].parameters()))
    )
    assert made.layers[0].weight_gradient_norm == pytest.approx(
        math.hypot(*(float(p.grad.norm()) for p in model[0].parameters())), rel=1e-5
    )
    assert [layer.name for layer in made.layers] == ["0", "1", "2", "3", "4", ""]


def test_norms_and_similarity_are_those_of_each_sample_alone(tmp_path):
    model, given = net(), batch()
    made = unsum.report(model, squares, given, tmp_path / "r.html")
    truth = per_sample_gradients(model, lambda m, x, y: (m(x) - y).square().sum(), *given)
    flat = torch.cat([g.flatten(1) for g in truth.values()], 1)
    told = data_of(tmp_path / "r.html")
    torch.testing.assert_close(torch.tensor(told["samples"]["norms"]).double(), flat.norm(dim=1), rtol=1e-4, atol=0)
    cosines = F.normalize(flat) @ F.normalize(flat).T
    torch.testing.assert_close(torch.tensor(told["similarity"]["cosines"]).double(), cosines, rtol=0, atol=2e-4)
    torch.testing.assert_close(torch.tensor(told["losses"]), squares(model, given).detach(), rtol=1e-4, atol=0)
    assert len(told["samples"]["parts"]) == 12
    for k in range(12):
        index, norm = told["samples"]["parts"][str(k)][0]
        assert norm == pytest.approx(max(float(g[k].norm()) for g in truth.values()), rel=1e-4)
        assert norm == pytest.approx(float(truth[told["samples"]["parameters"][index]][k].norm()), rel=1e-4)
    assert made.check.ok and made.norms.shape == (12,)
    assert "by rule: 100.0%" in (tmp_path / "r.html").read_text()


def test_token_norms_are_those_of_each_position_alone(tmp_path):
    model = Sequences()
    unsum.report(model, next_token, IDS, tmp_path / "r.html", text=lambda k: f"w{k}")
    told = data_of(tmp_path / "r.html")["tokens"]
    assert told["text"][2] == [f"w{k}" for k in IDS[2].tolist()]
    x = model.embed(IDS[:, :-1])
    a = x + x.cumsum(1)
    h = model.mix(a)
    out = model.head(F.gelu(h))
    loss = F.cross_entropy(out.transpose(1, 2), IDS[:, 1:], reduction="sum")
    d_embed, d_mix, d_head = torch.autograd.grad(loss, [x, h, out])
    squared = d_embed.square().sum(-1)
    for delta, saw in ((d_mix, a), (d_head, F.gelu(h))):
        squared = squared + delta.square().sum(-1) * (saw.square().sum(-1) + 1)  # the weight's part, and the bias's
    torch.testing.assert_close(torch.tensor(told["norms"]), squared.sqrt().detach(), rtol=1e-3, atol=1e-5)


def test_more_samples_than_a_matrix_can_show_are_thinned_out_and_projected(tmp_path):
    torch.manual_seed(0)
    model, n = nn.Linear(6, 2), 400
    x, y = torch.randn(n, 6), torch.randn(n, 2)
    x[397] *= 50
    made = unsum.report(model, squares, (x, y), tmp_path / "r.html", check=False)
    assert made.outliers[0] == 397 and 397 in made.samples.similarity.rows
    assert len(made.samples.similarity.rows) == 256 and "estimated" in made.samples.similarity.how
    assert "256 of 400 samples" in (tmp_path / "r.html").read_text()
    grads = per_sample_gradients(model, lambda m, x, y: (m(x) - y).square().sum(), x, y)
    flat = torch.cat([g.flatten(1) for g in grads.values()], 1)[made.samples.similarity.rows]
    # Parameters this small are kept as they are, so that the estimate is exact.
    torch.testing.assert_close(
        made.samples.similarity.cosines, F.normalize(flat) @ F.normalize(flat).T, atol=1e-4, rtol=0
    )


# ---- flags -----------------------------------------------------------------------------------------------------------


def kinds(made):
    return {flag.kind for flag in made.flags}


def test_a_healthy_network_has_no_flags(tmp_path):
    made = unsum.report(net(), squares, batch(), tmp_path / "r.html")
    assert made.flags == [] and made.missing == {}
    assert "Nothing stands out" in (tmp_path / "r.html").read_text()


class Functional(nn.Module):
    """The activation is no module: what is dead shows at the next layer's input."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def test_dead_units_are_named_where_they_first_show(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 2))
    model[0].bias.data[:] = 0.2  # all are active, if not always …
    made = unsum.report(model, squares, batch(), tmp_path / "r.html")
    assert "dead" not in kinds(made) and 0.2 < made.layers[1].activation.zeros < 0.8
    model[0].bias.data[[2, 5]] = -100  # … but two
    made = unsum.report(model, squares, batch(), tmp_path / "r.html")
    (flag,) = [flag for flag in made.flags if flag.kind == "dead"]
    assert flag.where == "1:output" and "units 2, 5" in flag.text and "2 of 8" in flag.text
    assert [layer.name for layer in made.layers if "dead" in layer.flags] == ["1"]
    functional = Functional()
    functional.fc1.load_state_dict(model[0].state_dict())
    made = unsum.report(functional, squares, batch(), tmp_path / "r.html")
    assert [(flag.kind, flag.where) for flag in made.flags] == [("dead", "fc2:input")]


def test_dead_channels_of_a_convolution(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
    model[0].bias.data[:] = 2
    model[0].bias.data[1] = -100
    made = unsum.report(model, squares, (torch.randn(6, 1, 8, 8), torch.randn(6, 2)), tmp_path / "r.html")
    dead = [flag for flag in made.flags if flag.kind == "dead"]
    assert [flag.where for flag in dead] == ["1:output"] and "unit 1 is never active" in dead[0].text


def test_data_that_is_zero_is_no_dead_unit(tmp_path):
    x, y = batch()
    x[:, 3] = 0
    assert unsum.report(net(), squares, (x, y), tmp_path / "r.html").flags == []


def deep(gain):
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(8)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, gain)
    return nn.Sequential(nn.Linear(6, 16), *layers, nn.Linear(16, 2))


@pytest.mark.parametrize(("gain", "kind"), [(0.2, "vanishing"), (1.0, None), (6.0, "exploding")])
def test_gradients_that_vanish_or_explode(gain, kind, tmp_path):
    made = unsum.report(deep(gain), squares, batch(), tmp_path / "r.html")
    found = kinds(made) & {"vanishing", "exploding"}
    assert found == ({kind} if kind else set())
    if kind:
        flagged = [layer.name for layer in made.layers if kind in layer.flags]
        assert "0" in flagged and "9" not in flagged and "8" not in flagged


def test_a_gradient_of_nothing_but_zeros(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].bias.data[:] = -100
    made = unsum.report(model, squares, batch(), tmp_path / "r.html")
    assert ("silent", "0:grad_output") in {(flag.kind, flag.where) for flag in made.flags}


class Broken(nn.Module):
    def forward(self, x):
        return (x - x.detach()).sqrt() * 0 + x  # finite forward; the root's slope at zero is not


def test_where_nan_first_appears(tmp_path):
    def first(model, given=None):
        made = unsum.report(model, squares, given or batch(), tmp_path / "r.html")
        assert "first place" in (tmp_path / "r.html").read_text()
        return made, [flag for flag in made.flags if flag.kind == "nan"]

    model = net()
    model[2].weight.data[3, 3] = float("nan")
    made, (parameter, place) = first(model)
    assert parameter.where == "2.weight" and place.where == "2:output" and "12 NaN of 96 values" in place.text
    assert next(layer.name for layer in made.layers if "nan" in layer.flags and not layer.activation.is_finite) == "2"
    assert not made.layers[0].activation.nan
    torch.manual_seed(0)
    made, (place,) = first(nn.Sequential(nn.Linear(6, 8), Broken(), nn.Linear(8, 2)))
    assert place.where == "0:grad_output" and "first place backward" in place.text
    x, y = batch()
    x[4, 2] = float("inf")
    made, flags = first(net(), (x, y))
    assert [flag.where for flag in flags] == ["batch[0]", "0:output"]


def test_a_loss_that_is_not_finite_though_all_layers_are(tmp_path):
    def logs(model, given):
        return model(given[0]).square().sum(1) + torch.tensor([0.0] * 11 + [-1.0]).log().where(
            torch.arange(12) > 10, 0.0
        )

    made = unsum.report(net(), logs, batch(), tmp_path / "r.html")
    assert any(flag.where == "loss_fn" and "sample 11" in flag.text for flag in made.flags)
    assert data_of(tmp_path / "r.html")["losses"][11] == "NaN"


def test_samples_that_stand_out(tmp_path):
    x, y = batch()
    y[7] += 40
    made = unsum.report(net(), squares, (x, y), tmp_path / "r.html")
    assert made.outliers == [7] and [flag.where for flag in made.flags if flag.kind == "outlier"] == ["sample 7"]
    norms = made.norms
    spread = (norms - norms.median()).abs().median() * 1.4826
    assert made.samples.limit == pytest.approx(float(norms.median() + 5 * spread))


@pytest.mark.parametrize(
    ("norms", "far"),
    [
        ([1.0, 1.02, 0.98, 1.01, 1.2], []),  # no spread to speak of: a fifth more is nothing
        ([1.0, 1.02, 0.98, 1.01, 1.3], [4]),
        ([1.0, 1.0, 1.0, 9.0], []),  # too few to say what is usual
        ([1.0, 2.0, 3.0, 4.0, 5.0, 9.0], []),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 40.0, 30.0], [5, 6]),
        ([1.0, float("nan"), 1.0, 1.0, 1.0, 1.0], [1]),
    ],
    ids=str,
)
def test_which_norms_stand_out(norms, far):
    assert outliers(torch.tensor(norms))[0] == far


# ---- never lose everything for one part ------------------------------------------------------------------------------


def test_samples_that_interact_are_told_and_the_rest_is_there(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    before = model[1].running_mean.clone()
    made = unsum.report(model, squares, batch(), tmp_path / "r.html")
    assert "interacting" in kinds(made) and made.norms is not None and len(made.layers) == 4
    assert "samples interact" in (tmp_path / "r.html").read_text()
    assert torch.equal(model[1].running_mean, before)


def test_a_model_that_is_refused_still_has_its_layers(tmp_path):
    class Head(nn.Module):  # dimension 0 of what it returns is not the samples
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 2)

        def forward(self, x):
            return self.fc(x).sum(0)

    model, x = Head(), torch.randn(4, 6)
    made = unsum.report(model, lambda m, b: m(b).square(), x, tmp_path / "r.html")
    assert made.samples is None and "samples" in made.missing["gradients by sample"]
    assert [layer.name for layer in made.layers] == ["fc", ""]
    assert html.escape(made.missing["gradients by sample"].splitlines()[0]) in (tmp_path / "r.html").read_text()


def test_a_frozen_model_has_activations_only(tmp_path):
    model = net().requires_grad_(False)
    made = unsum.report(model, squares, batch(), tmp_path / "r.html")
    assert "requires a gradient" in made.missing["gradients"] and all(layer.gradient is None for layer in made.layers)


def test_a_backward_that_fails_leaves_what_came_before(tmp_path):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("no way back")

    class Wall(nn.Module):
        def forward(self, x):
            return Fails.apply(x)

    model = nn.Sequential(nn.Linear(6, 4), Wall(), nn.Linear(4, 2))
    made = unsum.report(model, squares, batch(), tmp_path / "r.html")
    assert "no way back" in made.missing["gradients"] and len(made.layers) == 4
    assert made.layers[2].gradient is not None and made.layers[0].gradient is None


# ---- everything is as it was -----------------------------------------------------------------------------------------


def test_the_model_is_afterwards_as_it_was(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    model[3].eval()
    squares(model, batch()).sum().backward()
    grads = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in grads]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    stepped = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: stepped.append(p))
    given = batch()
    torch.manual_seed(5)
    rng = torch.get_rng_state()
    made = unsum.report(model, squares, given, tmp_path / "r.html")
    assert not stepped, "an optimiser that steps in the backward must not be called"
    assert "waits for a parameter's gradient" in made.missing["check"]
    assert torch.equal(rng, torch.get_rng_state())
    assert all(p.grad is g and torch.equal(g, c) for p, g, c in zip(model.parameters(), grads, copies, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [m.training for m in model] == [True, True, True, False]
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks
    assert [set(vars(module)) for module in model.modules()] == attributes


def test_both_passes_see_the_same_random_numbers(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 2))
    given = batch()
    made = unsum.report(model, squares, given, tmp_path / "r.html", check=False)
    losses = squares(model, given)  # draws what the report drew and gave back
    grads = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    norms = torch.tensor([math.hypot(*(float(g.norm()) for g in row)) for row in grads])
    torch.testing.assert_close(made.losses, losses.detach())
    torch.testing.assert_close(made.norms.float(), norms, rtol=1e-4, atol=0)


def test_a_reentrant_checkpoint(tmp_path):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.reentrant = nn.Linear(6, 8), nn.Linear(8, 2), True

        def forward(self, x):
            return self.second(checkpoint(torch.tanh, self.first(x), use_reentrant=self.reentrant))

    torch.manual_seed(0)
    model = Checkpointed()
    made = unsum.report(model, squares, batch(), tmp_path / "r.html")
    model.reentrant = False
    truth = per_sample_gradients(model, lambda m, x, y: (m(x) - y).square().sum(), *batch())
    flat = torch.cat([g.flatten(1) for g in truth.values()], 1)
    torch.testing.assert_close(made.norms.double(), flat.norm(dim=1), rtol=1e-4, atol=0)
    assert all(p.grad is None for p in model.parameters()) and "gradients" not in made.missing


# ---- options, text, errors -------------------------------------------------------------------------------------------


def test_what_users_write_is_shown_as_text_and_never_run(tmp_path):
    evil = "</script><script>document.title='run'</script>"
    model = nn.Module()
    model.add_module("<b>bold", Sequences())
    model.forward = lambda ids: model._modules["<b>bold"](ids)
    path = tmp_path / "r.html"
    unsum.report(model, next_token, IDS, path, text=[[evil] * 7] * 5, title="<i>title & more")
    page = path.read_text()
    assert evil not in page and "<b>bold" not in page and "<i>title" not in page
    assert page.count("</script>") == 2  # the data, and the page's own
    assert data_of(path)["tokens"]["text"][0][0] == evil
    assert "&lt;b&gt;bold.<wbr>embed" in page and "&lt;i&gt;title &amp; more" in page


def test_the_page_stands_alone(tmp_path):
    unsum.report(net(), squares, batch(), tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    addresses = set(re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"'<)]*""", page)) - {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink",
    }  # fmt: skip
    assert not addresses
    assert not re.search(r"<link(?! rel=\"icon\" href=\"data:,\")|@import|src=", page)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ([["a"]] * 3, "3 samples"),
        ("abc", "a list of tokens for each sample"),
        (7, "a list of tokens for each sample"),
    ],
    ids=str,
)
def test_a_text_that_does_not_fit(text, said, tmp_path):
    with pytest.raises(OptionError, match=said):
        unsum.report(Sequences(), next_token, IDS, tmp_path / "r.html", text=text)


def test_a_tokenizer_is_asked_for_each_id(tmp_path):
    class Tokenizer:
        def decode(self, ids):
            return "".join("abcdefghijk"[k] for k in ids)

    made = unsum.report(Sequences(), next_token, IDS, tmp_path / "r.html", text=Tokenizer())
    assert made.text[0] == ["abcdefghijk"[k] for k in IDS[0].tolist()]
    with pytest.raises(OptionError, match="holds no integers"):
        unsum.report(net(), squares, batch(), tmp_path / "r.html", text=Tokenizer())


def test_places_to_write_to(tmp_path):
    made = unsum.report(net(), squares, batch(), str(tmp_path / "new" / "folder" / "r.html"))
    assert made.path.exists() and str(made).startswith(str(made.path))
    with pytest.raises(OptionError, match="is a folder"):
        unsum.report(net(), squares, batch(), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot make the folder"):
        unsum.report(net(), squares, batch(), tmp_path / "file" / "r.html")


def test_a_loss_that_is_not_one_for_each_sample(tmp_path):
    with pytest.raises(SamplesError, match=r"one loss for each of the samples"):
        unsum.report(net(), lambda m, b: squares(m, b).sum(), batch(), tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
    with pytest.raises(ZeroDivisionError):
        unsum.report(net(), lambda m, b: 1 / 0, batch(), tmp_path / "r.html")


def test_packed_documents(tmp_path):
    ends = torch.tensor([0, 3, 7])

    def by_document(model, ids):
        losses = F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="none")
        return torch.stack([losses[:3].sum(), losses[3:].sum()])

    class Flat(Sequences):
        def forward(self, ids):
            return self.head(F.gelu(self.mix(self.embed(ids))))

    model, ids = Flat(), torch.arange(8)[None]
    made = unsum.report(model, by_document, ids, tmp_path / "r.html", samples=unsum.packed(ends))
    assert made.norms.shape == (2,) and made.samples.tokens.shape == (2, 4)


def test_the_check_is_run_asked_or_where_it_is_quick(tmp_path):
    assert unsum.report(net(), squares, batch(), tmp_path / "r.html").check.ok
    made = unsum.report(net(), squares, batch(), tmp_path / "r.html", check=False)
    assert made.check is None and "not asked for" in made.missing["check"]


def test_several_calls_of_a_module_and_nested_outputs(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.rnn = nn.Linear(6, 6), nn.LSTM(6, 2, batch_first=True)

        def forward(self, x):
            return self.rnn(self.fc(torch.tanh(self.fc(x)))[:, None])[0][:, 0]

    torch.manual_seed(0)
    made = unsum.report(Twice(), squares, batch(), tmp_path / "r.html")
    assert [layer.name for layer in made.layers] == ["fc@0", "fc@1", "rnn[0]", "rnn[1][0]", "rnn[1][1]", ""]


def test_very_many_samples_do_not_make_a_very_large_page(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(20_000, 6), torch.randn(20_000, 2)
    x[12_345] *= 50
    made = unsum.report(nn.Linear(6, 2), squares, (x, y), tmp_path / "r.html", check=False)
    page = (tmp_path / "r.html").read_text()
    assert len(page) < 2_500_000 and made.outliers[0] == 12_345 and "largest of 20,000" in page
    assert page.count("<rect data-sample") == 2_000 and '<rect data-sample="12345"' in page


def test_twelve_layers_make_a_page_that_can_be_sent(tmp_path):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, activation="gelu", batch_first=True)
    model = nn.Sequential(nn.Embedding(500, 64), nn.TransformerEncoder(layer, 12), nn.Linear(64, 500))
    ids = torch.randint(500, (8, 33))
    made = unsum.report(model, next_token, ids, tmp_path / "r.html", text=str)
    assert made.flags == [] and made.missing == {} and made.check.ok
    assert "×12" in made.picture and (tmp_path / "r.html").stat().st_size < 5_000_000


def test_the_progress_line(tmp_path, capsys, monkeypatch):
    unsum.report(net(), squares, batch(), tmp_path / "r.html")
    assert capsys.readouterr().err == ""
    unsum.report(net(), squares, batch(), tmp_path / "r.html", progress=True)
    told = capsys.readouterr().err
    assert "5/5" in told and "gradients by sample" in told and told.endswith("\n")


# ---- what reviewers have run into -----------------------------------------------------------------------------------


def test_what_is_not_finite_has_no_norm_and_the_rest_is_said_to_be_of_finite_values(tmp_path):
    model, (x, y) = net(), batch()
    x[4, 2] = float("nan")
    made = unsum.report(model, squares, (x, y), tmp_path / "r.html")
    stats = made.layers[0].activation
    assert stats.nan == 8 and math.isnan(stats.norm) and math.isfinite(stats.mean)
    row = re.search(r'<tr id="layer-0".*?</tr>', (tmp_path / "r.html").read_text())[0]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row)
    assert cells[5] == "NaN" and "8 NaN<br>finite: " in cells[1] and "of finite values" in cells[2]
    outlier = next(flag for flag in made.flags if flag.kind == "outlier")
    assert outlier.where == "sample 4" and outlier.text == "its gradient is not finite"


def test_the_check_is_not_run_unasked_for_many_samples_of_a_small_model(tmp_path, monkeypatch):
    model, given = nn.Linear(6, 2), batch(5_000)
    made = unsum.report(model, squares, given, tmp_path / "r.html")
    assert made.check is None and "5,000 backwards" in made.missing["check"]
    assert "5,000 backwards" in (tmp_path / "r.html").read_text()
    assert unsum.report(model, squares, batch(40), tmp_path / "r.html").check.ok


def test_one_of_a_kind_is_no_plural_and_counts_agree(tmp_path):
    made = unsum.report(nn.Linear(6, 2), squares, batch(1), tmp_path / "r.html")
    assert str(made).endswith("r.html: 1 layer, 1 sample, 0 flags")
    made = unsum.report(net(), squares, batch(), tmp_path / "r.html")
    assert "6 layers" in str(made) and "<dt>layers</dt><dd>6</dd>" in (tmp_path / "r.html").read_text()


def test_the_colour_may_be_on_the_token_that_is_predicted(tmp_path):
    path = tmp_path / "r.html"
    made = unsum.report(Sequences(), next_token, IDS, path, text=lambda k: f"w{k}", ahead=1, labels=list("abcde"))
    told = data_of(path)
    assert told["tokens"]["ahead"] == 1 and told["tokens"]["apart"] and told["samples"]["labels"] == list("abcde")
    assert made.samples.tokens.shape == (5, 6) and len(told["tokens"]["text"][0]) == 7
    assert "on the token that is predicted there" in path.read_text() and "<bdi>c</bdi>" in path.read_text()
    unsum.report(Sequences(), next_token, IDS, path, text=lambda k: f" w{k}")
    assert not data_of(path)["tokens"]["apart"] and "on the token that is read there" in path.read_text()


@pytest.mark.parametrize("wrong", [{"labels": ["a"]}, {"labels": "abcde"}, {"ahead": -1}, {"ahead": "1"}], ids=str)
def test_options_that_do_not_fit(wrong, tmp_path):
    with pytest.raises(OptionError, match=f"{next(iter(wrong))}="):
        unsum.report(Sequences(), next_token, IDS, tmp_path / "r.html", **wrong)
