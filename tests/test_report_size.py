"""A report can be sent: its size, and the picture that folds, which it carries packed."""

import base64
import json
import re
import zlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unsum
from unsum.report.folding import packed, shortened

SMALL = 300_000


def classes(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def mlp():
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, classes, (torch.randn(32, 20), torch.arange(32) % 10)


def cnn():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return model, classes, (torch.randn(64, 3, 16, 16), torch.arange(64) % 10)


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=4, n_head=4, n_embd=64, vocab_size=500, n_positions=64, bos_token_id=0, eos_token_id=0
    )

    def next_token(model, ids):
        logits = model(ids, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").sum(1)

    return transformers.GPT2LMHeadModel(config).eval(), next_token, torch.randint(500, (16, 24))


@pytest.mark.parametrize("make", [mlp, cnn, gpt2], ids=lambda make: make.__name__)
def test_the_report_of_a_small_model_is_under_300_kb(make, tmp_path):
    torch.manual_seed(0)
    made = unsum.report(*make(), tmp_path / "r.html")
    assert made.path.stat().st_size < SMALL and made.missing == {}
    assert made.picture in made.path.read_text()  # what is smaller is the page that folds
    assert len(unpacked(made)) > 2 * len(made.picture)


def unpacked(made):
    """The page that folds, as page.js reads it from the report."""
    text = re.search(r'id="folding">(.*?)</script>', made.path.read_text(), re.S)[1]
    lines = zlib.decompress(base64.b64decode(text)).decode().split("\n")
    count = int(lines[0])
    forms, rest = lines[1 : count + 1], lines[count + 1 :]
    found = []
    for line in rest:
        form, *numbers = line.split(" ")
        first, *parts = forms[int(form)].split("\x01")
        found.append(first + "".join(number + part for number, part in zip(numbers, parts, strict=True)))
    return "\n".join(found)


def test_the_page_that_folds_comes_back_letter_by_letter(tmp_path):
    made = unsum.report(
        nn.Sequential(nn.Linear(6, 2)), classes, (torch.randn(4, 6), torch.arange(4) % 2), tmp_path / "r"
    )
    assert unpacked(made) == made.foldable
    assert len(packed(made.foldable)) < len(made.foldable) / 4


def moves_of(page):
    return json.loads(re.search(r'id="moves">(.*?)</script>', page, re.S)[1])


def folded_in(page):
    """For each picture, which groups are folded."""
    pictures = re.findall(r"<template data-picture=.*?</template>", page, re.S)
    return [dict(re.findall(r'data-name="([^"]*)"[^>]*data-folded="(\w+)"', picture)) for picture in pictures]


def test_a_shorter_page_leads_only_to_pictures_that_it_holds_and_turns_the_group_that_was_clicked(tmp_path):
    torch.manual_seed(0)
    made = unsum.report(*cnn(), tmp_path / "r.html")
    whole, short = made.foldable, shortened(made.foldable, 400_000)
    moves, folded = moves_of(short), folded_in(short)
    assert 5 < len(folded) == len(moves) < len(moves_of(whole))
    assert folded == folded_in(whole)[: len(folded)]
    told = 0
    for here, leads in zip(folded, moves, strict=True):
        for name, to in leads.items():
            there = folded[to if to >= 0 else ~to]
            assert there[name] != here[name], name
            told += to < 0  # other groups are then as at the beginning
            if to < 0:
                assert sum(there[other] != folded[0][other] for other in there if other in folded[0]) <= 1
    assert told and set(moves[0]) == set(moves_of(whole)[0])
    assert shortened(whole, 10**9) == whole
