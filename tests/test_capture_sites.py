"""Which sites, calls and arguments a capture finds, where it stops, and how its values are read."""

import pytest
import torch
from torch import nn

import unsum
from capture_net import X, two_layers
from unsum.errors import OptionError, SiteError, UnknownSite


@pytest.fixture
def net():
    return two_layers()


def test_stop_ends_the_forward_after_the_last_site(net):
    ran = []
    net.fc2.register_forward_hook(lambda *_: ran.append("fc2"))
    after = False
    with unsum.capture(net, "fc1:output", stop=True) as got:
        net(X)
        after = True
    assert not ran and not after
    assert got["fc1:output"].shape == (5, 6, 3)
    with unsum.capture(net, "fc*:input", "fc2:grad_output", stop=True) as got:
        net(X).sum().backward()
        after = True
    assert not after
    assert net.fc1.weight.grad is None
    assert len(got) == 3


def test_stop_passes_through_the_models_own_handlers():
    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            try:
                return self.fc(x)
            except Exception:
                return None

    net = Careful()
    with unsum.capture(net, "fc:output", stop=True):
        with unsum.capture(net, "fc:input", missing="ignore"):
            net(X)
            raise AssertionError("not reached")


def test_stop_waits_for_the_call_that_was_asked_for(net):
    with unsum.capture(net, "fc1:output@2", stop=True) as got:
        for k in range(5):
            net(X + k)
    assert torch.equal(got["fc1:output@2"], net.fc1(X + 2))
    assert k == 2


def test_keyword_and_nested_inputs(net):
    mask = torch.ones(3, requires_grad=True)
    with unsum.capture(net, ":input", ":input.mask", ":grad_input.mask") as got:
        net(X, mask=mask).sum().backward()
    assert got[":input"].shape == X.shape
    assert torch.equal(got[":input.mask"], mask)
    assert torch.equal(got[":input[1]"], mask)  # its place, though it was given by name
    assert torch.equal(got[":grad_input.mask"], mask.grad)
    with unsum.capture(net, ":input.mask", ":input[0]") as got:
        net(X, mask)
    assert torch.equal(got[":input.mask"], mask)
    with unsum.capture(net, ":input[1]") as got:
        net(x=X, mask=mask)
    assert torch.equal(got[":input[1]"], mask)
    with pytest.raises(SiteError, match=r":input.mask.*it has: \[0\]"):
        with unsum.capture(net, ":input.mask"):
            net(X)


def test_a_site_that_holds_several_tensors_is_read_by_their_names():
    net = nn.Sequential(nn.LSTM(4, 3))
    with unsum.capture(net, "0:output", "0:grad_output") as got:
        out, (h, c) = net(X)
        (out.sum() + 2 * c.sum()).backward()
    with pytest.raises(SiteError, match=r"3 tensors.*'0:output\[0\]', '0:output\[1\]\[0\]'"):
        got["0:output"]
    assert torch.equal(got["0:output[1][1]"], c)
    assert torch.equal(got["0:output[1][0]"], h)
    assert (got["0:grad_output[1][1]"] == 2).all()
    assert got.keys()[:3] == ["0:output[0]", "0:output[1][0]", "0:output[1][1]"]
    with pytest.raises(SiteError, match=r"0:output\[7\].*it has: \[0\], \[1\]\[0\]"):
        with unsum.capture(net, "0:output[7]"):
            net(X)


def test_reading_what_is_not_there_says_what_is(net):
    with unsum.capture(net, "fc1:output", "fc2:input") as got:
        net(X)
        net(X)
    with pytest.raises(UnknownSite, match="fc1:input: was not asked for"):
        got["fc1:input"]
    with pytest.raises(KeyError, match="near: 'fc1:output'"):
        got["fc11:output"]
    with pytest.raises(SiteError, match="fits 1 sites|2 calls"):
        got["fc1*:output"]
    with pytest.raises(KeyError, match="called 2 times"):
        got["fc1:output@5"]
    for typo in ("fc1", "fc1:outptu"):
        with pytest.raises(KeyError, match="kinds are"):
            got[typo]
    assert got.keys() == ["fc1:output@0", "fc2:input@0", "fc1:output@1", "fc2:input@1"]
    assert all(torch.equal(got[name], value) for name, value in got.items())
    assert len(got) == 4
    assert "fc1:output" in got and "nonsense" not in got


