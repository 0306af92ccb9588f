"""What is different on a GPU: worker threads of the engine, copies that do not wait, loss scaling in half precision."""

import pytest
import torch
from reference import norms_of_all, per_sample_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

import unsum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class Net(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.fc1, self.fc2, self.reentrant = nn.Linear(64, 64), nn.Linear(64, 64), reentrant

    def part(self, h):
        return torch.tanh(self.fc2(torch.tanh(self.fc2(h))))

    def forward(self, x):
        h = self.fc1(x)
        return self.part(h) if self.reentrant is None else checkpoint(self.part, h, use_reentrant=self.reentrant)


SITES = ["fc1:grad_output", "fc2:input", "fc2:output", "fc2:grad_output", "fc2:grad_input", "fc2.weight:grad"]


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_engines_worker_threads_see_the_block(reentrant):
    torch.manual_seed(0)
    net, x = Net(reentrant).double(), torch.randn(8, 64, dtype=torch.float64)
    with unsum.capture(net, *SITES) as truth:
        net(x).square().sum().backward()
    net.zero_grad()
    net.cuda()
    with unsum.capture(net, *SITES, to="cpu") as got:
        net(x.cuda()).square().sum().backward()
    for site in SITES:
        for one, other in zip(got.calls(site), truth.calls(site), strict=True):
            assert one.device.type == "cpu"
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
    with unsum.edit(net, {"fc2:output@1": unsum.scale(2.0), "fc2:grad_output@0": unsum.scale(3.0)}):
        net.zero_grad()
        net(x.cuda()).square().sum().backward()
    edited = net.fc1.weight.grad.cpu()
    net.cpu().zero_grad()
    net.reentrant = None
    with unsum.edit(net, {"fc2:output@1": unsum.scale(2.0), "fc2:grad_output@0": unsum.scale(3.0)}):
        net(x).square().sum().backward()
    torch.testing.assert_close(edited, net.fc1.weight.grad, atol=1e-9, rtol=1e-9)


def test_a_copy_to_the_cpu_does_not_wait_and_is_right_when_read():
    net, x = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)).cuda(), torch.randn(4096, 4096, device="cuda")
    for attempt in range(5):
        with torch.no_grad(), unsum.capture(net, "0:output", to="cpu") as got:
            torch.cuda._sleep(50_000_000)
            net(x)
        kept = got._entries[0].kept
        if attempt:  # the first time, making the pinned memory waits
            assert not kept.arrives.query()  # the device is still busy, and nobody has waited
        torch.testing.assert_close(got["0:output"], net[0](x).detach().cpu())


def test_nobody_waits_for_the_device_while_capturing():
    net, x = Net().cuda(), torch.randn(8, 64, device="cuda")
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        with unsum.capture(net, *SITES, scaler=scaler):
            scaler.scale(net(x).sum()).backward()
        with unsum.capture(net, *SITES, reduce="finite"), unsum.edit(net, {"fc1:grad_output": unsum.clip_norm(1.0)}):
            net(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gradients_under_autocast_and_a_grad_scaler():
    torch.manual_seed(0)
    net, x = Net().cuda(), torch.randn(8, 64, device="cuda")
    scaler = torch.amp.GradScaler("cuda")
    with unsum.capture(net, "fc1:grad_output", "fc1.weight:grad") as truth:
        net(x).square().mean().backward()
    net.zero_grad()
    with unsum.capture(net, "fc1:grad_output", "fc1.weight:grad", scaler=scaler) as got:
        with torch.autocast("cuda", torch.float16):
            out = net(x)
        scaler.scale(out.float().square().mean()).backward()
    for site, value in truth.items():
        assert got[site].dtype == torch.float32
        assert (got[site] - value).norm() < 0.01 * value.norm()


def test_a_tensor_on_another_device_is_an_error_that_names_the_site():
    net = Net().cuda()
    for verb in (unsum.replace(torch.zeros(8, 64)), unsum.add(torch.zeros(64)), lambda t: t.cpu()):
        with pytest.raises(unsum.errors.SiteError, match="fc1:output.*cpu.*needs.*cuda"):
            with unsum.edit(net, {"fc1:output": verb}):
                net(torch.randn(8, 64, device="cuda"))


def test_noise_from_a_generator_on_either_device():
    net, x = Net().cuda(), torch.randn(8, 64, device="cuda")
    for device in ("cpu", "cuda"):
        with unsum.edit(net, {"fc1:output": unsum.noise(1.0, torch.Generator(device).manual_seed(0))}):
            assert net(x).is_cuda


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_by_sample(dtype):
    torch.manual_seed(0)
    net, x = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), torch.randn(5, 7, 16)
    net, x = net.to("cuda", dtype), x.to("cuda", dtype)
    with unsum.gradients(net) as g:
        losses = net(x).flatten(1).square().mean(1)
        losses.sum().backward(retain_graph=True)
    for name, parameter in net.named_parameters():
        wanted = torch.stack([torch.autograd.grad(loss, parameter, retain_graph=True)[0] for loss in losses])
        largest = wanted.float().norm() + 1e-3
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
        assert (g[name].per_sample() - wanted).norm() <= tolerance * largest, name


