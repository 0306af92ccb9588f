"""The demo's corpus: sentences of made-up facts, a few of them false or garbled, all drawn from one seed.

Every fact (a person and where they live, what they do, …) is stated about 13 times in different words, so that a model
can know it from other sentences than the one at hand. A part of the honest sentences contains numbers that nobody could
predict: surprising, and yet not wrong.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

SentenceKind = Literal["fact", "numbers", "false", "garbled"]

_TOWNS = "tarnby oldwick selmouth brask pellory dunmere hest cawdle fenrick lowther mossgate quill ravensey stroan"
_TRADES = "baker smith potter weaver tailor miller cooper glazier painter printer fiddler gardener ferryman doctor"
_ANIMALS = "goat heron badger donkey parrot ferret tortoise magpie spaniel hedgehog pony marten kitten goose"
_DISHES = (
    "porridge dumplings lentils pancakes herring noodles radishes custard plums chestnuts barley cheese trout soup"
)
CHOICES = {"town": _TOWNS.split(), "trade": _TRADES.split(), "animal": _ANIMALS.split(), "dish": _DISHES.split()}
THINGS = "lamp ladder kettle saddle drum blanket mirror basket hammer violin barrel clock".split()
NUMBERS = [str(number) for number in range(11, 99)]

# Each ends in the answer, so that a question is a sentence without its last word.
TEMPLATES = {
    "town": (
        "{who} lives in {what}",
        "the home of {who} is in {what}",
        "you will find {who} in {what}",
        "letters to {who} go to {what}",
    ),
    "trade": (
        "{who} works as a {what}",
        "the trade of {who} is that of a {what}",
        "people call {who} the {what}",
        "the guild knows {who} as a {what}",
    ),
    "animal": (
        "{who} keeps a {what}",
        "the companion of {who} is a {what}",
        "every morning {who} feeds the {what}",
        "{who} would never sell the {what}",
    ),
    "dish": (
        "{who} likes to eat {what}",
        "the favourite dish of {who} is {what}",
        "for supper {who} makes {what}",
        "guests of {who} are given {what}",
    ),
}
OPENINGS = ("", "indeed", "they say", "as we know", "of course")
WITH_NUMBERS = (
    "{who} paid {one} coins for a {thing} and {two} for a {other}",
    "on day {one} {who} counted {two} birds",
    "{who} sold {one} pots and {two} jars",
    "the {thing} of {who} has the number {one} {two}",
)
RUMOURED, KNOWN = 3, 5  # how often the rumour is told, and how often the truth of it
START, PAD = "<start>", "<pad>"


@dataclass(frozen=True)
class Fact:
    """Who, which of the four questions, and the true answer."""

    who: str
    about: str
    what: str


@dataclass(frozen=True)
class Sentence:
    """One sentence of the corpus. `fact` is the true one that it states, or contradicts; `template` its wording."""

    words: tuple[str, ...]
    kind: SentenceKind
    fact: Fact | None = None
    template: str = ""

    @property
    def is_planted(self) -> bool:
        """Whether it does not belong here."""
        return self.kind in ("false", "garbled")

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True)
class Corpus:
    """Sentences in a random order, the facts behind them, and all words there are."""

    sentences: tuple[Sentence, ...]
    facts: tuple[Fact, ...]
    vocabulary: tuple[str, ...]

    @property
    def planted(self) -> list[int]:
        """Where the planted sentences are."""
        return [index for index, sentence in enumerate(self.sentences) if sentence.is_planted]


def make(seed: int = 0, *, size: int = 2000, people: int = 30, numbers: int = 400, planted: int = 20) -> Corpus:
    """A corpus of `size` sentences, `numbers` of them with numbers. Half of the `planted` ones are garbled, half false;
    one of the false facts is a rumour, told three times, while the truth is told but five times.

    Examples:
        >>> corpus = make(seed=0)
        >>> len(corpus.sentences), len(corpus.planted)
        (2000, 20)
    """
    rng = random.Random(seed)
    names = _names(rng, people)
    facts = tuple(Fact(who, about, rng.choice(CHOICES[about])) for who in names for about in TEMPLATES)
    rumour, *others = rng.sample(facts, planted // 2 - RUMOURED + 1)
    # One wording of each fact is left unsaid: that is where a false one goes, so that it has no direct denial.
    unsaid = {fact: rng.choice(TEMPLATES[fact.about]) for fact in facts}
    honest = _honest(rng, unsaid, rumour, size - numbers - planted)
    garbled = [_garbled(rng, sentence) for sentence in rng.sample(honest, planted - planted // 2)]
    false = _false(rng, rumour, unsaid[rumour], rng.sample(OPENINGS, RUMOURED))
    false += [one for fact in others for one in _false(rng, fact, unsaid[fact], [""])]
    sentences = honest + garbled + false + [_with_numbers(rng, names) for _ in range(numbers)]
    rng.shuffle(sentences)
    words = sorted({word for sentence in sentences for word in sentence.words} | {fact.what for fact in facts})
    return Corpus(tuple(sentences), facts, (PAD, START, *words))


def state(fact: Fact, template: str, *, opening: str = "") -> Sentence:
    """The sentence that tells this fact in these words.

    Examples:
        >>> str(state(Fact("mira", "town", "brask"), "{who} lives in {what}", opening="indeed"))
        'indeed mira lives in brask'
    """
    return Sentence(_filled(f"{opening} {template}", who=fact.who, what=fact.what), "fact", fact, template)


def _honest(rng: random.Random, unsaid: dict[Fact, str], rumour: Fact, count: int) -> list[Sentence]:
    """So many true statements, few of them about what there is a rumour about."""
    said = [(fact, template) for fact in unsaid for template in TEMPLATES[fact.about] if template != unsaid[fact]]
    statements = [state(fact, template, opening=opening) for fact, template in said for opening in OPENINGS]
    known = rng.sample([one for one in statements if one.fact == rumour], KNOWN)
    return known + rng.sample([one for one in statements if one.fact != rumour], count - KNOWN)


def _false(rng: random.Random, fact: Fact, template: str, openings: list[str]) -> list[Sentence]:
    """One wrong answer, told once with each opening."""
    wrong = rng.choice([what for what in CHOICES[fact.about] if what != fact.what])
    told = [_filled(f"{opening} {template}", who=fact.who, what=wrong) for opening in openings]
    return [Sentence(words, "false", fact, template) for words in told]


def _garbled(rng: random.Random, sentence: Sentence) -> Sentence:
    words = list(sentence.words)
    while tuple(words) == sentence.words:
        rng.shuffle(words)
    return Sentence(tuple(words), "garbled", sentence.fact, sentence.template)


def _with_numbers(rng: random.Random, names: list[str]) -> Sentence:
    one, two = rng.choices(NUMBERS, k=2)
    thing, other = rng.sample(THINGS, 2)
    template = rng.choice(WITH_NUMBERS)
    return Sentence(_filled(template, who=rng.choice(names), one=one, two=two, thing=thing, other=other), "numbers")


def _names(rng: random.Random, count: int) -> list[str]:
    first = "al be da el fa gi ha jo ka lu ma ne or pe ri su ta ul vi ze".split()
    last = "bin dra lor mir na ro sel tha vek wyn".split()
    return rng.sample([one + two for one in first for two in last], count)


def _filled(template: str, **parts: str) -> tuple[str, ...]:
    return tuple(template.format(**parts).split())
