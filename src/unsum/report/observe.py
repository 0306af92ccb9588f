"""One forward and one backward, of which only statistics are kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unsum.capture import capture
from unsum.check import LossFunction, losses_by_sample
from unsum.errors import EmptyData, NoGradient
from unsum.flow.captured import Captured
from unsum.graph.nodes import ordered
from unsum.nested import leaves
from unsum.report.data import Layer, Statistics
from unsum.report.measure import Measuring, Stats, norm
from unsum.sites import Names, parse, site_name


def statistics(model: nn.Module, loss_fn: LossFunction, batch: Any) -> tuple[Statistics, Tensor]:
    """What flows, layer by layer; and the losses, still attached to their graph."""
    names = Names(model)
    measuring = Measuring(tensor for _, tensor in leaves(batch))
    missing: dict[str, str] = {}
    found: dict[str, float] = {}
    everything = (_any, "output"), (_any, "grad_output"), (_leaf, "input")
    with capture(model, *everything, reduce=measuring, missing="ignore") as got:
        losses = losses_by_sample(loss_fn, model, batch)
        if not len(losses):
            raise EmptyData("there is nothing to report: the batch has no samples.", write="batch = next(iter(loader))")
        try:
            wanted = trainable(names)
            brought = differentiate(losses.sum(), wanted)
            found = {name: norm(g) for name, g in brought.items()}
        except Exception as error:
            missing["gradients"] = in_words(error)
    return _ordered(names, got, losses.detach(), found, measuring.elements, missing), losses


def differentiate(loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gradient of every parameter that the loss reaches. No `.grad` is written, so that nothing which waits for one
    (an optimiser that steps in the backward) is called; where torch refuses that, `.grad` is set aside meanwhile."""
    if not loss.requires_grad:
        raise NoGradient(
            "the losses do not depend on any parameter that requires a gradient.", write="model.requires_grad_(True)"
        )
    brought: Sequence[Tensor | None]
    if any(node.name() == "CheckpointFunctionBackward" for node in ordered([loss.grad_fn])):  # the reentrant kind
        loss.backward(retain_graph=True)
        brought = [p.grad for p in parameters.values()]
    else:
        given = list(parameters.values())
        brought = torch.autograd.grad(loss, given, retain_graph=True, allow_unused=True)
    return {name: grad for name, grad in zip(parameters, brought, strict=True) if grad is not None}


def trainable(names: Names) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, tied ones once, under their first name."""
    first: dict[int, str] = {}
    for name, parameter in names.parameters.items():
        if parameter.requires_grad:
            first.setdefault(id(parameter), name)
    return {name: names.parameters[name] for name in first.values()}


def in_words(error: BaseException) -> str:
    """Why a part of the report is not there."""
    text = str(error).strip() or type(error).__name__
    return text if type(error).__module__.startswith("unsum.") else f"{type(error).__name__}: {text}"


def _any(name: str, module: nn.Module) -> bool:
    return not isinstance(module, torch.jit.ScriptModule)


def _leaf(name: str, module: nn.Module) -> bool:
    return _any(name, module) and next(module.children(), None) is None


def _ordered(
    names: Names, got: Captured, losses: Tensor, gradients: dict[str, float], elements: int, missing: dict[str, str]
) -> Statistics:
    sites = list(_sites(got))
    back = {name: stats for kind, name, _, stats in sites if kind == "grad_output"}
    norms = _norms(names, gradients)
    layers = []
    for kind, name, module, stats in sites:
        if kind != "output":
            continue
        thing = names.modules[module]
        own, grad = norms.get(module, (None, None))
        layers.append(Layer(name, module, type(thing).__name__, _leaf("", thing), stats, back.get(name), own, grad))
    inputs = {name: stats for kind, name, _, stats in sites if kind == "input"}
    backwards = [(name, stats) for kind, name, _, stats in sites if kind == "grad_output"]
    return Statistics(losses, layers, inputs, backwards, gradients, elements, missing)


def _sites(got: Captured) -> Iterator[tuple[str, str, str, Stats]]:
    """Kind, name of the row, module and statistics of all that was captured, in the order in which it came."""
    for name, stats in got.items():
        site = parse(name)
        module = str(site.where)
        row = site_name(module, "", site.call, site.path).replace(":", "", 1)
        yield site.kind, row, module, stats


def _norms(names: Names, gradients: Mapping[str, float]) -> dict[str, tuple[float, float | None]]:
    """Of the parameters that a module holds itself: the norm of their values, and of their gradients."""
    found: dict[str, tuple[float, float | None]] = {}
    of = {id(names.parameters[name]): length for name, length in gradients.items()}  # tied ones have several names
    for name, parameter in names.parameters.items():
        owner = names.owners[name]
        weight, grad = found.get(owner, (0.0, None))
        weight = math.hypot(weight, norm(parameter))
        if id(parameter) in of:
            grad = math.hypot(grad or 0.0, of[id(parameter)])
        found[owner] = weight, grad
    return found
