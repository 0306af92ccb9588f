"""`mark`: give a name to any tensor, so that it becomes a site."""

from __future__ import annotations

from torch import Tensor

from unsum import seams
from unsum.errors import SiteError
from unsum.flow.flow import Flow


def mark(tensor: Tensor, name: str) -> Tensor:
    """Name a tensor in your own code, inside a model's forward or in the loop, so that `capture` and `edit` find it.
    Use what it returns. Costs nothing while no such block is open.

    Beside sites of a model, a mark's site begins with `mark:`, as in `capture(model, "fc1:output", "mark:y:output")`.
    So a mark cannot be confused with a module. A misspelt module is an error when the block opens. A mark's name is
    known only when `mark` is called, so a mark that was never made is an error when the block ends. Without a model,
    write `capture(None, "y:output")`.

    Examples:
        >>> import torch, unsum
        >>> x = torch.tensor(2.0, requires_grad=True)
        >>> with unsum.capture(None, "y:grad_output") as got:
        ...     y = unsum.mark(x**2, "y")
        ...     (y * 3).backward()
        >>> got["y:grad_output"]
        tensor(3.)
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> with unsum.capture(model, ":output", "mark:y:grad_output") as got:
        ...     y = unsum.mark(model(torch.ones(1)) ** 2, "y")
        ...     (y * 3).backward()
        >>> got.keys()
        [':output', 'mark:y:grad_output']
    """
    if not isinstance(tensor, Tensor):
        raise SiteError(f"mark names a tensor, got {type(tensor).__name__}")
    if not isinstance(name, str) or not name or ":" in name:
        raise SiteError(f"a mark's name is a text without a colon, got {name!r}")
    if seams.none_open():
        return tensor
    for block in tuple(seams.here()):
        if isinstance(block, Flow):
            tensor = block.mark(tensor, name)
    return tensor
