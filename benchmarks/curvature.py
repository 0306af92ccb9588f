"""What curvature costs: a pass of K-FAC, of EK-FAC's correction, a Gauss–Newton product, each over a plain gradient.

    python benchmarks/curvature.py [--quick] [--device cuda] [--json benchmarks/results/curvature_cpu.json]

nanoGPT's shape with a small vocabulary (a factor over 50,257 outputs would have 2.5 · 10⁹ numbers). A plain gradient is
forward and backward of one batch, without an optimizer. A fit reads its batches from an iterable that looks at the
clock whenever it is asked for the next one: the time between two of them is the time of one batch, and decompositions,
which are done once for each block, are in the last column alone. The first batch of a pass, which learns, is left out.
In each repetition every way runs once, in random order, and its median time for a batch is divided by that of the plain
gradient in the same repetition; shown are the median of these ratios and their quartiles. "plain, again" is the noise.

Gauss–Newton products need attention that can be differentiated twice, or forwards: they run with torch's math kernel,
and are shown over the plain gradient with the kernel that torch chooses, and over that with the math kernel. curvlinops
has linear layers alone; unsum covers every parameter. A way that is absent or fails is shown with its reason.
"""

from __future__ import annotations

import contextlib
import copy
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import unsum
from measuring import fill, machine, memory_of, memory_on_cpu, now, options_of, parsed, ratios, write
from models import GPT
from peers import reason

RESULTS = Path(__file__).resolve().parent / "results"
Batch = tuple[Tensor, Tensor]
Way = Callable[[], list[float]]  # seconds of each batch


class Clocked:
    """Batches; when each was asked for, pass by pass."""

    def __init__(self, batches: list[Batch], device: str) -> None:
        self.batches, self.device = batches, device
        self.passes: list[list[float]] = []

    def __iter__(self) -> Iterator[Batch]:
        times: list[float] = []
        self.passes.append(times)
        for batch in self.batches:
            times.append(now(self.device))
            yield batch
        times.append(now(self.device))

    def __len__(self) -> int:
        return len(self.batches)

    def seconds(self, which: int) -> list[float]:
        """Of each batch but the first, in one of the passes that went to the end."""
        whole = [times for times in self.passes if len(times) == len(self.batches) + 1]
        return [b - a for a, b in zip(whole[which][1:], whole[which][2:], strict=False)]


# ---- ways -----------------------------------------------------------------------------------------------------------


def losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).movedim(-1, 1), batch[1], reduction="none").sum(1)


def plain(model: nn.Module, data: Clocked) -> Way:
    def run() -> list[float]:
        for batch in data:
            model.zero_grad(set_to_none=True)
            losses(model, batch).sum().backward()
        return data.seconds(-1)

    return run


def fit(kind: str, drawn: bool, which: int) -> Callable[[nn.Module, Clocked], Way]:
    def make(model: nn.Module, data: Clocked) -> Way:
        def run() -> list[float]:
            data.passes.clear()
            likelihood = unsum.curvature.categorical(lambda model, batch: model(batch[0])) if drawn else None
            unsum.curvature.fit(model, losses, data, kind=kind, likelihood=likelihood)
            return data.seconds(which)

        return run

    return make


def product(model: nn.Module, data: Clocked) -> Way:
    h = unsum.curvature.ggn(model, data, unsum.curvature.categorical(lambda model, batch: model(batch[0])))
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def run() -> list[float]:
        data.passes.clear()
        h.matvec(v)
        return data.seconds(-1)

    return run


class ForCurvlinops(nn.Module):
    """Logits as curvlinops expects them with a cross entropy: (n, classes, positions); for EK-FAC (n·t, classes)."""

    def __init__(self, model: nn.Module, flat: bool) -> None:
        super().__init__()
        self.model, self.flat = model, flat

    def forward(self, x: Tensor) -> Tensor:
        logits = self.model(x)
        return logits.flatten(0, 1) if self.flat else logits.movedim(-1, 1)


def curvlinops_of(kind: str, model: nn.Module, data: Clocked, params: list[nn.Parameter], **options: Any) -> Any:
    import curvlinops

    n, flat = sum(len(x) for x, _ in data.batches), kind == "EKFACLinearOperator"
    if flat:
        data.batches = [(x, y.flatten()) for x, y in data.batches]
    return getattr(curvlinops, kind)(
        ForCurvlinops(model, flat), nn.CrossEntropyLoss(reduction="sum"), params, data,
        check_deterministic=False, num_data=n, **options,
    )  # fmt: skip


def linear_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for layer in model.modules() if isinstance(layer, nn.Linear) for p in layer.parameters()]


def curvlinops_factors(kind: str) -> Callable[[nn.Module, Clocked], Way]:
    def make(model: nn.Module, data: Clocked) -> Way:
        length = data.batches[0][0].shape[1]
        options = {"fisher_type": "empirical", "separate_weight_and_bias": False, "num_per_example_loss_terms": length}
        operator = curvlinops_of(kind, model, data, linear_parameters(model), **options)
        if kind == "EKFACLinearOperator":
            operator.compute_eigenvalue_correction()  # factors and their eigenvectors, which it keeps

        def run() -> list[float]:
            data.passes.clear()
            if kind == "EKFACLinearOperator":
                operator.compute_eigenvalue_correction()
            else:
                operator.compute_kronecker_factors()
            return data.seconds(-1)

        return run

    return make


