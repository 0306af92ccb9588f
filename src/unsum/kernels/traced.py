"""While torch writes down what is to be compiled, tensors are stand-ins and sizes may be symbols."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unsum.seams.operators import is_stand_in


def is_traced(tensor: Tensor) -> bool:
    """Whether this is a stand-in for a tensor: there are no numbers behind it."""
    return torch.compiler.is_dynamo_compiling() or is_stand_in(tensor)


def hint(value: Any) -> Any:
    """The number that a symbol stands for while torch writes down; nothing is made to depend on it."""
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value
