"""A sweep of patches: its numbers are those of plain hooks on a GPT-2, its picture and table say the same."""

import re
from xml.etree import ElementTree

import pytest
import torch
import transformers
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import unsum
from unsum.errors import OptionError, SiteError
from unsum.patch_sweep import PatchSweep


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=16, bos_token_id=0, eos_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # at its first values nothing depends on much
    return model


CLEAN = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
CORRUPT = torch.tensor([[3, 1, 7, 1, 5], [9, 2, 8, 5, 3]])


def metric(out):
    return (out.logits[:, -1, 7] - out.logits[:, -1, 9]).mean()


def by_hooks(model, names, positions):
    """(sites, positions): each patch written with hooks of torch's own."""
    modules = dict(model.named_modules())
    kept = {}

    def first(output):
        return output[0] if isinstance(output, tuple) else output

    values = torch.empty(len(names), len(positions), dtype=torch.float64)
    with torch.no_grad():
        for row, name in enumerate(names):
            hook = modules[name].register_forward_hook(lambda m, a, out: kept.update(clean=first(out).clone()))
            model(CLEAN)
            hook.remove()
            for column, position in enumerate(positions):

                def patch(module, args, output, position=position):
                    new = first(output).clone()
                    new[:, position] = kept["clean"][:, position]
                    return (new, *output[1:]) if isinstance(output, tuple) else new

                hook = modules[name].register_forward_hook(patch)
                values[row, column] = metric(model(CORRUPT)).item()
                hook.remove()
    return values


def test_the_numbers_are_those_of_plain_hooks(gpt2):
    sites = [(GPT2Block, "output"), "transformer.h.*.mlp:output", "transformer.h.*.attn:output[0]"]
    sweep = unsum.patch_sweep(gpt2, CLEAN, CORRUPT, sites, metric)
    assert sorted(sweep.sites) == sorted(
        f"transformer.h.{k}{end}" for k in (0, 1) for end in (":output", ".mlp:output", ".attn:output[0]")
    )
    assert sweep.positions == [0, 1, 2, 3, 4] and sweep.values.dtype == torch.float64
    truth = by_hooks(gpt2, [site.partition(":")[0] for site in sweep.sites], range(5))
    torch.testing.assert_close(sweep.values, truth, rtol=0, atol=1e-6)
    assert sweep.values.std() > 1e-3  # patches do something
    with torch.no_grad():
        assert sweep.clean == metric(gpt2(CLEAN)).item() and sweep.corrupt == metric(gpt2(CORRUPT)).item()
    block = sweep.values[sweep.sites.index("transformer.h.1:output")]
    torch.testing.assert_close(block[4], torch.tensor(sweep.clean, dtype=torch.float64))  # the last token of the last
    share = sweep.recovered[sweep.sites.index("transformer.h.1:output"), 4]
    torch.testing.assert_close(share, torch.ones((), dtype=torch.float64))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in gpt2.modules())


def test_some_positions_and_inputs_by_keyword_or_place(gpt2):
    site = "transformer.h.0:output"
    whole = unsum.patch_sweep(gpt2, CLEAN, CORRUPT, site, metric)
    for clean, corrupt in (({"input_ids": CLEAN}, {"input_ids": CORRUPT}), ((CLEAN,), [CORRUPT])):
        for positions, numbers in (([2, -1], [2, 4]), (2, [2]), (slice(3), [0, 1, 2]), (range(4, 1, -2), [4, 2])):
            some = unsum.patch_sweep(gpt2, clean, corrupt, [site], lambda out: metric(out).item(), positions=positions)
            assert some.positions == numbers and torch.equal(some.values, whole.values[:, numbers])


def test_each_call_of_a_module_is_a_row():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(torch.tanh(self.fc(x)))

    net, one, other = Twice(), torch.randn(1, 4, 3), torch.randn(1, 4, 3)
    sweep = unsum.patch_sweep(net, one, other, "fc:output", lambda out: out.sum())
    assert sweep.sites == ["fc:output@0", "fc:output@1"]
    with torch.no_grad():
        mixed = other.clone()
        mixed[:, 2] = one[:, 2]
        assert sweep.values[0, 2].item() == pytest.approx(net(mixed).sum().item(), abs=1e-5)
        torch.testing.assert_close(sweep.values[0], sweep.values[1])  # each position is alone


def test_activations_that_are_changed_in_place_later():
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    one, other = torch.randn(1, 4, 3), torch.randn(1, 4, 3)
    values = unsum.patch_sweep(net, one, other, "0:output", lambda out: out.sum(), positions=1).values
    mixed = other.clone()
    mixed[:, 1] = one[:, 1]
    torch.testing.assert_close(values, net(mixed).sum().detach().double().view(1, 1))


