"""The flags of a report on networks with one planted fault each."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unsum
from report_nets import batch, data_of, kinds, net, squares
from unsum.report.flags import outliers


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


def test_one_of_a_kind_is_no_plural_and_counts_agree(tmp_path):
    made = unsum.report(nn.Linear(6, 2), squares, batch(1), tmp_path / "r.html")
    assert str(made).endswith("r.html: 1 layer, 1 sample, 0 flags")
    made = unsum.report(net(), squares, batch(), tmp_path / "r.html")
    assert "6 layers" in str(made) and "<dt>layers</dt><dd>6</dd>" in (tmp_path / "r.html").read_text()


class Cut(nn.Module):
    """A forgotten detach(), a layer that is not called, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.spare, self.frozen, self.last = (nn.Linear(6, 6) for _ in range(4))
        self.out = nn.Linear(6, 2, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.out(self.last(self.frozen(self.first(x).detach())))


def test_parameters_that_the_loss_does_not_reach_are_flagged(tmp_path):
    torch.manual_seed(0)
    made = unsum.report(Cut(), squares, batch(), tmp_path / "r.html")
    found = {flag.where: flag.text for flag in made.flags if flag.kind == "unreached"}
    assert list(found) == ["first:weight, bias", "spare:weight, bias"]
    assert "detach()" in found["first:weight, bias"] and "not called" in found["spare:weight, bias"]
    assert [layer.name for layer in made.layers if "unreached" in layer.flags] == ["first"]
    page = (tmp_path / "r.html").read_text()
    assert "Parameters that the loss does not reach: 2" in page and "138 of 180 train" in page
    assert "Nothing stands out" not in page
