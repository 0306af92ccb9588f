"""What `fit` and `influence` refuse, with an error that says what, where, and the way out."""

import pytest
import torch
from torch import nn

import unsum
from brute_curvature import random_rows
from curvature_checks import fitted
from curvature_nets import LAYERED, Batches, Examples, Mixed, classified, forward, ids, made, mlp, numbers
from unsum.errors import InteractionError, UnsumError


def batch_of(n=12, seed=0):
    return numbers(seed, n, 4), ids(seed + 1, n, high=3)


def run_fit(model, loss_fn, data, **options):
    return unsum.curvature.fit(model, loss_fn, data, kind="kfac", **options)


def run_influence(model, loss_fn, data, **options):
    return unsum.influence(model, loss_fn, data, Batches(batch_of(2, seed=5)), **options).matrix


RUNS = {"fit": run_fit, "influence": run_influence}


# ---- losses ---------------------------------------------------------------------------------------------------------

NO_LOSSES = {
    "a mean": lambda model, batch: classified(model, batch).mean(),
    "a number for each output": lambda model, batch: model(batch[0]),
    "a column": lambda model, batch: classified(model, batch)[:, None],
    "fewer than samples": lambda model, batch: classified(model, batch)[:-1],
    "a number": lambda model, batch: 1.0,
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("loss", NO_LOSSES)
def test_a_loss_that_is_not_one_number_for_each_sample(loss, run):
    with pytest.raises(UnsumError, match="loss"):
        RUNS[run](mlp(), NO_LOSSES[loss], Batches(batch_of()))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("as_examples", [True, False], ids=["examples", "batches"])
def test_an_example_that_is_not_finite_is_named(as_examples, value, run):
    x, y = batch_of()
    x[7, 2] = value
    data = Batches((x[:5], y[:5]), (x[5:], y[5:]))
    options = {"batch_size": 3} if as_examples else {}
    with pytest.raises(UnsumError, match=r"\b7\b"):
        RUNS[run](mlp(), classified, Examples(x, y) if as_examples else data, **options)


def test_a_query_that_is_not_finite_is_named():
    x, y = batch_of(4)
    x[2] = float("nan")
    with pytest.raises(UnsumError, match=r"(?s)quer.*\b2\b|\b2\b.*quer"):
        unsum.influence(mlp(), classified, Batches(batch_of()), Batches((x, y)))


@pytest.mark.parametrize("run", RUNS)
def test_a_finite_loss_whose_gradient_is_not(run):
    x, y = batch_of()

    def loss_fn(model, batch):
        at_zero = (model(batch[0]) * batch[2][:, None]).square().sum(1).sqrt()  # its slope at 0 is not finite
        return classified(model, batch) + at_zero

    scale = torch.ones(12).double()
    scale[4] = 0
    with pytest.raises(UnsumError, match=r"\b4\b"):
        if run == "fit":
            run_fit(mlp(), loss_fn, Batches((x, y, scale)))
        else:
            unsum.influence(mlp(), loss_fn, Batches((x, y, scale)), Batches((x[:1], y[:1], scale[:1])))


# ---- data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [iter, lambda batches: (batch for batch in batches)], ids=["iterator", "generator"])
def test_a_one_shot_iterator_is_refused_for_two_passes(make):
    with pytest.raises(UnsumError, match="(?i)iterator|generator"):
        unsum.curvature.fit(mlp(), classified, make([batch_of()]), kind="ekfac")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("data", [[], Batches()], ids=["list", "batches"])
def test_no_data(data, run):
    with pytest.raises(UnsumError):
        RUNS[run](mlp(), classified, data)


@pytest.mark.parametrize("run", RUNS)
def test_samples_that_interact(run):
    model = made(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)))
    with pytest.raises(InteractionError, match="interact"):
        RUNS[run](model, classified, Batches(batch_of()))