def test_the_table_and_the_picture_say_the_numbers(gpt2, tmp_path):
    sweep = unsum.patch_sweep(gpt2, CLEAN, CORRUPT, (GPT2Block, "output"), metric)
    head, columns, *rows = str(sweep).splitlines()
    assert re.fullmatch(r"clean -?[\d.]+, corrupt -?[\d.]+", head) and columns.split() == ["site", *"01234"]
    for row, site, values in zip(rows, sweep.sites, sweep.values, strict=True):
        name, *cells = row.split()
        assert name == site
        distance = (sweep.values - sweep.corrupt).abs().max().item()
        assert [float(cell) for cell in cells] == pytest.approx(values.tolist(), abs=distance / 10)
    tokens = ["<s>", " a", "\n", " & ", "é"]
    written = sweep.save(tmp_path / "new" / "sweep.svg", tokens=tokens)
    tree = ElementTree.fromstring(written.read_text(encoding="utf-8"))
    cells = [g for g in tree.iter() if g.get("data-role") == "cell"]
    assert [float(cell.get("data-value")) for cell in cells] == sweep.values.flatten().tolist()
    assert {"<s>", "a", "↵", "&", "é"} <= {text.text for text in tree.iter() if text.tag.endswith("text")}
    assert sweep._repr_svg_().startswith("<svg") and "<svg" in sweep.save(tmp_path / "sweep.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("values", "ends", "said"),
    [
        ([0.0, 2.0], ["0.0", "2.0"], ["coral: above the corrupt run, towards the clean run"]),
        ([0.0, -2.0], ["-2.0", "0.0"], ["blue: below the corrupt run, away from the clean run"]),
        (
            [-1.0, 2.0],
            ["-2.0", "0.0", "2.0"],
            [
                "blue: below the corrupt run, away from the clean run",
                "coral: above the corrupt run, towards the clean run",
            ],
        ),
    ],
    ids=["above", "below", "both"],
)
def test_the_legend_has_the_colours_that_are_there(values, ends, said):
    sweep = PatchSweep(["a:output"], [0, 1], torch.tensor([values], dtype=torch.float64), 2.0, 0.0)
    tree = ElementTree.fromstring(sweep.picture().svg)
    texts = [text.text for text in tree.iter() if text.tag.endswith("text")]
    assert texts[-len(said) - len(ends) :] == [*ends, *said]
    colours = {rect.get("class") for rect in tree.iter() if rect.tag.endswith("rect")}
    assert ("coral" in colours, "blue" in colours) == ("coral" in str(said), "blue" in str(said))


def test_a_number_that_rounds_to_zero_has_no_sign():
    sweep = PatchSweep(["a:output"], [0, 1], torch.tensor([[-0.001, 9.0]], dtype=torch.float64), 9.0, 1.0)
    assert str(sweep).splitlines()[-1].split() == ["a:output", "0.0", "9.0"]


def test_numbers_that_are_not_finite_and_many_columns_are_shown():
    values = torch.full((70, 40), 1.5, dtype=torch.float64)
    values[0, 0], values[1, 1] = float("nan"), float("inf")
    sweep = PatchSweep([f"a.{k}:output" for k in range(70)], [*range(40)], values, 2.0, 1.5)
    assert "NaN" in str(sweep) and "∞" in str(sweep) and len(str(sweep).splitlines()) == 63
    assert all(len(line) < 120 for line in str(sweep).splitlines())
    ElementTree.fromstring(sweep.picture().svg)
    assert "no patch changes the metric" in sweep.picture().svg


def run(model, **changes):
    given = {"clean": CLEAN, "corrupt": CORRUPT, "sites": "transformer.h.0:output", "metric": metric}
    return unsum.patch_sweep(model, **(given | changes))


LONGER = torch.tensor([[7, 3, 1, 4, 1, 5, 2], [8, 9, 2, 6, 5, 3, 4]])  # what CLEAN has, and a position on each side
ALIGN = {1: 0, 2: 1, 3: 2, -2: -1}


@pytest.mark.parametrize("align", [ALIGN, {6: 4, 0: 0}], ids=str)
def test_a_sweep_between_inputs_of_different_lengths(gpt2, align):
    """Against hooks of torch's own."""
    site, block = "transformer.h.1:output", gpt2.transformer.h[1]
    sweep = unsum.patch_sweep(gpt2, LONGER, CORRUPT, site, metric, align=align)
    assert sweep.positions == [goes % 5 for goes in align.values()]
    kept = []
    first = lambda output: output[0] if isinstance(output, tuple) else output
    hook = block.register_forward_hook(lambda m, a, out: kept.append(first(out).detach().clone()))
    gpt2(LONGER)
    hook.remove()
    for column, (source, goes) in enumerate(align.items()):

        def patch(module, args, output, source=source, goes=goes):
            new = first(output).clone()
            new[:, goes] = kept[0][:, source]
            return (new, *output[1:]) if isinstance(output, tuple) else new

        hook = block.register_forward_hook(patch)
        want = metric(gpt2(CORRUPT))
        hook.remove()
        torch.testing.assert_close(sweep.values[0, column], want.detach().double())
    some = unsum.patch_sweep(gpt2, LONGER, CORRUPT, site, metric, align=align, positions=[0, -1])
    assert some.positions == [0, 4]
    torch.testing.assert_close(some.values[0, 1], sweep.values[0, sweep.positions.index(4)])


