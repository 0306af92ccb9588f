"""Each Triton kernel beside its torch twin and the other ways to the same numbers, on a GPU, for shapes of real models.

    python benchmarks/fused.py [--only windows|linear|tokens|norms|passes|lookup|project] [--json PATH] [--device cpu]

Times are microseconds on the device, from replays of a CUDA graph (so that Python is not timed). `off` is how far the
kernel's result is from the twin's in float32, relative to the largest number. With `--device cpu` (set
TRITON_INTERPRET=1) the shapes are tiny and times mean nothing: it shows that the script runs.

"windows": all convolutions of ResNet-50, B=64, bf16, channels last. `rows` unfolds, multiplies and makes one pass;
`kernel` reads windows from the image; `gram rows` and `gram kernel` give norms alone, `torch` is the weight's gradient
alone: the Gram ways need both. `now` is the way that unsum takes; the last line adds up all layers of the model.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from measuring import machine, options_of, parsed, write
from models import ResNet50
from unsum.factors.windows import Geometry, Windows
from unsum.kernels import costs, fused, product, twins

Ways = dict[str, Callable[[], Any]]


def microseconds(step: Callable[[], Any], device: str) -> float:
    """The median of some runs."""
    for _ in range(3):
        step()
    if device == "cpu":
        times = []
        for _ in range(3):
            start = time.perf_counter()
            step()
            times.append(1e6 * (time.perf_counter() - start))
        return statistics.median(times)
    torch.cuda.synchronize()
    graph, repeats = torch.cuda.CUDAGraph(), 5
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            step()
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / repeats)
    return statistics.median(times[2:])


def timed(ways: Ways, device: str) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, step in ways.items():
        try:
            found[name] = round(microseconds(step, device), 1)
        except Exception as error:  # a way that does not run is a result, too
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def off(name: str, *given: Any) -> float | str:
    """How far a kernel is from its twin in float32, relative to the largest number; a word where it is not used."""
    if not fused.serves(name, *given):
        return "not used"
    try:
        found, wanted = getattr(fused.kernels(), name)(*given), getattr(twins, name)(*map(fused.precise, given))
    except torch.OutOfMemoryError:
        return "too large"
    pairs = zip(*((f,) if isinstance(f, Tensor) else f for f in (found, wanted)), strict=True)
    apart = [float((ours.float() - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs if ours.numel()]
    return round(max(apart), 6)


class Made:
    """Tensors of one dtype on one device."""

    def __init__(self, device: str) -> None:
        self.device, self.is_small = device, device == "cpu"
        self.dtype = torch.bfloat16

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def less(self, *sizes: int) -> tuple[int, ...]:
        """Sizes, tiny where there is no GPU."""
        return tuple(max(1, min(size, 20)) for size in sizes) if self.is_small else sizes


# ---- the families --------------------------------------------------------------------------------


def layers_of_resnet(size: int) -> tuple[Counter[Any], Counter[Any]]:
    """Shapes of the convolutions, and (channels, places) of the BatchNorms, with how often they occur."""
    with torch.device("meta"):
        model, x = ResNet50().eval(), torch.empty(1, 3, size, size)
    convolutions: Counter[Any] = Counter()
    norms: Counter[Any] = Counter()

    def seen(module: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> None:
        if isinstance(module, nn.Conv2d):
            geometry = Geometry(module.kernel_size, module.stride, module.padding, module.dilation, 1)
            convolutions[tuple(given[0].shape[1:]), tuple(y.shape[1:]), geometry] += 1
        elif isinstance(module, nn.BatchNorm2d):
            norms[tuple(y.shape[1:])] += 1

    for module in model.modules():
        module.register_forward_hook(seen)
    model(x)
    return convolutions, norms


def windows(made: Made) -> Iterator[dict[str, Any]]:
    n = 2 if made.is_small else 64
    sums: Counter[str] = Counter()
    shapes = layers_of_resnet(32 if made.is_small else 224)[0].items()
    for (inside, outside, geometry), count in list(shapes)[: 4 if made.is_small else None]:
        x, delta = (made(n, *s).contiguous(memory_format=torch.channels_last) for s in (inside, outside))
        shape = (outside[0], inside[0], *geometry.kernel)
        kind = Windows(x[:, None], delta[:, None], geometry, shape)
        image = kind._images()
        assert image is not None
        given = (*image[:2], *image[2])
        rows = lambda kind=kind: product.norms_and_sum(*kind.rows(), want_sum=True)
        ways: Ways = {
            "rows": rows,
            "kernel": lambda given=given: fused.products(*given, False),
            "gram rows": lambda kind=kind: product.sq_norms(*kind.rows(), way="gram"),
            "gram kernel": lambda given=given: fused.gram_sq_norms(*given),
            "torch": kind.sum,
        }
        times = timed(ways, made.device)
        now = _now(kind)
        for name, value in times.items():
            sums[name] += count * value if isinstance(value, float) else 0
        sums["best of all"] += count * min(_whole(times).values(), default=0)
        sums["as now"] += count * _whole(times).get(now, 0)
        what = f"{inside[0]}→{outside[0]} {'×'.join(map(str, geometry.kernel))}/{geometry.stride[0]} {outside[1]}²"
        found = {"layer": f"{what} ({count})", **times, "now": now, "off": off("products", *given, False)}
        yield found | {"off, gram": off("gram_sq_norms", *given)}
    yield {"layer": "all layers", **{name: round(value, 1) for name, value in sums.items()}}


def _whole(times: dict[str, Any]) -> dict[str, float]:
    """What norms and the weight's gradient take together by each way."""
    alone = times["torch"]
    found = {name: times[name] for name in ("rows", "kernel")}
    found |= {name: times[name] + alone for name in ("gram rows", "gram kernel") if isinstance(times[name], float)}
    return {name: value for name, value in found.items() if isinstance(value, float)}


