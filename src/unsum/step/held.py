"""Factors without their tensors: how what is held of gradients is made again of tensors that a recording gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from unsum.factors.dense import Dense
from unsum.factors.lookup import Lookup
from unsum.factors.outer import Outer
from unsum.factors.total import Term
from unsum.factors.windows import Windows
from unsum.kernels import recorded


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """Factors, or formed gradients, without their tensors."""

    cls: Callable[..., Term]
    names: tuple[str, ...]  # of the tensors
    rest: Mapping[str, Any]

    def made(self, tensors: Sequence[Tensor]) -> Term:
        """The factors, of these tensors, which may be those of the graph: they are detached."""
        own = [tensor.detach() for tensor in tensors]
        return self.cls(**self.rest, **dict(zip(self.names, own, strict=True)))


def taken_apart(kind: Term) -> tuple[Form, list[Tensor]]:
    """The form of these factors, and their tensors. Functions among them are left out: they find norms, which are known
    by then."""
    if not isinstance(kind, Outer | Windows | Dense | Lookup):
        raise recorded.NotRecordable(f"{type(kind).__name__} is held by functions")
    every = {field.name: getattr(kind, field.name) for field in fields(kind) if field.init}
    names = tuple([name for name, value in every.items() if isinstance(value, Tensor)])
    rest = {name: value for name, value in every.items() if name not in names and not callable(value)}
    return Form(type(kind), names, rest), [every[name] for name in names]
