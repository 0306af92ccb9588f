"""Private training (DP-SGD) beside Opacus: accuracy, epsilon, and what a private step costs.

    python benchmarks/private.py [--quick] [--device cuda] [--json benchmarks/results/private_cpu.json]

*Training*: the same model on the same generated problem, by unsum, by Opacus and without privacy, for some seeds; shown
are test accuracies (mean and standard deviation over seeds) and epsilon. *Cost*: one step is forward, loss (a sum over
samples), backward, clipping, noise and the optimizer's step, on a fixed batch. In each repetition every way makes one
step, in random order, and its time is divided by that of the plain step of the same repetition; shown are the median of
these ratios and their quartiles. "plain, again" is the noise. Without noise, each way's clipped sum is compared with
that of gradients which were computed one sample at a time. A way that is absent or fails is shown with its reason.
Written to results/private_cpu.json, the tables go to docs/private.md too.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unsum
from measuring import machine, memory_of, memory_on_cpu, now, options_of, parsed, ratios, write
from models import CNN, GPT
from peers import SCIPY, no_need_of, reason

CLIP, NOISE, DELTA = 1.0, 1.0, 1e-5
ROOT = Path(__file__).resolve().parent
RESULTS, PAGE = ROOT / "results" / "private_cpu.json", ROOT.parent / "docs" / "private.md"
ON_GPU = ROOT / "results" / "private_cuda.json"
END = "<!-- end -->"
Step = Callable[[Tensor, Tensor], None]
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


# ---- training -------------------------------------------------------------------------------------------------------

EXAMPLES, TESTS, FEATURES, RATE, EPOCHS, RATE_OF_LEARNING = 4000, 2000, 20, 0.05, 6, 0.5


def problem() -> tuple[TensorDataset, Tensor, Tensor]:
    """Four classes told apart by a small random network."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES + TESTS, FEATURES, generator=generator)
    first, second = torch.randn(FEATURES, 8, generator=generator), torch.randn(8, 4, generator=generator)
    y = (torch.tanh(x @ first / FEATURES**0.5) @ second).argmax(1)
    return TensorDataset(x[:EXAMPLES], y[:EXAMPLES]), x[EXAMPLES:], y[EXAMPLES:]


def network(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 4))
    return model, torch.optim.SGD(model.parameters(), lr=RATE_OF_LEARNING, momentum=0.9)


def by_unsum(seed: int, data: TensorDataset, how: str = "flat") -> tuple[nn.Module, float | None]:
    model, optimizer = network(seed)
    dp = unsum.private(
        model, optimizer, max_norm=CLIP, noise_multiplier=NOISE, expected_batch=RATE * EXAMPLES, sample_rate=RATE,
        how=how, seed=seed,
    )  # fmt: skip
    for _ in range(EPOCHS):
        for x, y in dp.loader(data):
            with dp:
                F.cross_entropy(model(x), y, reduction="sum").backward()
            dp.step()
    return model, dp.epsilon(DELTA)


def by_opacus(seed: int, data: TensorDataset) -> tuple[nn.Module, float | None]:
    from opacus import PrivacyEngine

    model, optimizer = network(seed)
    engine = PrivacyEngine(accountant="prv")
    loader = DataLoader(data, batch_size=int(RATE * EXAMPLES))
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=NOISE, max_grad_norm=CLIP,
        loss_reduction="sum",
    )  # fmt: skip
    optimizer.expected_batch_size = int(RATE * EXAMPLES)  # which its step divides only mean losses by
    optimizer.loss_reduction = "mean"
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
    return model, engine.get_epsilon(DELTA)


