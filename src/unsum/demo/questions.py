"""The demo's four uses of unsum, each a few lines. `unsum demo` shows them as they are here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import unsum
from unsum.demo.corpus import TEMPLATES, Corpus, Fact, Sentence, state
from unsum.demo.model import Transformer
from unsum.demo.train import Batch, encode, losses, parts
from unsum.gathered import Gradients
from unsum.index import Hits
from unsum.progress import progress


@dataclass(frozen=True)
class Asked:
    """A question, and what the model says."""

    words: tuple[str, ...]
    fact: Fact
    template: str
    answer: str
    sure: float  # the probability of the answer
    truth: float  # and of the right one

    @property
    def is_right(self) -> bool:
        """Whether the model knows."""
        return self.answer == self.fact.what

    @property
    def name(self) -> int:
        """The position at which the person's name is read; the start is at 0."""
        return self.words.index(self.fact.who) + 1

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True)
class QuestionPosition:
    """A position in a question that is read, (1, t)."""

    read: Tensor
    position: int


def ask_all(model: Transformer, corpus: Corpus) -> list[Asked]:
    """Every fact, asked for in all its wordings."""
    whole = [state(fact, template) for fact in corpus.facts for template in TEMPLATES[fact.about]]
    read, _ = encode(corpus, [sentence.words for sentence in whole])
    last = torch.tensor([len(sentence.words) - 1 for sentence in whole])
    with torch.no_grad():
        chances = model(read)[torch.arange(len(whole)), last].softmax(-1)
    return [_asked(corpus, sentence, row) for sentence, row in zip(whole, chances, strict=True)]


def _asked(corpus: Corpus, sentence: Sentence, chances: Tensor) -> Asked:
    assert sentence.fact is not None
    best = int(chances.argmax())
    truth = chances[corpus.vocabulary.index(sentence.fact.what)].item()
    answer, sure = corpus.vocabulary[best], chances[best].item()
    return Asked(sentence.words[:-1], sentence.fact, sentence.template, answer, sure, truth)


def gradient_norms(model: Transformer, batch: Batch) -> unsum.Norms:
    """How hard each sentence pulls on the weights."""
    with unsum.gradients(model, unsum.Norms(), grad=False) as g:
        for part in progress(parts(batch), "gradients"):
            losses(model, part).sum().backward()
    return g[unsum.Norms]


def gradient_of(model: Transformer, question: Batch) -> Gradients:
    """The gradient of one answer, to be compared with others."""
    with unsum.gradients(model, grad=False) as g:
        losses(model, question).sum().backward()
    return g


def taught_by(model: Transformer, batch: Batch, question: Batch, folder: Path) -> Hits:
    """The sentences whose gradients are most like the answer's. The index is built once and asked often; the best 200
    that it finds are compared again, by whole gradients."""
    sentences = list(zip(*batch, strict=True))
    unsum.index.build(model, losses, sentences, folder, batch_size=100)
    i = unsum.index.open(folder, sentences)
    return i.query(model, losses, question, k=200, score="cosine", rerank=200)


def by_word(model: Transformer, sentence: Batch) -> Gradients:
    """The gradient of one sentence, word by word: each word's loss is a sample, so that they add up to the whole."""
    read, guess = sentence  # (1, t)
    with unsum.gradients(model, grad=False) as g:
        losses(model, (read.expand(guess.shape[1], -1), guess * torch.eye(guess.shape[1]).long())).sum().backward()
    return g


def transplant(model: Transformer, site: str, here: QuestionPosition, there: QuestionPosition) -> Tensor:
    """(words,): chances of the next word, when at one position of one run flows what flowed in another run."""
    with torch.no_grad(), unsum.capture(model, site) as got:
        model(there.read)
    moved = unsum.replace(got[site][:, [there.position]]).at(positions=here.position)
    with torch.no_grad(), unsum.edit(model, {site: moved}):
        return model(here.read)[0, -1].softmax(-1)


def as_batch(corpus: Corpus, words: Sequence[str], *, only_last: bool = False) -> Batch:
    """One sentence (1, t); with `only_last`, only its last word is guessed."""
    read, guess = encode(corpus, [tuple(words)])
    if only_last:
        guess = torch.where(torch.arange(guess.shape[1]) == guess.shape[1] - 1, guess, 0)
    return read, guess
