"""Names for the few plain types that every other file speaks of."""

from __future__ import annotations

from typing import Literal, get_args

Kind = Literal["input", "output", "grad_input", "grad_output", "grad"]
"""What flows at a place: forward in, forward out, backward out, backward in; `grad` is a parameter's."""

KINDS: tuple[Kind, ...] = get_args(Kind)

PathStep = int | str
Path = tuple[PathStep, ...]
"""The way to a tensor inside a nested value: `(1, "logits")` for `[1].logits`."""