def without_privacy(seed: int, data: TensorDataset) -> tuple[nn.Module, float | None]:
    model, optimizer = network(seed)
    for _ in range(EPOCHS):
        for x, y in DataLoader(data, batch_size=int(RATE * EXAMPLES), shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model, None


def train(seeds: int) -> list[dict[str, Any]]:
    data, x, y = problem()
    ways: dict[str, Callable[[int, TensorDataset], tuple[nn.Module, float | None]]] = {
        "without privacy": without_privacy,
        "unsum": by_unsum,
        'unsum, how="layer"': lambda seed, data: by_unsum(seed, data, "layer"),
        'unsum, how="automatic"': lambda seed, data: by_unsum(seed, data, "automatic"),
        "Opacus": by_opacus,
    }
    rows: list[dict[str, Any]] = []
    for name, way in ways.items():
        found, epsilon, row = [], None, {"way": name}
        try:
            for seed in range(seeds):
                model, epsilon = way(seed, data)
                found.append(float((model(x).argmax(1) == y).double().mean()))
        except Exception as error:
            rows.append({**row, "note": reason(error)})
            continue
        row |= {"accuracy": round(statistics.mean(found), 4), "deviation": round(statistics.stdev(found), 4)}
        rows.append({**row, "seeds": seeds, "epsilon": None if epsilon is None else round(epsilon, 4)})
    return rows


# ---- cost -----------------------------------------------------------------------------------------------------------


def token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")


def class_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


def models(device: str) -> dict[str, Callable[[], tuple[nn.Module, Loss, Tensor, Tensor]]]:
    def gpt(depth: int, width: int, length: int, batch: int, vocabulary: int, heads: int) -> Any:
        model = GPT(width=width, length=length, depth=depth, heads=heads, vocabulary=vocabulary)
        return model, token_loss, *torch.randint(vocabulary, (2, batch, length)).unbind()

    if device == "cuda":
        return {
            "GPT-2 small: L=12 d=768 T=1024 B=16": lambda: gpt(12, 768, 1024, 16, 50_257, 12),
            "CNN 64×64 B=256": lambda: (CNN(), class_loss, torch.randn(256, 3, 64, 64), torch.randint(10, (256,))),
        }
    return {
        "GPT L=4 d=256 T=128 B=16": lambda: gpt(4, 256, 128, 16, 1000, 4),
        "CNN 32×32 B=32": lambda: (CNN(), class_loss, torch.randn(32, 3, 32, 32), torch.randint(10, (32,))),
    }


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def plain(model: nn.Module, loss: Loss, n: int, noise: float) -> Step:
    optimizer = sgd(model)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()

    return step


def ours(how: str) -> Callable[[nn.Module, Loss, int, float], Step]:
    def make(model: nn.Module, loss: Loss, n: int, noise: float) -> Step:
        dp = unsum.private(
            model,
            sgd(model),
            max_norm=CLIP,
            noise_multiplier=noise,
            expected_batch=n,
            sample_rate=0.01,
            how=how,
            seed=0,
        )

        def step(x: Tensor, y: Tensor) -> None:
            with dp:
                loss(model, x, y).backward()
            dp.step()

        return step

    return make


def opacus_hooks(model: nn.Module, loss: Loss, n: int, noise: float) -> Step:
    with no_need_of(*SCIPY):
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer
    wrapped = GradSampleModule(model, loss_reduction="sum")
    optimizer = DPOptimizer(sgd(model), noise_multiplier=noise, max_grad_norm=CLIP, expected_batch_size=n)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss(wrapped, x, y).backward()
        optimizer.step()

    return step


def opacus_ghost(model: nn.Module, loss: Loss, n: int, noise: float) -> Step:
    with no_need_of(*SCIPY):
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping
    wrapped = GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=CLIP, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        sgd(model), noise_multiplier=noise, max_grad_norm=CLIP, expected_batch_size=n
    )

    def step(x: Tensor, y: Tensor) -> None:  # its two backwards, of which the second has weighted losses
        optimizer.zero_grad()
        out = wrapped(x)
        losses = F.cross_entropy(out.movedim(-1, 1), y, reduction="none").view(len(x), -1).sum(1)
        losses.sum().backward(retain_graph=True)
        optimizer.zero_grad()
        coefficient = wrapped.get_clipping_coef()
        wrapped.disable_hooks()
        (coefficient * losses).sum().backward()
        wrapped.enable_hooks()
        optimizer.step()

    return step


WAYS: dict[str, Callable[[nn.Module, Loss, int, float], Step]] = {
    "plain": plain,
    "plain, again": plain,
    "unsum.private": ours("flat"),
    'unsum.private, how="layer"': ours("layer"),
    "Opacus, per-sample gradients": opacus_hooks,
    "Opacus, ghost clipping": opacus_ghost,
}