def test_what_the_error_proposes_for_another_length_works(gpt2):
    names = {"unsum": unsum, "model": gpt2, "clean": LONGER, "corrupt": CORRUPT, "metric": metric}
    names["sites"] = ["transformer.h.0:output"]
    with pytest.raises(SiteError) as told:
        unsum.patch_sweep(gpt2, LONGER, CORRUPT, names["sites"], metric)
    codes = [line.partition(": ")[2] for line in str(told.value).splitlines()[1:]]
    assert [eval(code, names).positions for code in codes] == [[2, 3, 4], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"clean": CLEAN[:, :4]}, SiteError, r"(2, 4, 16) in the clean run, (2, 5, 16) in the corrupt one"),
        ({"clean": CLEAN[:1]}, SiteError, r"(1, 5, 16) in the clean run"),
        ({"clean": 3}, OptionError, "clean: give the model's input as a tensor"),
        ({"sites": []}, SiteError, "name at least one site"),
        ({"sites": "transformer.h.0:grad_output"}, SiteError, "did you mean 'output'?"),
        ({"sites": "transformer.h.7:output"}, SiteError, "no site 'transformer.h.7:output'"),
        ({"sites": "transformer.h.0.attn:output"}, SiteError, "name one of them: transformer.h.0.attn:output[0]"),
        ({"sites": "transformer.h.0.attn:output[1]", "positions": 3}, SiteError, "not the 5 positions"),
        ({"sites": ["transformer.h.0.attn:output[1]", "transformer.h.0:output"]}, SiteError, "not the 5 positions"),
        ({"metric": lambda out: out.logits}, OptionError, "metric gave a tensor of shape (2, 5, 40)"),
        ({"metric": lambda out: None}, OptionError, "metric gave a NoneType"),
        ({"positions": 9}, OptionError, "positions=9: there are 5 positions"),
        ({"positions": []}, OptionError, "names none of the 5 positions"),
        ({"align": {}}, OptionError, "{clean position: corrupt position}"),
        ({"align": [0, 1]}, OptionError, "{clean position: corrupt position}"),
        ({"align": {5: 0}}, OptionError, "5 is no position of the clean run, which has 5"),
        ({"align": {0: -6}}, OptionError, "-6 is no position of the corrupt run"),
        ({"align": {0: 4, 1: -1}}, OptionError, "two clean positions go to corrupt position 4"),
        ({"align": {0: 1}, "positions": [1, 2]}, OptionError, "align= names no clean position for 2"),
    ],
)  # fmt: skip
def test_what_a_sweep_cannot_do_it_says(gpt2, changes, error, said):
    with pytest.raises(error) as told:
        run(gpt2, **changes)
    assert said in str(told.value)


def test_dropout_two_dimensions_and_wrong_tokens_are_refused(gpt2):
    gpt2.train()
    with pytest.raises(OptionError, match=r"model\.eval\(\)"):
        run(gpt2)
    gpt2.eval()
    with pytest.raises(SiteError, match=r"needs \(samples, positions, \.\.\.\)"):
        unsum.patch_sweep(nn.Linear(3, 2), torch.ones(4, 3), torch.zeros(4, 3), ":output", lambda out: out.sum())
    sweep = run(gpt2)
    for tokens in (["a", "b"], "abcde", [1, 2, 3, 4, 5]):
        with pytest.raises(OptionError, match="tokens="):
            sweep.picture(tokens)


