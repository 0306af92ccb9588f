"""Modules that are tied, patched, copied, exchanged, traced or transformed; hooks and patches after any exit."""

import copy
import pickle

import pytest
import torch
from torch import nn

import unsum
from hazard_nets import Residual, close
from unsum.errors import SiteError, UnsupportedError

torch.manual_seed(0)


def test_inference_mode():
    net, x = Residual(), torch.randn(2, 4)
    with unsum.capture(net, "fc:output") as got, torch.inference_mode():
        net(x)
    close(got["fc:output"], net.fc(2 * x).detach())


def test_autocast_shows_what_really_flows():
    net, x = Residual(), torch.randn(2, 4)
    with unsum.capture(net, "fc:input", "fc:grad_output", "fc.weight:grad") as got:
        with torch.autocast("cpu", torch.bfloat16):
            out = net(x)
        out.float().sum().backward()
    assert got["fc:input"].dtype == torch.float32
    assert got["fc:grad_output"].dtype == torch.bfloat16
    assert got["fc.weight:grad"].dtype == torch.float32


def test_the_projection_inside_multihead_attention_is_never_called_and_says_so():
    net = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2)})
    x = torch.randn(3, 2, 4)
    for block in (
        lambda: unsum.capture(net, "attn.out_proj:output"),
        lambda: unsum.edit(net, {"attn.out_proj:output": unsum.zero()}),
    ):
        with pytest.raises(SiteError, match=r"attn.out_proj:output.*MultiheadAttention.*attn:output\[0\]"):
            with block():
                net["attn"](x, x, x)


def test_the_fast_path_of_the_encoder_does_not_hide_its_layers():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad(), unsum.capture(layer, "linear1:output") as got:
        layer(x)
    assert got["linear1:output"].shape == (2, 3, 16)


def test_a_forward_that_was_patched_on_the_instance():
    net, x = Residual(), torch.randn(2, 4)
    net.fc.forward = lambda x: x * 7
    with unsum.capture(net, "fc:output", "fc:grad_input") as got:
        net(x.requires_grad_()).sum().backward()
    close(got["fc:output"], (14 * x).detach())
    assert (got["fc:grad_input"] == 21).all()


