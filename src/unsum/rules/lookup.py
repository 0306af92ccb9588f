"""Tables whose rows are looked up."""

from __future__ import annotations

from unsum.factors.lookup import Lookup
from unsum.rules.registry import Call, rule


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