def curvlinops_product(model: nn.Module, data: Clocked) -> Way:
    operator = curvlinops_of("GGNLinearOperator", model, data, list(model.parameters()))
    v = [torch.randn_like(p) for p in model.parameters()]

    def run() -> list[float]:
        data.passes.clear()
        operator @ v
        return data.seconds(-1)

    return run


WAYS: dict[str, Callable[[nn.Module, Clocked], Way]] = {
    "plain": plain,
    "plain, again": plain,
    "plain, math kernel": plain,
    "K-FAC": fit("kfac", False, 0),
    "K-FAC, labels drawn": fit("kfac", True, 0),
    "EK-FAC's correction": fit("ekfac", False, -1),
    "Gauss–Newton product": product,
    "curvlinops K-FAC": curvlinops_factors("KFACLinearOperator"),
    "curvlinops EK-FAC's correction": curvlinops_factors("EKFACLinearOperator"),
    "curvlinops Gauss–Newton product": curvlinops_product,
}


def attention_of(way: str) -> Any:
    twice = way.endswith(("product", "math kernel"))
    return sdpa_kernel(SDPBackend.MATH) if twice else contextlib.nullcontext()


# ---- measuring ------------------------------------------------------------------------------------------------------


def shapes(device: str, quick: bool) -> list[dict[str, Any]]:
    if device == "cuda":
        shape = {"depth": 12, "width": 768, "heads": 12, "length": 1024, "vocabulary": 512, "batch": 8}
        return [{**shape, "dtype": "bfloat16"}, {**shape, "dtype": "float32"}]
    shape = {"depth": 4, "width": 128, "heads": 4, "length": 128, "vocabulary": 256, "batch": 8, "dtype": "float32"}
    return [shape | ({"depth": 2} if quick else {})]


def measure(shape: dict[str, Any], device: str, seconds: float, batches: int) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {key: value for key, value in shape.items() if key not in ("batch", "dtype")}
    model = GPT(**sizes).to(device, getattr(torch, shape["dtype"]))
    size = (2, shape["batch"], shape["length"])
    data = [torch.randint(shape["vocabulary"], size, device=device).unbind() for _ in range(batches)]
    ways: dict[str, Way] = {}
    memory: dict[str, int] = {}
    whole: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for name, make in WAYS.items():
        try:
            own = copy.deepcopy(model)
            with attention_of(name):
                run = make(own, Clocked(data, device))
                memory[name] = memory_of(run, own) if device == "cuda" else memory_on_cpu(run, own)
                begin = time.perf_counter()
                run()
                whole[name] = time.perf_counter() - begin
            ways[name] = run
        except Exception as error:  # whatever a library raises is what the table says of it
            note = "not installed" if isinstance(error, ModuleNotFoundError) else reason(error)
            rows.append({"way": name, "note": note})
            print(f"{name}: {note}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in ways}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times["plain"]) < 5:
        for name in random.sample(list(ways), len(ways)):
            with attention_of(name):
                times[name].append(statistics.median(ways[name]()))
    for name in ways:
        row: dict[str, Any] = {"way": name, "ms": round(1e3 * statistics.median(times[name]), 3)}
        row |= {"to_plain": ratios(times, name, "plain"), "memory": round(memory[name] / memory["plain"], 3)}
        if attention_of(name).__class__ is not contextlib.nullcontext:
            row["to_math"] = ratios(times, name, "plain, math kernel")
        rows.append({**row, "whole_seconds": round(whole[name], 2)})
    order = list(WAYS)
    rows.sort(key=lambda row: order.index(row["way"]))
    return {"shape": shape, "batches": batches, "repetitions": len(times["plain"]), "rows": rows}


# ---- telling --------------------------------------------------------------------------------------------------------


def tables(report: dict[str, Any]) -> str:
    lines: list[str] = []
    for found in report["shapes"]:
        told = ", ".join(f"{key} {value}" for key, value in found["shape"].items())
        lines += [
            f"**{told}**", "",
            "| way | to a plain gradient | quartiles | to one with the math kernel | peak memory | all batches, s |",
            "|---|---|---|---|---|---|",
        ]  # fmt: skip
        for row in found["rows"]:
            if "note" in row:
                lines.append(f"| {row['way']} | {row['note'].replace('|', '/')} | | | | |")
                continue
            ratio, math = row["to_plain"], row.get("to_math")
            cells = [f"{ratio['median']:.2f}×", f"{ratio['low']:.2f}, {ratio['high']:.2f}"]
            cells += [f"{math['median']:.2f}×" if math else "", f"{row['memory']:.2f}×", f"{row['whole_seconds']:.2f}"]
            lines.append(f"| {row['way']} | " + " | ".join(cells) + " |")
        lines.append("")
    machine = report["machine"]
    where = machine.get("gpu", machine["cpu"])
    return "\n".join([*lines, f"Measured on {where}, torch {machine['torch']}, {machine['date']}."])


def main() -> None:
    options = parsed(options_of(__doc__ or ""))
    warnings.simplefilter("ignore")
    seconds = options.seconds or (20.0 if options.quick else 90.0)
    report: dict[str, Any] = {"machine": machine(options.device), "device": options.device, "shapes": []}
    for shape in shapes(options.device, options.quick):
        report["shapes"].append(measure(shape, options.device, seconds, 4 if options.quick else 8))
        write(options.json, report)
    print(tables(report))
    if options.json is not None and options.json.resolve().parent == RESULTS:
        fill(f"benchmarks/curvature.py {options.device}", tables(report))


if __name__ == "__main__":
    main()
