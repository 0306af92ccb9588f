"""What deserves a look: dead units, parameters without a gradient, gradients that vanish or explode, NaN and where it
first appears, outliers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unsum.nested import format_path, leaves
from unsum.report.data import Flag, Layer, Statistics
from unsum.report.measure import Idle, Stats
from unsum.report.observe import trainable
from unsum.sites import Names

SHRUNK = 1e-3  # of the gradient at the model's end: below, a gradient vanishes
GROWN = 1e3  # above, it explodes
SEEN = 4  # values of a unit, before it is called dead
SPREADS = 5  # robust standard deviations above the median: an outlier

RULES = {
    "dead": f"every value of a unit is zero over the whole batch, {SEEN} values or more. Flagged where it first shows.",
    "vanishing": f"the norm of the gradient at a layer's output is below {SHRUNK:g} of that at the last layer's.",
    "exploding": f"it is above {GROWN:g} times that at the last layer's.",
    "silent": "a gradient came back, and all of it is zero.",
    "unreached": "parameters that require a gradient and get none: the loss does not depend on them.",
    "nan": "NaN or infinite values. Forward first, in the order of the calls; then backward, from the loss.",
    "outlier": f"a sample's gradient norm is above median + {SPREADS} · 1.4826 · MAD (MAD: the median distance from "
    "the median; with its factor, 5 % of the median at least), among five samples or more; or it is not finite.",
    "interacting": "what a sample gets depends on the other samples of the batch.",
    "check": "per-sample gradients differ from those of plain autograd.",
}

_CHANNELS_FIRST = ("Conv", "BatchNorm", "InstanceNorm", "GroupNorm")
_FEATURES_LAST = ("Linear", "Conv1D", "LayerNorm", "RMSNorm", "Embedding", "LSTM", "GRU", "RNN", "Attention")


def flagged(found: Statistics, model: nn.Module, batch: Any) -> tuple[list[Layer], list[Flag]]:
    """The layers with their flags, and the same as a list, the gravest first."""
    flags = [*_not_finite(found, model, batch), *_unreached(found, model), *_gradients(found), *_dead(found)]
    by_layer: dict[str, list[str]] = {}
    for flag in flags:
        by_layer.setdefault(flag.where.rpartition(":")[0], []).append(flag.kind)
    for layer in found.layers:
        if not _is_finite(layer) and "nan" not in by_layer.get(layer.name, ()):
            by_layer.setdefault(layer.name, []).append("nan")
    layers = [
        dataclasses.replace(layer, flags=tuple(dict.fromkeys(by_layer.get(layer.name, ())))) for layer in found.layers
    ]
    return layers, flags


# ---- NaN ------------------------------------------------------------------------------------------------------------


def _not_finite(found: Statistics, model: nn.Module, batch: Any) -> Iterator[Flag]:
    """The first place forward; the first backward, only if the forward was clean."""
    for path, tensor in leaves(batch):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            yield Flag("nan", f"batch{format_path(path)}", "the batch itself holds NaN or infinite values")
    for name, parameter in model.named_parameters():
        if not bool(parameter.detach().isfinite().all()):
            yield Flag("nan", name, "this parameter holds NaN or infinite values")
    first = next((layer for layer in found.layers if not layer.activation.is_finite), None)
    if first is not None:
        yield Flag("nan", f"{first.name}:output", f"first place forward: {_how_many(first.activation)}")
        return
    bad = (~found.losses.isfinite()).nonzero().flatten().tolist()
    if bad:
        which = f"{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad[:8]))}{', …' if len(bad) > 8 else ''}"
        yield Flag("nan", "loss_fn", f"every layer's output is finite, the loss of sample{which} is not")
    for name, stats in found.backwards:
        if not stats.is_finite:
            yield Flag("nan", f"{name}:grad_output", f"first place backward: {_how_many(stats)}")
            return
    for name, norm in found.parameters.items():
        if math.isnan(norm):
            yield Flag("nan", f"{name}:grad", "first in the gradient of this parameter")
            return


def _how_many(stats: Stats) -> str:
    parts = [f"{stats.nan:,} NaN"] * bool(stats.nan) + [f"{stats.inf:,} infinite"] * bool(stats.inf)
    return f"{' and '.join(parts)} of {math.prod(stats.shape):,} values"


def _is_finite(layer: Layer) -> bool:
    return layer.activation.is_finite and (layer.gradient is None or layer.gradient.is_finite)


# ---- parameters without a gradient ----------------------------------------------------------------------------------


def _unreached(found: Statistics, model: nn.Module) -> Iterator[Flag]:
    """Trainable parameters that the loss does not reach, module by module; none if there was no backward at all."""
    names, called = Names(model), {layer.module for layer in found.layers}
    by_module: dict[str, list[str]] = {}
    for name in trainable(names):
        if found.parameters and name not in found.parameters:
            by_module.setdefault(names.owners[name], []).append(name.rpartition(".")[2])
    for module, own in by_module.items():
        why = (
            "a detach(), no_grad() or an output that nothing uses" if module in called else "this module is not called"
        )
        yield Flag(
            "unreached", f"{module}:{', '.join(own)}", f"the loss does not depend on it: no gradient comes ({why})"
        )


# ---- gradients that fade or grow ------------------------------------------------------------------------------------


def reference(layers: Sequence[Layer]) -> tuple[str, float] | None:
    """The last layer that a gradient came back to, and its norm: what the others are compared with."""
    for layer in reversed(layers):
        if layer.is_leaf and layer.gradient is not None and layer.gradient.is_finite and layer.gradient.norm > 0:
            return layer.name, layer.gradient.norm
    return None


def _gradients(found: Statistics) -> Iterator[Flag]:
    against = reference(found.layers)
    if against is None:
        return
    end, norm = against
    for layer in found.layers:
        stats = layer.gradient
        if stats is None or not stats.is_finite:
            continue
        at, ratio = f"{layer.name}:grad_output", stats.norm / norm
        if stats.norm == 0:
            yield Flag("silent", at, "the gradient that comes back is zero everywhere")
        elif ratio < SHRUNK:
            yield Flag("vanishing", at, f"norm {stats.norm:.2g}, {ratio:.1g} of that at {end}")
        elif ratio > GROWN:
            yield Flag("exploding", at, f"norm {stats.norm:.2g}, {ratio:.1g} times that at {end}")


# ---- dead units -----------------------------------------------------------------------------------------------------


def _dead(found: Statistics) -> Iterator[Flag]:
    """Where units that are never active first show: at a layer's output, or, where a function of the user's own stands
    between two layers, at the input of the next."""
    first = False  # whether dimension 1 has the units
    known: list[float] = []  # shares of dead units that were told, since the last layer that has parameters
    for layer in found.layers:
        has_parameters = layer.weight_norm is not None
        before = found.inputs.get(layer.name)
        if before is not None and not before.is_data and has_parameters:
            idle = _units(before, first)
            if idle is not None and _is_new(idle, known):
                yield Flag("dead", f"{layer.name}:input", _named(idle))
            known = [] if idle is None else [idle.count / idle.units]  # which a norm layer passes on
        first = _channels_first(layer.kind, first)
        idle = _units(layer.activation, first)
        if idle is not None and not layer.activation.is_data and _is_new(idle, known):
            known.append(idle.count / idle.units)
            yield Flag("dead", f"{layer.name}:output", _named(idle))


def _units(stats: Stats, first: bool) -> Idle | None:
    idle = stats.idle.get("first" if first and len(stats.shape) > 2 else "last")
    return idle if idle is not None and idle.seen >= SEEN and stats.is_finite else None


def _is_new(idle: Idle, known: Sequence[float]) -> bool:
    """Whether these are not the dead units of the layer before, passed on (dropout, pooling, flattening)."""
    return not any(math.isclose(idle.count / idle.units, share, rel_tol=1e-6) for share in known)


def _channels_first(kind: str, before: bool) -> bool:
    if any(word in kind for word in _FEATURES_LAST):
        return False
    return before or any(word in kind for word in _CHANNELS_FIRST)


def _named(idle: Idle) -> str:
    names = ", ".join(map(str, idle.named[:12])) + (", …" if idle.count > 12 else "")
    if idle.count == idle.units:
        return f"no unit is active anywhere in the batch ({idle.seen:,} values each)"
    which = f"unit{'s' if idle.count > 1 else ''} {names}"
    verb = "are" if idle.count > 1 else "is"
    return f"{which} {verb} never active in the batch ({idle.count:,} of {idle.units:,}; {idle.seen:,} values each)"


# ---- samples --------------------------------------------------------------------------------------------------------


def outliers(norms: Tensor) -> tuple[list[int], float]:
    """The samples whose norms are far above the others', largest first, and the limit.

    Examples:
        >>> outliers(torch.tensor([1.0, 1.1, 0.9, 1.0, 9.0]))[0]
        [4]
    """
    finite = norms[norms.isfinite()].double()
    broken = (~norms.isfinite()).nonzero().flatten().tolist()
    if len(finite) < 5:
        return broken, math.inf
    median = finite.median()
    spread = torch.maximum((finite - median).abs().median() * 1.4826, median * 0.05)
    limit = float(median + SPREADS * spread)
    order = norms.nan_to_num(0.0, 0.0, 0.0).argsort(descending=True).tolist()
    return broken + [k for k in order if bool(norms[k].isfinite()) and float(norms[k]) > limit], limit
