"""`Record`: what one watched step has shown, as data that can be written and read again."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from html import escape
from typing import Any

import torch
from torch import Tensor

from unsum.notebook import element


@dataclass(frozen=True)
class NonFinite:
    """The first value of a step that is NaN or infinite: in the order of the forward, then of the backward. If a
    parameter was not finite before the step, `site` is its name: an earlier step made it so.

    Examples:
        >>> print(NonFinite("fc1:output", "nan", sample=3, position=7, parameter="fc1.weight"))
        nan at fc1:output, sample 3, position 7, micro-batch 0, rank 0
        >>> print(NonFinite("fc1.bias", "nan", parameter="fc1.bias", last_finite=6))
        nan in fc1.bias, a parameter that was last finite in step 6: see that step's record, update and learning rate
    """

    site: str  # "blocks.3.mlp:output", "fc1:grad_output", "fc1.weight:grad", "loss"
    value: str  # "nan" or "inf"
    sample: int | str | None = None  # its id
    position: int | tuple[int, ...] | None = None  # in the sample: a token, or an index
    parameter: str | None = None  # of the module of the site; else the first whose gradient is not finite
    microbatch: int = 0
    rank: int = 0
    last_finite: int | None = None  # of a parameter: the last watched step before which all parameters were finite
    every: int = 1  # how often the run is watched

    @property
    def is_parameter(self) -> bool:
        """Whether it is in a parameter, so that an earlier step, or the initialisation, is the cause."""
        return self.site == self.parameter

    def __str__(self) -> str:
        if self.is_parameter:
            where = f"{self.value} in {self.site}, a parameter that"
            if self.last_finite is None:
                return (
                    f"{where} was not finite before the first watched step: check its initialisation or the checkpoint "
                    "that you loaded"
                )
            advice = "see that step's record, update and learning rate"
            advice = "watch with every=1 to find the cause" if self.every > 1 else advice
            return f"{where} was last finite in step {self.last_finite}: {advice}"
        where = f"{self.value} at {self.site}"
        where += "" if self.sample is None else f", sample {self.sample}"
        where += "" if self.position is None else f", position {self.position}"
        return where + f", micro-batch {self.microbatch}, rank {self.rank}"


@dataclass
class Layer:
    """Statistics of one layer (a module with parameters of its own) in a step. None: not measured."""

    output: float | None = None  # root mean square of its output
    grad_output: float | None = None  # the same of the gradient at its output
    norm: float | None = None  # root mean square over samples of the norms of its parameters' gradients
    largest: float | None = None  # the largest of these norms
    grad: float | None = None  # norm of the step's gradient: the sum over samples, as in .grad
    weight: float | None = None  # norm of its parameters
    update: float | None = None  # norm of the optimizer's change of them, over `weight`


@dataclass
class Record:
    """The record of one watched step. It prints as one line; sinks write `as_dict()`.

    Examples:
        >>> record = Record(step=3, loss=0.5, norms=torch.tensor([1.0, 2.0]), ids=[0, 1])
        >>> print(record)
        step 3  loss 0.5  norms 1.5 median, 2 largest (sample 1)
        >>> Record.from_dict(record.as_dict()).ids
        [0, 1]
    """

    step: int
    loss: float | None = None  # the sum of what was differentiated, without the scale of a GradScaler
    norms: Tensor | None = None  # (n,): of each sample's gradient, over all chosen parameters; None where refused
    ids: list[int | str] = field(default_factory=list)
    noise_scale: float | None = None  # tr Σ / |G|², unbiased; None for one sample, or where `.grad` is not the sum
    outliers: list[int | str] = field(default_factory=list)  # ids of samples with norms far above the others'
    nonfinite: NonFinite | None = None
    layers: dict[str, Layer] = field(default_factory=dict)
    texts: dict[int | str, str] = field(default_factory=dict)  # of outliers, by id, where texts are given
    refused: str | None = None  # why there are no norms
    seconds: float | None = None  # since the watched step before
    rank: int = 0
    parameters: int | None = None  # how many numbers the model's parameters are, and how many of these are trained
    trainable: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data: numbers, strings, lists and dicts. What is not finite is written as "nan", "inf", "-inf"."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        found["norms"] = None if self.norms is None else self.norms.tolist()
        found["nonfinite"] = None if self.nonfinite is None else asdict(self.nonfinite)
        found["layers"] = {name: dict(vars(layer)) for name, layer in self.layers.items()}
        found["texts"] = {str(key): text for key, text in self.texts.items()}
        return _plain(found)  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Record:
        """A record from the result of `as_dict`; unknown fields are ignored."""
        known = {each.name for each in fields(cls)}
        values = {name: value for name, value in found.items() if name in known}
        for name in ("loss", "noise_scale", "seconds"):
            values[name] = _number(values.get(name))
        if values.get("norms") is not None:
            values["norms"] = torch.tensor([_number(value) for value in values["norms"]], dtype=torch.float64)
        if values.get("nonfinite") is not None:
            where = values["nonfinite"]
            position = where.get("position")
            where = {**where, "position": tuple(position) if isinstance(position, list) else position}
            values["nonfinite"] = NonFinite(**where)
        values["layers"] = {
            name: Layer(**{key: _number(value) for key, value in layer.items()})
            for name, layer in (values.get("layers") or {}).items()
        }
        return cls(**values)

    def scalars(self) -> dict[str, float]:
        """{name: number}: the numbers that loggers draw as curves."""
        found: dict[str, float | None] = {"loss": self.loss, "noise_scale": self.noise_scale}
        if self.norms is not None and len(self.norms):
            found |= {"norm/median": _middle(self.norms), "norm/largest": float(self.norms.max())}
            found["outliers"] = float(len(self.outliers))
        for name, layer in self.layers.items():
            found |= {f"layer/{name or 'model'}/{key}": value for key, value in vars(layer).items()}
        return {name: float(value) for name, value in found.items() if value is not None}

    def headlines(self) -> dict[str, float]:
        """{"unsum/…": number}: what joins a trainer's own logs. These are the `scalars` without the layers, and without
        the loss, which a trainer logs itself."""
        shown = {name: value for name, value in self.scalars().items() if not name.startswith("layer/")}
        return {f"unsum/{name}": value for name, value in shown.items() if name != "loss"}

    def __str__(self) -> str:
        parts = [f"step {self.step}"]
        parts += [] if self.loss is None else [f"loss {self.loss:.4g}"]
        if self.norms is not None and len(self.norms):
            at = self.ids[int(self.norms.argmax())]
            parts.append(f"norms {_middle(self.norms):.3g} median, {float(self.norms.max()):.3g} largest (sample {at})")
        parts += [] if self.noise_scale is None else [f"noise scale {self.noise_scale:.3g}"]
        parts += [f"outliers {', '.join(map(str, self.outliers))}"] if self.outliers else []
        parts += [] if self.nonfinite is None else [f"NOT FINITE: {self.nonfinite}"]
        parts += [] if self.refused is None else [f"no norms: {self.refused.splitlines()[0]}"]
        return "  ".join(parts)

    def _repr_html_(self) -> str:
        layers = f"{len(self.layers):,} layers: .layers; all numbers: .as_dict()"
        return element(f'<div>{escape(str(self))}</div><div class="note">{layers}</div>')


def _middle(values: Tensor) -> float:
    """The median of those that are not NaN."""
    return float(values.double().nanquantile(0.5))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # which JSON has no word for
    if isinstance(value, dict):
        return {key: _plain(held) for key, held in value.items()}
    return [_plain(held) for held in value] if isinstance(value, list | tuple) else value


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value
