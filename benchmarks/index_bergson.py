"""How bergson projects gradients, as its `build` goes through batches: two-sided projections of the weights of all
linear layers below the head, in memory or into its file that is mapped into memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def collector(model: Any, project: int, size: int, folder: str, *, on_disk: bool) -> Callable[[Tensor], Any]:
    """A step over a batch, of which it gives the gradients by module. Raises where bergson is absent or fails.

    Only embeddings need a gradient, as in bergson's own `setup_model_and_peft`: torch then computes no gradients of
    weights. The index has room for `size` examples, which are written again by each batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from bergson import GradientCollector, GradientProcessor, IndexConfig, InMemoryCollector
        from bergson.collector.collector import fwd_bwd_factory
        from datasets import Dataset

    if not hasattr(model, "base_model"):
        raise TypeError("bergson needs a model of transformers")
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    data = Dataset.from_dict({"input_ids": [[0, 0]] * size})
    config = IndexConfig(run_path=f"{folder}/index", projection_dim=project)
    config.partial_run_path.mkdir(parents=True, exist_ok=True)
    kind = GradientCollector if on_disk else InMemoryCollector
    processor = GradientProcessor(projection_dim=project)
    own = kind(model=model.base_model, cfg=config, processor=processor, data=data)
    forward_backward = fwd_bwd_factory(config)

    def step(batch: Tensor) -> Any:
        tokens = batch.to(model.device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[:, -1] = False
        with own.with_batch(mask):
            found = forward_backward(model, tokens, tokens, {})
        own.process_batch(list(range(len(tokens))), losses=found)
        return own.builder.grad_buffer

    return step
