"""Options of a report, its text and tokens, the places it is written to, and its errors."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unsum
from report_nets import IDS, Sequences, batch, data_of, net, next_token, squares
from unsum.errors import OptionError, SamplesError


def test_what_users_write_is_shown_as_text_and_never_run(tmp_path):
    evil = "</script><script>document.title='run'</script>"
    model = nn.Module()
    model.add_module("<b>bold", Sequences())
    model.forward = lambda ids: model._modules["<b>bold"](ids)
    path = tmp_path / "r.html"
    unsum.report(model, next_token, IDS, path, text=[[evil] * 7] * 5, title="<i>title & more")
    page = path.read_text()
    assert evil not in page and "<b>bold" not in page and "<i>title" not in page
    assert page.count("</script>") == 3  # the picture that folds, the data, and the page's own
    assert data_of(path)["tokens"]["text"][0][0] == evil
    assert "&lt;b&gt;bold.<wbr>embed" in page and "&lt;i&gt;title &amp; more" in page


def test_the_page_stands_alone(tmp_path):
    unsum.report(net(), squares, batch(), tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    addresses = set(re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"'<)]*""", page)) - {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink",
    }  # fmt: skip
    assert not addresses
    assert not re.search(r"<link(?! rel=\"icon\" href=\"data:,\")|@import|src=", page)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ([["a"]] * 3, "3 samples"),
        ("abc", "a list of tokens for each sample"),
        (7, "a list of tokens for each sample"),
    ],
    ids=str,
)
def test_a_text_that_does_not_fit(text, said, tmp_path):
    with pytest.raises(OptionError, match=said):
        unsum.report(Sequences(), next_token, IDS, tmp_path / "r.html", text=text)


def test_a_tokenizer_is_asked_for_each_id(tmp_path):
    class Tokenizer:
        def decode(self, ids):
            return "".join("abcdefghijk"[k] for k in ids)

    made = unsum.report(Sequences(), next_token, IDS, tmp_path / "r.html", text=Tokenizer())
    assert made.text[0] == ["abcdefghijk"[k] for k in IDS[0].tolist()]
    with pytest.raises(OptionError, match="holds no integers"):
        unsum.report(net(), squares, batch(), tmp_path / "r.html", text=Tokenizer())


def test_places_to_write_to(tmp_path):
    made = unsum.report(net(), squares, batch(), str(tmp_path / "new" / "folder" / "r.html"))
    assert made.path.exists() and str(made).startswith(str(made.path))
    with pytest.raises(OptionError, match="is a folder"):
        unsum.report(net(), squares, batch(), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot make the folder"):
        unsum.report(net(), squares, batch(), tmp_path / "file" / "r.html")


def test_a_loss_that_is_not_one_for_each_sample(tmp_path):
    with pytest.raises(SamplesError, match=r"one loss for each of the samples"):
        unsum.report(net(), lambda m, b: squares(m, b).sum(), batch(), tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
    with pytest.raises(ZeroDivisionError):
        unsum.report(net(), lambda m, b: 1 / 0, batch(), tmp_path / "r.html")


def test_packed_documents(tmp_path):
    ends = torch.tensor([0, 3, 7])

    def by_document(model, ids):
        losses = F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="none")
        return torch.stack([losses[:3].sum(), losses[3:].sum()])

    class Flat(Sequences):
        def forward(self, ids):
            return self.head(F.gelu(self.mix(self.embed(ids))))

    model, ids = Flat(), torch.arange(8)[None]
    made = unsum.report(model, by_document, ids, tmp_path / "r.html", samples=unsum.packed(ends))
    assert made.norms.shape == (2,) and made.samples.tokens.shape == (2, 4)


def test_the_check_is_run_asked_or_where_it_is_quick(tmp_path):
    assert unsum.report(net(), squares, batch(), tmp_path / "r.html").check.ok
    made = unsum.report(net(), squares, batch(), tmp_path / "r.html", check=False)
    assert made.check is None and "not asked for" in made.missing["check"]


def test_very_many_samples_do_not_make_a_very_large_page(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(20_000, 6), torch.randn(20_000, 2)
    x[12_345] *= 50
    made = unsum.report(nn.Linear(6, 2), squares, (x, y), tmp_path / "r.html", check=False)
    page = (tmp_path / "r.html").read_text()
    assert len(page) < 2_500_000 and made.outliers[0] == 12_345 and "largest of 20,000" in page
    assert page.count("<rect data-sample") == 2_000 and '<rect data-sample="12345"' in page


def test_twelve_layers_make_a_page_that_can_be_sent(tmp_path):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, activation="gelu", batch_first=True)
    model = nn.Sequential(nn.Embedding(500, 64), nn.TransformerEncoder(layer, 12), nn.Linear(64, 500))
    ids = torch.randint(500, (8, 33))
    made = unsum.report(model, next_token, ids, tmp_path / "r.html", text=str)
    assert made.flags == [] and made.missing == {} and made.check.ok
    assert "11 × TransformerEncoderLayer" in made.picture and (tmp_path / "r.html").stat().st_size < 600_000


def test_the_progress_line(tmp_path, capsys, monkeypatch):
    unsum.report(net(), squares, batch(), tmp_path / "r.html")
    assert capsys.readouterr().err == ""
    unsum.report(net(), squares, batch(), tmp_path / "r.html", progress=True)
    told = capsys.readouterr().err
    assert "5/5" in told and "per-sample gradients" in told and told.endswith("\n")


def test_the_check_is_not_run_unasked_for_many_samples_of_a_small_model(tmp_path, monkeypatch):
    model, given = nn.Linear(6, 2), batch(5_000)
    made = unsum.report(model, squares, given, tmp_path / "r.html")
    assert made.check is None and "5,000 backwards" in made.missing["check"]
    assert "5,000 backwards" in (tmp_path / "r.html").read_text()
    assert unsum.report(model, squares, batch(40), tmp_path / "r.html").check.ok


def test_the_colour_may_be_on_the_token_that_is_predicted(tmp_path):
    path = tmp_path / "r.html"
    made = unsum.report(Sequences(), next_token, IDS, path, text=lambda k: f"w{k}", ahead=1, labels=list("abcde"))
    told = data_of(path)
    assert told["tokens"]["ahead"] == 1 and told["tokens"]["apart"] and told["samples"]["labels"] == list("abcde")
    assert made.samples.tokens.shape == (5, 6) and len(told["tokens"]["text"][0]) == 7
    assert "on the token that is predicted there" in path.read_text() and "<bdi>c</bdi>" in path.read_text()
    unsum.report(Sequences(), next_token, IDS, path, text=lambda k: f" w{k}")
    assert not data_of(path)["tokens"]["apart"] and "on the token that is read there" in path.read_text()


@pytest.mark.parametrize("wrong", [{"labels": ["a"]}, {"labels": "abcde"}, {"ahead": -1}, {"ahead": "1"}], ids=str)
def test_options_that_do_not_fit(wrong, tmp_path):
    with pytest.raises(OptionError, match=f"{next(iter(wrong))}="):
        unsum.report(Sequences(), next_token, IDS, tmp_path / "r.html", **wrong)


def test_a_report_needs_no_path():
    made = unsum.report(net(), squares, batch())
    assert made.path.exists() and "<iframe" in made._repr_html_()
    made.path.unlink()