def test_a_glob_that_fits_several_sites_is_read_through_items(net):
    with unsum.capture(net, "fc*:output") as got:
        net(X)
    with pytest.raises(SiteError, match="fits 2 sites"):
        got["fc*:output"]
    assert [name for name, _ in got.items()] == ["fc1:output", "fc2:output"]
    assert len(got.calls("fc*:output")) == 2
    assert "fc1:output" in repr(got)


@pytest.mark.parametrize(
    "options",
    [
        {"keep": "copy"},
        {"reduce": "median"},
        {"missing": "warn"},
        {"scaler": "none"},
        {"scaler": 0},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_an_option_that_makes_no_sense_is_an_error(net, options):
    with pytest.raises(OptionError, match=next(iter(options))):
        with unsum.capture(net, "fc1:grad_output", **options):
            net(X).sum().backward()
    with pytest.raises(SiteError, match="at least one site"):
        unsum.capture(net)


def test_a_capture_can_be_opened_again_but_not_twice_at_once(net):
    block = unsum.capture(net, "fc1:output")
    with block as first:
        net(X)
        with pytest.raises(SiteError, match="open already"):
            block.__enter__()
    with block as second:
        net(X)
    assert first is not second
    assert len(first.calls("fc1:output")) == len(second.calls("fc1:output")) == 1


def test_one_absent_path_does_not_silence_the_others():
    class Sometimes(nn.Module):
        def forward(self, a, mask=None):
            return (a * 2,) if mask is None else (a * mask, mask)

    net = nn.ModuleDict({"k": Sometimes()})
    x, mask = torch.randn(3, 4), torch.ones(4) * 5
    with unsum.capture(net, "k:input[0]", "k:input.mask", "k:output[0]", "k:output[1]") as got:
        net["k"](x, mask=mask), net["k"](x)
    assert len(got.calls("k:input[0]")) == len(got.calls("k:output[0]")) == 2
    assert len(got.calls("k:input.mask")) == len(got.calls("k:output[1]")) == 1
    edits = {"k:input[0]": unsum.zero(), "k:input.mask": unsum.scale(1.0)}
    with unsum.edit(net, edits):
        assert all((net["k"](x, m)[0] == 0).all() for m in (mask, None))
    with pytest.raises(SiteError, match=r"k:output\[7\]: never fired: it has no \[7\]; it has: \[0\]") as error:
        with unsum.capture(net, "k:output", "k:output[7]"):
            net["k"](x)
    assert len(str(error.value).splitlines()) == 2


def test_calls_are_in_the_order_in_which_they_began():
    class Recursive(nn.Module):
        def forward(self, x, n=2):
            return x if n == 0 else self(x + 1, n - 1) * 2

    net = nn.Sequential(Recursive())
    with unsum.capture(net, "0:input", "0:output") as got:
        net(torch.zeros(1))
    assert [v.item() for v in got.calls("0:input")] == [0, 1, 2]
    assert [v.item() for v in got.calls("0:output")] == [8, 4, 2]
    assert [got[f"0:output@{k}"].item() for k in range(3)] == [8, 4, 2]


def test_a_call_that_raises_is_left_out_and_shifts_nothing():
    class Retry(nn.Module):
        def forward(self, x, n=0):
            if n:
                raise ValueError
            try:
                self(x * 100, 1)
            except ValueError:
                return x * 2

    net, x = nn.Sequential(Retry()), torch.ones(1, requires_grad=True)
    sites = ["0:input", "0:output@0", "0:grad_output", "0:grad_input"]
    with unsum.capture(net, *sites) as got, unsum.edit(net, {"0:output@0": unsum.scale(3.0)}):
        assert net(x) == 6
        net(x).backward()
    assert [v.item() for v in got.calls("0:input")] == [1, 100, 1, 100]
    assert got["0:output@0"] == 2
    assert got.calls("0:grad_output") == [None, None, 1, None]
    assert got.calls("0:grad_input") == [None, None, 2, None]


def test_a_call_by_keyword_is_like_one_by_place():
    net, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4)
    with unsum.capture(net, "0:input") as got:
        net[0](x), net[0](input=x)
    for site in ("0:input", "0:input[0]", "0:input.input"):
        assert len(got.calls(site)) == 2


def test_keyword_only_arguments_and_the_rest():
    class Many(nn.Module):
        def forward(self, a, *rest, mask=None):
            return a + sum(rest)

    net, x = nn.ModuleDict({"k": Many()}), torch.ones(2)
    with unsum.capture(net, "k:input.rest[1]", "k:input.mask", missing="ignore") as got:
        net["k"](x, 2 * x, 3 * x)
    assert torch.equal(got["k:input.rest[1]"], 3 * x)
    assert got.calls("k:input.mask") == []