def test_a_users_own_exception_is_not_replaced():
    def loss_fn(model, batch):
        raise ZeroDivisionError("mine")

    for run in RUNS.values():
        with pytest.raises(ZeroDivisionError, match="mine"):
            run(mlp(), loss_fn, Batches(batch_of()))


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"kind": "kronecker"}, {"setting": "other"}, {"likelihood": "categorical"}], ids=str
)
def test_options_of_fit_that_make_no_sense(options):
    (value,) = options.values()
    with pytest.raises((UnsumError, TypeError), match=value):
        unsum.curvature.fit(mlp(), classified, Batches(batch_of()), **({"kind": "kfac"} | options))


def test_options_of_influence_that_make_no_sense():
    with pytest.raises(UnsumError, match="euclid"):
        run_influence(mlp(), classified, Batches(batch_of()), score="euclid")
    with pytest.raises((UnsumError, TypeError), match="curvature"):
        run_influence(mlp(), classified, Batches(batch_of()), curvature="kfac")


@pytest.mark.parametrize("damping", [-1.0, float("nan"), "much"])
def test_a_damping_that_makes_no_sense(damping):
    model = mlp()
    c = fitted(model, classified, [batch_of()])
    with pytest.raises((UnsumError, TypeError), match="damping"):
        c.solve(random_rows(model, 1), damping=damping)


def test_a_model_without_trainable_parameters():
    with pytest.raises(UnsumError, match="parameters"):
        run_fit(mlp().requires_grad_(False), classified, Batches(batch_of()))


# ---- vectors --------------------------------------------------------------------------------------------------------


def test_vectors_that_do_not_fit():
    model = mlp()
    c, rows = fitted(model, classified, [batch_of()]), random_rows(model, 2)
    for read in (c.solve, c.matvec):
        with pytest.raises((UnsumError, KeyError), match="nothing"):
            read(rows | {"nothing": torch.zeros(2, 3).double()})
        with pytest.raises(UnsumError, match="0.weight"):
            read(rows | {"0.weight": torch.zeros(2, 3, 9).double()})
        with pytest.raises(UnsumError, match="2.bias|rows"):
            read(rows | {"2.bias": torch.zeros(5, 3).double()})


@pytest.mark.parametrize("kind", ["kfac", "ekfac", "diagonal"])
def test_a_singular_block_is_named(kind):
    """One example: the factors have rank one, and nothing is added to their eigenvalues."""
    model = mlp()
    x, y = batch_of(1)
    if kind == "diagonal":
        x[0, 1] = 0
    c = fitted(model, classified, [(x, y)], kind)
    with pytest.raises(UnsumError, match=r"(?s)singular.*0\.weight|0\.weight.*singular"):
        c.solve(random_rows(model, 1), damping=0.0)


def test_a_parameter_that_nothing_reaches_gives_no_silent_numbers():
    """Its curvature is zero, and so is its default damping: an error, or finite numbers; never NaN."""
    model = made(Mixed)
    model.unused = nn.Parameter(torch.zeros(3).double())
    c, rows = fitted(model, classified, [batch_of()]), random_rows(model, 1)
    assert "unused" in c.parameters
    said, found = "", {}
    try:
        found = c.solve(rows)
    except UnsumError as error:
        said = str(error)
    assert "unused" in said or all(found[name].isfinite().all() for name in rows)
    assert "None" not in said  # the default damping is what failed
    torch.testing.assert_close(c.solve(rows, damping=0.5)["unused"], rows["unused"] / 0.5)


# ---- a model that is another one now --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kfac", "ekfac", "diagonal"])
def test_a_model_whose_parameters_changed_since_the_fit(kind, tmp_path):
    model, loss_fn, batches = LAYERED["mlp"]()
    c = fitted(model, loss_fn, batches, kind)
    c.save(tmp_path / "c")
    run_influence(model, loss_fn, Batches(*batches), curvature=c)
    with torch.no_grad():
        model[2].weight[0, 0] += 1e-3
    for changed in (c, unsum.curvature.load(tmp_path / "c")):
        with pytest.raises(UnsumError, match="changed"):
            run_influence(model, loss_fn, Batches(*batches), curvature=changed)
    with torch.no_grad():
        model[2].weight[0, 0] -= 1e-3