def truth(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    """The clipped sum over the batch's size, from gradients of one sample at a time, as one vector."""
    model, total = copy.deepcopy(model).double(), torch.zeros(())
    x = x.double() if x.is_floating_point() else x
    for k in range(len(x)):
        grads = torch.autograd.grad(loss(model, x[k : k + 1], y[k : k + 1]), list(model.parameters()))
        flat = torch.cat([grad.flatten() for grad in grads])
        total = total.to(flat) + flat * (CLIP / flat.norm()).clamp(max=1)
    return total / len(x)


def off(model: nn.Module, made: Any, loss: Loss, x: Tensor, y: Tensor, wanted: Tensor) -> float:
    """How far a step without noise is from the true one, relative to it, in float64."""
    own = copy.deepcopy(model).double()
    x = x.double() if x.is_floating_point() else x
    before = nn.utils.parameters_to_vector(own.parameters()).detach().clone()
    made(own, loss, len(x), 0.0)(x, y)
    moved = (before - nn.utils.parameters_to_vector(own.parameters()).detach()) / 0.01
    return float((moved - wanted).norm() / wanted.norm())


def cost(name: str, make: Any, device: str, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model, loss, x, y = make()
    model, x, y = model.to(device), x.to(device), y.to(device)
    steps: dict[str, Step] = {}
    rows: list[dict[str, Any]] = []
    memory: dict[str, int] = {}
    checked: dict[str, str] = {}
    wanted = truth(model, loss, x, y)
    for way, made in WAYS.items():
        try:
            own = copy.deepcopy(model)
            if made is not plain and 'how="layer"' not in way:
                checked[way] = f"off by {off(model, made, loss, x, y, wanted):.0e}"
            step = made(own, loss, len(x), NOISE)
            for _ in range(4):  # learns, records
                step(x, y)
            run = lambda step=step: step(x, y)
            memory[way] = memory_of(run, own) if device == "cuda" else memory_on_cpu(run, own)
            steps[way] = step
        except Exception as error:
            rows.append({"way": way, "note": reason(error)})
    times: dict[str, list[float]] = {way: [] for way in steps}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times["plain"]) < 5:
        for way in random.sample(list(steps), len(steps)):
            begin = now(device)
            steps[way](x, y)
            times[way].append(now(device) - begin)
    for way in steps:
        ms = round(1e3 * statistics.median(times[way]), 2)
        took = round(memory[way] / memory["plain"], 3)
        rows.append({"way": way, "ms": ms, "to_plain": ratios(times, way, "plain"), "memory": took})
        rows[-1]["checked"] = checked.get(way, "")
    return {"model": name, "repetitions": len(times["plain"]), "rows": rows}


def tables(report: dict[str, Any]) -> str:
    """What docs/private.md quotes."""
    lines = ["| training | test accuracy | epsilon |", "|---|---|---|"] if report["training"] else []
    for row in report["training"]:
        if "note" in row:
            lines.append(f"| {row['way']} | {row['note']} | |")
        else:
            epsilon = "" if row["epsilon"] is None else f"{row['epsilon']:.2f}"
            lines.append(f"| {row['way']} | {row['accuracy']:.3f} ± {row['deviation']:.3f} | {epsilon} |")
    for made in report["cost"]:
        later = f" ({made['date']})" if "date" in made else ""  # measured after the others
        lines += [
            "",
            f"| {made['model']}{later} | to a plain step | quartiles | memory | clipped sum |",
            "|---|---|---|---|---|",
        ]
        for row in made["rows"]:
            ratio = row.get("to_plain")
            told = (
                f"{row['note']} | | | |"
                if ratio is None
                else f"{ratio['median']:.2f}× | {ratio['low']:.2f}, {ratio['high']:.2f} | {row['memory']:.2f}× | "
                f"{row['checked']} |"
            )
            lines.append(f"| {row['way']} | {told}")
    machine = report["machine"]
    where = ", ".join([machine.get("gpu", machine["cpu"]), f"torch {machine['torch']}", machine["date"]])
    return "\n".join([*lines, "", f"Measured on {where}."])


def filled(page: str, report: dict[str, Any]) -> str:
    """The page with these tables between the marks of their device."""
    begin = f"<!-- begin: benchmarks/private.py {report['device']} -->\n"
    before, _, rest = page.partition(begin)
    return before + begin + tables(report).lstrip("\n") + "\n" + END + rest.partition(END)[2]


def show(report: dict[str, Any]) -> None:
    for row in report["training"]:
        told = row.get("note") or f"accuracy {row['accuracy']:.3f} ± {row['deviation']:.3f}, epsilon {row['epsilon']}"
        print(f"{row['way']:30} {told}")
    for made in report["cost"]:
        print(f"\n{made['model']}, {made['repetitions']} repetitions")
        for row in made["rows"]:
            told = (
                row.get("note")
                or f"{row['to_plain']['median']:.2f}× a plain step, memory {row['memory']:.2f}×, {row['checked']}"
            )
            print(f"{row['way']:30} {told}")


def main() -> None:
    options = parsed(options_of(__doc__ or ""))
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    seconds = options.seconds or (10.0 if options.quick else 60.0)
    report: dict[str, Any] = {"machine": machine(options.device), "device": options.device, "delta": DELTA}
    report["training"] = train(2 if options.quick else 5) if options.device == "cpu" else []
    report["cost"] = []
    for name, make in models(options.device).items():
        report["cost"].append(cost(name, make, options.device, seconds))
        write(options.json, report)
    show(report)
    if options.json is not None and options.json.resolve() in (RESULTS, ON_GPU):
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), report), encoding="utf-8")


if __name__ == "__main__":
    main()
