"""How well scores foretell what training on other examples would have given: the linear datamodeling score (LDS).

    python benchmarks/lds.py [--quick] [--only digits] [--json benchmarks/results/lds_cpu.json]     or: make lds

A model is trained on all examples, and every method scores each example for each query: (queries, examples), positive
where training on the example lowers the query's loss. Then the same model is trained again, by the same recipe, on
random halves of the examples, and each query's loss is measured, the mean over as many trainings as the table says
(other initialisations, other orders; the first has the initialisation of the scored model). LDS is Spearman's
correlation, over the halves, of minus the sum of a query's scores over the half with its measured loss; shown is the
mean over queries, and how far it moves (standard deviation) when the halves are drawn again with replacement.

Nothing is tuned for a method: the recipes are stated, the damping is each library's own rule (kronfluence:
`damping_factor=None`, 0.1 times the mean eigenvalue of a block). *Time*, for digits: from a fresh copy of the model to
the matrix of scores, fit included; in each repetition every way runs once, in random order; shown is the median of
kronfluence's time over ours in the same repetition, and its quartiles. A way that is absent or fails is shown with its
reason.
"""

from __future__ import annotations

import contextlib
import copy
import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import TensorDataset

import lds_kronfluence
import unsum
from lds_problems import Problem, concrete, diabetes, digits, text
from measuring import fill, machine, now, options_of, parsed, ratios, write
from peers import reason
from retraining import half_subsets, lds, measured, trained

RESULTS = Path(__file__).resolve().parent / "results" / "lds_cpu.json"
Method = Callable[[Problem, nn.Module], Tensor]  # (queries, examples)


# ---- methods --------------------------------------------------------------------------------------------------------


def likelihood_of(problem: Problem) -> Any:
    make = getattr(unsum.curvature, problem.likelihood)
    return make(lambda model, batch: model(batch[0]), **({"mask": problem.mask} if problem.mask else {}))


def scored(problem: Problem, model: nn.Module, curvature: Any = None, score: str = "dot") -> Tensor:
    train, query, size = TensorDataset(*problem.train), TensorDataset(*problem.query), len(problem.train[0])
    options = {"curvature": curvature, "score": score, "batch_size": size}
    return unsum.influence(model, problem.losses, train, query, **options).matrix


def fitted(kind: str, drawn: bool) -> Method:
    def method(problem: Problem, model: nn.Module) -> Tensor:
        train, size = TensorDataset(*problem.train), len(problem.train[0])
        likelihood = likelihood_of(problem) if drawn else None
        c = unsum.curvature.fit(model, problem.losses, train, kind=kind, likelihood=likelihood, batch_size=size)
        return scored(problem, model, c)

    return method


def gauss_newton(problem: Problem, model: nn.Module) -> Tensor:
    train, size = TensorDataset(*problem.train), len(problem.train[0])
    return scored(problem, model, unsum.curvature.ggn(model, train, likelihood_of(problem), batch_size=size))


def projection(problem: Problem, model: nn.Module) -> Tensor:
    """Two-sided, and preconditioned with the projected gradients' own second moment, damped by 0.1 of its mean
    eigenvalue."""

    def rows(batch: Any) -> Tensor:
        with unsum.gradients(model, unsum.Project(k=16, seed=0), grad=False) as g:
            problem.losses(model, batch).sum().backward()
        return g[unsum.Project].matrix().double()

    p, q = rows(problem.train), rows(problem.query)
    gram = p @ p.T / len(p)
    damping = 0.1 * gram.trace() / p.shape[1]
    return torch.linalg.solve(gram + damping * torch.eye(len(p), dtype=p.dtype), p @ q.T).T  # (S + λ)⁻¹Pᵀ = Pᵀ(…)⁻¹


def kronfluence(strategy: str) -> Method:
    def method(problem: Problem, model: nn.Module) -> Tensor:
        train, query, size = TensorDataset(*problem.train), TensorDataset(*problem.query), len(problem.train[0])
        losses = problem.losses, problem.drawn
        return lds_kronfluence.scores(strategy, model, *losses, train, query, size, problem.mask)

    return method