@pytest.mark.parametrize("how", ["frozen", "not chosen"])
@pytest.mark.parametrize("kind", ["kfac", "ekfac", "diagonal", "ggn"])
def test_a_model_whose_other_parameters_changed_since_the_fit(kind, how, tmp_path):
    """The gradients of those that are fitted depend on them."""
    model, batch = mlp(), batch_of()
    model[0].requires_grad_(how == "not chosen")
    if kind == "ggn":
        known = [unsum.curvature.ggn(model, Batches(batch), unsum.curvature.categorical(forward), params="2.*")]
    else:
        c = fitted(model, classified, [batch], kind, params="2.*")
        c.save(tmp_path / "c")
        known = [c, unsum.curvature.load(tmp_path / "c")]
    for each in known:
        run_influence(model, classified, Batches(batch), curvature=each)
    with unsum.gradients(model, params="2.*") as g:
        classified(model, batch).sum().backward()
    known[0].solve(g)
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-3
    for each in known:
        with pytest.raises(UnsumError, match="changed"):
            run_influence(model, classified, Batches(batch), curvature=each)
        with pytest.raises(UnsumError, match="changed"):
            each.solve(g)
    if kind in ("kfac", "diagonal"):
        with pytest.raises(UnsumError, match="different parameters"):
            c.merge(fitted(model, classified, [batch], kind, params="2.*"))


def test_a_curvature_of_another_model():
    c = fitted(*LAYERED["convolution"]())
    with pytest.raises(UnsumError):
        run_influence(mlp(), classified, Batches(batch_of()), curvature=c)


def test_a_loaded_fit_serves_the_same_parameters_in_another_model(tmp_path):
    model, batch = mlp(), batch_of()
    fitted(model, classified, [batch]).save(tmp_path / "c")
    again = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    again.load_state_dict(model.state_dict())
    c = unsum.curvature.load(tmp_path / "c")
    assert run_influence(again, classified, Batches(batch), curvature=c).shape == (2, 12)


def test_an_exact_curvature_needs_a_likelihood():
    with pytest.raises((UnsumError, TypeError)):
        unsum.curvature.ggn(mlp(), Batches(batch_of()), "categorical").matvec(random_rows(mlp(), 1))
    assert unsum.curvature.categorical(forward) is not None


# ---- masks and batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["categorical", "gaussian"])
def test_a_mask_that_has_weights_is_refused(make):
    """A fit would square them, and the exact matrix would not."""
    data = Batches((numbers(0, 6, 5, 4), torch.full((6, 5), 0.5)))
    likelihood = getattr(unsum.curvature, make)(forward, mask=lambda batch: batch[1])
    with pytest.raises(UnsumError, match="mask.*True or False"):
        unsum.curvature.fit(mlp(), None, data, likelihood=likelihood)
    with pytest.raises(UnsumError, match="mask.*True or False"):
        unsum.curvature.ggn(mlp(), data, likelihood).matvec(random_rows(mlp(), 1))
    ones = getattr(unsum.curvature, make)(forward, mask=lambda batch: (2 * batch[1]).long())
    unsum.curvature.fit(mlp(), None, data, likelihood=ones)


def test_one_sample_of_a_recurrent_layer_after_batches_of_more():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 3)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    batches = [(numbers(0, n, 5, 4), ids(1, n, high=3)) for n in (3, 1)]
    with pytest.raises(UnsumError, match="weight_hh_l0.*\n.*one sample: give batches of two or more"):
        run_fit(made(Recurrent), classified, Batches(*batches))
