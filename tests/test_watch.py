"""`unsum.watch`: the records of a run, against plain autograd one sample at a time."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from reference import per_sample_gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unsum
from one_by_one import norms_of


class Net(nn.Module):
    """Embedding, a layer with its own parameters, attention by hand, a tied head."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        weights = (h @ h.mT / 3).softmax(-1)
        h = h + weights @ h
        inner = checkpoint(self.mlp, self.norm(h), use_reentrant=False) if self.checkpointed else self.mlp(self.norm(h))
        return (h + inner) @ self.embed.weight.T


def loss_of(model: nn.Module, x: Tensor, *, reduction: str = "sum") -> Tensor:
    losses = F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="none")
    return getattr(losses.view(len(x), -1).sum(1), reduction)()


def batch(n: int = 6, t: int = 5) -> Tensor:
    return torch.randint(11, (n, t), generator=torch.Generator().manual_seed(n * 100 + t))


def truth(model: nn.Module, x: Tensor) -> Tensor:
    return norms_of(per_sample_gradients(model, loss_of, x))


def noise_scale(each: dict[str, Tensor]) -> float:
    """tr Σ / |G|² from all samples' gradients, as the variance of each number and the mean, both without bias."""
    flat = torch.cat([value.flatten(1) for value in each.values()], 1)
    trace = flat.var(0).sum()
    return float(trace / (flat.mean(0).square().sum() - trace / len(flat)))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def test_norms_losses_and_noise_scale_of_steps_of_other_sizes(model: nn.Module) -> None:
    w = unsum.watch(model)
    for n, t in ((6, 5), (4, 7), (6, 5), (3, 5)):
        x = batch(n, t)
        model.zero_grad()
        with w:
            loss = loss_of(model, x)
            loss.backward()
        each = per_sample_gradients(model, loss_of, x)
        torch.testing.assert_close(w.last.norms, norms_of(each), rtol=1e-4, atol=0)
        assert w.last.loss == pytest.approx(loss.item())
        assert w.last.noise_scale == pytest.approx(noise_scale(each), rel=1e-3)
        assert w.last.ids == list(range(n))
    assert [record.step for record in w.history] == [0, 1, 2, 3]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_micro_batches_are_one_step(model: nn.Module, reduction: str) -> None:
    x = batch(6)
    w = unsum.watch(model, loss_reduction="mean" if reduction == "mean" else None)
    with w:
        for part in x.split(3):
            loss_of(model, part, reduction=reduction).backward()
    each = per_sample_gradients(model, loss_of, x)
    torch.testing.assert_close(w.last.norms, norms_of(each), rtol=1e-4, atol=0)
    assert w.last.noise_scale == pytest.approx(noise_scale(each), rel=1e-3)


def test_gradients_that_were_there_do_not_count(model: nn.Module) -> None:
    x = batch()
    loss_of(model, batch(3)).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    w = unsum.watch(model)
    with w:
        loss_of(model, x).backward()
    each = per_sample_gradients(model, loss_of, x)
    assert w.last.noise_scale == pytest.approx(noise_scale(each), rel=1e-3)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, before[name] + each[name].sum(0).float(), rtol=1e-4, atol=1e-5)


def test_what_is_nobodys_does_not_count(model: nn.Module) -> None:
    x = batch()
    w = unsum.watch(model)
    for _ in range(2):
        model.zero_grad()
        with w:
            (loss_of(model, x) + 10 * sum(p.square().sum() for p in model.parameters())).backward()
    each = per_sample_gradients(model, loss_of, x)
    torch.testing.assert_close(w.last.norms, norms_of(each), rtol=1e-4, atol=0)
    assert w.last.noise_scale == pytest.approx(noise_scale(each), rel=1e-3)