METHODS: dict[str, Method] = {
    "dot": scored,
    "cosine": lambda problem, model: scored(problem, model, score="cosine"),
    "K-FAC": fitted("kfac", drawn=False),
    "EK-FAC": fitted("ekfac", drawn=False),
    "diagonal": fitted("diagonal", drawn=False),
    "K-FAC, labels drawn": fitted("kfac", drawn=True),
    "EK-FAC, labels drawn": fitted("ekfac", drawn=True),
    "Gauss–Newton": gauss_newton,
    "projection": projection,
    "kronfluence K-FAC": kronfluence("kfac"),  # it draws labels, too
    "kronfluence EK-FAC": kronfluence("ekfac"),
}
PAIRS = {  # whose times are compared
    "K-FAC": "kronfluence K-FAC",
    "K-FAC, labels drawn": "kronfluence K-FAC",
    "EK-FAC": "kronfluence EK-FAC",
    "EK-FAC, labels drawn": "kronfluence EK-FAC",
}


# ---- measuring ------------------------------------------------------------------------------------------------------


def full_model(problem: Problem) -> nn.Module:
    """Trained on everything."""
    everything = torch.arange(len(problem.train[0]))[None]
    stacked = trained(problem.make, problem.losses, problem.train, problem.recipe, everything, seed=0)
    model = problem.make()
    model.load_state_dict({name: p[0] for name, p in stacked.items()})
    return model


def outcome_of(problem: Problem, subsets: Tensor, folder: Path | None) -> Tensor:
    """Queries' losses after training on subsets; where a folder is given, from there if they were measured before."""
    kept = folder and folder / f"{problem.name}, {problem.recipe}, {problem.recipe.seeds} × {len(subsets)}.pt"
    if kept and kept.exists():
        return torch.load(kept, weights_only=True)
    found = measured(
        problem.make, problem.losses, problem.train, problem.query, problem.recipe, subsets, problem.at_once
    )
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, kept)
    return found


