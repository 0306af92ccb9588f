"""The first value that is not finite is located: site, sample, position, parameter, micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import unsum
from test_watch import Net, batch, loss_of

pytestmark = pytest.mark.filterwarnings("ignore:unsum.watch. a value is not finite")


def planted(value: float, *index: int) -> unsum.verbs.Verb:
    def change(tensor: Tensor) -> Tensor:
        tensor[index] = value
        return tensor

    return change


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    ("site", "parameter"),
    [("embed:output", "embed.weight"), ("norm:output", "norm.weight"), ("mlp.0:output", "mlp.0.weight"),
     ("mlp.1:output", "embed.weight"), ("mlp.2:output", "mlp.2.weight")],
)  # fmt: skip
def test_in_the_forward(model: nn.Module, site: str, parameter: str, value: str) -> None:
    w = unsum.watch(model)
    for step in range(3):
        edits = {site: planted(float(value), 2, 3, 1)} if step == 2 else {}
        with unsum.edit(model, edits), w:
            loss_of(model, batch()).backward()
        if step < 2:
            assert w.last.nonfinite is None
    found = w.last.nonfinite
    assert (found.site, found.sample, found.position, found.value) == (site, 2, 3, value)
    assert (found.microbatch, found.rank) == (0, 0)
    assert found.parameter is not None
    if site != "mlp.1:output":  # a GELU has none: then the first one whose gradient is not finite
        assert found.parameter == parameter
    assert 2 in w.last.outliers
    assert f"{value} at {site}, sample 2, position 3" in str(w.last)


@pytest.mark.parametrize("site", ["norm:grad_output", "mlp.2:grad_output", "mlp.0:grad_output"])
def test_in_the_backward(model: nn.Module, site: str) -> None:
    w = unsum.watch(model)
    with unsum.edit(model, {site: planted(float("nan"), 4, 1, 0)}), w:
        loss_of(model, batch()).backward()
    found = w.last.nonfinite
    assert (found.site, found.sample, found.position) == (site, 4, 1)
    assert found.parameter == f"{site.partition(':')[0]}.weight"


def test_in_the_second_micro_batch_by_the_samples_id(model: nn.Module) -> None:
    w, parts = unsum.watch(model, ids=lambda part: [f"s{int(row.sum())}-{k}" for k, row in enumerate(part)]), []
    with w:
        for k, part in enumerate(w.loader(batch(6).split(2))):
            parts += [f"s{int(row.sum())}-{i}" for i, row in enumerate(part)]
            with unsum.edit(model, {"mlp.0:output": planted(float("nan"), 1, 0, 0)} if k == 1 else {}):
                loss_of(model, part).backward()
    assert w.last.nonfinite.microbatch == 1
    assert w.last.nonfinite.sample == w.last.ids[3] == parts[3]
    assert w.last.ids == parts


def test_in_the_loss(model: nn.Module) -> None:
    w = unsum.watch(model)
    with w:
        losses = model(batch()).square().sum((1, 2))
        (losses * torch.tensor([1.0, 1, 1, float("inf"), 1, 1])).sum().backward()
    assert (w.last.nonfinite.site, w.last.nonfinite.sample) == ("loss", 3)


def test_in_a_gradient_where_all_values_are_finite() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    x[4] = 0
    w = unsum.watch(model)
    with torch.no_grad():
        model.bias.zero_()
    with w:
        model(x).square().sum(1).sqrt().sum().backward()  # a derivative of 0 · inf at 0
    assert (w.last.nonfinite.sample, w.last.nonfinite.value) == (4, "nan")
    assert w.last.nonfinite.site == ":grad_output"


def test_large_values_are_not_taken_for_infinite() -> None:
    model = nn.Linear(3, 2)
    w = unsum.watch(model)
    with w:
        (model(torch.full((4, 3), 1e25)) * 1e-25).sum().backward()
    assert w.last.nonfinite is None or w.last.nonfinite.site.endswith("grad")  # whose square is beyond float32


def test_in_an_image() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
    w = unsum.watch(model)
    with unsum.edit(model, {"0:output": planted(float("nan"), 3, 2, 1, 0)}), w:
        model(torch.randn(4, 2, 6, 6)).sum().backward()
    found = w.last.nonfinite
    assert (found.site, found.sample, found.position) == ("0:output", 3, (2, 1))


@pytest.mark.parametrize("samples", ["second dimension", "packed", "ids"])
def test_wherever_the_samples_are(samples: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(6, 4, 3)
    given = {
        "second dimension": (unsum.dim(1), 2, 5),
        "packed": (unsum.packed(torch.arange(0, 25, 6)), 3, (5, 2)),
        "ids": (torch.arange(24).view(6, 4) // 12, 1, (5, 2)),
    }[samples]
    w = unsum.watch(model, samples=given[0])
    with unsum.edit(model, {"0:output": planted(float("nan"), 5, 2, 0)}), w:
        model(x).square().sum().backward()
    assert (w.last.nonfinite.sample, w.last.nonfinite.position) == given[1:]


def test_a_compiled_model_tells_sample_and_parameter() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    compiled, w, x = torch.compile(model, backend="aot_eager"), None, torch.randn(5, 3)
    w = unsum.watch(compiled)
    for step in range(3):
        if step == 2:
            x[3, 1] = float("nan")
        with w:
            compiled(x).square().sum().backward()
    assert w.last.layers["0"].output is None
    assert w.last.nonfinite.sample == 3
    assert w.last.nonfinite.site == "loss"


def test_a_parameter_that_an_earlier_step_broke_is_named_instead_of_a_sample():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    watch = unsum.watch(model)
    with pytest.warns(UserWarning, match=r"not finite before the first watched step: check its initialisation"), watch:
        model(torch.ones(5, 3)).square().sum().backward()
    assert (watch.last.nonfinite.site, watch.last.nonfinite.sample) == ("2.weight", None)


@pytest.mark.parametrize("every", [1, 2])
def test_a_parameter_that_broke_in_the_run_names_the_last_good_step_and_nobody_stands_out(every):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    watch, x = unsum.watch(model, every=every), torch.randn(6, 3)
    for step in range(8):
        if step == 5:
            with torch.no_grad():
                model[2].weight[0, 0] = float("inf")
        with watch:
            model(x).square().sum().backward()
    told = {1: "was last finite in step 4: see that step's record", 2: "was last finite in step 4: watch with every=1"}
    assert told[every] in str(watch.last.nonfinite)
    assert watch.last.outliers == [] and not bool(watch.last.norms.isfinite().all())
    again = unsum.training.Record.from_dict(watch.last.as_dict())
    assert again.nonfinite == watch.last.nonfinite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_whose_square_is_beyond_float32_is_finite(dtype):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    with torch.no_grad():
        model[0].weight[0, 0] = 1e20
    watch = unsum.watch(model)
    with watch:
        model(torch.ones(5, 3, dtype=dtype)).square().sum().backward()
    assert watch.last.nonfinite is None
    assert watch.last.layers["0"].weight == pytest.approx(1e20)