class Experts(nn.Module):
    """Each token goes to two of four experts, sorted by expert."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(64, 4), nn.Parameter(torch.randn(4, 64, 128) / 8)
        self.down = nn.Parameter(torch.randn(4, 128, 64) / 11)

    def forward(self, x):
        flat = x.flatten(0, 1)
        scores, chosen = self.gate(flat).float().softmax(-1).topk(2)
        expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(4, device=x.device), right=True).int()
        h = torch.tanh(torch.nn.functional.grouped_mm(flat[order // 2], self.up, offs=ends))
        h = torch.nn.functional.grouped_mm(h, self.down, offs=ends) * scores.flatten()[order, None].to(h)
        return h[order.argsort()].view(-1, 2, 64).sum(1).view_as(x)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped_mm")
@pytest.mark.parametrize("way", ["gram", "product"])
def test_experts_wait_for_the_gpu_once(way, monkeypatch, recwarn):
    from unsum.factors import routed

    monkeypatch.setattr(routed.costs, "cheaper", lambda *args, **options: way)
    torch.manual_seed(0)
    model = nn.Sequential(*(Experts() for _ in range(3))).to("cuda", torch.bfloat16)

    def step(x):
        losses = model(x).float().square().sum((1, 2))
        losses.sum().backward()

    found = {}
    for k in range(7):  # learnt, written down and compared by then
        x = torch.randn(6, 32, 64, device="cuda", dtype=torch.bfloat16)
        torch.cuda.set_sync_debug_mode("warn" if k == 6 else "default")
        try:
            recwarn.clear()
            step(x)
            found["plain"] = len(recwarn)
            recwarn.clear()
            with unsum.gradients(model, unsum.Norms()) as g:
                step(x)
            found["norms"] = len(recwarn)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses = model(x).float().square().sum((1, 2))
        wanted = [
            sum(
                p.float().square().sum() for p in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            )
            for loss in losses
        ]
        torch.testing.assert_close(g[unsum.Norms].sq_norms(), torch.stack(wanted), rtol=3e-2, atol=0)
    assert found["norms"] - found["plain"] <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory", [0, None])
def test_clipped_sums(dtype, memory):
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Flatten(2), nn.Linear(256, 40), nn.LayerNorm(40))
    model, x = nn.Sequential(*layers, nn.Linear(40, 8)), torch.randn(6, 3, 16, 16)
    loss = lambda model, x: model(x).float().square().mean((1, 2)).sum()
    each = per_sample_gradients(model, loss, x)
    norms = torch.cat([v.flatten(1) for v in each.values()], 1).norm(dim=1)
    clip = lambda norms: (0.01 / norms).clamp(max=1)
    model, x = model.to("cuda", dtype), x.to("cuda", dtype)
    for grad in (True, False, False):
        with unsum.gradients(model, unsum.WeightedSum(clip, memory=memory), grad=grad) as g:
            loss(model, x).backward()
        for name, found in g[unsum.WeightedSum].sum().items():
            wanted = torch.tensordot(clip(norms), each[name], 1)
            off = (found.double().cpu() - wanted).norm() / (clip(norms) * norms).norm()
            assert off < (1e-4 if dtype == torch.float32 else 3e-2), name
    assert memory is None or "factors" in g[unsum.WeightedSum].chosen.values()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": False}]
)
def test_cudnns_recurrent_layers_by_factors(kind, options):
    torch.manual_seed(0)
    options = {"batch_first": True} | options
    model, x = nn.Sequential(kind(8, 16, **options)), torch.randn(4, 10, 8)

    def loss(model, x):
        y = model(x if options["batch_first"] else x.transpose(0, 1))[0]
        return y.square().sum()

    wanted = per_sample_gradients(model, loss, x)
    model, x = model.cuda(), x.cuda()
    for _ in range(2):
        with unsum.gradients(model, samples=unsum.dim(0 if options["batch_first"] else 1)) as g:
            loss(model, x).backward()
        for name, value in wanted.items():
            found = g[name].per_sample().cpu().double()
            assert float((found - value).norm()) <= 2e-3 * float(value.norm()), name
    assert "replay" not in str(g.coverage()).rpartition("by rule")[0], str(g.coverage())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cudnns_batch_norm_in_evaluation_by_a_rule(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3)).eval()
    x = torch.randn(4, 3, 8, 8)
    wanted = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
    model, x = model.to("cuda", dtype), x.to("cuda", dtype)
    with unsum.gradients(model) as g:
        model(x).float().square().sum().backward()
    for name, value in wanted.items():
        found = g[name].per_sample().cpu().double()
        assert float((found - value).norm()) <= (2e-3 if dtype == torch.float32 else 3e-2) * float(value.norm()), name
    assert "replay" not in str(g.coverage()).rpartition("by rule")[0], str(g.coverage())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_with_channels_last(dtype):
    torch.manual_seed(0)
    layer = lambda i, o, k: nn.Sequential(nn.Conv2d(i, o, k, padding=k // 2, bias=False), nn.BatchNorm2d(o), nn.ReLU())
    model = nn.Sequential(layer(3, 32, 3), layer(32, 32, 1), layer(32, 64, 3), nn.Flatten(), nn.Linear(64 * 64, 3))
    model, x = model.eval(), torch.randn(4, 3, 8, 8)
    wanted = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
    norms = norms_of_all(wanted)
    model = model.to("cuda", dtype, memory_format=torch.channels_last)
    x = x.to("cuda", dtype, memory_format=torch.channels_last)
    for _ in range(5):
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms()) as g:
            model(x).float().square().sum().backward()
        loose = 2e-3 if dtype == torch.float32 else 3e-2
        assert float((g.norms().cpu().double() - norms).norm()) <= loose * float(norms.norm())
        for name, value in wanted.items():
            found, total = model.get_parameter(name).grad.cpu().double(), value.sum(0)
            assert float((found - total).norm()) <= loose * float(value.norm()), name
