"""How far the table of how samples travel goes: over all architectures of the suite (tests/batches.py), the
structures in which values had to decide, and at which kinds of nodes.

    python benchmarks/coverage.py --json benchmarks/results/coverage.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import batches  # noqa: E402
import unsum  # noqa: E402
from unsum.learn import evidence, learn  # noqa: E402


class Listener:
    """Hears what each walk and each sweep has found."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.nodes = self.judged = self.swept = 0
        walk, sweep = evidence.walk, learn.sweep

        def hear(*args: Any, **options: Any) -> Any:
            found = walk(*args, **options)
            self.asked = Counter(node.name() for node in found.asked)
            self.nodes = sum(owners is not None for owners in found.owners.values())
            return found

        def hear_sweep(*args: Any, **options: Any) -> Any:
            self.swept += 1
            return sweep(*args, **options)

        evidence.walk, learn.sweep = hear, hear_sweep


def measured(name: str, architecture: Any, listener: Listener) -> dict[str, Any]:
    model, step = architecture.model(), architecture.steps()[0]
    listener.asked, listener.swept = Counter(), 0
    with unsum.gradients(model, unsum.Norms()):
        architecture.losses(model, step).sum().backward()
    return {"name": name, "nodes": listener.nodes, "asked": dict(listener.asked), "swept": bool(listener.swept)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    listener, rows = Listener(), []
    for name, architecture in batches.suite().items():
        try:
            rows.append(measured(name, architecture, listener))
        except Exception as error:  # one that cannot be run here
            print(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
    kinds: Counter[str] = Counter()
    for row in rows:
        kinds.update(row["asked"].keys())
    silent = [row["name"] for row in rows if row["asked"] or row["swept"]]
    print(f"{len(rows)} architectures; values had to decide in {len(silent)}: {', '.join(silent)}")
    for kind, count in kinds.most_common():
        print(f"  {kind}: {count}")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
