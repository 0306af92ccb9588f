"""Small networks that several tests use: two layers on rows of five numbers, and a language model."""

import pytest
import torch
from torch import nn

D = 5


def mlp(*between, outputs=4):
    """Two layers in float64, always the same; `between` are modules on its 6 hidden numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 6), *between, nn.Tanh(), nn.Linear(6, outputs)).double()


def gpt2():
    """A GPT-2 of two layers and 40 tokens, in evaluation mode, always the same."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=16)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval()
