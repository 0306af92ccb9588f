"""Every architecture of the suite on a GPU, in one command, with nothing but torch, transformers and timm:

    make gpu-architectures                      # or PYTHONPATH=src:tests python tests/gpu_architectures.py
    ... --workers 12 --limit 120 --total 540 --only 'gpt*' --dtype bfloat16 --json PATH --device cpu

Each runs the six batches of `tests/batches.py`, of which no two are alike, in float32 and in bfloat16, with torch's
defaults. In each batch two blocks: norms while backward runs, and the gradients of all samples; both against gradients
of one sample at a time (`autograd.grad` on the graph that the second block has seen, in the same dtype), and every
`.grad` against their sum. Where torch's own gradients of a batch are not the sum of its samples', torch fails. What is
not right is printed as it comes, and a table at the end.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import multiprocessing
import os
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# cuDNN rounds convolutions to TF32, as torch has it by default.
TOLERANCE = {"float32": 2e-3, "bfloat16": 5e-2}  # of the largest sample's gradient, over all parameters
OUTCOMES = ("right", "refused", "wrong", "crash", "plain torch fails", "took too long", "process ended", "not run")
SEVERITY = ("wrong", "crash", "refused", "right", "plain torch fails")  # the first of these that a step had


# ---- in a process of its own ----------------------------------------------------------------------------------------


def work(pipe: Connection, device: str) -> None:
    """Answer what is asked until nothing more is: (name, dtype) -> a result."""
    import warnings

    import torch

    import batches

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unsum").addHandler(handler)
    suite = batches.suite()
    pipe.send(None)  # ready
    while (asked := pipe.recv()) is not None:
        name, dtype = asked
        start = time.monotonic()
        said.clear()
        result = checked(suite[name], getattr(torch, dtype), device)
        result |= {"name": name, "dtype": dtype, "seconds": round(time.monotonic() - start, 1), "said": [*said]}
        broken = any("CUDA error" in note for note in result["notes"])  # after which this process can do nothing more
        pipe.send(result | {"broken": broken})
        if broken:
            return
        if device == "cuda":
            torch.cuda.empty_cache()


def checked(architecture: Any, dtype: Any, device: str) -> dict[str, Any]:
    """The six steps of one architecture."""
    outcomes, notes = [], []
    try:
        model = architecture.model().to(device, dtype)
    except Exception as error:
        return {"outcome": "plain torch fails", "steps": [], "notes": [f"cannot be made: {first_line(error)}"]}
    for k, step in enumerate(architecture.steps()):
        outcome, note, step = step_of(
            architecture, model, step, str(dtype).removeprefix("torch."), norms_first=k % 2 == 0
        )
        outcomes.append({"step": str(step), "outcome": outcome})
        if note:
            notes.append(f"{step}: {note}")
    found = {one["outcome"] for one in outcomes}
    return {"outcome": next(each for each in SEVERITY if each in found), "steps": outcomes, "notes": notes}


def step_of(architecture: Any, model: Any, step: Any, dtype: str, *, norms_first: bool) -> tuple[str, str, Any]:
    """(outcome, what there is to say, the step as the model can run it)."""
    done = plainly(architecture, model, step, TOLERANCE[dtype])
    if isinstance(done, str):
        return "plain torch fails", done, step
    step, again = done
    outcome, note = blocks_of(architecture, model, step, again, TOLERANCE[dtype], norms_first=norms_first)
    for _ in range(0 if outcome == "right" else 3):
        once_more = plainly(architecture, model, step, TOLERANCE[dtype])
        if isinstance(once_more, str) or once_more[0] != step:
            why = once_more if isinstance(once_more, str) else "gradients that are not finite"
            return "plain torch fails", f"at times: {why}", step
    return outcome, note, step


def plainly(architecture: Any, model: Any, step: Any, tolerance: float) -> Any:
    """(the step as the model can run it, the truth), or why torch has none."""
    import batches

    done = batches.plain(architecture, model, step)
    if isinstance(done, str):
        return done
    step, each = done
    model.zero_grad()
    architecture.losses(model, step).sum().backward()
    off, name = grads_off(model, each)
    scale = max(float(values.float().norm()) for values in each.values())
    return done if off <= tolerance * scale else f"{name}.grad off by {off / scale:.1e} from the sum of its samples'"


def grads_off(model: Any, each: Any) -> tuple[float, str]:
    """How far a `.grad` is from the sum of the samples', at most, and whose."""
    found = [(0.0, "")]
    for name, values in each.items():
        wanted, grad = values.float().sum(0), model.get_parameter(name).grad
        off = float((wanted if grad is None else grad.float() - wanted).norm())
        found.append((off if off == off else float("inf"), name))
    return max(found)


