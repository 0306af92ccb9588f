"""The command line: `unsum demo`, `unsum sites`, `unsum check`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

import unsum
from unsum.errors import OptionError, UnsumError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit code 0: done; 1: unsum says no; 2: the command line is wrong; 3: a check is red."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except UnsumError as error:
        print(f"unsum: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unsum", description="What flows through a PyTorch network.")
    parser.add_argument("--version", action="version", version=f"unsum {unsum.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="see what it is for, in less than two minutes",
        description="Train a small transformer on sentences, some of them wrong; find them, ask why, edit a thought.",
        epilog="example: unsum demo --out demo; a report and a picture are written there",
    )
    demo.add_argument("--out", default="demo", metavar="DIR", help="where report.html and graph.svg go (default: demo)")
    demo.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else")
    demo.add_argument("--seeds", action="store_true", help="the programs of the articles on hooks instead, in a second")
    demo.set_defaults(run=_demo)
    sites = commands.add_parser(
        "sites",
        help="list the sites of a model",
        description="List the sites of a model.",
        epilog="example: unsum sites torchvision.models:resnet18 'layer1.*:output'",
    )
    sites.add_argument("target", help="module:function or file.py:function that returns a model (or a tuple with one)")
    sites.add_argument("pattern", nargs="*", help="only the sites that these patterns choose")
    sites.add_argument("--json", action="store_true", help="print a JSON list of names")
    sites.set_defaults(run=_sites)
    check = commands.add_parser(
        "check",
        help="compare gradients per sample with plain autograd",
        description="Compare gradients per sample with plain autograd on a model of yours.",
        epilog="example: unsum check my_model.py:make; exit code 3 if something differs or samples interact",
    )
    check.add_argument("target", help="module:function or file.py:function that returns (model, loss_fn, batch)")
    check.add_argument("--json", action="store_true", help="print the result as JSON")
    check.set_defaults(run=_check)
    return parser


def _demo(arguments: argparse.Namespace) -> None:
    from unsum.demo import seeds, story

    if arguments.seeds:
        seeds.main()
        return
    figures = story.main(arguments.out, quiet=arguments.json)
    if arguments.json:
        print(json.dumps(figures))


def _sites(arguments: argparse.Namespace) -> None:
    found = unsum.sites(_model(arguments.target), *arguments.pattern)
    print(json.dumps(list(found)) if arguments.json else found)


def _check(arguments: argparse.Namespace) -> int:
    made = _call(arguments.target)
    if not isinstance(made, tuple) or len(made) != 3:
        raise OptionError(f"{arguments.target} must return (model, loss_fn, batch), got {type(made).__name__}")
    found = unsum.check(*made)
    if arguments.json:
        rows = {row.name: row.error for row in found.rows}
        print(json.dumps({"ok": found.ok, "interacting": found.interacting, "errors": rows}))
    else:
        print(found)
    return 0 if found.ok else 3


def _model(target: str) -> nn.Module:
    made = _call(target)
    for candidate in made if isinstance(made, tuple) else (made,):
        if isinstance(candidate, nn.Module):
            return candidate
    raise OptionError(f"{target} returned {type(made).__name__}, not an nn.Module or a tuple with one")


def _call(target: str) -> Any:
    """What the function that `target` names returns."""
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise OptionError(f"{target!r}: write module:function or file.py:function")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, "")
            module = importlib.import_module(where)
    except (ImportError, FileNotFoundError) as error:
        raise OptionError(f"cannot load {where}: {error}") from error
    function = getattr(module, name, None)
    if isinstance(function, nn.Module):
        return function
    if not callable(function):
        raise OptionError(f"{where} has no function {name!r}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise OptionError(f"{target} must be callable without arguments: {error}") from None
    return function()