def test_noise_scale_agrees_with_two_batch_sizes() -> None:
    """|G_b|² has the expectation |G|² + tr Σ / b (McCandlish et al., appendix A.1): two sizes of batches tell both."""
    torch.manual_seed(0)
    model, w = nn.Linear(10, 1, bias=False).double(), None
    data, target = torch.randn(4096, 10).double(), torch.randn(4096).double() + 1

    def loss(rows: Tensor) -> Tensor:
        return (model(data[rows]).squeeze(1) - target[rows]).square().sum()

    def mean_square(size: int) -> float:
        found = []
        for rows in torch.randperm(4096).split(size):
            model.zero_grad()
            (loss(rows) / size).backward()
            found.append(float(model.weight.grad.square().sum()))
        return sum(found) / len(found)

    small, large = mean_square(8), mean_square(512)
    signal = (512 * large - 8 * small) / (512 - 8)
    noise = (small - large) / (1 / 8 - 1 / 512)
    model.zero_grad()
    w = unsum.watch(model)
    with w:
        loss(torch.arange(4096)).backward()
    assert w.last.noise_scale == pytest.approx(noise / signal, rel=0.1)


def test_every_k_opens_nothing_in_between(model: nn.Module) -> None:
    w = unsum.watch(model, every=3)
    for step in range(7):
        with w:
            assert bool(unsum.seams.here()) == (step % 3 == 0)
            loss_of(model, batch()).backward()
    assert [record.step for record in w.history] == [0, 3, 6]


def test_training_is_the_same_with_and_without() -> None:
    def trained(watched: bool) -> tuple[dict[str, Tensor], int]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        w = unsum.watch(model, optimizer=optimizer) if watched else None
        for step in range(20):
            x = batch(4 + step % 3, 5 + step % 2)
            optimizer.zero_grad()
            if w is None:
                loss_of(model, x).backward()
            else:
                with w:
                    loss_of(model, x).backward()
            optimizer.step()
        return model.state_dict(), 0 if w is None else len(w.history)

    (plain, _), (watched, records) = trained(False), trained(True)
    assert records == 20
    for name, value in plain.items():
        torch.testing.assert_close(watched[name], value, rtol=1e-3, atol=1e-4)


def test_layers(model: nn.Module) -> None:
    x, seen, grads = batch(), {}, {}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = copy.deepcopy(model)
    layer = model.mlp[0]
    hooks = [
        layer.register_forward_hook(lambda _, args, out: seen.update(out=out.detach())),
        layer.register_forward_hook(lambda _, args, out: out.register_hook(lambda g: grads.update(out=g)) and None),
    ]
    loss_of(model, x).backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    w = unsum.watch(model, optimizer=optimizer)
    with w:
        loss_of(model, x).backward()
    found = w.last.layers
    assert set(found) == {"embed", "norm", "mlp.0", "mlp.2"}
    assert found["mlp.0"].update is None
    own = dict(model.mlp[0].named_parameters())
    assert found["mlp.0"].output == pytest.approx(float(seen["out"].square().mean().sqrt()), rel=1e-4)
    assert found["mlp.0"].grad_output == pytest.approx(float(grads["out"].square().mean().sqrt()), rel=1e-4)
    assert found["mlp.0"].weight == pytest.approx(float(torch.cat([p.detach().flatten() for p in own.values()]).norm()))
    assert found["mlp.0"].grad == pytest.approx(float(torch.cat([p.grad.flatten() for p in own.values()]).norm()))
    each = per_sample_gradients(before, loss_of, x)
    norms = norms_of({name: value for name, value in each.items() if name.startswith("mlp.0")})
    assert found["mlp.0"].norm == pytest.approx(float(norms.square().mean().sqrt()), rel=1e-4)
    assert found["mlp.0"].largest == pytest.approx(float(norms.max()), rel=1e-4)
    optimizer.step()
    expected = 0.1 * found["mlp.0"].grad / found["mlp.0"].weight
    assert w.last.layers["mlp.0"].update == pytest.approx(expected, rel=1e-3)


def test_a_step_that_fails_leaves_no_record(model: nn.Module) -> None:
    w = unsum.watch(model)
    with pytest.raises(ZeroDivisionError):
        with w:
            loss_of(model, batch())
            1 / 0
    assert w.last is None
    assert not unsum.seams.here()
    with w:
        loss_of(model, batch()).backward()
    assert w.last.step == 1


