"""For the tests of other projects: keep your own models honest, and your own rules lawful."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from unsum.check import Checked, LossFunction, check
from unsum.errors import NotAvailable
from unsum.factors.factors import Factors, projection
from unsum.gathered import Gradients
from unsum.gradients import gradients
from unsum.kernels.product import rows
from unsum.plan.memory import forget
from unsum.reducers import Kronecker, Norms, Project, SecondMoment, TokenNorms, WeightedSum

__all__ = ["assert_exact", "laws"]


def assert_exact(model: nn.Module, loss_fn: LossFunction, batch: Any) -> Checked:
    """Assert that `unsum.check` finds nothing; with pytest, the fixture of the same name needs no import.

    Examples:
        >>> import torch
        >>> found = assert_exact(nn.Linear(2, 1), lambda m, x: m(x)[:, 0].square(), torch.randn(3, 2))
        >>> found.ok
        True
    """
    found = check(model, loss_fn, batch)
    if not found.ok:
        raise AssertionError(f"per-sample gradients are not those of plain autograd: {found}")
    return found


def laws(make: Callable[[], tuple[nn.Module, Tensor]], rule: str | None = None, **options: Any) -> None:
    """Assert that every read of every parameter's factors, and every reducer, gives what its dense twin gives: the
    gradients that come from calling the graph's own nodes again, which needs no rule.

    Args:
        make: Returns a model in float64 and its input, the same each time. The loss is the sum of squares of what the
            model returns.
        rule: The name of the rule that must have spoken at every parameter, such as "linear.addmm".
        options: Of `unsum.gradients`, such as `samples=`.

    Examples:
        >>> def make():
        ...     torch.manual_seed(0)
        ...     return nn.Linear(3, 2, bias=False).double(), torch.randn(4, 5, 3, dtype=torch.float64)
        >>> laws(make, "linear.mm")
    """
    truth = _run(make, engine="graph", **options)[0]
    for _ in range(2):  # learnt, then remembered
        found, model = _run(make, **options)
        if rule is not None:
            table = found.coverage()
            assert rule in table and "replay " not in table, f"not by the rule {rule}:\n{table}"
        for name in truth:
            _factors(found[name], truth[name])
            _same(
                found[name].sum() + found[name].shared(), _dense(model.get_parameter(name).grad), name, "sum and .grad"
            )
    _reducers(make, truth, options)


def _run(make: Callable[[], tuple[nn.Module, Tensor]], *reducers: Any, **options: Any) -> tuple[Gradients, nn.Module]:
    model, x = make()
    with gradients(model, *reducers, **options) as found:
        model(x).square().sum().backward()
    return found, model


def _dense(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.to_dense() if grad.layout != torch.strided else grad


def _same(ours: Tensor, wanted: Tensor, name: str, what: str) -> None:
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-10, msg=lambda text: f"{name}, {what}: {text}")


def _factors(ours: Factors, twin: Factors) -> None:
    dense, name = twin.per_sample(), ours.name
    flat = rows(dense)
    w = torch.linspace(-1, 2, len(dense), dtype=dense.dtype, device=dense.device)
    _same(ours.per_sample(), dense, name, "per_sample")
    _same(ours.shared(), twin.shared(), name, "shared")
    _same(ours.sum(), dense.sum(0), name, "sum")
    _same(ours.weighted_sum(w), torch.tensordot(w, dense, 1), name, "weighted_sum")
    _same(ours.sq_norms(), flat.square().sum(1), name, "sq_norms")
    norms, total = ours.norms_and_sum()
    _same(norms, flat.square().sum(1), name, "norms_and_sum")
    _same(total, dense.sum(0), name, "norms_and_sum")
    _same(ours.dot(ours), flat @ flat.T, name, "dot")
    _same(ours.dot(twin), flat @ flat.T, name, "dot with dense ones")
    _same(ours.project(2, seed=3), _projected(dense, name, 2, 3), name, "project")
    try:
        tokens = ours.per_token()
    except NotAvailable:
        return
    _same(tokens.sum(1), dense, name, "per_token")
    _same(
        ours.token_sq_norms(), rows(tokens.flatten(0, 1)).square().sum(1).view(tokens.shape[:2]), name, "token_sq_norms"
    )
    assert len(ours.lengths) == ours.n and int(ours.lengths.max()) <= tokens.shape[1]


def _projected(dense: Tensor, name: str, k: int, seed: int) -> Tensor:
    shape = tuple(dense.shape[1:])
    if prod(shape) <= k * k:
        return rows(dense)
    if len(shape) == 1:
        return dense @ projection(name, seed, k * k, shape[0], 1)[0].to(dense).T
    left, right = projection(name, seed, k, shape[0], prod(shape[1:]))
    return (left.to(dense) @ dense.flatten(2) @ right.to(dense)).flatten(1)


def _reducers(make: Callable[[], tuple[nn.Module, Tensor]], truth: Gradients, options: dict[str, Any]) -> None:
    squares = truth.sq_norms()
    w = torch.linspace(-1, 2, len(squares), dtype=squares.dtype)
    clip = lambda norms: (norms.median() / norms).clamp_max(1)
    norms, clipped, weighted, moment, project = (
        Norms(),
        WeightedSum(clip),
        WeightedSum(w),
        SecondMoment(),
        Project(2, 3),
    )
    everything = (norms, clipped, weighted, moment, project, TokenNorms(), Kronecker())
    plain = _run(make, engine="graph", **options)[1]
    model, x = make()
    forget(model)
    for reducers in (
        everything,
        everything,
        (norms,),
    ):  # learnt, remembered; and norms alone, with the weight gradients
        model.zero_grad()
        with gradients(model, *reducers, **options) as found:
            model(x).square().sum().backward()
        _same(norms.sq_norms().double(), squares, "all parameters", "Norms")
        for name, parameter in model.named_parameters():
            _same(_dense(parameter.grad), _dense(plain.get_parameter(name).grad), name, ".grad")
    for name in truth:
        dense = truth[name].per_sample()
        if name not in norms.by_parameter():
            assert not dense.any(), name
            continue
        _same(norms.by_parameter()[name], rows(dense).square().sum(1), name, "Norms.by_parameter")
        _same(weighted.sum()[name], torch.tensordot(w.to(dense), dense, 1), name, "WeightedSum")
        _same(
            clipped.sum()[name], torch.tensordot(clip(squares.sqrt()).to(dense), dense, 1), name, "clipped WeightedSum"
        )
        _same(moment.sum_squares()[name], dense.square().sum(0), name, "SecondMoment")
        _same(project.by_parameter()[name], _projected(dense, name, 2, 3), name, "Project")
    assert found[Norms] is norms
