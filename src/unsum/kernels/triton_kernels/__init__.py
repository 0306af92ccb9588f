"""The Triton kernels, by family. Imported only where they are used (`fused`, the tests)."""

# mypy: ignore-errors
from unsum.kernels.triton_kernels.accumulators import gram_sq_norms, products
from unsum.kernels.triton_kernels.grouped import (
    grouped_gram_sq_norms,
    grouped_norm_sq_norms,
    grouped_shift_sq_norms,
)
from unsum.kernels.triton_kernels.lookups import lookup_sq_norms
from unsum.kernels.triton_kernels.passes import bfloat16_parts, norms_and_sum, parts_and_sum, scaled, weighted_sum
from unsum.kernels.triton_kernels.projections import two_sided
from unsum.kernels.triton_kernels.recurrent import lstm_gates
from unsum.kernels.triton_kernels.sums import channel_sums, scale_and_shift
from unsum.kernels.triton_kernels.tokens import normalised_token_sq_norms, token_sq_norms

__all__ = [
    "bfloat16_parts",
    "channel_sums", "gram_sq_norms", "grouped_gram_sq_norms", "grouped_norm_sq_norms", "grouped_shift_sq_norms",
    "lookup_sq_norms", "lstm_gates", "normalised_token_sq_norms", "norms_and_sum", "parts_and_sum",
    "products",
    "scale_and_shift", "scaled", "token_sq_norms", "two_sided", "weighted_sum",
]  # fmt: skip
