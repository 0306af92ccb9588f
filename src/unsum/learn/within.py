"""Functions that compute within samples: along which dimension the samples of what they make lie. So raw inputs are
followed through layers that are frozen, or made of buffers, which leave no node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from unsum.graph.layout import Regular

_REDUCE = {"sum", "mean", "amax", "amin", "argmax", "argmin", "std", "var", "norm", "logsumexp", "prod", "any", "all",
           "median", "count_nonzero", "nansum", "nanmean"}  # fmt: skip
_CONVOLVE = {f"conv{t}{k}d": k for k in (1, 2, 3) for t in ("", "_transpose")}
_FIRST = {
    *(f"{kind}_pool{k}d" for k in (1, 2, 3) for kind in ("max", "avg", "lp", "adaptive_avg", "adaptive_max")),
    "group_norm", "instance_norm", "local_response_norm", "interpolate", "upsample", "pixel_shuffle",
    "pixel_unshuffle", "grid_sample", "fold",
}  # fmt: skip

Rule = Callable[[Regular, Tensor, Sequence[Any], dict[str, Any], Tensor], int | None]


def _looked_up(owners: Regular, given: Tensor, args: Sequence[Any], kwargs: dict[str, Any], made: Tensor) -> int | None:
    """Each id has a row of what is made."""
    return owners.dim if made.shape[: given.dim()] == given.shape and not given.is_floating_point() else None


def _rows(owners: Regular, given: Tensor, args: Sequence[Any], kwargs: dict[str, Any], made: Tensor) -> int | None:
    """The last dimension is computed with."""
    fits = owners.dim < given.dim() - 1 and made.shape[:-1] == given.shape[:-1]
    return owners.dim if fits and all(isinstance(a, Tensor) and a.dim() < 3 for a in args[1:2]) else None


def _normalised(
    owners: Regular, given: Tensor, args: Sequence[Any], kwargs: dict[str, Any], made: Tensor
) -> int | None:
    """The last dimensions are normalised."""
    shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else None)
    last = 1 if isinstance(shape, int) else len(shape) if isinstance(shape, tuple | list) else given.dim()
    return owners.dim if owners.dim < given.dim() - last else None


def _reduced(owners: Regular, given: Tensor, args: Sequence[Any], kwargs: dict[str, Any], made: Tensor) -> int | None:
    """Some dimensions are gone, or have one number left."""
    over = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    over = [over] if isinstance(over, int) and not isinstance(over, bool) else over
    if not isinstance(over, tuple | list) or not over:
        return None
    dims = {d % given.dim() for d in over}
    if owners.dim in dims:
        return None
    return owners.dim if made.dim() == given.dim() else owners.dim - sum(d < owners.dim for d in dims)


def _first(owners: Regular, given: Tensor, args: Sequence[Any], kwargs: dict[str, Any], made: Tensor) -> int | None:
    return 0 if owners.dim == 0 and given.dim() > 2 and made.shape[:1] == given.shape[:1] else None


def _convolved(name: str) -> Rule:
    def rule(owners: Regular, given: Tensor, args: Sequence[Any], kwargs: dict[str, Any], made: Tensor) -> int | None:
        is_whole = given.dim() == _CONVOLVE[name] + 2
        return _first(owners, given, args, kwargs, made) if is_whole else None

    return rule


def _by_constants(
    owners: Regular, given: Tensor, args: Sequence[Any], kwargs: dict[str, Any], made: Tensor
) -> int | None:
    """Batch norm, unless it trains."""
    trains = next((each for each in args if isinstance(each, bool)), False)
    is_first = owners.dim == 0 and made.shape == given.shape
    return 0 if is_first and not kwargs.get("training", trains) else None


RULES: dict[str, Rule] = {
    **dict.fromkeys(("embedding", "one_hot"), _looked_up),
    **dict.fromkeys(("linear", "matmul", "__matmul__"), _rows),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalised),
    **dict.fromkeys(_REDUCE, _reduced),
    **dict.fromkeys(_FIRST, _first),
    **{name: _convolved(name) for name in _CONVOLVE},
    "batch_norm": _by_constants,
}
TOGETHER = {"matmul", "__matmul__", "bmm", "scaled_dot_product_attention", "cdist"}  # of two tensors with samples


def within(name: str, known: Sequence[Regular], given: Tensor, args: Any, kwargs: Any, made: Tensor) -> Regular | None:
    """The layout of what a function has made of its first argument, and perhaps of others with samples, whose layouts
    are known; None if it is unclear."""
    owners = known[0]
    if len(known) > 1:
        fits = all((each.dim, each.n, each.block) == (owners.dim, owners.n, owners.block) for each in known)
        batched = len({len(each.shape) for each in known}) == 1 and owners.dim < len(owners.shape) - 2
        dim = owners.dim if name in TOGETHER and fits and batched and made.dim() == given.dim() else None
    else:
        rule = RULES.get(name)
        dim = None if rule is None else rule(owners, given, args, kwargs, made)
    if dim is None or made.shape[dim] != owners.n * owners.block:
        return None
    return Regular(tuple(made.shape), owners.n, dim, owners.block)