def blocks_of(
    architecture: Any, model: Any, step: Any, again: Any, tolerance: float, *, norms_first: bool
) -> tuple[str, str]:
    """(outcome, what there is to say) of both blocks."""
    from reference import each_of

    import unsum

    try:
        if norms_first:
            squares, off = norms_of(architecture, model, step, again)
        model.zero_grad()
        with unsum.gradients(model) as g:
            losses = architecture.losses(model, step)
            losses.sum().backward(retain_graph=True)
        each = each_of(model, losses)
        del losses
        offs = [(*grads_off(model, each), "")]
        if not norms_first:
            squares, off = norms_of(architecture, model, step, again)
        wrong = compared(g, squares, [*offs, (*off, " beside Norms")], each, again, tolerance)
    except unsum.errors.UnsumError as error:
        return "refused", first_line(error)
    except Exception as error:
        return "crash", f"{first_line(error)} [{where(error)}]"
    return ("wrong", wrong) if wrong else ("right", "")


def norms_of(architecture: Any, model: Any, step: Any, each: Any) -> tuple[dict[str, Any], tuple[float, str]]:
    """({parameter: (n,)}, how far a `.grad` is off) of a block that a training loop would have."""
    import unsum

    model.zero_grad()
    with unsum.gradients(model, unsum.Norms()) as g:
        architecture.losses(model, step).sum().backward()
    return {"": g[unsum.Norms].sq_norms(), **g[unsum.Norms].by_parameter()}, grads_off(model, each)


def compared(g: Any, squares: dict[str, Any], grads: Any, each: Any, again: Any, tolerance: float) -> str:
    """What is wrong, or nothing. `again` is the same truth from a forward of its own: how far torch is from itself."""
    import torch

    norm = {name: values.flatten(1).float().norm(dim=1) for name, values in each.items()}
    norm[""] = torch.stack([*norm.values()]).square().sum(0).sqrt()
    scale = float(norm[""].max())
    if not scale > 0:
        return "the truth is zero everywhere: nothing is tested"
    noise = max(float((each[name] - again[name]).float().norm()) for name in each)
    allowed, found = tolerance * scale, []
    found += [(off, allowed + noise, f"{name}.grad{which}") for off, name, which in grads]
    for name, values in each.items():
        if name not in g:
            off = float(norm[name].max())
        else:
            ours = g[name].per_sample()
            off = float((ours.float() - values.float()).flatten(1).norm(dim=1).max()) if values.numel() else 0.0
        found.append((off, allowed, f"{name}.per_sample()"))
    found.append((float((g.norms().float() - norm[""]).abs().max()), allowed, "norms()"))
    for name, ours in squares.items():
        off = float((ours.float().clamp_min(0).sqrt() - norm[name]).abs().max())
        found.append((off, allowed + noise, f"Norms of {name}" if name else "Norms"))
    bad = [one for one in found if not one[0] <= one[1]]
    if not bad:
        return ""
    off, _, what = max(bad)
    return f"{what} off by {off / scale:.1e} of the largest gradient ({len(bad)} of {len(found)} reads are wrong)"


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def where(error: BaseException) -> str:
    """The last line of the library's own that it came through."""
    import unsum

    home = os.path.dirname(unsum.__file__)
    ours = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(home)]
    return f"{os.path.relpath(ours[-1].filename, home)}:{ours[-1].lineno}: {ours[-1].line}" if ours else "outside unsum"


# ---- the one that asks ----------------------------------------------------------------------------------------------


