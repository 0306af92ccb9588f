"""Kernels against their plain torch twins: through Triton's interpreter on a CPU, compiled where there is a GPU."""

from types import SimpleNamespace

import pytest
import torch

import unsum
from unsum.kernels import fused, launch

triton_kernels = pytest.importorskip("unsum.kernels.triton_kernels", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def made(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def close(ours, exact, dtype):
    loose = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours.double(), exact, rtol=loose, atol=loose * float(exact.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 33, 70), (5, 64, 65), (2, 2, 4096)])
def test_norms_and_sum(shape, dtype):
    each = made(*shape, dtype=dtype)
    exact = each.double()
    for way in (triton_kernels.norms_and_sum, fused.norms_and_sum_twin, fused.norms_and_sum):
        squares, total = way(each)
        close(squares, exact.flatten(1).square().sum(1), dtype)
        close(total, exact.sum(0), dtype)
        assert total.dtype == dtype and squares.dtype == torch.float32
    parts, total = triton_kernels.parts_and_sum(each)
    close(parts.sum(0), exact.flatten(1).square().sum(1), dtype)
    close(total, exact.sum(0), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 70, 33), (2, 129, 64), (2, 3, 1500)])
def test_scale_and_shift(shape, dtype):
    delta, x = made(*shape, dtype=dtype), made(*shape, dtype=dtype) + 1
    mean, rstd = made(*shape[:2]), made(*shape[:2]).abs()
    exact = (x.double() - mean.double()[..., None]) * rstd.double()[..., None]
    for way in (triton_kernels.scale_and_shift, fused.scale_and_shift_twin, fused.scale_and_shift):
        scale, shift = way(delta, x, mean, rstd)
        close(scale, (delta.double() * exact).sum(1), dtype)
        close(shift, delta.double().sum(1), dtype)


def test_a_kernel_that_gives_something_else_is_not_used(monkeypatch):
    monkeypatch.setattr(triton_kernels, "norms_and_sum", lambda each: [2 * t for t in fused.norms_and_sum_twin(each)])
    with pytest.warns(UserWarning, match="Triton kernels are not used"):
        assert not fused.is_on.__wrapped__(torch.device(DEVICE))
    monkeypatch.undo()
    assert fused.is_on.__wrapped__(torch.device(DEVICE))
    monkeypatch.setenv("UNSUM_KERNELS", "off")
    assert not fused.is_on.__wrapped__(torch.device(DEVICE))


def test_a_kernel_is_launched_by_itself_only_where_triton_would_choose_the_same(monkeypatch):
    """Without a GPU: stand-ins count who is launched."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "again", True)
    launched = []

    class Compiled:
        launch_metadata = None

        def __getitem__(self, grid):
            return lambda *given: launched.append(("by itself", grid, len(given)))

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, **options: launched.append(("by Triton", grid, len(given))) or Compiled()

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
    assert {(grid, count) for how, grid, count in launched if how == "by itself"} == {((2, 1, 1), 4)}
    monkeypatch.setattr(launch, "again", False)
    run(*ordinary)
    assert launched[-1][0] == "by Triton"


def test_layers_through_kernels(monkeypatch):
    """The same norms and gradients with kernels as without, in a whole backward."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.LayerNorm(50), torch.nn.Linear(50, 3)).to(DEVICE)
    x, found = made(4, 6, 40), []
    for on in (False, True):
        monkeypatch.setattr(fused, "serves", lambda *tensors, on=on: on and all(t.is_contiguous() for t in tensors))
        monkeypatch.setattr("unsum.plan.pool.SMALL", {})
        for _ in range(2):
            model.zero_grad()
            with unsum.gradients(model, unsum.Norms()) as g:
                model(x).square().sum().backward()
        found.append((g[unsum.Norms].by_parameter(), {n: p.grad.clone() for n, p in model.named_parameters()}))
    for ours, wanted in zip(*found, strict=True):
        for name in wanted:
            torch.testing.assert_close(ours[name], wanted[name], rtol=1e-4, atol=1e-5)
