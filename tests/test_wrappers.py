"""Under torch.compile, DDP and FSDP2 the names are those of the user's own model, and what flows is seen."""

import pytest
import torch
import torch.distributed as dist
from reference import per_sample_gradients
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import unsum
from unsum.errors import SiteError, UnsupportedError


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


SITES = ["0:input", "0:output", "2:grad_input", "2:grad_output", "2.weight:grad", ":output"]


def captured(model, x, *, call=None):
    with unsum.capture(model, *SITES) as got:
        (call or model)(x).square().sum().backward()
    return {site: got[site] for site in SITES}


def test_a_wrapper_does_not_show_in_the_names():
    model = make()
    model[2] = checkpoint_wrapper(model[2])
    wrapped = torch.compile(nn.DataParallel(model), backend="eager")
    assert list(unsum.sites(wrapped)) == list(unsum.sites(make()))
    with pytest.raises(SiteError, match="near: '0:output'"):
        with unsum.capture(wrapped, "module.0:output"):
            pass


@pytest.mark.parametrize("before", [False, True], ids=["compiled in the block", "compiled and called before"])
@pytest.mark.parametrize("how", ["torch.compile", "model.compile()", "a function that calls it", "a part of it"])
def test_a_compiled_model_shows_what_flows(how, before):
    x, plain = torch.randn(3, 4), make()
    truth = captured(plain, x)
    model = make()
    run = model
    if how == "torch.compile":
        run = torch.compile(model, backend="aot_eager")
    elif how == "model.compile()":
        model.compile(backend="aot_eager")
    elif how == "a part of it":
        model[0] = torch.compile(model[0], backend="aot_eager")
    else:
        run = torch.compile(lambda x: model(x), backend="aot_eager")
    if before:
        run(x).sum().backward()
        model.zero_grad()
    got = captured(model, x, call=run)
    for site, value in truth.items():
        assert torch.equal(got[site], value), site
    with unsum.edit(model, {"0:output": unsum.zero()}):
        edited = run(x)
    assert torch.equal(edited, plain[2](torch.zeros(3, 4)))
    each = per_sample_gradients(plain, lambda model, x: model(x).square().sum(), x)
    for reducers in ((), (unsum.Norms(),), (unsum.Norms(),)):
        model.zero_grad()
        with unsum.gradients(run if isinstance(run, nn.Module) else model, *reducers) as g:
            run(x).square().sum().backward()
        for name, wanted in each.items():
            squares = g[unsum.Norms].by_parameter()[name] if reducers else g[name].sq_norms()
            torch.testing.assert_close(squares.double(), wanted.flatten(1).square().sum(1), rtol=1e-4, atol=1e-5)
    # After the block the compiled code is in force again, and knows nothing of the edit.
    torch.testing.assert_close(run(x), plain(x))
    torch._dynamo.reset()


def test_a_model_that_is_exported_inside_a_block_is_refused():
    model = make()
    with pytest.raises((UnsupportedError, RuntimeError, torch._dynamo.exc.TorchDynamoException), match=r"compiled|0:"):
        with unsum.capture(model, "0:output"):
            torch.export.export(model, (torch.randn(3, 4),), strict=True)


def check(rank, kind):
    torch.manual_seed(1)
    x = torch.randn(2, 3, 4)[rank]
    plain = make()
    truth = captured(plain, x)
    model = make()
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (2,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    names = SITES
    with unsum.capture(wrapped, *names) as got:
        wrapped(x).square().sum().backward()
    for site in names:
        torch.testing.assert_close(got[site], truth[site], msg=site)  # the rank's own, before any averaging
    with unsum.edit(wrapped, {"0:output": unsum.zero()}):
        edited = wrapped(x)
    torch.testing.assert_close(edited, plain[2](torch.zeros(3, 4)))
    if kind == "ddp":
        grads = [torch.zeros_like(plain[2].weight.grad) for _ in range(2)]
        dist.all_gather(grads, plain[2].weight.grad)
        torch.testing.assert_close(model[2].weight.grad, sum(grads) / 2)
    _by_sample(wrapped, plain, x)


def _by_sample(wrapped, plain, x):
    """Gradients per sample are the rank's own; `.grad` is averaged over the ranks as ever."""
    truth = [torch.autograd.grad(plain(x[k : k + 1]).square().sum(), list(plain.parameters())) for k in range(len(x))]
    each = {
        name: torch.stack(g) for (name, _), g in zip(plain.named_parameters(), zip(*truth, strict=True), strict=True)
    }
    squares = sum(g.flatten(1).square().sum(1) for g in each.values())
    w = torch.tensor([1.0, 0.5, -1.0])
    for step in range(4):  # learnt, remembered, in a loop
        reducers = (unsum.Norms(),) if step % 2 else (unsum.Norms(), unsum.WeightedSum(w), unsum.SecondMoment())
        wrapped.zero_grad()
        with unsum.gradients(wrapped, *reducers) as g:
            wrapped(x).square().sum().backward()
        torch.testing.assert_close(g[unsum.Norms].sq_norms().float(), squares)
        for name, parameter in plain.named_parameters():
            if len(reducers) > 1:
                wanted = torch.tensordot(w, each[name], 1)
                torch.testing.assert_close(g[unsum.WeightedSum].sum()[name].float(), wanted)
                torch.testing.assert_close(
                    g[unsum.SecondMoment].sum_squares()[name].float(), each[name].square().sum(0)
                )
            own = [torch.zeros_like(parameter) for _ in range(2)]
            dist.all_gather(own, each[name].sum(0))
            grad = getattr(wrapped, "module", wrapped).get_parameter(name).grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            torch.testing.assert_close(grad, sum(own) / 2)
    with unsum.gradients(wrapped) as g:
        wrapped(x).square().sum().backward()
    torch.testing.assert_close(g["0.weight"].per_sample().float(), each["0.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes(kind, ranks):
    ranks[2].run(check, kind)
