"""`unsum index build | query | info | verify | export` on the command line."""

from __future__ import annotations

import argparse
from typing import Any

import unsum
from unsum.command import TARGET, aside, command, count, target_name, written
from unsum.errors import OptionError
from unsum.target import everything, task

_TASK = (
    "module:function or file.py:function that returns (model, loss_fn, data), or (model, loss_fn, data, options), a "
    "dict of what unsum.index.build takes (collate, text, samples, curvature, ...); what is given here counts more"
)


def add(commands: Any) -> None:
    """Add the commands."""
    about = "the gradients of a data set on disk: build, query, info, verify, export"
    own = commands.add_parser("index", help=about, description=f"{about[0].upper()}{about[1:]}.").add_subparsers(
        required=True, metavar="command", dest="action"
    )
    _add_build(own)
    _add_query(own)
    for name, what, run in (
        ("info", "say what an index holds", _info),
        ("verify", "read every byte of an index; exit with 1 where something is damaged", _verify),
    ):
        command(own, name, what, f"unsum index {name} index", run, None).add_argument("path", help="its folder")
    what = "write all rows for another program"
    export = command(own, "export", what, "unsum index export index rows.parquet --format parquet", _export, None)
    export.add_argument("path", help="the index's folder")
    export.add_argument("to", help="the file to write")
    export.add_argument("--format", choices=("faiss", "arrow", "parquet", "numpy"), required=True, help="of the file")


def _add_build(own: Any) -> None:
    example = "unsum index build train.py:setup index --project 16"
    build = command(own, "build", "build an index, or go on with one", example, _build, _TASK)
    build.add_argument("path", help="its folder")
    build.add_argument("--project", type=count, metavar="K", help="K² numbers a parameter (16)")
    build.add_argument("--seed", type=int, help="of the projections (0)")
    build.add_argument("--sketches", type=count, metavar="M", help="independent projections, for error bars")
    build.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="(float16)")
    build.add_argument("--tokens", action="store_true", default=None, help="a row for each token")
    build.add_argument("--batch-size", type=count, metavar="N", help="examples at a time (32)")
    build.add_argument("--batch-tokens", type=count, metavar="N", help="instead: tokens in a batch, padding included")
    sizes = build.add_mutually_exclusive_group()
    sizes.add_argument("--shard-size", type=count, metavar="N", help="examples in a shard (at most 64 MB)")
    sizes.add_argument("--shards", type=count, metavar="N", help="instead: how many shards")
    which = build.add_mutually_exclusive_group()
    which.add_argument("--shard", type=_number, metavar="I", help="only this shard, from 0 on (arrays of jobs)")
    which.add_argument("--part", type=_part, metavar="I/N", help="only every N-th shard, from the I-th on (0/4)")


def _add_query(own: Any) -> None:
    example = "unsum index query train.py:question index -k 5 --html hits.html"
    query = command(own, "query", "the examples that score highest", example, _query, TARGET)
    query.add_argument("path", help="the index's folder")
    query.add_argument("-k", type=count, default=10, help="how many examples (%(default)s)")
    query.add_argument("--score", choices=("dot", "cosine", "influence"), default="dot", help="(%(default)s)")
    query.add_argument("--by", choices=("example", "token"), default="example", help="what is found (%(default)s)")
    query.add_argument(
        "--data", type=target_name, metavar="TARGET", help="the target that build was given: hits bring their examples"
    )
    query.add_argument("--rerank", type=count, metavar="N", help="score the best N again, exactly; needs --data")
    query.add_argument("--tokens", action="store_true", help="also the score of every token of the hits")
    query.add_argument("--html", metavar="FILE", help="also write a page")


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, 0 or more")
    return int(text)


def _part(text: str) -> tuple[int, int]:
    number, _, many = text.partition("/")
    if not number.isdecimal() or not many.isdecimal() or not int(number) < int(many):
        raise argparse.ArgumentTypeError(f"{text!r}: I/N with I below N, such as 0/4")
    return int(number), int(many)


def _build(arguments: argparse.Namespace) -> None:
    with aside():
        model, loss_fn, data, options = task(arguments.target)
        given = {
            name: value
            for name in ("project", "seed", "sketches", "dtype", "tokens", "batch_size", "batch_tokens", "shard_size",
                         "shards", "shard", "part")
            if (value := getattr(arguments, name)) is not None
        }  # fmt: skip
        unsum.index.build(model, loss_fn, data, arguments.path, **(options | given))  # what is typed counts
    if arguments.part is None and arguments.shard is None:
        return _info(arguments)
    which = f"shard {arguments.shard}" if arguments.part is None else f"part {arguments.part[0]} of {arguments.part[1]}"
    return written(
        arguments, {"path": arguments.path, "shard": arguments.shard, "part": arguments.part}, f"{which}: done"
    )


def _query(arguments: argparse.Namespace) -> None:
    with aside():
        model, loss_fn, batch = everything(arguments.target)
        data, options = (None, {}) if arguments.data is None else task(arguments.data)[2:]
        opened = unsum.index.open(arguments.path, data, collate=options.get("collate"))
        if data is None and (arguments.rerank is not None or (arguments.tokens and not opened.info["tokens"])):
            option = "--tokens" if arguments.rerank is None else "--rerank"
            raise OptionError(f"{option} needs the data set: add --data, with the target that build was given")
        hits = opened.query(
            model, loss_fn, batch, arguments.k, arguments.score,
            by=arguments.by, rerank=arguments.rerank, tokens=arguments.tokens,
        )  # fmt: skip
        if arguments.html is not None:
            hits.report(arguments.html)
    written(arguments, {"ids": hits.ids.tolist(), "scores": hits.scores.tolist(), "hits": hits.rows()}, str(hits))


def _info(arguments: argparse.Namespace) -> None:
    found = unsum.index.open(arguments.path)
    info = found.info
    size = sum(file.stat().st_size for file in found.files())
    audit = "" if info["audit"] is None else f"; Σ of the samples' gradients is off by {info['audit']:.1e}"
    told = f"{len(info['shards'])} shards, {size / 1e6:.1f} MB ({size / max(info['examples'], 1):.0f} bytes an example)"
    written(arguments, {**info, "bytes": size}, f"{repr(found).partition(':')[0]}; {told}{audit}")


def _verify(arguments: argparse.Namespace) -> int:
    damaged = unsum.index.open(arguments.path).verify()
    written(arguments, {"damaged": damaged}, "\n".join(damaged) or "whole")
    return 1 if damaged else 0


def _export(arguments: argparse.Namespace) -> None:
    unsum.index.open(arguments.path).export(arguments.to, arguments.format)
    written(arguments, {"path": arguments.to, "format": arguments.format}, f"written: {arguments.to}")
