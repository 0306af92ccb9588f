"""Where kernels are used and where their twins are: in a whole backward, and inside compiled graphs."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import unsum
from kernel_inputs import DEVICE, close, kernels, made
from unsum.factors.windows import Geometry, Windows
from unsum.kernels import costs, fused, launch, product, twins
from unsum.plan.memory import forget
from unsum.seams.operators import is_stand_in

# ---- which is used ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", fused.KERNELS)
def test_a_kernel_that_gives_something_else_is_not_used(name, monkeypatch):
    is_on = lambda: fused.is_on.__wrapped__(name, torch.device(DEVICE), torch.float32)

    def wrong(*given):
        found = getattr(twins, name)(*given)
        return 2 * found if isinstance(found, torch.Tensor) else [2 * t for t in found]

    monkeypatch.setattr(kernels, name, wrong)
    with pytest.warns(UserWarning, match=f"the Triton kernel {name} is not used"):
        assert not is_on()
    monkeypatch.undo()
    assert is_on()
    monkeypatch.setenv("UNSUM_KERNELS", "off")
    assert not is_on()


def test_what_does_not_lie_as_a_kernel_needs_it_goes_to_the_twin(monkeypatch):
    monkeypatch.setattr(fused, "is_on_a_gpu", lambda tensor: True)
    each = made(3, 4, 5)
    assert fused.serves("norms_and_sum", each) and not fused.serves("norms_and_sum", each.mT)
    assert not fused.serves("norms_and_sum", each.double()) and not fused.serves("norms_and_sum", each[:0])
    assert not fused.serves("token_sq_norms", each[0].mT, each[0])
    assert not fused.serves("products", each[:, None], each[:, None].half())
    monkeypatch.setenv("UNSUM_KERNELS", "off")
    fused.is_on.cache_clear()
    assert not fused.serves("norms_and_sum", each)
    fused.is_on.cache_clear()


# ---- in a whole backward ------------------------------------------------------------------------------------


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.down, self.deep = nn.Conv2d(8, 4, 1, 2, bias=False), nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.head = nn.Linear(6, 3)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return self.head(self.deep(self.down(torch.relu(self.norm(self.stem(x))))).mean((2, 3)))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(7, 40), nn.LayerNorm(40), nn.Linear(40, 5)

    def forward(self, ids):
        return self.head(self.norm(self.table(ids)))


def given(net):
    if net is Words:
        return torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return made(4, 3, 12, 10).to(memory_format=torch.channels_last)


def test_a_kernel_is_launched_by_itself_only_where_triton_would_choose_the_same(monkeypatch):
    """Without a GPU: stand-ins count who is launched."""
    now = [0]

    @contextlib.contextmanager
    def device(index):
        before, now[0] = now[0], index
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "again", True)
    monkeypatch.setattr(launch, "is_stand_in", lambda tensor: False)
    launched, where = [], []

    class Compiled:
        launch_metadata = function = packed_metadata = None

        def _init_handles(self): ...

        def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *given):
            launched.append(("by itself", (x, y, z), len(given)))

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, **options: (
                where.append(now[0]) or launched.append(("by Triton", grid, len(given))) or (Compiled())
            )

    def tensor(dtype=torch.float32, address=1024, index=0):
        return SimpleNamespace(is_cuda=True, dtype=dtype, device=SimpleNamespace(index=index), data_ptr=lambda: address)

    kernel, ordinary = Kernel(), (tensor(), (3, 16))
    others = [
        (tensor(torch.float16), (3, 16)),
        (tensor(address=1028), (3, 16)),
        (tensor(), (1, 16)),
        (tensor(index=1), (3, 16)),
    ]
    run = lambda given, numbers: launch.launch(kernel, (2, 1, 1), (given,), numbers, {"block": 64}, 4)
    for given in (ordinary, ordinary, *others, ordinary):
        run(*given)
    who = [how for how, _, _ in launched]
    assert who == ["by Triton", "by itself", *["by Triton"] * 4, "by itself"]
    assert where == [0, 0, 0, 0, 1]  # on the tensors' own device
    assert {(grid, count) for how, grid, count in launched if how == "by itself"} == {((2, 1, 1), 4)}
    monkeypatch.setattr(launch, "again", False)
    run(*ordinary)
    assert launched[-1][0] == "by Triton"


@pytest.mark.parametrize("way", ["product", "gram"])
@pytest.mark.parametrize("net", [Images, Words])
def test_layers_through_kernels(net, way, monkeypatch):
    """The same norms, token norms and gradients with kernels as without."""
    torch.manual_seed(0)
    model, x, found, used = net().eval().to(DEVICE), given(net), [], set()
    monkeypatch.setattr(costs, "cheaper", lambda *shape, **options: way)
    monkeypatch.setattr(costs, "is_fused", lambda *shape: True)
    monkeypatch.setattr(product, "_at_once", lambda n, size: n)
    monkeypatch.setattr("unsum.step.lanes.SMALL", {})
    monkeypatch.setattr("unsum.kernels.grouped.ROWS", {})
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    served = fused.serves
    for on in (False, True):
        forget(model)  # and what was written down without kernels
        if on:
            monkeypatch.setattr(fused, "is_on_a_gpu", lambda tensor: True)
            monkeypatch.setattr(fused, "serves", lambda name, *given: served(name, *given) and not used.add(name))
        for reducer in (unsum.Norms, unsum.TokenNorms):
            for _ in range(2):
                model.zero_grad()
                with unsum.gradients(model, reducer()) as g:
                    model(x).square().sum().backward()
            norms = g[reducer].by_parameter() if reducer is unsum.Norms else {"tokens": g[reducer].norms()}
            found.append(norms | {f"{n}:grad": p.grad.clone() for n, p in model.named_parameters()})
    for name, each in per_sample_gradients(model, lambda m, x: m(x).square().sum(), x).items():
        close(found[2][name], each.flatten(1).square().sum(1), torch.float32)
        close(found[2][f"{name}:grad"], each.sum(0), torch.float32)
    for ours, wanted in zip(found[2:], found[:2], strict=True):
        assert ours.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(ours[name], wanted[name], rtol=1e-4, atol=1e-4)
    if net is Images:
        assert {"channel_sums", "token_sq_norms", "gram_sq_norms" if way == "gram" else "products"} <= used
    else:
        sums = {"scale_and_shift", "normalised_token_sq_norms", "lookup_sq_norms", "token_sq_norms"}
        assert sums | ({"products"} if way == "product" else set()) <= used


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("way", ["product", "gram"])
def test_convolutions_in_half_precision_unfold_nothing(dims, way, monkeypatch):
    conv, turn = (F.conv1d, F.conv2d)[dims - 1], {1: torch.nn.grad.conv1d_weight, 2: torch.nn.grad.conv2d_weight}[dims]
    x, weight = made(3, 4, *(9,) * dims, dtype=torch.bfloat16), made(5, 4, *(3,) * dims, dtype=torch.bfloat16)
    delta = made(*conv(x, weight, stride=2, padding=1).shape, dtype=torch.bfloat16)
    each = torch.stack(
        [turn(x[k : k + 1].double(), weight.shape, delta[k : k + 1].double(), 2, 1) for k in range(len(x))]
    )
    geometry = Geometry((3,) * dims, (2,) * dims, (1,) * dims, (1,) * dims, 1)
    monkeypatch.setattr(costs, "cheaper", lambda *shape, **options: way)
    monkeypatch.setattr(fused, "is_on_a_gpu", lambda tensor: True)
    monkeypatch.setattr(Windows, "rows", None)  # which would unfold
    squares, total = Windows(x[:, None], delta[:, None], geometry, tuple(weight.shape)).norms_and_sum()
    close(squares, each.flatten(1).square().sum(1), torch.bfloat16)
    close(total, each.sum(0), torch.bfloat16)


# ---- in compiled graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_kernels_inside_compiled_graphs(backend):
    """One graph for any number of samples; of those that a compiler makes as well itself, the twin is in it."""

    def all_of(each, x, mean):
        found = [*fused.norms_and_sum(each), *fused.scale_and_shift(each, x, mean, mean)]
        found += fused.channel_sums(each, x, mean[0, :1].expand(x.shape[-1]), mean[0, :1].expand(x.shape[-1]) ** 2, 0.1)
        found += fused.token_sq_norms(each[0], x[0])
        found += fused.products(each[:, None], x[:, None], [1, 1], [1, 1], [0, 0], [1, 1], True)
        return [2 * t for t in found]

    torch._dynamo.reset()
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(all_of, backend=graphs, fullgraph=True, dynamic=True)
    for n in (3, 5, 4):
        x = made(n, 6, 9), made(n, 6, 9, seed=1), made(n, 6)
        for ours, wanted in zip(compiled(*x), all_of(*x), strict=True):
            torch.testing.assert_close(ours, wanted)
    assert graphs.frame_count == 1
    names = {str(node.target).split(".")[1] for node in graphs.graphs[0].graph.nodes if "unsum." in str(node.target)}
    assert names == {"products"}


@pytest.mark.parametrize("name", fused.KERNELS)
def test_what_an_operator_says_of_its_shapes_is_true(name):
    example = fused.KERNELS[name].example(lambda *shape: made(*shape))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.unsum, name).default, tuple(example), test_utils=tests)


def test_fake_tensors_are_traced():
    from torch._subclasses.fake_tensor import FakeTensorMode

    each = made(2, 3, 4)
    assert not is_stand_in(each)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(each)
        assert is_stand_in(fake)
        squares, total = fused.norms_and_sum(fake)
    assert squares.shape == (2,) and total.shape == (3, 4)
