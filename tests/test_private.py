"""Private training: what a step applies, what is refused, and what epsilon says."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from reference import per_sample_gradients
from torch import nn

import unsum
from reads import close
from unsum.errors import InteractionError, OptionError, SamplesError, UnsumError, UnsupportedError

RATE, N = 0.25, 64


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def data(n=N):
    torch.manual_seed(1)
    return [(torch.randn(4), torch.randint(2, ())) for _ in range(n)]


def loss(model, x, y):
    return F.cross_entropy(model(x), y, reduction="sum")


def made(model, lr=1.0, **options):
    options = {"max_norm": 0.5, "noise_multiplier": 0.0, "expected_batch": 16, "sample_rate": RATE, **options}
    return unsum.private(model, torch.optim.SGD(model.parameters(), lr=lr), **options)


def trained(model, dp, batches):
    for x, y in batches:
        with dp:
            loss(model, x, y).backward()
        dp.step()
    return model


def moved(before, after):
    """{parameter: what a step of SGD with lr=1 has subtracted}."""
    return {name: (p - after.get_parameter(name)).detach() for name, p in before.named_parameters()}


@pytest.mark.parametrize("how", ["flat", "layer", "automatic"])
def test_a_step_applies_the_clipped_sum_over_the_expected_batch(how):
    model, batch = mlp(), (torch.randn(7, 4), torch.randint(2, (7,)))
    before = copy.deepcopy(model)
    with unsum.clip_per_sample(before, max_norm=0.5, how=how):
        loss(before, *batch).backward()
    dp = made(model, how=how, expected_batch=100)
    with dp as clipped:
        loss(model, *batch).backward()
    assert dp.step() is True and dp.steps == 1 and len(clipped.norms) == 7
    for name, value in moved(before, model).items():
        close(value, before.get_parameter(name).grad / 100, 1e-5, 0.05, name)  # not over 7, the batch's own size
    assert all(p.grad is None for p in model.parameters())


def test_a_clipped_sum_is_that_of_gradients_one_by_one():
    model, batch = mlp(), (torch.randn(7, 4), torch.randint(2, (7,)))
    each = per_sample_gradients(model, loss, *batch)
    norms = sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt()
    before = copy.deepcopy(model)
    trained(model, made(model, expected_batch=1), [batch])
    for name, value in moved(before, model).items():
        close(value, torch.tensordot((0.5 / norms).clamp(max=1), each[name], 1), 1e-5, 1.0, name)


@pytest.mark.parametrize("source", ["seed", "generator", "secure"])
def test_the_noise_has_the_standard_deviation_that_was_said(source):
    options = {"seed": {"seed": 3}, "generator": {"generator": torch.Generator().manual_seed(3)}}
    model = nn.Linear(100, 100)
    before = copy.deepcopy(model)
    dp = made(model, max_norm=0.5, noise_multiplier=4.0, expected_batch=8, **options.get(source, {"secure": True}))
    draws = []
    for _ in range(20):
        assert dp.step()
        draws.append(torch.cat([value.flatten() for value in moved(before, model).values()]))
        before = copy.deepcopy(model)
    noise = torch.stack(draws)  # 20 × 10,100 numbers
    spread, n = 4.0 * 0.5 / 8, noise.numel()
    assert abs(float(noise.std()) / spread - 1) < 5 / math.sqrt(2 * n)  # five standard errors
    assert abs(float(noise.mean())) < 5 * spread / math.sqrt(n)
    kurtosis = float(((noise - noise.mean()) / noise.std()).pow(4).mean())
    assert abs(kurtosis - 3) < 5 * math.sqrt(24 / n)  # Gaussian
    between = torch.corrcoef(noise)[~torch.eye(20, dtype=torch.bool)]
    assert float(between.abs().max()) < 6 / math.sqrt(10_100)  # every step has its own


def test_every_parameter_gets_noise_whether_data_reached_it_or_not():
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "unused": nn.Linear(4, 2)})
    before = copy.deepcopy(model)
    dp = made(model, noise_multiplier=1.0, seed=0)
    with dp:
        loss(model["used"], torch.randn(3, 4), torch.randint(2, (3,))).backward()
    dp.step()
    assert all((value != 0).all() for value in moved(before, model).values())


def test_a_seed_repeats_a_run_and_none_does_not():
    def run(seed):
        model = mlp()
        dp = made(model, noise_multiplier=1.0, seed=seed)
        return trained(model, dp, dp.loader(data()))[0].weight.detach()

    assert torch.equal(run(5), run(5))
    assert not torch.equal(run(5), run(6))
    assert not torch.equal(run(None), run(None))


def test_a_run_goes_on_with_other_noise_than_it_began_with():
    def run(first, second):
        model = mlp()
        dp = made(model, noise_multiplier=1.0, seed=5)
        for _ in range(first):
            dp.step()
        if second:
            state, dp = dp.state_dict(), made(model, noise_multiplier=1.0, seed=5)
            dp.load_state_dict(state)
        for _ in range(second):
            dp.step()
        assert dp.steps == first + second
        return model[0].weight.detach()

    assert torch.equal(run(4, 0), run(2, 2))


def test_tied_and_frozen_parameters_are_told_and_right():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.base, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
            self.head.weight = self.tokens.weight
            self.base.requires_grad_(False)

        def forward(self, x):
            return self.head(torch.tanh(self.base(self.tokens(x))))

    torch.manual_seed(0)
    model, x = Tied(), torch.randint(9, (5, 3))
    token_loss = lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten(), reduction="sum")
    each = per_sample_gradients(model, token_loss, x)
    norms = sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt()
    before, dp = copy.deepcopy(model), made(model, expected_batch=1)
    told = str(dp)
    assert "head.weight = tokens.weight" in told and "base.weight, base.bias" in told and "2 tensors" in told
    with dp:
        token_loss(model, x).backward()
    dp.step()
    for name, value in moved(before, model).items():
        wanted = torch.tensordot((0.5 / norms).clamp(max=1), each[name], 1) if name in each else torch.zeros(())
        close(value, wanted, 1e-5, 1.0, name)


def test_mean_losses_adam_and_bfloat16():
    torch.manual_seed(0)
    batch = torch.randn(6, 4), torch.randint(2, (6,))
    steps = []
    for reduction in ("sum", "mean"):
        model = mlp()
        dp = made(model, loss_reduction=None if reduction == "sum" else "mean")
        with dp:
            F.cross_entropy(model(batch[0]), batch[1], reduction=reduction).backward()
        dp.step()
        steps.append(model[0].weight.detach())
    torch.testing.assert_close(*steps)
    model = mlp().bfloat16()
    dp = unsum.private(
        model, torch.optim.AdamW(model.parameters()), max_norm=1.0, noise_multiplier=1.0, expected_batch=4,
        sample_rate=0.5, seed=0,
    )  # fmt: skip
    with dp:
        loss(model, batch[0].bfloat16(), batch[1]).backward()
    assert dp.step() and model[0].weight.dtype == torch.bfloat16


# ---- epsilon --------------------------------------------------------------------------------------------------------


def stepped(steps, **options):
    dp = made(mlp(), **{"noise_multiplier": 1.1, "seed": 0, **options})
    for _ in range(steps):
        dp.step()
    return dp


def test_epsilon_of_nothing_and_without_noise():
    assert stepped(0).epsilon() == 0.0
    with pytest.warns(UserWarning, match="Poisson"):
        assert stepped(2, noise_multiplier=0).epsilon() == math.inf
    for delta in (0, 1, -1.0, "1e-5"):
        with pytest.raises(OptionError, match="delta"):
            stepped(0).epsilon(delta)


@pytest.mark.filterwarnings("ignore:unsum.private")
def test_epsilon_is_that_of_dp_accounting_and_near_that_of_opacus():
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import pld

    event = accounting.PoissonSampledDpEvent(0.02, accounting.GaussianDpEvent(1.1))
    direct = pld.PLDAccountant().compose(event, 60).get_epsilon(1e-5)
    dp = stepped(60, sample_rate=0.02)
    assert dp.epsilon(delta=1e-5) == direct and f"{direct:.4g}" in str(dp)
    assert stepped(30, sample_rate=0.02).epsilon() < direct < dp.epsilon(delta=1e-7)
    pytest.importorskip("opacus")
    from opacus.accountants import PRVAccountant, RDPAccountant

    prv, rdp = PRVAccountant(), RDPAccountant()
    prv.history = rdp.history = [(1.1, 0.02, 60)]
    assert prv.get_epsilon(delta=1e-5) == pytest.approx(direct, rel=0.02)
    assert direct <= rdp.get_epsilon(delta=1e-5) <= 1.5 * direct  # a looser bound


@pytest.mark.filterwarnings("ignore:unsum.private")
def test_epsilon_of_a_run_that_goes_on_with_other_noise_counts_each_step_with_its_own():
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import pld

    first = stepped(3, noise_multiplier=1.0, sample_rate=0.1)
    dp = made(mlp(), noise_multiplier=2.0, sample_rate=0.05)
    dp.load_state_dict(first.state_dict())
    assert dp.epsilon() == first.epsilon() and "before: 3 steps with multiplier 1 at rate 0.1" in str(dp)
    dp.step()
    direct = pld.PLDAccountant()
    for multiplier, rate, steps in ((1.0, 0.1, 3), (2.0, 0.05, 1)):
        direct.compose(accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(multiplier)), steps)
    assert dp.steps == 4 and dp.epsilon() == direct.get_epsilon(1e-5)
    without = made(mlp(), noise_multiplier=0.0)
    without.load_state_dict(first.state_dict())
    without.step()
    assert without.epsilon() == math.inf


def test_a_state_of_another_source_of_noise_is_refused():
    given = made(mlp(), generator=torch.Generator().manual_seed(0))
    given.step()
    with pytest.raises(OptionError, match="generator="):
        made(mlp(), seed=0).load_state_dict(given.state_dict())


def test_an_optimizer_that_needs_a_closure_is_refused():
    model = mlp()
    with pytest.raises(UnsumError, match="LBFGS calls a closure"):
        unsum.private(
            model, torch.optim.LBFGS(model.parameters()), max_norm=1.0, noise_multiplier=1.0, expected_batch=2,
            sample_rate=0.1,
        )  # fmt: skip


def test_epsilon_says_what_to_install(monkeypatch):
    dp = stepped(1)
    monkeypatch.setattr("unsum.training.accountant.find_spec", lambda name: None)
    with pytest.raises(UnsumError, match=r"pip install dp-accounting"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dp.epsilon()
    assert "pip install dp-accounting" in str(dp)


def test_batches_of_ones_own_are_allowed_and_warned_of_once():
    pytest.importorskip("dp_accounting")
    dp = stepped(1)
    with pytest.warns(UserWarning, match="only if their batches came from Poisson"):
        first = dp.epsilon()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dp.epsilon() == first


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_samples_that_interact_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    dp = made(model)
    with pytest.raises(InteractionError, match="unsum.private.*interact"), dp:
        loss(model, torch.randn(3, 4), torch.randint(2, (3,))).backward()


def test_a_gradient_that_was_not_clipped_is_refused():
    model = mlp()
    batch = torch.randn(3, 4), torch.randint(2, (3,))
    dp = made(model)
    loss(model, *batch).backward()
    with pytest.raises(SamplesError, match=r"0.weight.grad was not made inside the block"):
        dp.step()
    with pytest.raises(SamplesError, match="not made inside"), dp:
        pass
    model.zero_grad(set_to_none=False)  # zeros are nobody's
    with dp:
        loss(model, *batch).backward()
    loss(model, *batch).backward()  # added in place to what is clipped
    with pytest.raises(SamplesError, match="changed after the block"):
        dp.step()


def test_the_optimizers_own_step_is_refused():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dp = unsum.private(model, optimizer, max_norm=1, noise_multiplier=1, expected_batch=4, sample_rate=0.1)
    with dp:
        loss(model, torch.randn(3, 4), torch.randint(2, (3,))).backward()
        with pytest.raises(OptionError, match="inside"):
            dp.step()
    with pytest.raises(OptionError, match="without noise"):
        optimizer.step()
    assert dp.step()


def test_optimizers_with_other_parameters_are_refused_and_with_fewer_are_told():
    model, other = mlp(), nn.Linear(2, 2)
    options = {"max_norm": 1.0, "noise_multiplier": 1.0, "expected_batch": 4, "sample_rate": 0.1}
    with pytest.raises(OptionError, match="not the model's"):
        unsum.private(model, torch.optim.SGD([*model.parameters(), *other.parameters()]), **options)
    with pytest.raises(OptionError, match="Optimizer"):
        unsum.private(model, model.parameters(), **options)
    with pytest.warns(UserWarning, match=r"not have 0.weight, 0.bias"):
        dp = unsum.private(model, torch.optim.SGD(model[2].parameters(), lr=1.0), **options)
    assert "not in the optimizer (not trained): 0.weight, 0.bias" in str(dp)
    with dp:
        loss(model, torch.randn(3, 4), torch.randint(2, (3,))).backward()
    assert model[0].weight.grad is None
    assert dp.step()


def test_penalties_and_hooks_are_refused():
    model = mlp()
    dp = made(model)
    with pytest.raises(UnsupportedError, match="weight_decay"), dp:
        (loss(model, torch.randn(3, 4), torch.randint(2, (3,))) + model[0].weight.square().sum()).backward()
    assert model[0].weight.grad is None
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(UnsupportedError, match="0.weight: hooks"), dp:
        pass
    handle.remove()
    model = nn.ParameterList([nn.Parameter(torch.randn(2, dtype=torch.complex64))])
    with pytest.raises(UnsupportedError, match="complex"), made(model):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": 0}, {"noise_multiplier": -1}, {"noise_multiplier": math.inf}, {"noise_multiplier": math.nan},
        {"expected_batch": 0}, {"sample_rate": 0}, {"sample_rate": 1.5}, {"sample_rate": "all"}, {"how": "none"},
        {"seed": 1.5}, {"seed": 1, "secure": True}, {"generator": 3}, {"verify": 2}, {"loss_reduction": "sum"},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_make_no_sense(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        made(mlp(), **options)


def test_print_says_all():
    dp = made(mlp(), noise_multiplier=1.5, seed=7)
    told = str(dp)
    for part in (
        "0 steps",
        "58 parameters in 4 tensors",
        "max_norm 0.5, flat",
        "multiplier 1.5, seed 7",
        "rate 0.25",
        "epsilon 0",
    ):
        assert part in told, told
    with pytest.raises(TypeError, match="state_dict"):
        copy.copy(dp)