def _now(kind: Windows) -> str:
    places, (o, *rest) = kind.delta.shape[3] * kind.delta.shape[4], kind.shape
    size = 1
    for each in rest:
        size *= each
    if kind.way(want_sum=True) == "gram":
        return "gram kernel" if kind._is_unfolded() or places % 8 else "gram rows"
    return "kernel" if kind._is_unfolded() and costs.spares_unfolding(places, size, o, "cuda") else "rows"


LINEAR = [
    (16, 1024, 768, 2304), (16, 1024, 768, 768), (16, 1024, 768, 3072), (16, 1024, 3072, 768), (16, 1024, 768, 50304),
    (8, 2048, 2048, 6144), (8, 2048, 2048, 2048), (8, 2048, 2048, 8192), (8, 2048, 8192, 2048), (8, 2048, 2048, 32000),
    (256, 64, 256, 256), (512, 16, 256, 1024), (64, 196, 384, 384), (64, 197, 768, 768), (8, 128, 768, 3072),
]  # fmt: skip


def _linear(made: Made) -> Iterator[tuple[str, Tensor, Tensor]]:
    for n, t, i, o in LINEAR[: 2 if made.is_small else None]:
        yield f"n={n} t={t} {i}→{o}", made(*made.less(n, t, i)), made(*made.less(n, t, o))


def linear(made: Made) -> Iterator[dict[str, Any]]:
    for layer, a, delta in _linear(made):
        given = (a[:, None], delta[:, None], *product.ONE_PLACE)
        ways: Ways = {
            "bmm and pass": lambda a=a, delta=delta: product.norms_and_sum(a, delta, want_sum=True),
            "kernel": lambda given=given: fused.products(*given, False),
            "kernel and bias": lambda given=given: fused.products(*given, True),
            "gram bmm": lambda a=a, delta=delta: product.gram(a, delta, a, delta),
            "gram kernel": lambda given=given: fused.gram_sq_norms(*given),
            "torch": lambda a=a, delta=delta: delta.flatten(0, 1).T @ a.flatten(0, 1),
            "bias, torch": lambda delta=delta: delta.sum(1, dtype=torch.float32),
        }
        yield {"layer": layer, **timed(ways, made.device), "off": off("products", *given, True)}


