"""Tokens coloured by value: what is shown is what was given, and nothing of a text becomes a tag."""

import re

import numpy as np
import pytest
import torch

import unsum
from test_hits_page import NASTY, Page
from unsum.errors import OptionError


def shown(text):
    """Of each token its string, its title and its share of the strongest colour, with a sign."""
    found = []
    for token in [t for t in Page(text).classed("t") if "title" in t]:
        share = float(re.search(r"--s:([\d.]+)", token.get("style", "--s:0")).group(1))
        found.append((token["text"], token["title"], -share if "n" in token["class"].split() else share))
    return found


def test_tokens_and_values_are_those_given(tmp_path):
    values = torch.tensor([0.0, 1.0, -2.0, 0.5], requires_grad=True)
    tokens = ["The", " cat", NASTY, "\n"]
    made = unsum.heatmap(tokens, values, label="<norm>")
    for text in (made.html, made._repr_html_(), made.save(tmp_path / "new" / "tokens.html").read_text("utf-8")):
        assert shown(text) == [
            ("The", "position 0: 0", 0.0), (" cat", "position 1: +1", 0.5),
            (NASTY, "position 2: −2", -1.0), ("\n", "position 3: +0.5", 0.25),
        ]  # fmt: skip
        assert "&lt;norm&gt;: −2" in text and "<b>" not in text and "http" not in text
    (row,) = Page(made.html).classed("tokens")
    assert row["text"] == "".join(tokens)
    assert "4 tokens" in repr(made)


def test_several_texts_share_a_scale_words_get_spaces_and_padding_is_left_out():
    page = unsum.heatmap([["a", "b"], ["c"]], torch.tensor([[1.0, 4.0], [2.0, 99.0]])).html
    assert [row["text"] for row in Page(page).classed("tokens")] == ["a b", "c"]
    assert [share for _, _, share in shown(page)] == [0.25, 1.0, 0.5]
    lists = unsum.heatmap([["a", "b"], ["c"]], [torch.tensor([1.0, 4.0]), [2.0]])
    assert lists.html == page


@pytest.mark.parametrize(
    ("values", "said"), [([0.0, 2.0], "v: 0 +2"), ([0.0, -2.0], "v: −2 0"), ([-1.0, 2.0], "v: −2 +2"), ([0.0, 0.0], "")]
)
def test_the_legend_has_the_colours_that_are_there(values, said):
    legend = Page(unsum.heatmap(["a", "b"], values, label="v").html).classed("legend-of")
    assert [" ".join(each["text"].split()) for each in legend] == ([said] if said else [])


def test_values_that_are_not_finite_are_outlined_and_do_not_set_the_scale():
    page = Page(unsum.heatmap(["a", "b", "c"], [float("nan"), float("inf"), 1.0]).html)
    assert [t["text"] for t in page.classed("odd")] == ["a", "b"]
    assert [t["text"] for t in page.classed("p")] == ["c"]
    nothing = unsum.heatmap([], torch.tensor([]))
    assert "0 tokens" in repr(nothing) and nothing.html and unsum.heatmap(["a"], [0.0]).html


@pytest.mark.parametrize(
    ("tokens", "values", "said"),
    [
        (["a", "b"], [1.0], "there are 2 tokens and 1 values"),
        (["a"], [1.0, 2.0], "there are 1 tokens and 2 values"),
        ("ab", [1.0, 2.0], "a list of strings, not a str"),
        ([1, 2], [1.0, 2.0], "text 0: tokens"),
        ([["a"], ["b"]], [[1.0]], "2 texts and values for 1"),
        ([["a"], ["b", "c"]], [[1.0], [1.0]], "text 1: there are 2 tokens and 1 values"),
        (["a"], torch.ones(1, 3), "one number for each token"),
        (["a"], 3.0, "one number for each token, not a float"),
    ],
)
def test_what_does_not_fit_is_an_error(tokens, values, said):
    with pytest.raises(OptionError) as told:
        unsum.heatmap(tokens, values)
    assert said in str(told.value)
    with pytest.raises(OptionError, match="saved as .html"):
        unsum.heatmap(["a"], [1.0]).save("tokens.svg")


def test_spaces_as_tokenizers_write_them_and_arrays():
    for tokens in (["The", "Ġcat", "Ċ"], ["▁The", "▁cat", "s"]):
        shown = unsum.heatmap(tokens, np.array([0.0, 1.5, -0.5])).html
        assert " cat</span>" in shown and "Ġ" not in shown and "▁" not in shown
    assert "Ġ alone</span>" not in unsum.heatmap(["a", "bĠ"], [1.0, 2.0]).html
    assert "bĠ</span>" in unsum.heatmap(["a", "bĠ"], [1.0, 2.0]).html  # no token begins with it