class Attending(nn.Module):
    """Returns its attention weights, which nothing reads, as a second output of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attn = nn.Embedding(9, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids):
        x = self.table(ids)
        return self.attn(x, x, x, average_attn_weights=False)[0]


def test_a_sweep_along_heads_is_refused():
    with pytest.raises(SiteError, match=r"attn:output\[1\].*not the 5 positions"):
        unsum.patch_sweep(Attending(), torch.tensor([[0, 1, 2, 3, 4]]), torch.tensor([[0, 1, 8, 3, 4]]),
                          "attn:output[1]", lambda out: out.sum())  # fmt: skip


def test_a_sweep_over_what_nothing_reads_says_so():
    class Averaged(Attending):
        def forward(self, ids):
            x = self.table(ids)
            return self.attn(x, x, x)[0]

    ids = torch.tensor([[0, 1, 2, 3, 4]])
    with pytest.warns(unsum.errors.UnreadEdit, match=r"attn:output\[1\]"):
        unsum.patch_sweep(Averaged(), ids, ids.flip(1), "attn:output[1]", lambda out: out.sum().item())


@pytest.mark.parametrize(
    ("sites", "metric", "match"),
    [
        ("table:output", lambda out: float("nan"), "metric gave NaN"),
        ("table:output", "logits", "metric is a function"),
        (lambda out: out.sum(), "table:output", "sites come before the metric"),
    ],
    ids=["nan", "no function", "swapped"],
)
def test_arguments_that_make_no_sweep(sites, metric, match):
    ids = torch.tensor([[0, 1, 2]])
    with pytest.raises((OptionError, SiteError), match=match):
        unsum.patch_sweep(Attending(), ids, ids, sites, metric)


def test_tokens_stand_upright_where_there_are_many():
    sweep = PatchSweep(["a:output"], [*range(30)], torch.rand(1, 30, dtype=torch.float64), 1.0, 0.0)
    words = [f"word{k}" for k in range(30)]
    svg = ElementTree.fromstring(sweep.picture(tokens=words).svg)
    shown = {text.text: text.get("transform", "") for text in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert all(shown[word].startswith("rotate(-90") for word in words)


def test_a_model_or_an_input_that_keeps_state_begins_every_run_alike(gpt2):
    def given(ids):
        cache = transformers.DynamicCache(config=gpt2.config)
        gpt2(torch.tensor([[4, 5, 6]] * 2), past_key_values=cache)
        return {"input_ids": ids, "past_key_values": cache}

    clean, corrupt = given(CLEAN), given(CORRUPT)
    sweep = unsum.patch_sweep(gpt2, clean, corrupt, "transformer.h.1:output", metric)
    own = given(CLEAN)
    with torch.no_grad(), unsum.capture(gpt2, "transformer.h.1:output") as got:
        gpt2(**own)
    for position in range(5):
        verb, own = unsum.replace(got["transformer.h.1:output"]).at(positions=position), given(CORRUPT)
        with torch.no_grad(), unsum.edit(gpt2, {"transformer.h.1:output": verb}):
            assert sweep.values[0, position] == pytest.approx(metric(gpt2(**own)).item(), abs=1e-6)
    assert clean["past_key_values"].get_seq_length() == corrupt["past_key_values"].get_seq_length() == 3
    unsum.sites(gpt2, batch=clean)
    assert clean["past_key_values"].get_seq_length() == 3


def test_buffers_are_as_they_were_in_every_run_and_afterwards():
    class Counting(Attending):
        def __init__(self):
            super().__init__()
            self.register_buffer("runs", torch.zeros(()))

        def forward(self, ids):
            self.runs += 1
            return super().forward(ids) * self.runs

    torch.manual_seed(0)
    model, ids = Counting(), torch.tensor([[0, 1, 2, 3, 4]])
    sweep = unsum.patch_sweep(model, ids, ids.flip(1), "table:output", lambda out: out.sum().item())
    assert sweep.values[0, 2] == pytest.approx(sweep.corrupt)  # the middle is the same in both
    assert model.runs == 0


def test_what_is_recovered_can_be_drawn_and_needs_a_difference(gpt2):
    sweep = unsum.patch_sweep(gpt2, CLEAN, CORRUPT, "transformer.h.1:output", metric)
    svg = sweep.picture(recovered=True).svg
    assert "clean 1.0, corrupt 0.0: share of the difference brought back" in svg
    shown = [float(value) for value in re.findall(r'data-value="([^"]+)"', svg)]
    assert shown == pytest.approx(sweep.recovered.flatten().tolist())
    with pytest.raises(OptionError, match="no difference to bring back"):
        PatchSweep(["a:output"], [0], torch.ones(1, 1), 1.0, 1.0).recovered


def test_the_legend_says_which_colour_leads_to_the_clean_run():
    for clean, colour in ((4.0, "coral: above"), (-4.0, "blue: below")):
        svg = PatchSweep(["a:output"], [0, 1], torch.tensor([[1.0, -1.0]]), clean, 0.0).picture().svg
        assert f"{colour} the corrupt run, towards the clean run" in svg


def test_clean_and_corrupt_are_written_with_digits_that_tell_them_apart():
    sweep = PatchSweep(["a:output"], [0, 1], torch.tensor([[5.0, -30.0]]), clean=-2.21, corrupt=-2.24)
    assert repr(sweep).startswith("clean -2.210, corrupt -2.240")
