"""Several passes over memory as one: Triton kernels for CUDA, each with a plain torch twin that is always there.

`UNSUM_KERNELS=off` turns them off. A kernel is used where Triton is installed, the tensors are on a GPU and lie in
memory as it needs them, and its first use on a device has given what the twin gives. Inside `torch.compile` each is an
operator, `torch.ops.unsum.*`, which makes the same choice when the compiled code runs.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from unsum.kernels import launch, recurrence, twins
from unsum.seams.operators import is_stand_in

Make = Callable[..., Tensor]
_HAS_TRITON = importlib.util.find_spec("triton") is not None  # not asked while torch writes down, which it cannot
SMALL = 1 << 18  # numbers, below which starting a kernel takes longer than what it does
NARROW = 64  # rows of a projection, up to which they fit a program
PARTS = 1 << 28  # gradients of more numbers leave parts that are worth adding up at once
WINDOWS = "Tensor x, Tensor delta, SymInt[] kernel, SymInt[] stride, SymInt[] padding, SymInt[] dilation"


@dataclass(frozen=True)
class Kernel:
    """A kernel, by its twin and what it is tried with."""

    twin: Callable[..., Any]
    example: Callable[[Make], tuple[Any, ...]]
    fits: Callable[..., bool]  # whether tensors lie in memory as the kernel needs them


KERNELS: dict[str, Kernel] = {}
_LAUNCHED: list[str] = []  # those that a compiler launches itself, or that must be there if it is to call them
_ready: set[tuple[str, torch.device, torch.dtype]] = set()  # of these, the ones that were tried


def is_ready(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel that a compiler may call was tried."""
    return (name, device, dtype) in _ready


def make_ready(device: torch.device, dtype: torch.dtype) -> None:
    """Try the kernels that a compiler may launch itself: it cannot be done while it writes down."""
    if device.type == "cuda" and dtype in DTYPES:
        _ready.update((name, device, dtype) for name in _LAUNCHED if is_on(name, device, dtype))


