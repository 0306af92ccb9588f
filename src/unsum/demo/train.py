"""Words to numbers, and the demo's training: plain PyTorch, nothing of unsum in it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from unsum.demo.corpus import PAD, START, Corpus
from unsum.demo.model import Transformer
from unsum.progress import progress

EPOCHS = 20
Batch = tuple[Tensor, Tensor]
_PAD = 0  # its place in the vocabulary; as a target: no word is asked for here


def encode(corpus: Corpus, sentences: list[tuple[str, ...]] | None = None) -> Batch:
    """Words read and words to guess, (n, t) each: of all sentences, or of those given.

    Examples:
        >>> from unsum.demo.corpus import make
        >>> read, guess = encode(make())
        >>> read.shape == guess.shape, bool((read[:, 1:] == guess[:, :-1])[guess[:, 1:] != 0].all())
        (True, True)
    """
    places = {word: place for place, word in enumerate(corpus.vocabulary)}
    lines = [sentence.words for sentence in corpus.sentences] if sentences is None else sentences
    longest = max(len(line) for line in lines)
    ids = torch.tensor([[places[word] for word in (START, *line, *[PAD] * (longest - len(line)))] for line in lines])
    return ids[:, :-1], ids[:, 1:]


def word_losses(model: Transformer, batch: Batch) -> Tensor:
    """(n, t): how surprised the model is by each word; 0 where there is none."""
    read, guess = batch
    return F.cross_entropy(model(read).transpose(1, 2), guess, ignore_index=_PAD, reduction="none")


def losses(model: Transformer, batch: Batch) -> Tensor:
    """(n,): by sentence."""
    return word_losses(model, batch).sum(1)


def parts(batch: Batch, size: int = 100) -> list[Batch]:
    """The same, so many sentences at a time."""
    return list(zip(*(tensor.split(size) for tensor in batch), strict=True))


def train(corpus: Corpus, *, seed: int = 0, epochs: int = EPOCHS, size: int = 40, rate: float = 4e-3) -> Transformer:
    """A transformer that has read the corpus `epochs` times. The strong weight decay keeps it from learning single
    sentences by heart before it has learnt what many of them say."""
    read, guess = encode(corpus)
    torch.manual_seed(seed)
    model = Transformer(words=len(corpus.vocabulary), longest=read.shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1.0)
    steps = epochs * -(-len(read) // size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    with progress[None](steps, "training") as line:
        for _ in range(epochs):
            for chosen in torch.randperm(len(read)).split(size):
                batch = read[chosen], guess[chosen]
                loss = losses(model, batch).sum() / (batch[1] != _PAD).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                line.step(f"loss {loss.item():.2f}")
    return model
