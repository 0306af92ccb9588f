"""The demo: what is wrong in a corpus, why the model said that, and what if it had thought otherwise."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unsum.demo import corpus as corpora
from unsum.demo.corpus import Corpus
from unsum.demo.looks import folder_for_index, places, write
from unsum.demo.model import Transformer
from unsum.demo.questions import (
    Asked,
    QuestionPosition,
    as_batch,
    ask_all,
    by_word,
    gradient_norms,
    gradient_of,
    taught_by,
    transplant,
)
from unsum.demo.terminal import Page
from unsum.demo.train import EPOCHS, encode, parts, train, word_losses
from unsum.index import store

Figures = dict[str, Any]
Doubt = tuple[Asked, list[Asked]]  # a wrong answer, and the same question in words in which the answer is right
KINDS = {"fact": "facts", "numbers": "with numbers", "false": "planted: false", "garbled": "planted: garbled"}


def main(out: str | Path = "demo", *, quiet: bool = False, seed: int = 0) -> Figures:
    """Tell the story, write the report and the picture into `out`, and give back the figures that were printed."""
    files = places(Path(out))  # before anything is told
    for package in store.PACKAGES:
        store.needed(package)
    page, began = Page(quiet=quiet), time.monotonic()
    with torch.random.fork_rng(devices=[]), _one_thread():
        corpus = corpora.make(seed)
        figures: Figures = {"seed": seed, "sentences": len(corpus.sentences), "planted": len(corpus.planted)}
        model, wrong = _train(page, corpus, seed, figures)
        norms = _whose(page, corpus, model, figures)
        for asked, others in wrong[:1]:
            _why(page, corpus, model, asked, figures, folder_for_index(Path(out)))
            _what_if(page, corpus, model, asked, others, figures)
        figures["files"] = write(page, files, corpus, model, norms)
    page.line(f"\nThat took {time.monotonic() - began:.0f} seconds.")
    return figures


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from more threads, and on a busy machine threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _train(page: Page, corpus: Corpus, seed: int, figures: Figures) -> tuple[Transformer, list[Doubt]]:
    page.heading("A corpus with something wrong in it")
    people, planted = len({fact.who for fact in corpus.facts}), len(corpus.planted)
    page.say(
        f"{len(corpus.sentences):,} sentences tell made-up facts about {people} people, each about 13 times in "
        f"different words. {planted} sentences were planted: {planted // 2} garbled ones, {planted // 2} false ones."
    )
    page.line()
    for kind, title in KINDS.items():
        example = next(sentence for sentence in corpus.sentences if sentence.kind == kind)
        page.line(f"    {title:<20}{example}")
    page.line()
    model = train(corpus, seed=seed)
    answers = ask_all(model, corpus)
    wrong = [asked for asked in answers if not asked.is_right]
    figures |= {"questions": len(answers), "right": len(answers) - len(wrong)}
    weights = sum(parameter.numel() for parameter in model.parameters())
    page.say(
        f"A transformer of {weights:,} weights has read them {EPOCHS} times. "
        f"It now answers {figures['right']} of {figures['questions']} questions right."
    )
    known = [(asked, [other for other in answers if other.fact == asked.fact and other.is_right]) for asked in wrong]
    # First the one that it is surest of, both that it is so and, asked in other words, that it is not.
    known.sort(key=lambda doubt: -doubt[0].sure * sum(other.sure for other in doubt[1]))
    return model, [(asked, others) for asked, others in known if others]


def _whose(page: Page, corpus: Corpus, model: Transformer, figures: Figures) -> Tensor:
    page.heading("Which sentences do not belong? Those that pull hardest")
    page.code(gradient_norms)
    batch = encode(corpus)
    found = gradient_norms(model, batch)
    norms, head = found.norms(), found.by_parameter()["head.weight"]
    with torch.no_grad():
        words = torch.cat([word_losses(model, part) for part in parts(batch)])
    loss = words.sum(1)
    columns = {"loss": loss, "gradient norm": norms, "in the head": head.sqrt()}
    columns["beneath it"] = (norms.square() - head).sqrt()
    figures["medians"] = _medians(page, corpus, columns)
    scores = {
        "gradient norm": norms,
        "loss": loss,
        "loss per word": loss / (batch[1] != 0).sum(1),
        "loss of its worst word": words.max(1).values,
    }
    figures["precision"] = _precisions(page, corpus, scores)
    page.line()
    page.say(
        "Why not the loss? A number that nobody could guess has a high loss for ever. But one number is as good as "
        "another: the layers beneath the head have less to change than for a false word, which contradicts them."
    )
    page.line("\nThe six that pull hardest, and the words that do it:\n")
    _suspects(page, corpus, model, norms)
    return norms


def _medians(page: Page, corpus: Corpus, columns: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    page.line(f"    {'medians':<20}{'sentences':>9}" + "".join(f"{name:>15}" for name in columns))
    found = {}
    for kind, title in KINDS.items():
        which = torch.tensor([sentence.kind == kind for sentence in corpus.sentences])
        found[kind] = {name: values[which].median().item() for name, values in columns.items()}
        row = "".join(f"{value:>15.1f}" for value in found[kind].values())
        page.line(f"    {title:<20}{int(which.sum()):>9,}{row}")
    return found


def _precisions(page: Page, corpus: Corpus, scores: dict[str, Tensor]) -> dict[str, float]:
    planted, k = set(corpus.planted), len(corpus.planted)
    found = {name: len(planted & set(score.topk(k).indices.tolist())) / k for name, score in scores.items()}
    found["chance"] = k / len(corpus.sentences)
    page.line(f"\n    {f'planted among the {k} highest':<30}{'precision':>9}")
    for name, value in found.items():
        page.line(f"    {'by ' + name:<30}{value:>9.2f}")
    return found


def _suspects(page: Page, corpus: Corpus, model: Transformer, norms: Tensor) -> None:
    chosen = [corpus.sentences[index] for index in norms.topk(6).indices.tolist()]
    weights = [by_word(model, as_batch(corpus, sentence.words)).norms().tolist() for sentence in chosen]
    strongest = max(max(row) for row in weights)
    for sentence, row in zip(chosen, weights, strict=True):
        mark = f"planted: {sentence.kind}" if sentence.is_planted else "honest"
        page.line(f"    {mark:<18}{page.words(sentence.words, row, strongest)}")


def _why(page: Page, corpus: Corpus, model: Transformer, asked: Asked, figures: Figures, folder: Path) -> None:
    page.heading("Which sentence taught it this? Those whose gradients are most alike")
    page.line(
        f"    {asked} … {asked.answer}  ({asked.sure:.0%}; the truth, {asked.fact.what}, has {asked.truth:.0%})\n"
    )
    page.code(taught_by)
    batch = as_batch(corpus, (*asked.words, asked.answer), only_last=True)
    hits = taught_by(model, encode(corpus), batch, folder)
    order, cosines = hits.ids[0].tolist(), hits.scores[0].tolist()
    question = gradient_of(model, batch)
    page.line(f"    {'cosine':<9}{'':<18}the words that make it up")
    for index, cosine in zip(order[:6], cosines[:6], strict=True):
        sentence = corpus.sentences[index]
        each = by_word(model, as_batch(corpus, sentence.words)).dot(question)[:, 0]
        row = (each / each.sum() * cosine).tolist()  # adds up to the cosine
        mark = f"planted: {sentence.kind}" if sentence.is_planted else "honest"
        page.line(f"    {cosine:<9.2f}{mark:<18}{page.words(sentence.words, row, 0.7)}")
    guilty = [
        index
        for index in corpus.planted
        if corpus.sentences[index].fact == asked.fact and corpus.sentences[index].words[-1] == asked.answer
    ]
    ranks = sorted(order.index(index) + 1 for index in guilty if index in order)
    figures |= {"question": str(asked), "answer": asked.answer, "truth": asked.fact.what, "ranks": ranks}
    figures["cosines"] = [cosines[rank - 1] for rank in ranks]
    which, none = "sentence" if len(ranks) == 1 else "sentences", f"not among the first {len(order)}"
    page.line(f"\nRank of the planted {which} among {len(corpus.sentences):,}: {', '.join(map(str, ranks)) or none}.")


def _what_if(
    page: Page, corpus: Corpus, model: Transformer, asked: Asked, others: list[Asked], figures: Figures
) -> None:
    page.heading("What if it had thought otherwise? One activation from another run")
    page.say(f"In other words it knows: {'; '.join(f'{other} … {other.answer}' for other in others)}.")
    page.line()
    page.code(transplant)
    tried = [
        (_chances(corpus, model, site, asked, other, place), site, place, other)
        for other in others
        for site in ("blocks.0.attn:output", "blocks.0:output", "blocks.1.attn:output")
        for place in ("name", "last word")
    ]
    right, wrong = (corpus.vocabulary.index(word) for word in (asked.fact.what, asked.answer))
    chances, site, place, other = max(tried, key=lambda one: one[0][right].item())
    answer, after = corpus.vocabulary[int(chances.argmax())], chances[right].item()
    page.line(f"    {asked} …")
    page.line(f"    {'as it is':<12}{asked.answer} {asked.sure:.0%}, {asked.fact.what} {asked.truth:.0%}")
    page.line(f"    {'edited':<12}{asked.answer} {chances[wrong]:.0%}, {asked.fact.what} {after:.0%}\n")
    page.say(
        f"It now answers: {answer}. Edited was {site} at the {place}, taken from “{other}”: the best of {len(tried)}."
    )
    figures["edit"] = {"site": site, "place": place, "from": str(other), "answer": answer}
    figures["edit"] |= {"before": asked.truth, "after": after}


def _chances(corpus: Corpus, model: Transformer, site: str, asked: Asked, other: Asked, place: str) -> Tensor:
    """The chances of the next word with the other run's activation at its name, or at its last word."""
    here, there = (
        QuestionPosition(
            as_batch(corpus, (*run.words, run.answer))[0], len(run.words) if place == "last word" else run.name
        )
        for run in (asked, other)
    )
    return transplant(model, site, here, there)