def test_parametrizations_and_spectral_norm_keep_their_buffers():
    torch.manual_seed(0)
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
    twin = copy.deepcopy(net)
    x = torch.randn(3, 4)
    twin(x).sum().backward()
    with unsum.capture(net, "0:input", "0:grad_output", "0.parametrizations.weight.original:grad") as got:
        net(x).sum().backward()
    for (name, one), other in zip(net.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    original = "parametrizations.weight.original"
    assert torch.equal(got[f"0.{original}:grad"], twin.get_parameter(f"0.{original}").grad)
    with pytest.raises(SiteError, match="parametrizations.weight.original:grad"):
        with unsum.capture(net, "0.weight:grad"):
            pass


def test_tied_parameters_and_modules_are_found_under_every_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.one = self.two = nn.Linear(4, 4)

        def forward(self, ids):
            return self.head(self.two(self.one(self.embed(ids))))

    net = Tied()
    with unsum.capture(net, "head.weight:grad", "two:output") as got:
        net(torch.tensor([1, 2])).sum().backward()
    assert torch.equal(got["head.weight:grad"], net.embed.weight.grad)
    assert torch.equal(got["embed.weight:grad"], net.embed.weight.grad)
    assert len(got.calls("two:output")) == len(got.calls("one:output")) == 2


def test_a_copy_made_inside_a_block_does_not_write_into_it():
    net, x = Residual(), torch.randn(2, 4)
    with unsum.capture(net, "fc:output") as got:
        net(x)
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            other(x)
    assert len(got.calls("fc:output")) == 1


def test_modules_exchanged_before_the_block_are_resolved_when_it_opens():
    net, x = Residual(), torch.randn(2, 4)
    block = unsum.capture(net, "fc:output")
    net.fc = nn.Linear(4, 4)
    net.load_state_dict(Residual().state_dict(), assign=True)
    with block as got:
        net(x)
    close(got["fc:output"], net.fc(2 * x).detach())


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_torch_func_transforms_are_refused_by_name(transform):
    net = Residual()
    run = transform(lambda x: net(x[None]).sum())
    with pytest.raises(UnsupportedError, match="torch.func"):
        with unsum.capture(net, "fc:output"):
            run(torch.randn(4) if transform is torch.func.grad else torch.randn(3, 4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torch_jit_and_fx_are_refused_by_name():
    net, x = Residual(), torch.randn(2, 4)
    with pytest.raises(UnsupportedError, match="torch.jit"):
        with unsum.capture(torch.jit.trace(net, x), "fc:output"):
            pass
    with pytest.raises(UnsupportedError, match="torch.jit.trace"):
        with unsum.capture(net, "fc:output"):
            torch.jit.trace(net, x)
    with pytest.raises(UnsupportedError, match="torch.fx"):
        with unsum.capture(net, ":output"):
            torch.fx.Tracer().trace(nn.Sequential(net))
            torch.fx.symbolic_trace(net)(x)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_any_exit_the_model_has_exactly_the_users_own_hooks(error):
    class Failing(Residual):
        def forward(self, x):
            super().forward(x)
            raise error("the user's own")

    net, fired = Failing(), []
    net.fc.register_forward_hook(lambda *_: fired.append(1))

    def hooks():
        return [
            (name, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._forward_hooks_with_kwargs))
            for name, m in net.named_modules()
        ] + [len(p._backward_hooks or ()) for p in net.parameters()]

    before = hooks()
    run_backward = torch.autograd._engine_run_backward
    with pytest.raises(error, match="the user's own"):
        with unsum.capture(net, "fc:output", "same:grad_input", "fc.weight:grad"):
            with unsum.edit(net, {"fc:output": unsum.scale(2.0), "fc.weight:grad": unsum.scale(2.0)}):
                net(torch.randn(2, 4))
    assert hooks() == before
    assert fired == [1]

    def generator():
        with unsum.capture(net, "fc:output", "fc.weight:grad"):
            yield 1
            yield 2

    steps = generator()
    next(steps)
    assert hooks() != before
    steps.close()
    assert hooks() == before
    assert torch.autograd._engine_run_backward is run_backward


@pytest.mark.parametrize("method", ["__call__", "_call_impl"])
@pytest.mark.parametrize("compiled", [False, True])
def test_others_who_replace_the_call_of_modules(method, compiled, monkeypatch):
    """Before a block, inside it and beyond its end: nobody's replacement is lost, and blocks go on to see calls."""
    model, x, seen = nn.Linear(3, 2), torch.randn(4, 3), []
    if compiled:  # in place: then the call itself is watched
        monkeypatch.setattr(
            model, "_compiled_call_impl", lambda *given: nn.Module._call_impl(model, *given), raising=False
        )
    present = lambda: getattr(nn.Module, method)
    put = lambda call: setattr(nn.Module, method, call)
    original = present()

    def wrapped(before):
        def call(self, *args, **kwargs):
            seen.append(before)
            return before(self, *args, **kwargs)

        return call

    def norms():
        with unsum.gradients(model, unsum.Norms()) as g:
            model(x).square().sum().backward()
        return g[unsum.Norms].norms()

    try:
        first = norms()
        assert present() is original
        outer = wrapped(original)
        put(outer)
        torch.testing.assert_close(norms(), first)
        assert present() is outer and len(seen) == 1
        with unsum.gradients(model, unsum.Norms()):
            over = wrapped(present())
            put(over)
            model(x).square().sum().backward()
        assert present() is over
        for _ in range(2):
            torch.testing.assert_close(norms(), first)
        put(outer)
        torch.testing.assert_close(norms(), first)
        assert present() is outer
    finally:
        put(original)
    torch.testing.assert_close(norms(), first)
    assert present() is original
