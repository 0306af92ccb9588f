"""The table of docs/watch.md: each feature in each kind of loop is right, or refused by name; each cell is tried."""

from __future__ import annotations

import copy
import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference import per_sample_gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unsum
from one_by_one import norms_of

BOUND = 0.5


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter, as LoRA has it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, inner.in_features) / 3)
        self.up = nn.Parameter(torch.randn(inner.out_features, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.down.T @ self.up.T


class Net(nn.Module):
    """An embedding, attention by hand, an MLP behind a norm, a head."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(12, 8, padding_idx=0), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 12)
        self.is_checkpointed = way == "checkpoint"
        if way == "frozen":
            self.embed.requires_grad_(False)
            self.mlp[0].requires_grad_(False)
        if way == "LoRA":
            self.requires_grad_(False)
            self.mlp[0], self.head = Adapted(self.mlp[0]), Adapted(self.head)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        scores = (h @ h.mT).masked_fill((x == 0)[:, None], float("-inf"))
        h = self.norm(h + scores.softmax(-1) @ h)
        inner = checkpoint(self.mlp, h, use_reentrant=False) if self.is_checkpointed else self.mlp(h)
        return self.head(h + inner)


def loss_of(model: Any, x: Tensor) -> Tensor:
    logits = model(x)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten(), ignore_index=0, reduction="sum")


def batch(step: int, way: str) -> Tensor:
    """Four samples; with dynamic padding of other lengths in every step."""
    generator = torch.Generator().manual_seed(step)
    longest = 5 + step % 3 if way == "dynamic padding" else 6
    x = torch.randint(1, 12, (4, longest), generator=generator)
    if way == "dynamic padding":
        for row in range(4):
            x[row, max(2, longest - row) :] = 0
    return x


WAYS = ("eager", "compiled", "checkpoint", "autocast", "GradScaler", "accumulation", "DDP", "FSDP2", "frozen", "LoRA",
        "dynamic padding")  # fmt: skip
Backward = Callable[[], None]


class Loop:
    """One kind of loop: the model as it is called, and its backward."""

    def __init__(self, way: str) -> None:
        self.way, self.plain = way, Net(way)
        self.model: Any = Net(way)
        if way == "compiled":
            self.model = torch.compile(self.model, backend="aot_eager")
        if way == "DDP":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        if way == "FSDP2":
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model.mlp)
            fully_shard(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if way == "GradScaler" else None
        self.loose = 0.05 if way == "autocast" else 1e-4

    def backward(self, x: Tensor) -> None:
        for part in x.split(2) if self.way == "accumulation" else (x,):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.way == "autocast"):
                loss = loss_of(self.model, part)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def truth(self, x: Tensor) -> dict[str, Tensor]:
        return per_sample_gradients(self.plain, loss_of, x)

    def grads(self) -> dict[str, Tensor]:
        named = {
            name.removeprefix("module.").removeprefix("_orig_mod."): p for name, p in self.model.named_parameters()
        }
        scale = 1.0 if self.scaler is None else 256.0
        return {name: whole(p.grad) / scale for name, p in named.items() if p.grad is not None}

    def values(self) -> dict[str, Tensor]:
        return {own(name): whole(p.detach()).clone() for name, p in self.model.named_parameters() if p.requires_grad}

    def same(self, ours: Tensor, wanted: Tensor, what: str) -> None:
        atol = self.loose * max(float(wanted.abs().max()), 1e-6)
        torch.testing.assert_close(ours.double(), wanted.double(), rtol=self.loose, atol=atol,
                                   msg=lambda told: f"{what}: {told}")  # fmt: skip


def own(name: str) -> str:
    """A parameter's name in the model itself."""
    return name.removeprefix("module.").removeprefix("_orig_mod.")


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clipped(each: dict[str, Tensor]) -> dict[str, Tensor]:
    weights = (BOUND / norms_of(each)).clamp(max=1)
    return {name: torch.einsum("n,n...->...", weights, value) for name, value in each.items()}


def norms(loop: Loop) -> None:
    for step in range(4):
        x = batch(step, loop.way)
        loop.model.zero_grad()
        with unsum.gradients(loop.model, unsum.Norms(), scaler=loop.scaler) as g:
            loop.backward(x)
        each = loop.truth(x)
        loop.same(g.norms(), norms_of(each), "norms")
        for name, value in loop.grads().items():
            loop.same(value, each[name].sum(0), f"{name}.grad")


def watched(loop: Loop) -> None:
    watch = unsum.watch(loop.model, scaler=loop.scaler)
    for step in range(4):
        x = batch(step, loop.way)
        loop.model.zero_grad()
        with watch:
            loop.backward(x)
        each = loop.truth(x)
        loop.same(watch.last.norms, norms_of(each), "norms")
        assert watch.last.noise_scale is not None
        assert watch.last.nonfinite is None
        for name, value in loop.grads().items():
            loop.same(value, each[name].sum(0), f"{name}.grad")


def clipping(loop: Loop) -> None:
    for step in range(3):
        x = batch(step, loop.way)
        loop.model.zero_grad()
        with unsum.clip_per_sample(loop.model, max_norm=BOUND, scaler=loop.scaler) as found:
            loop.backward(x)
        each = loop.truth(x)
        loop.same(found.norms, norms_of(each), "norms")
        wanted = clipped(each)
        for name, value in loop.grads().items():
            loop.same(value, wanted[name], f"{name}.grad")


def private(loop: Loop) -> None:
    optimizer = torch.optim.SGD([p for p in loop.model.parameters() if p.requires_grad], lr=0.1)
    options = {} if loop.scaler is None else {"scaler": loop.scaler}
    dp = unsum.private(loop.model, optimizer, max_norm=BOUND, noise_multiplier=0.0, expected_batch=4, sample_rate=0.1,
                       seed=0, **options)  # fmt: skip
    before = loop.values()
    x = batch(1, loop.way)
    with dp:
        loop.backward(x)
    dp.step()
    wanted = clipped(loop.truth(x))
    for name, value in loop.values().items():
        loop.same((before[name] - value) / 0.1 * 4, wanted[name], name)


FEATURES: dict[str, Callable[[Loop], None]] = {
    "`gradients`": norms, "`watch`": watched, "`clip_per_sample`": clipping, "`private`": private,
}  # fmt: skip
REFUSED = {("`private`", "GradScaler"): "GradScaler", ("`private`", "FSDP2"): "FSDP2"}


@pytest.fixture
def _alone() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.filterwarnings("ignore")
def test_each_cell(feature: str, way: str, request: pytest.FixtureRequest) -> None:
    if way in ("DDP", "FSDP2"):
        request.getfixturevalue("_alone")
    torch._dynamo.reset()
    loop = Loop(way)
    loop.plain = copy.deepcopy(loop.plain)
    if (feature, way) in REFUSED:
        with pytest.raises(unsum.errors.UnsupportedError, match=REFUSED[feature, way]):
            FEATURES[feature](loop)
        return
    FEATURES[feature](loop)


def test_the_page_has_the_figures_of_the_results() -> None:
    root = Path(__file__).parent.parent
    found = importlib.util.spec_from_file_location("watching", root / "benchmarks" / "watching.py")
    page = (root / "docs" / "watch.md").read_text(encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / "benchmarks"))
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        assert module.filled(page) == page
    assert "every=50" in page.split("## What it costs")[1]


def test_the_page_says_so() -> None:
    page = (Path(__file__).parent.parent / "docs" / "watch.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in page.splitlines()
            if line.startswith("|")]  # fmt: skip
    start = next(k for k, row in enumerate(rows) if row[0] == "loop")
    assert rows[start][1:] == list(FEATURES)
    told = {row[0]: row[1:] for row in rows[start + 2 : start + 2 + len(WAYS)]}
    assert list(told) == list(WAYS)
    for way, cells in told.items():
        for feature, cell in zip(FEATURES, cells, strict=True):
            assert re.fullmatch("refused.*" if (feature, way) in REFUSED else "✔.*", cell), f"{feature}, {way}: {cell}"