def test_ids_and_texts_from_the_loader(model: nn.Module) -> None:
    batches = [{"x": batch(6), "id": [f"s{k}" for k in range(6)], "text": [f"text {k}" for k in range(6)]}]
    batches[0]["x"] = torch.cat([batches[0]["x"][:5], torch.tensor([[3, 3, 9, 3, 3]])])
    w = unsum.watch(model, text="text")
    with torch.no_grad():
        model.embed.weight[9] *= 300
    for each in w.loader(batches):
        with w:
            loss_of(model, each["x"]).backward()
    assert w.last.ids == [f"s{k}" for k in range(6)]
    expected = [f"s{k}" for k in range(6) if bool((batches[0]["x"][k] == 9).any())]
    assert set(w.last.outliers) <= set(expected)
    assert w.last.texts == {each: f"text {each[1:]}" for each in w.last.outliers}
    with pytest.raises(unsum.errors.OptionError, match="no key 'key'; it has 'x'"):
        list(unsum.watch(model, ids="key").loader([{"x": 1}]))


def test_outliers() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(16, 4)
    x[7] *= 100
    w = unsum.watch(model)
    with w:
        model(x).sum().backward()
    assert w.last.outliers == [7]
    with w:
        model(torch.randn(16, 4)).sum().backward()
    assert w.last.outliers == []


@pytest.mark.parametrize("how", ["checkpointed", "autocast", "scaler", "frozen", "set_to_none"])
def test_in_loops_that_people_have(how: str) -> None:
    torch.manual_seed(0)
    model, x = Net(checkpointed=how == "checkpointed"), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if how == "scaler" else None
    if how == "frozen":
        model.mlp[0].requires_grad_(False)
    if how == "set_to_none":
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    w = unsum.watch(model, scaler=scaler)
    for _ in range(3):
        model.zero_grad(set_to_none=how != "set_to_none")
        with w, torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            loss = loss_of(model, x)
            (loss if scaler is None else scaler.scale(loss)).backward()
    each = per_sample_gradients(model, loss_of, x)
    loose = 0.03 if how == "autocast" else 1e-4
    torch.testing.assert_close(w.last.norms, norms_of(each), rtol=loose, atol=0)
    assert w.last.loss == pytest.approx(float(loss_of(model, x)), rel=loose)
    if how != "autocast":
        assert w.last.noise_scale == pytest.approx(noise_scale(each), rel=1e-3)


def test_samples_that_interact_are_refused_at_first_and_told_later() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), torch.randn(8, 3)
    w = unsum.watch(model)
    with pytest.raises(unsum.errors.InteractionError, match="interact"):
        with w:
            model(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    model.eval()
    with w:
        model(x).sum().backward()
    model.train()
    model.zero_grad()
    with pytest.warns(UserWarning, match="interact"):
        with w:
            model(x).square().sum().backward()
    assert w.last.norms is None
    assert "interact" in w.last.refused
    assert model[0].weight.grad is not None
    exact = unsum.watch(model, interacting="exact")
    with exact:
        model(x).square().sum().backward()
    assert exact.last.norms.shape == (8,)


def test_memory_does_not_grow(model: nn.Module) -> None:
    import gc

    w = unsum.watch(model, history=5)

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(thing, Tensor) for thing in gc.get_objects())

    counts = []
    for step in range(60):
        with w:
            loss_of(model, batch(4 + step % 2)).backward()
        model.zero_grad()
        if step in (20, 59):
            counts.append(tensors())
    assert abs(counts[1] - counts[0]) <= 4
    assert len(w.history) == 5


def test_bad_options(model: nn.Module) -> None:
    for options in ({"every": 0}, {"every": 1.5}, {"threshold": -1}, {"interacting": "no"}, {"loss_reduction": "sum"},
                    {"optimizer": 3}, {"history": 0}, {"ids": 3}, {"scaler": "x"}, {"layers": "0"}):  # fmt: skip
        with pytest.raises(unsum.errors.OptionError):
            unsum.watch(model, **options)
    w = unsum.watch(model)
    w.open()
    with pytest.raises(unsum.errors.OptionError, match="open already"):
        w.open()
    w.close()
    w.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert w.last is None  # no backward, no record