class Worker:
    """A process, and what it has been asked."""

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()
        self.job: tuple[str, str] | None = None
        self.since = time.monotonic()
        self.ready = False

    def ask(self, job: tuple[str, str]) -> None:
        self.job, self.since = job, time.monotonic()
        self.pipe.send(job)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Run:
    """All jobs, given to the workers until none is left or the time is up."""

    def __init__(self, jobs: list[tuple[str, str]], options: argparse.Namespace) -> None:
        self.jobs, self.options = jobs, options
        self.results: list[dict[str, Any]] = []
        self.workers: list[Worker] = []

    def go(self) -> None:
        end = time.monotonic() + self.options.total
        self.workers = [Worker(self.options.device) for _ in range(min(self.options.workers, len(self.jobs)))]
        try:
            while (self.jobs or any(w.job for w in self.workers)) and self.workers and time.monotonic() < end:
                for pipe in wait([w.pipe for w in self.workers], timeout=1):
                    self.answer(next(w for w in self.workers if w.pipe is pipe))
                for worker in [w for w in self.workers if w.job and time.monotonic() - w.since > self.options.limit]:
                    self.gone(worker, "took too long", f"more than {self.options.limit:.0f} s")
        finally:
            left = [w.job for w in self.workers if w.job] + self.jobs
            self.results += [{"name": n, "dtype": d, "outcome": "not run", "notes": [], "seconds": 0} for n, d in left]
            for worker in self.workers:
                worker.end()

    def answer(self, worker: Worker) -> None:
        try:
            result = worker.pipe.recv()
        except (EOFError, ConnectionError):
            worker.process.join()
            self.gone(worker, "process ended", f"exit code {worker.process.exitcode}")
            return
        if result is not None:
            worker.job = None
            self.take(result)
        worker.ready = True
        if result is not None and result.pop("broken"):
            self.replace(worker)
        elif self.jobs:
            worker.ask(self.jobs.pop(0))

    def gone(self, worker: Worker, outcome: str, why: str) -> None:
        if worker.job:
            name, dtype = worker.job
            seconds = round(time.monotonic() - worker.since, 1)
            self.take({"name": name, "dtype": dtype, "outcome": outcome, "notes": [why], "seconds": seconds})
        self.replace(worker)

    def replace(self, worker: Worker) -> None:
        worker.end()
        self.workers.remove(worker)
        if self.jobs and worker.ready:  # one that cannot even begin would not do so the next time
            self.workers.append(Worker(self.options.device))

    def take(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        if result["outcome"] != "right":
            notes = result["notes"]
            more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
            worst = [n for n, s in zip(notes, not_right(result), strict=False) if s == result["outcome"]] or notes
            print(f"{result['dtype']:<9} {result['name']}: {result['outcome']}: {(worst or [''])[0]}{more}", flush=True)


def not_right(result: dict[str, Any]) -> list[str]:
    """The outcomes that the notes speak of."""
    return [one["outcome"] for one in result.get("steps", ()) if one["outcome"] != "right"]


def table(results: list[dict[str, Any]]) -> str:
    dtypes = [d for d in TOLERANCE if any(r["dtype"] == d for r in results)]
    count = Counter((r["dtype"], r["outcome"]) for r in results)
    shown = [o for k, o in enumerate(OUTCOMES) if k < 5 or any(count[d, o] for d in dtypes)]
    lines = [f"{'':<10}" + "".join(f"{o:>{len(o) + 3}}" for o in shown)]
    for dtype in dtypes:
        lines.append(f"{dtype:<10}" + "".join(f"{count[dtype, o]:>{len(o) + 3}}" for o in shown))
    return "\n".join(lines)


def machine(device: str) -> dict[str, str]:
    """Asked in a process of its own: this one holds no part of the GPU."""
    import torch

    gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" and torch.cuda.is_available() else {}
    return {**gpu, "torch": torch.__version__, "processors": str(os.cpu_count())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--workers", type=int, default=12, help="processes, all of them on the same GPU")
    parser.add_argument("--only", default="*", metavar="GLOB", help="architectures: 'gpt*', 'timm/*', 'nn/lstm'")
    parser.add_argument("--dtype", choices=[*TOLERANCE], help="only this one")
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="for one architecture")
    parser.add_argument("--total", type=float, default=570, metavar="SECONDS", help="then what there is is printed")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    options = parser.parse_args()
    from batches import suite

    start = time.monotonic()
    dtypes = [options.dtype] if options.dtype else [*TOLERANCE]
    jobs = [(name, dtype) for name in suite() if fnmatch.fnmatch(name, options.only) for dtype in dtypes]
    if not jobs:
        parser.error(f"--only {options.only!r}: there is none; choose of {', '.join(suite())}")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        about = pool.apply(machine, (options.device,))
    if options.device == "cuda" and "gpu" not in about:
        parser.error("there is no GPU; --device cpu")
    print(", ".join(f"{key} {value}" for key, value in about.items()) + f", {len(jobs)} runs", flush=True)
    options.total -= time.monotonic() - start
    run = Run(jobs, options)
    try:
        run.go()
    finally:
        results = sorted(run.results, key=lambda r: (r["name"], r["dtype"]))
        print("\n" + table(results))
        for words, count in Counter(line for r in results for line in {*r.get("said", ())}).items():
            print(f'in {count} runs: "{words}"')
        slow = sorted(results, key=lambda r: -r["seconds"])[:5]
        print(
            f"{time.monotonic() - start:.0f} s; longest: "
            + ", ".join(f"{r['name']} {r['seconds']:.0f} s" for r in slow)
        )
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    bad = {"wrong", "crash", "took too long", "process ended", "not run"}
    raise SystemExit(any(r["outcome"] in bad for r in results))


if __name__ == "__main__":
    main()
