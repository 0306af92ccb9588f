"""What each quantity costs over a plain training step, on a GPU (or, with small models, on a CPU).

    python benchmarks/quantities.py [--device cuda] [--quick] [--json PATH] [--only NAME]

The unit is one training step: forward, loss (a sum over samples), backward. In each repetition, which has a batch of
its own, every way makes one step, in random order, and its time is divided by that of the plain step of the same
repetition; shown are the median of these ratios, their quartiles, and peak memory over that of the plain step (on a GPU
all memory, on a CPU what the step adds). "clipped" holds what fits half of the free memory, "clipped, factors" factors
alone, "clipped, twice" nothing: one backward for the norms, one of the weighted losses. Each way is checked against
plain autograd: norms and dots against gradients of one sample at a time, clipped sums against the gradient of a
weighted loss, projections against the projection of `.grad`, norms of tokens against what modules were given and got
back, captures against the weight gradients that they multiply to.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import unittest.mock
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unsum
from checks import checked, clip
from measuring import machine, memory_of, memory_on_cpu, now, options_of, parsed, ratios, write
from models import GPT, RecurrentLM, ResNet50
from peers import reason
from unsum.reducers.holding import FACTORS

Step = Callable[[], Any]


def token_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    logits = logits.logits if hasattr(logits, "logits") else logits
    losses = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="none")
    return losses.view(len(x), -1).sum(1)


def class_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y, reduction="none")


def gpt(batch: int, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        model = GPT(**options)
        return model, token_losses, *torch.randint(options["vocabulary"], (2, batch, options["length"]))

    return make


def resnet(batch: int, size: int) -> Callable[[], Any]:
    def make() -> Any:
        model = ResNet50().eval().to(memory_format=torch.channels_last)
        x = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
        return model, class_losses, x, torch.randint(1000, (batch,))

    return make


def recurrent(batch: int, length: int, width: int, kind: type[nn.RNNBase] = nn.LSTM) -> Callable[[], Any]:
    def make() -> Any:
        return (
            RecurrentLM(vocabulary=1000, width=width, kind=kind),
            token_losses,
            *torch.randint(1000, (2, batch, length)),
        )

    return make


def experts(batch: int, length: int, width: int, layers: int, *, loop: bool = False) -> Callable[[], Any]:
    def make() -> Any:
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, vocab_size=8192, use_cache=False,
            max_position_embeddings=length, attention_dropout=0.0,
        )  # fmt: skip
        model = MixtralForCausalLM(config).eval()
        model.set_experts_implementation("eager" if loop else "grouped_mm")
        return model, token_losses, *torch.randint(8192, (2, batch, length))

    return make


SMALL = {"width": 768, "depth": 12, "heads": 12, "vocabulary": 50304}
LARGE = {"width": 2048, "depth": 8, "heads": 16, "vocabulary": 32000}
CLIPPED = ("clipped", "clipped, factors", "clipped, twice", "clipped, with .grad")
ALL = ("norms", *CLIPPED, "projected", "projected, linears", "tokens", "dots", "captured", "captured, hooks by hand")
MODELS: dict[str, dict[str, tuple[Callable[[], Any], tuple[str, ...]]]] = {
    "cuda": {
        "GPT-2 small shape B=16 T=1024": (gpt(16, length=1024, **SMALL), ALL),
        "GPT L=8 d=2048 B=8 T=2048": (gpt(8, length=2048, **LARGE), ALL),
        "GPT-2 small shape, tied": (gpt(16, length=1024, tied=True, **SMALL), ("norms", *CLIPPED)),
        "launch-bound: GPT-2 small shape B=8 T=128": (gpt(8, length=128, **SMALL), ALL),
        "GPT-2 small shape B=8 T=512": (gpt(8, length=512, **SMALL), ("norms", "clipped")),
        "ResNet-50 224×224 B=64, channels last, eval": (resnet(64, 224), ("norms", *CLIPPED)),
        "experts: Mixtral-like, 8 of d=1024, 4 layers, B=8 T=512": (experts(8, 512, 1024, 4), ("norms",)),
        "the same experts in a loop": (experts(8, 512, 1024, 4, loop=True), ("norms",)),
        "LSTM language model, d=1024, B=32 T=128": (recurrent(32, 128, 1024), ("norms", "clipped")),
    },
    "cpu": {
        "GPT L=2 d=128 T=64 B=8": (gpt(8, width=128, depth=2, heads=4, vocabulary=500, length=64), ALL),
        "GPT L=4 d=256 T=128 B=16": (
            gpt(16, width=256, depth=4, heads=4, vocabulary=1000, length=128),
            ("norms", *CLIPPED),
        ),
        "GPT L=2 d=512 T=64 B=32": (
            gpt(32, width=512, depth=2, heads=8, vocabulary=1000, length=64),
            ("norms", *CLIPPED),
        ),
        "ResNet-50 64×64 B=4, eval": (resnet(4, 64), ("norms", *CLIPPED)),
        "experts: Mixtral-like, 8 of d=128, 2 layers, B=4 T=64": (experts(4, 64, 128, 2), ("norms",)),
        "the same experts in a loop": (experts(4, 64, 128, 2, loop=True), ("norms",)),
        "LSTM language model, d=256, B=16 T=64": (recurrent(16, 64, 256), ("norms", "clipped")),
        "GRU language model, d=256, B=16 T=64": (recurrent(16, 64, 256, nn.GRU), ("norms", "clipped")),
        "RNN language model, d=256, B=16 T=64": (recurrent(16, 64, 256, nn.RNN), ("norms", "clipped")),
    },
}


def ways_of(model: nn.Module, losses: Any, x: Tensor, y: Tensor, names: tuple[str, ...]) -> dict[str, Step]:
    def block(*reducers: Any, **options: Any) -> Any:
        with unsum.gradients(model, *reducers, **options) as g:
            losses(model, x, y).sum().backward()
        return g

    def captured() -> Any:
        with unsum.capture(model, (nn.Linear, "input"), (nn.Linear, "grad_output"), keep="reference") as got:
            losses(model, x, y).sum().backward()
        return got

    def by_hand() -> dict[str, Tensor]:
        """The same with hooks: a forward hook on each layer, and a hook on its output for the gradient."""
        found: dict[str, Tensor] = {}
        handles: list[Any] = []

        def hook_of(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
                found[f"{name}:input"] = given[0].detach()
                handles.append(output.register_hook(lambda grad: found.__setitem__(f"{name}:grad_output", grad)))

            return hook

        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                handles.append(module.register_forward_hook(hook_of(name)))
        losses(model, x, y).sum().backward()
        for handle in handles:
            handle.remove()
        return found

    def twice() -> Any:
        with unsum.gradients(model, unsum.Norms(), grad=False) as g:
            each = losses(model, x, y)
            each.sum().backward(retain_graph=True)
        (each * clip(g[unsum.Norms].norms())).sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    def with_frozen(step: Step, trained: set[int]) -> Any:
        for p in model.parameters():
            p.requires_grad_(id(p) in trained)
        found = step()
        for p in model.parameters():
            p.requires_grad_(True)
        return found

    first = {id(next(model.parameters()))}
    matrices = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Linear)}
    project = lambda: block(unsum.Project(k=16), grad=False)[unsum.Project].by_parameter()
    possible: dict[str, Step] = {
        "norms": lambda: block(unsum.Norms())[unsum.Norms].sq_norms(),
        "clipped": lambda: block(unsum.WeightedSum(clip), grad=False)[unsum.WeightedSum].sum(),
        "clipped, factors": lambda: held_as_factors(
            lambda: block(unsum.WeightedSum(clip), grad=False)[unsum.WeightedSum].sum()
        ),
        "clipped, twice": twice,
        "clipped, with .grad": lambda: block(unsum.WeightedSum(clip))[unsum.WeightedSum].sum(),
        "projected": project,
        "projected, linears": lambda: with_frozen(project, matrices),
        "tokens": lambda: block(unsum.TokenNorms())[unsum.TokenNorms].norms(),
        "dots": lambda: (lambda g: g.dot(g))(block(grad=False)),
        "captured": captured,
        "captured, hooks by hand": by_hand,
    }
    plain = lambda: losses(model, x, y).sum().backward()
    chosen = {"plain": plain, "plain, again": plain} | {name: possible[name] for name in names}
    frozen = {"plain, weights frozen": lambda: with_frozen(plain, first)}
    return chosen | (frozen if "projected" in names else {})


def held_as_factors(step: Step) -> Any:
    """Whatever the budget would be: factors, to compare with."""
    with unittest.mock.patch("unsum.reducers.weighted.choose", lambda sizes, *_, **__: dict.fromkeys(sizes, FACTORS)):
        return step()


def shuffle(x: Tensor) -> None:
    """Another batch of the same numbers: experts get other rows, as in every step of a training run."""
    x.copy_(x.flatten()[torch.randperm(x.numel(), device=x.device)].view_as(x))


def run(name: str, make: Callable[[], Any], names: tuple[str, ...], *, device: str, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, losses, x, y = make()
    model = model.to(device, dtype)
    x, y = (t.to(device, dtype) if t.is_floating_point() else t.to(device) for t in (x, y))
    ways = ways_of(model, losses, x, y, names)
    results = {key: checked(key, step, model, losses, x, y) for key, step in ways.items()}
    for step in ways.values():
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            step()
    times: dict[str, list[float]] = {key: [] for key in ways}
    gc.collect()
    gc.freeze()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain"]) < 5:
        shuffle(x)
        for key in random.sample(list(ways), len(ways)):
            model.zero_grad(set_to_none=True)
            start = now(device)
            ways[key]()
            times[key].append(now(device) - start)
    peak_of = memory_of if device == "cuda" else memory_on_cpu
    peaks = {key: peak_of(step, model) for key, step in ways.items()}
    rows = []
    for key in ways:
        row = {"way": key, "ms": round(1e3 * statistics.median(times[key]), 2),
               "to_plain": ratios(times, key, "plain"), "checked": results[key]}  # fmt: skip
        row["memory"] = round(peaks[key] / peaks["plain"], 3)
        rows.append(row)
    return {"model": name, "repetitions": len(times["plain"]), "rows": rows}


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['model']}; {result['repetitions']} repetitions"]
    for row in result["rows"]:
        median, low, high = row["to_plain"].values()
        peak = f"{row['memory']:.2f}" if "memory" in row else ""
        lines.append(
            f"  {row['way']:<24}{row['ms']:>9.2f}{median:>9.3f}{low:>8.3f}{high:>8.3f}{peak:>7}  {row['checked']}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", default="", help="models whose name contains this")
    options = parsed(parser)
    warnings.simplefilter("ignore")
    random.seed(0)
    about, results = machine(options.device), []
    print(", ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
    for name, (make, names) in MODELS[options.device].items():
        if options.only not in name:
            continue
        try:
            seconds = options.seconds or (3 if options.quick else 20)
            results.append(run(name, make, names, device=options.device, seconds=seconds))
            print(table(results[-1]), end="\n\n", flush=True)
        except (ImportError, torch.OutOfMemoryError) as error:
            print(f"{name}: {reason(error)}", flush=True)
        write(
            options.json, {"machine": about, "device": options.device, "models": results}
        )  # a time limit loses nothing
        gc.unfreeze()
        gc.collect()


if __name__ == "__main__":
    main()
