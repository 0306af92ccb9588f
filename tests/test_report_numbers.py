"""The numbers of a report against plain torch and each sample alone."""

import math
import re

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from report_nets import IDS, Sequences, batch, data_of, net, next_token, squares
from unsum.report.charts import bars, brief


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


def test_the_chart_by_depth_has_the_layers_in_the_order_of_the_forward_with_the_norms_that_plain_torch_gives(tmp_path):
    class Backwards(nn.Module):  # calls its layers in another order than it holds them
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.head, self.block = nn.Linear(8, 2), nn.Sequential(nn.Linear(6, 8), nn.Tanh())

        def forward(self, x):
            return self.head(self.block(x))

    model, given = Backwards(), batch()
    unsum.report(model, squares, given, tmp_path / "r.html")
    told = re.findall(r'<a class="slot" href="#(.*?)" aria-label="(.*?)"', (tmp_path / "r.html").read_text())
    first = model.block[0](given[0])
    hidden = torch.tanh(first)
    out = model.head(hidden)
    flowing = torch.autograd.grad((out - given[1]).square().sum(), [first, hidden, out], retain_graph=True)
    (out - given[1]).square().sum().backward()
    own = [math.hypot(*(float(p.grad.norm()) for p in layer.parameters())) for layer in (model.block[0], model.head)]
    norm = [brief(float(g.norm())) for g in flowing]
    assert [said for _, said in told] == [
        f"block.0: gradient norm at its output: {norm[0]}; of its parameters: {brief(own[0])}",
        f"block.1: gradient norm at its output: {norm[1]}",
        f"head: gradient norm at its output: {norm[2]}; of its parameters: {brief(own[1])}",
    ]
    names = {f"layer-{k}": layer["name"] for k, layer in enumerate(data_of(tmp_path / "r.html")["layers"])}
    assert [names[link] for link, _ in told] == ["block.0", "block.1", "head"]


def slots(path):
    return re.findall(
        r'<a class="slot" href="#.*?" aria-label="(.*?): gradient norm at its output: (.*?)"', path.read_text()
    )


def test_the_chart_by_depth_has_a_layer_with_several_outputs_once_and_leaves_gaps_where_the_gradient_is_zero(tmp_path):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm, self.gate = nn.Embedding(11, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 11)

        def forward(self, ids):
            return self.gate(self.lstm(self.embed(ids))[0])

    model, path = Recurrent(), tmp_path / "r.html"
    unsum.report(model, next_token, IDS, path)
    assert [name for name, _ in slots(path)] == ["embed", "lstm[0]", "gate"]
    assert (
        sum("of its parameters" in said for _, said in slots(path)) == 3 and "gradient is zero" not in path.read_text()
    )
    with torch.no_grad():
        model.gate.weight.zero_()
    unsum.report(model, next_token, IDS, path)
    assert [said.partition(";")[0] for _, said in slots(path)][:2] == ["0", "0"]
    assert "At 2 of 3 layers the gradient is zero" in path.read_text()


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
    assert "By rule: 100.0%" in (tmp_path / "r.html").read_text()


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


def test_the_bar_of_a_sample_that_is_not_finite_is_hatched_and_has_the_whole_height():
    _, svg = bars(torch.tensor([1.0, float("nan"), 2.0, float("inf")]), set(), 5.0, range(4))
    found = {rect[0]: rect[1:] for rect in re.findall(r'data-sample="(\d)"( class=odd)? .*?height="([\d.]+)"', svg)}
    assert {k for k, (kind, _) in found.items() if kind} == {"1", "3"}
    assert found["1"][1] == found["3"][1] == "100" and float(found["2"][1]) == pytest.approx(40)
    assert "<pattern" in svg and "<pattern" not in bars(torch.ones(3), set(), 5.0, range(3))[1]
