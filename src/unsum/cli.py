"""The command line: `unsum sites | check | draw | report | watch | index | demo`."""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from torch import Tensor

import unsum
from unsum import index_commands
from unsum.command import CODES, TARGET, as_json, aside, command, count, written
from unsum.demo.terminal import has_colour
from unsum.destination import writable
from unsum.errors import OptionError, UnsumError
from unsum.listing import Sites
from unsum.picture import Picture, place
from unsum.report.make import data_of
from unsum.target import everything, model_of, told


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Exit code 0: done; 1: unsum raised an error; 2: the command line is wrong; 3: a check is red."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except KeyboardInterrupt:
        print("unsum: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if arguments.traceback:
            traceback.print_exc()
        text = _line(error) if isinstance(error, UnsumError) else f"{_name(arguments)} failed: {told(error)}"
        own = not isinstance(error, UnsumError) or error.__cause__ is not None
        hint = "; --traceback shows where" if own and not arguments.traceback else ""
        print(f"unsum: {text}{hint}", file=sys.stderr)
        return 1


def _line(error: Exception) -> str:
    """The lines of a message as one."""
    return "; ".join(part.strip().rstrip(".;") for part in str(error).splitlines() if part.strip())


def _name(arguments: argparse.Namespace) -> str:
    return getattr(arguments, "target", arguments.command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unsum", description="What flows through a PyTorch network, and the gradient of every sample.",
        epilog=f"{CODES}\n\nexample: unsum report train.py:setup -o report.html",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"unsum {unsum.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    _add_sites(commands)
    _add_check(commands)
    _add_draw(commands)
    _add_report(commands)
    _add_watch(commands)
    index_commands.add(commands)
    _add_demo(commands)
    return parser


# ---- sites -----------------------------------------------------------------------------------------------------------


def _add_sites(commands: Any) -> None:
    target = "module:function or file.py:function that returns a model, or a tuple with one"
    example = "unsum sites torchvision.models:resnet18 'layer1.*:output'"
    parser = command(commands, "sites", "list the sites of a model", example, _sites, target)
    parser.add_argument("pattern", nargs="*", default=[], help="only the sites that these patterns choose")
    parser.add_argument("--all", action="store_true", help="every block, also those that are alike")
    parser.add_argument(
        "--shapes", action="store_true", help="run the loss function once, and show the shape of every module's output"
    )


def _sites(arguments: argparse.Namespace) -> None:
    with aside():
        if arguments.shapes:
            model, loss_fn, batch = everything(arguments.target)
            found = Sites(
                model, *arguments.pattern, run=lambda: loss_fn(model, batch), given=batch, fold=not arguments.all
            )
        else:
            found = Sites(model_of(arguments.target), *arguments.pattern, fold=not arguments.all)
    names: Any = list(found)
    written(arguments, {"sites": names, "shapes": found.shapes} if arguments.shapes else names, str(found))


# ---- check -----------------------------------------------------------------------------------------------------------


def _add_check(commands: Any) -> None:
    about = "compare per-sample gradients with plain autograd, on a model of yours"
    command(commands, "check", about, "unsum check train.py:setup && echo exact", _check, TARGET)


def _check(arguments: argparse.Namespace) -> int:
    with aside():
        found = unsum.check(*everything(arguments.target))
    errors = {row.name: row.error for row in found.rows}
    written(arguments, {"ok": found.ok, "interacting": found.interacting, "errors": errors}, str(found))
    return 0 if found.ok else 3


# ---- draw ------------------------------------------------------------------------------------------------------------


def _add_draw(commands: Any) -> None:
    about = "draw the autograd graph of the losses: which gradients are stored, which flow and are thrown away"
    parser = command(commands, "draw", about, "unsum draw train.py:setup -o graph.svg", _draw, TARGET)
    parser.add_argument("-o", "--output", default="graph.svg", metavar="FILE", help=".svg or .html (%(default)s)")
    parser.add_argument("--backward", action="store_true", help="after a backward, with the sizes of what has flowed")


def _draw(arguments: argparse.Namespace) -> None:
    place(arguments.output)
    with aside():
        picture = _drawn(arguments.target, arguments.backward)
    picture.save(arguments.output)
    written(arguments, {"path": arguments.output}, arguments.output)


def _drawn(target: str, backward: bool) -> Picture:
    model, loss_fn, batch = everything(target)
    losses = loss_fn(model, batch)
    if not isinstance(losses, Tensor):
        raise OptionError(f"{target}: loss_fn(model, batch) returned {type(losses).__name__}, not a tensor")
    loss = losses.sum()
    if backward:
        loss.backward(retain_graph=True)
    return unsum.draw(loss, model=model, data=data_of(batch))


# ---- report ----------------------------------------------------------------------------------------------------------


def _add_report(commands: Any) -> None:
    about = "write one page on a model and a batch: layers with flags, per-sample gradients, the picture, the check"
    parser = command(commands, "report", about, "unsum report train.py:setup -o report.html", _report, TARGET)
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="where to write (%(default)s)")
    parser.add_argument("--title", help="the page's heading")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, help="run the check, or do not; where it is quick otherwise"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 3 if there are flags or the check is red")


def _report(arguments: argparse.Namespace) -> int:
    path = writable(arguments.output)
    with aside():
        made = unsum.report(*everything(arguments.target), path, title=arguments.title, check=arguments.check)
    ok = None if made.check is None else made.check.ok
    flags = [{"kind": flag.kind, "where": flag.where, "text": flag.text} for flag in made.flags]
    summary = {
        "path": str(made.path), "samples": len(made.losses), "layers": len(made.layers), "flags": flags,
        "outliers": made.outliers, "check": ok, "missing": made.missing,
    }  # fmt: skip
    written(arguments, summary, str(made))
    return 3 if arguments.strict and (flags or ok is False) else 0


# ---- watch -----------------------------------------------------------------------------------------------------------


def _add_watch(commands: Any) -> None:
    about = (
        "show a training run that unsum.watch has recorded: loss, norms, noise scale, samples that stand out, layers"
    )
    example = "unsum watch run.jsonl --last 500 --html run.html"
    parser = command(commands, "watch", about, example, _watch, None)
    parser.add_argument("path", metavar="run.jsonl", help='the file that unsum.watch(model, to="run.jsonl") writes')
    parser.add_argument("--last", type=count, metavar="N", help="only the last N records")
    parser.add_argument("--html", metavar="FILE", help="write it as a page too")


def _watch(arguments: argparse.Namespace) -> None:
    from unsum.training import page, run_file, terminal

    run = run_file.read(arguments.path)
    records = run.records[-arguments.last :] if arguments.last else run.records
    for note in run.notes:
        print(f"unsum: {run.path.name}: {note}", file=sys.stderr)
    if arguments.html is not None:
        page.write(records, arguments.html, title=run.path.stem)
    if arguments.json:
        return print(
            as_json({"path": str(run.path), "notes": run.notes, "html": arguments.html} | terminal.as_data(records))
        )
    width = shutil.get_terminal_size((100, 24)).columns
    print(terminal.text(records, width=width, blocks=_has_blocks(), colour=has_colour(sys.stdout)))
    return print(f"\npage: {arguments.html}") if arguments.html is not None else None


def _has_blocks() -> bool:
    """Whether standard output can show the letters of sparklines."""
    try:
        "▁█−×…∞".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


# ---- demo ------------------------------------------------------------------------------------------------------------


def _add_demo(commands: Any) -> None:
    about = "train a small transformer on sentences, some of them wrong; find them, ask why, edit a thought"
    example = "unsum demo --out demo; a report and a picture are written there"
    parser = command(commands, "demo", about, example, _demo, None)
    parser.add_argument("--out", default="demo", metavar="DIR", help="where report.html and graph.svg go (%(default)s)")
    parser.add_argument(
        "--seeds", action="store_true", help="the programs of the articles on hooks instead, in a second"
    )


def _demo(arguments: argparse.Namespace) -> None:
    from unsum.demo import seeds, story

    if arguments.seeds and not arguments.json:
        return seeds.main()
    if arguments.seeds:
        with contextlib.redirect_stdout(io.StringIO()) as told:
            seeds.main()
        return print(as_json({"lines": told.getvalue().splitlines()}))
    figures = story.main(arguments.out, quiet=arguments.json)
    if arguments.json:
        print(as_json(figures))
    return None