def deviation(scores: Tensor, subsets: Tensor, outcome: Tensor, draws: int = 50) -> float:
    """Of the mean score, when subsets are drawn again with replacement."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(draws):
        rows = torch.randint(len(subsets), (len(subsets),), generator=generator)
        found.append(float(lds(scores, subsets[rows], outcome[rows]).nanmean()))
    return statistics.stdev(found)


def solve(problem: Problem, repetitions: int, folder: Path | None) -> dict[str, Any]:
    begin = time.perf_counter()
    model, subsets = full_model(problem), half_subsets(len(problem.train[0]), problem.subsets)
    outcome = outcome_of(problem, subsets, folder)
    with torch.no_grad():
        losses = {"train": problem.losses(model, problem.train), "query": problem.losses(model, problem.query)}
    report: dict[str, Any] = {
        "problem": problem.name, "about": problem.about, "recipe": str(problem.recipe), "seeds": problem.recipe.seeds,
        "examples": len(problem.train[0]), "queries": len(problem.query[0]), "subsets": len(subsets),
        "trained_in": round(time.perf_counter() - begin, 1), "rows": [],
        "loss": {name: round(float(each.mean()), 4) for name, each in losses.items()},
    }  # fmt: skip
    ways: dict[str, Method] = {}
    for name, method in METHODS.items():
        row: dict[str, Any] = {"method": name}
        if name in problem.left_out:
            report["rows"].append(row | {"note": problem.left_out[name]})
            continue
        try:
            torch.manual_seed(0)
            start = now("cpu")
            scores = method(problem, copy.deepcopy(model))
            row["seconds"] = round(now("cpu") - start, 3)
            each = lds(scores, subsets, outcome)
            row |= {"lds": round(float(each.mean()), 4), "deviation": round(deviation(scores, subsets, outcome), 4)}
            ways[name] = method
        except Exception as error:  # whatever a library raises is what the table says of it
            row["note"] = "not installed" if isinstance(error, ModuleNotFoundError) else reason(error)
        if name in problem.aims:
            row["aim"] = problem.aims[name]
        report["rows"].append(row)
        print(f"{problem.name}: {told(row)}", flush=True)
    ways = {name: way for name, way in ways.items() if name in PAIRS or name in PAIRS.values()}
    report["times"] = compared(problem, model, ways, repetitions) if repetitions else []
    return report


def compared(problem: Problem, model: nn.Module, ways: dict[str, Method], repetitions: int) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name in random.sample(list(ways), len(ways)):
            own = copy.deepcopy(model)
            begin = now("cpu")
            ways[name](problem, own)
            times[name].append(now("cpu") - begin)
    rows: list[dict[str, Any]] = []
    for name, each in times.items():
        rows.append({"method": name, "seconds": round(statistics.median(each), 4), "repetitions": repetitions})
        if PAIRS.get(name) in times:
            rows[-1] |= {"peer": PAIRS[name], "faster": ratios(times, PAIRS[name], name)}
    return rows


# ---- telling --------------------------------------------------------------------------------------------------------


def told(row: dict[str, Any]) -> str:
    if "note" in row:
        return f"{row['method']:22} {row['note']}"
    aim = f"   asked for {row['aim']}" if "aim" in row else ""
    return f"{row['method']:22} {row['lds']:6.3f} ± {row['deviation']:.3f}   {row['seconds']:7.2f} s{aim}"


def tables(report: dict[str, Any]) -> str:
    lines: list[str] = []
    for found in report["problems"]:
        if "note" in found:
            lines += [f"**{found['problem']}**: {found['note']}", ""]
            continue
        times = f"{found['seeds']} times " if found["seeds"] > 1 else ""
        lines += [
            f"**{found['about']}**: {found['examples']} examples, {found['queries']} queries; {found['recipe']}; "
            f"trained {times}on each of {found['subsets']} halves. Loss {found['loss']['train']} on the examples, "
            f"{found['loss']['query']} on the queries.",
            "", "| method | LDS | ± | seconds |", "|---|---|---|---|",
        ]  # fmt: skip
        for row in found["rows"]:
            values = row.get("note") or f"{row['lds']:.3f} | {row['deviation']:.3f} | {row['seconds']:.2f}"
            lines.append(f"| {row['method']} | {values} |" + (" | |" if "note" in row else ""))
        if any("faster" in row for row in found["times"]):
            lines += ["", "| fit and all scores | seconds | faster than | times | quartiles |", "|---|---|---|---|---|"]
        for row in found["times"]:
            if "faster" in row:
                f = row["faster"]
                ratio = f"{row['peer']} | {f['median']:.1f} | {f['low']:.1f}, {f['high']:.1f}"
                lines.append(f"| {row['method']} | {row['seconds']:.3f} | {ratio} |")
        lines.append("")
    machine = report["machine"]
    return "\n".join([*lines, f"Measured on {machine['cpu']}, torch {machine['torch']}, {machine['date']}."])


def main() -> None:
    parser = options_of(__doc__ or "")
    parser.add_argument("--only", metavar="NAME", help="digits, concrete, diabetes or documents")
    parser.add_argument(
        "--concrete", type=Path, metavar="PATH", help="a file with UCI Concrete, nine numbers in a line"
    )
    parser.add_argument("--outcomes", type=Path, metavar="FOLDER", help="keep what trainings gave there, for next time")
    options = parsed(parser)
    warnings.simplefilter("ignore")
    makers: dict[str, Callable[[], Problem]] = {
        "digits": lambda: digits(options.quick),
        "concrete": lambda: concrete(options.quick, options.concrete),
        "documents": lambda: text(options.quick),
    }
    report: dict[str, Any] = {"machine": machine("cpu"), "device": "cpu", "threads": options.threads, "problems": []}
    for name, make in (makers | {"diabetes": lambda: diabetes(options.quick)}).items():
        solved = {found["problem"] for found in report["problems"] if "rows" in found}
        wanted = options.only == name if options.only else name in makers or "Concrete" not in solved
        if not wanted:  # diabetes stands in for Concrete
            continue
        try:
            problem = make()
        except ImportError as error:
            report["problems"].append({"problem": name, "note": str(error)})
            print(f"{name}: {error}")
            continue
        repetitions = (3 if options.quick else 15) if name == "digits" else 0
        attention = sdpa_kernel(SDPBackend.MATH) if name == "documents" else contextlib.nullcontext()
        with attention:  # the one that can be differentiated twice
            report["problems"].append(solve(problem, repetitions, options.outcomes))
        write(options.json, report)
    print("\n" + tables(report))
    if options.json is not None and options.json.resolve() == RESULTS:
        fill("benchmarks/lds.py", tables(report))


if __name__ == "__main__":
    main()