def _beside(layer: str, name: str, made: Made, *given: Any) -> dict[str, Any]:
    """A kernel and its twin, and how many GB/s of what it must read the kernel reads."""
    ways = {"kernel": lambda: getattr(fused, name)(*given), "twin": lambda: getattr(twins, name)(*given)}
    times = timed(ways, made.device)
    read = sum(g.numel() * g.element_size() for g in given if isinstance(g, Tensor))
    speed = round(read / times["kernel"] / 1e3) if isinstance(times["kernel"], float) else ""
    return {"layer": f"{name}: {layer}", **times, "GB/s": speed, "off": off(name, *given)}


def tokens(made: Made) -> Iterator[dict[str, Any]]:
    for layer, a, delta in _linear(made):
        yield _beside(layer, "token_sq_norms", made, a.flatten(0, 1), delta.flatten(0, 1))
    for rows, d in ((16384, 768), (16384, 2048)):
        rows, d = made.less(rows, d)
        numbers = (torch.randn(rows, device=made.device), torch.rand(rows, device=made.device))
        given = made(rows, d), made(rows, d), *numbers
        yield _beside(f"rows={rows} d={d}", "normalised_token_sq_norms", made, *given)


def norms(made: Made) -> Iterator[dict[str, Any]]:
    for n, t, d in ((16, 1024, 768), (8, 2048, 2048)):
        n, t, d = made.less(n, t, d)
        numbers = (torch.randn(n, t, device=made.device), torch.rand(n, t, device=made.device))
        yield _beside(f"n={n} t={t} d={d}", "scale_and_shift", made, made(n, t, d), made(n, t, d), *numbers)
    shapes = layers_of_resnet(32 if made.is_small else 224)[1].items()
    for (channels, high, wide), count in shapes:
        n = 2 if made.is_small else 64
        given = [made(n, high * wide, channels) for _ in range(2)]
        given += [torch.randn(channels, device=made.device), torch.rand(channels, device=made.device)]
        yield _beside(f"BatchNorm {channels} × {high}² ({count})", "channel_sums", made, *given, 1e-5)


def passes(made: Made) -> Iterator[dict[str, Any]]:
    for n, o, i in (
        (16, 2304, 768),
        (16, 768, 3072),
        (16, 10880, 768),
        (8, 8192, 2048),
        (64, 64, 576),
        (64, 512, 2048),
    ):
        yield _beside(f"n={n} {i}→{o}", "norms_and_sum", made, made(*made.less(n, o, i)))


def lookup(made: Made) -> Iterator[dict[str, Any]]:
    for n, t, d, rows in ((16, 1024, 768, 50304), (8, 2048, 2048, 32000), (16, 1024, 768, 1)):
        n, t, d = made.less(n, t, d)
        ids = torch.randint(rows, (n, t), device=made.device)
        yield _beside(f"n={n} t={t} d={d} of {rows}", "lookup_sq_norms", made, ids, made(n, t, d))


def project(made: Made) -> Iterator[dict[str, Any]]:
    for layer, a, delta in _linear(made):
        shape = (16, delta.shape[-1]), (a.shape[-1], 16)
        given = delta, a, *(torch.randn(*s, device=made.device).to(made.dtype) for s in shape)
        ways: Ways = {
            "kernel": lambda given=given: fused.two_sided(*given),
            "torch": lambda given=given: twins.two_sided(*given),
        }
        read = (a.numel() + delta.numel()) * a.element_size()
        times = timed(ways, made.device)
        speed = round(read / times["kernel"] / 1e3) if isinstance(times["kernel"], float) else ""
        yield {"layer": layer, **times, "GB/s": speed, "off": off("two_sided", *given)}


FAMILIES = {f.__name__: f for f in (windows, linear, tokens, norms, passes, lookup, project)}


def main() -> None:
    parser = options_of(__doc__ or "")
    parser.add_argument("--only", choices=FAMILIES)
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu")
    options = parsed(parser)
    torch.manual_seed(0)
    report: dict[str, Any] = {"machine": machine(options.device)}
    with torch.no_grad():
        for name, family in FAMILIES.items():
            if options.only not in (None, name):
                continue
            print(f"\n{name}")
            report[name] = []
            for row in family(Made(options.device)):
                report[name].append(row)
                print("  " + "  ".join(str(v) if k == "layer" else f"{k} {v}" for k, v in row.items()), flush=True)
    write(options.json, report)


if __name__ == "__main__":
    main()