def offer(
    name: str,
    schema: str,
    example: Callable[[Make], tuple[Any, ...]],
    fits: Callable[..., bool] = lambda *_: True,
    *,
    compiled: Literal["operator", "kernel", "twin"] = "operator",
    fake: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A function that runs the kernel, or its twin where there is none. In a graph that is compiled: an operator that
    does so; the kernel itself, launched as the compiler's own are; or the twin, where the compiler makes as good a
    kernel of it. `fake`: the shapes of what an operator gives, if the twin takes long to tell them."""
    twin = getattr(twins, name)
    KERNELS[name] = Kernel(twin, example, fits)

    def chosen(*given: Any) -> Any:
        return getattr(kernels(), name)(*given) if serves(name, *given) else twin(*given)

    def alone(*given: Any) -> Any:  # what an operator gives may not share memory
        found = chosen(*given)
        return found if isinstance(found, Tensor) else tuple(_own(found, k) for k in range(len(found)))

    operator = torch.library.custom_op(f"unsum::{name}", alone, mutates_args=(), schema=schema)
    operator.register_fake(fake or twin)

    def call(*given: Any) -> Any:
        if not is_stand_in(given[0] if isinstance(given[0], Tensor) else given[0][0]):
            return chosen(*given)
        if compiled == "kernel" and serves(name, *given) and is_ready(name, given[0].device, given[0].dtype):
            return getattr(kernels(), name)(*given)
        return operator(*given) if compiled == "operator" else twin(*given)

    if compiled == "kernel" or fake is not None:
        _LAUNCHED.append(name)

    call.__name__ = call.__qualname__ = name
    return call


def _own(found: tuple[Tensor, ...], k: int) -> Tensor:
    here = found[k].untyped_storage().data_ptr()
    if found[k].storage_offset():  # nor begin elsewhere than a tensor of their own would
        return found[k].clone()
    return found[k].clone() if here and any(t.untyped_storage().data_ptr() == here for t in found[:k]) else found[k]


def serves(name: str, *given: Any) -> bool:
    """Whether there is a kernel for these tensors."""
    first = None
    for each in given:
        each = each[0] if isinstance(each, list) else each  # `fits` looks at the others
        if isinstance(each, Tensor):
            dtype = each.dtype
            if not is_on_a_gpu(each) or not (dtype in DTYPES or dtype in _WHOLE) or not each.numel():
                return False
            first = each if first is None and dtype in DTYPES else first
    if first is None or not KERNELS[name].fits(*[each for each in given if _holds_tensors(each)]):
        return False
    return is_installed() if is_stand_in(first) else is_on(name, first.device, first.dtype)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE = (torch.int64, torch.int32)


def is_on_a_gpu(tensor: Tensor) -> bool:
    """Whether a tensor is where kernels run."""
    return tensor.is_cuda


def is_installed() -> bool:
    """Whether there is Triton, and kernels are not turned off."""
    return os.environ.get("UNSUM_KERNELS", "").lower() != "off" and _HAS_TRITON


@functools.cache
def is_on(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel runs on this device, and gives there what its twin gives."""
    if not is_installed():
        return False
    generator = torch.Generator(device).manual_seed(0)
    make = lambda *shape: torch.randn(shape, device=device, generator=generator).to(dtype)
    given = KERNELS[name].example(make)
    wanted = _listed(KERNELS[name].twin(*map(precise, given)))
    for again in (True, False) if launch.again else (False,):  # by itself the second time, if that goes
        launch.again = again
        try:
            for _ in range(2):
                _compare(_listed(getattr(kernels(), name)(*given)), wanted, 1e-4 if dtype == torch.float32 else 2e-2)
        except Exception as error:  # no compiler, another Triton, an old GPU: the twins are always there
            why = str(error).splitlines()[0]
        else:
            return True
    warnings.warn(f"unsum: the Triton kernel {name} is not used on {device} ({dtype}): {why}", stacklevel=2)
    return False


def precise(given: Any) -> Any:
    """An argument in float32, if it is a tensor of fewer bits, or tensors."""
    if isinstance(given, list):
        return [precise(each) for each in given]
    return given.float() if isinstance(given, Tensor) and given.is_floating_point() else given


def _holds_tensors(given: Any) -> bool:
    return isinstance(given, Tensor) or (isinstance(given, list) and isinstance(given[0], Tensor))


def _compare(found: list[Tensor], wanted: list[Tensor], loose: float) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        largest = float(theirs.abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=loose, atol=loose * largest)


def _listed(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


@functools.cache
def kernels() -> Any:
    """The Triton kernels, by name."""
    from unsum.kernels import triton_kernels

    return triton_kernels


def _is_dense(each: Tensor) -> bool:
    return each.is_contiguous()


def _has_rows(*tensors: Tensor) -> bool:
    """Whether the numbers of a row lie beside each other."""
    return all(t.dim() != 2 or t.stride(1) == 1 or t.shape[1] == 1 for t in tensors)


def lies_evenly(x: Tensor, delta: Tensor) -> bool:
    """Whether a product can be made of an image and δ where they lie: as far from a place of δ to the next in a line
    as from the end of a line to the next one."""
    _, high, wide, _ = delta.shape
    even = high == 1 or wide == 1 or delta.stride(1) == wide * delta.stride(2)
    return even and x.dtype == delta.dtype


def _norm(make: Make, *shape: int) -> tuple[Any, ...]:
    return make(*shape), make(*shape), make(*shape[:-1]), make(*shape[:-1])


def _image(make: Make) -> tuple[Any, ...]:
    return make(3, 6, 5, 128), make(3, 3, 3, 130), [3, 3], [2, 2], [1, 1], [1, 1]


norms_and_sum = offer(
    "norms_and_sum", "(Tensor each) -> (Tensor, Tensor)", lambda make: (make(3, 70, 33),), _is_dense, compiled="kernel"
)


def parts_and_sum(each: Tensor) -> tuple[Tensor, Tensor]:
    """The same with squared norms (n,), or (parts, n) that are still to be added up: for many layers at once."""
    if each.numel() <= PARTS and not is_stand_in(each) and serves("norms_and_sum", each):
        return kernels().parts_and_sum(each)  # type: ignore[no-any-return]
    return norms_and_sum(each)  # type: ignore[no-any-return]


norms_and_sum.__doc__ = "(n,) squared norms and the sum over samples, from gradients (n, …) in one pass."

scale_and_shift = offer(
    "scale_and_shift", "(Tensor delta, Tensor x, Tensor mean, Tensor rstd) -> (Tensor, Tensor)",
    lambda make: _norm(make, 3, 70, 33), compiled="twin",
)  # fmt: skip
scale_and_shift.__doc__ = "(n, d) twice: Σ_t δ·(x - mean)·rstd and Σ_t δ, of δ and x (n, t, d), mean and rstd (n, t)."

bfloat16_parts = offer(
    "bfloat16_parts", "(Tensor x) -> (Tensor, Tensor, Tensor)", lambda make: (make(70, 33),), _is_dense
)
bfloat16_parts.__doc__ = "Three tensors in bfloat16 whose sum x is: 8 bits of every number in each."

channel_sums = offer(
    "channel_sums", "(Tensor delta, Tensor x, Tensor mean, Tensor variance, float eps) -> (Tensor, Tensor)",
    lambda make: (make(3, 70, 33), make(3, 70, 33), make(33), make(33).abs(), 0.1), compiled="twin",
)  # fmt: skip
channel_sums.__doc__ = """(n, d) twice: Σ_t δ·(x - mean)/√(variance + eps) and Σ_t δ, of δ and x (n, t, d) with any
strides, mean and variance (d,)."""

token_sq_norms = offer(
    "token_sq_norms", "(Tensor a, Tensor delta) -> (Tensor, Tensor)", lambda make: (make(70, 33), make(70, 600)),
    _has_rows, compiled="twin",
)  # fmt: skip
token_sq_norms.__doc__ = "(rows,) twice: |a|²·|δ|² and |δ|², of a (rows, i) and δ (rows, o)."

normalised_token_sq_norms = offer(
    "normalised_token_sq_norms", "(Tensor delta, Tensor x, Tensor mean, Tensor rstd) -> (Tensor, Tensor)",
    lambda make: _norm(make, 70, 600), _has_rows, compiled="twin",
)  # fmt: skip
normalised_token_sq_norms.__doc__ = """(rows,) twice: Σ_d (δ·(x - mean)·rstd)² and Σ_d δ², of δ and x (rows, d),
mean and rstd (rows,)."""

lookup_sq_norms = offer(
    "lookup_sq_norms", "(Tensor ids, Tensor delta) -> Tensor",
    lambda make: (make(3, 70).mul(3).long(), make(3, 70, 33)),
)  # fmt: skip
lookup_sq_norms.__doc__ = """(n,): the squared norm of what a table gets from each sample, of ids (n, t) and δ
(n, t, d); positions of one row are added first."""

products = offer(
    "products", f"({WINDOWS}, bool with_shift) -> (Tensor, Tensor, Tensor)", lambda make: (*_image(make), True),
    lies_evenly,
)  # fmt: skip
products.__doc__ = """(n,) squared norms, the sum over samples (o, taps·channels), and (n, o) Σ δ if asked for; of x
(n, h, w, channels) and δ (n, places down, places right, o). No window is unfolded, no sample's gradient stored."""

gram_sq_norms = offer("gram_sq_norms", f"({WINDOWS}) -> Tensor", _image, lies_evenly)
gram_sq_norms.__doc__ = "(n,) squared norms by pairs of places; arguments as `products` has them."

weighted_sum = offer(
    "weighted_sum", "(Tensor each, Tensor w) -> Tensor", lambda make: (make(3, 70, 33), make(3).float()),
    lambda each, w: each.is_contiguous() and (each.dtype != twins.wide(each.dtype) or each.numel() >= SMALL),
    compiled="twin",
)  # fmt: skip
weighted_sum.__doc__ = "(…): Σ w_n each_n of (n, …) and (n,), in float32 at least: the weights are not rounded."

scaled = offer(
    "scaled", "(Tensor x, Tensor w) -> Tensor", lambda make: (make(3, 70, 33), make(3).float()),
    lambda x, w: x.is_contiguous(), compiled="twin",
)  # fmt: skip
scaled.__doc__ = "x (n, …) with the n-th part multiplied by w_n, rounded once."

two_sided = offer(
    "two_sided", "(Tensor rows, Tensor columns, Tensor left, Tensor right) -> Tensor",
    lambda make: (make(3, 70, 33), make(3, 70, 150), make(5, 33), make(150, 3)),
    lambda rows, columns, left, right: (
        max(left.shape[0], right.shape[1]) <= NARROW and len({t.dtype for t in (rows, columns, left, right)}) == 1
    ),
    compiled="twin",
)  # fmt: skip
two_sided.__doc__ = """(n, k, m): L G R of G = Σ_t rows_t ⊗ columns_t, of rows (n, t, r) and columns (n, t, c), L (k, r)
and R (c, m)."""

lstm_gates = offer(
    "lstm_gates",
    "(Tensor x, Tensor before, Tensor of_inputs, Tensor of_states, Tensor bias, Tensor cell, Tensor d_states,"
    " Tensor d_last, Tensor d_cell, bool reverse) -> Tensor",
    lambda make: (
        make(3, 5, 20), make(3, 5, 33), make(132, 20), make(132, 33), make(132), make(5, 33), make(3, 5, 33),
        make(5, 33), make(5, 33), True,
    ),
    lambda *tensors: (
        len({t.dtype for t in tensors}) == 1
        and recurrence.block_of(len(tensors[5]), tensors[5].shape[1], tensors[5].device) is not None
    ),
)  # fmt: skip
lstm_gates.__doc__ = """(T, B, 4H): the gradient at the gates of an LSTM, of what it was given (T, B, I), the states
(T, B, H) with which each time began, its weights (4H, I) and (4H, H), the sum of its biases (4H,), the first cell
(B, H), and the gradients of all states (T, B, H), of the last state and of the last cell (B, H)."""
