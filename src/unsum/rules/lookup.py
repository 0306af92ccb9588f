"""Tables whose rows are looked up."""

from __future__ import annotations

import torch

from unsum.factors.lookup import Lookup
from unsum.graph.layout import Mapped
from unsum.graph.nodes import signed
from unsum.graph.positions import Positions
from unsum.rules.registry import Call, rule

_MEAN, _MAX = 1, 2  # as torch numbers the modes of embedding_bag


@rule("EmbeddingBackward0", 0)
def embedding(call: Call) -> Lookup | None:
    """Each position brings its gradient to one row; the row of `padding_idx` gets none."""
    if call.saved("scale_grad_by_freq"):
        return None
    ids, delta = call.take(call.saved("indices")), call.take(call.delta)
    padding = call.saved("padding_idx")
    if 0 <= padding < call.shape[0]:
        delta = delta.masked_fill((ids == padding)[..., None], 0)
    return Lookup(ids, delta, call.shape)


@rule("EmbeddingBagBackward0", 0)
def embedding_bag(call: Call) -> Lookup | None:
    """Every index of a bag brings the bag's gradient to its row: whole, by its weight, or divided by the bag's size.
    Of `mode="max"` each number has a row of its own: no rule."""
    mode, weights = call.saved("mode"), call.saved("per_sample_weights")
    if mode == _MAX or call.saved("scale_grad_by_freq") or call.only_nobodys or call.by.lead != 1:
        return None
    ids, starts = call.saved("indices"), call.saved("offsets")
    bag = torch.searchsorted(starts, torch.arange(len(ids), device=ids.device, dtype=starts.dtype), right=True) - 1
    each = call.delta[bag]
    padding = signed(call.saved("padding_idx"))
    is_padding = (ids == padding) & (padding >= 0)
    if mode == _MEAN:
        sizes = torch.zeros(len(call.delta), dtype=each.dtype, device=ids.device)
        each = each / sizes.index_add_(0, bag, (~is_padding).to(each.dtype)).clamp_min(1)[bag, None]
    if weights is not None:
        each = each * weights[:, None]
    each = each.masked_fill(is_padding[:, None], 0)
    owner = call.by.rows.to(ids.device)[bag]
    apart = Positions(Mapped(owner.to(torch.int32)), call.by.n, 1)
    return Lookup(apart.of(ids), apart.of(each), call.shape, lengths=apart.lengths)
