"""`build`: the projected gradients of a data set, shard by shard, on disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal

from torch import nn

from unsum.check import LossFunction
from unsum.curvature import Curvature
from unsum.errors import OptionError, UnsupportedError
from unsum.examples import SamplesOfBatch, is_loss_function
from unsum.index import locks, store, texts
from unsum.index.builder import Builder
from unsum.index.data import Collate, Length, cut
from unsum.index.maker import Maker, sketch_of
from unsum.index.ranks import Ranks
from unsum.index.rate import Rate
from unsum.index.texts import Source
from unsum.progress import progress
from unsum.seams.sharding import OtherRankFailed


def build(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Any,
    path: str | os.PathLike[str],
    project: int = 16,
    seed: int = 0,
    curvature: Curvature | None = None,
    dtype: Literal["float16", "bfloat16", "float32"] = "float16",
    samples: SamplesOfBatch = None,
    tokens: bool = False,
    *,
    sketches: int = 1,
    params: str | Sequence[str] | None = None,
    batch_size: int = 32,
    batch_tokens: int | None = None,
    collate: Collate | None = None,
    length: Length | None = None,
    ids: Source = None,
    text: Source = None,
    shard_size: int | None = None,
    shards: int | None = None,
    shard: int | None = None,
    part: tuple[int, int] | None = None,
) -> None:
    """Write the projected gradient of every example of a data set into a folder, which `unsum.index.open` reads.

    A build that was interrupted, by whatever, is continued by calling `build` again with the same arguments: it goes on
    with the next batch and gives the same bytes. Shards that were damaged since are built again, alone. In a program
    that `torchrun` started, the processes share the work.

    Args:
        model: Any module, most often in eval mode; also in DDP, or under `fully_shard`.
        loss_fn: `loss_fn(model, batch)` returns one loss for each sample, (n,).
        data: A list, a Dataset or a Hugging Face data set, which give examples; or a DataLoader (not shuffled) or
            another iterable that can be read again, which give batches.
        path: The folder; it is made.
        project: k: each parameter is mapped to k² numbers (see `unsum.Project`).
        seed: Of the random projections.
        curvature: What `unsum.curvature.fit` gives: instead of random projections, the k² coordinates of each block's
            eigenbasis with the largest eigenvalues are kept, and queries may ask for influence.
        dtype: What numbers are stored in; each row has a power of two of its own beside them.
        samples: Where the samples are, as in `unsum.gradients`, or a function of the batch (packed documents).
        tokens: A row for each token, rather than for each example. Parameters that do not meet data once for each
            position of the input are left out; `i.info["covered"]` names them.
        sketches: Independent projections of each gradient: with 2 or more, queries give error bars.
        params: A glob that chooses parameters by name, or a list of globs; None: those of the curvature, or all.
        batch_size: Examples that go through the model together, where `data` gives examples.
        batch_tokens: Instead: tokens that a batch has at the most, padding included. Examples of like length are put
            together, among 1,024 that follow each other; rows come in the order of the data all the same.
        collate: Makes a batch of a list of examples (padding); None: torch's `default_collate`.
        length: How long an example is, for `batch_tokens` and `tokens`; None: that of its `input_ids`, or of its first
            tensor or list.
        ids: Names of the examples: a function of an example, the name of a part of it, or a list. Stored as Parquet.
        text: Their texts, for tables and pages of hits; in the same ways.
        shard_size: Examples in a shard (batches, where `data` gives batches); None: at most 64 MB.
        shards: Instead: into how many shards the data is cut.
        shard: Build this shard alone (arrays of jobs). Who builds the last one completes the index.
        part: (i, n): build every n-th shard, from the i-th on: for n processes or machines that share the folder.

    Examples:
        >>> import tempfile, torch, unsum
        >>> model, folder = nn.Linear(3, 2), tempfile.mkdtemp()
        >>> examples = [(torch.randn(3), torch.tensor(k % 2)) for k in range(10)]
        >>> loss = lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1], reduction="none")
        >>> build(model, loss, examples, f"{folder}/index", project=2)
        >>> unsum.index.open(f"{folder}/index")
        index of 10 examples, K = 6 (float16): i.query(model, loss_fn, batch), i.rows(0, 10), i.info
    """
    _check_options(loss_fn, curvature, dtype, tokens, sketches, part)
    for name, value, least in (
        ("project", project, 1), ("seed", seed, 0), ("sketches", sketches, 1), ("shard_size", shard_size, 1),
        ("shards", shards, 1), ("shard", shard, 0), ("batch_tokens", batch_tokens, 1),
    ):  # fmt: skip
        may_be_none = name not in ("project", "seed", "sketches")
        if value is None and may_be_none:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(f"{name}={value!r}: a whole number, {least} or more")
    if sum(option is not None for option in (shard, part)) > 1 or None not in (shards, shard_size):
        raise OptionError("build: give shard= or part=, and shards= or shard_size=; not both")
    texts.check(ids, "ids", data)
    texts.check(text, "text", data)
    sized = cut(data, batch_size=batch_size, batch_tokens=batch_tokens, collate=collate, length=length, what="build")
    sketch, params = sketch_of(model, project, seed, sketches, curvature, params, tokens=tokens)
    folder, ranks = _folder(path), Ranks(alone=shard is not None or part is not None)
    builder = Builder(
        folder, Maker(model, loss_fn, samples, sketch, params), sized, dtype, curvature,
        ranks=ranks, tokens=tokens, ids=ids, text=text,
    )  # fmt: skip
    with contextlib.ExitStack() as held:
        _lock(held, folder, ranks, alone=shard is None and part is None)
        builder.prepare(shard_size, shards)
        own = _own(builder, shard, part, ranks, shards)
        try:
            ranks.together(lambda: _work(builder, own, ranks), builder.is_out_of_reach)
        finally:
            ranks.forget(folder)
        is_whole = ranks.from_first(builder.finish)
    if not is_whole and shard is None and part is None:
        raise OptionError(f"{folder}: a shard vanished while the others were built; call build again")


def _check_options(loss_fn: Any, curvature: Any, dtype: Any, tokens: Any, sketches: Any, part: Any) -> None:
    if not is_loss_function(loss_fn):
        raise OptionError("build needs loss_fn(model, batch), which returns one loss for each sample, (n,)")
    if curvature is not None and not isinstance(curvature, Curvature):
        raise OptionError(f"curvature={curvature!r}: what unsum.curvature.fit gives, or None")
    if dtype not in store.DTYPES:
        raise OptionError(f"dtype={dtype!r}: choose 'float16', 'bfloat16' or 'float32'")
    if not isinstance(tokens, bool):
        raise OptionError(f"tokens={tokens!r}: True or False")
    if curvature is not None and tokens:
        raise UnsupportedError(
            "build(curvature=..., tokens=True): a token's gradient in an eigenbasis would have to be formed.\n  build "
            "rows for examples; i.query(..., rerank=) scores the tokens of what it finds"
        )
    if curvature is not None and sketches != 1:
        raise OptionError("sketches= are of random projections; with curvature= nothing is random")
    if part is not None:
        is_pair = isinstance(part, tuple) and len(part) == 2 and all(type(each) is int for each in part)
        if not is_pair or not 0 <= part[0] < part[1]:
            raise OptionError(f"part={part!r}: (i, n) with 0 ≤ i < n, the i-th of n processes")


def _folder(path: str | os.PathLike[str]) -> Path:
    if not os.fspath(path):
        raise OptionError("path='': name the folder of the index")
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"cannot make the folder {folder}: {error.strerror}; choose another path") from None
    return folder


def _lock(held: contextlib.ExitStack, folder: Path, ranks: Ranks, *, alone: bool) -> None:
    """One process holds the folder for itself. Ranks hold it together, after the first has seen that nobody else does:
    so a run is not begun while a rank of an earlier one is still alive."""

    def first() -> None:
        with contextlib.ExitStack() as until:
            until.enter_context(locks.building(folder, alone=alone))
            if alone:
                store.sweep(folder)
            if ranks.count == 1:
                held.push(until.pop_all())

    ranks.from_first(first)
    if ranks.count > 1:
        ranks.together(lambda: held.enter_context(locks.building(folder, alone=False)))


def _own(
    builder: Builder, shard: int | None, part: tuple[int, int] | None, ranks: Ranks, shards: int | None
) -> Sequence[int] | None:
    """The shards that this process makes; None: one after the other, until the data ends."""
    if shard is None and part is None and ranks.count == 1:
        builder.cut.until_the_end()
    known = builder.cut.shards()
    if known is None:
        if shard is not None or part is not None or ranks.count > 1:
            raise OptionError("build: several processes need data that knows how long it is (len())")
        return None
    if shard is not None:
        if shard >= max(known, shards or 0):
            raise OptionError(f"shard={shard}: there are {known}, from 0 on")
        return [shard] if shard < known else []  # shards=100 of 150 examples are 75 of two examples each
    if part is not None:
        return range(part[0], known, part[1])
    if ranks.count == 1:
        return range(known)
    missing = ranks.from_first(lambda: builder.missing(range(known)))
    return missing[ranks.rank :: ranks.count]


def _work(builder: Builder, own: Sequence[int] | None, ranks: Ranks) -> None:
    """Make what is missing; a rank that is done helps the others."""
    try:
        _fill(builder, own, ranks)
        if ranks.count > 1:
            for number in range(builder.cut.shards() or 0):
                if builder.missing([number], every_byte=False):
                    builder.make(number, lambda *_: builder.listen(), others=True)
        builder.come_along()
    except OtherRankFailed:
        raise
    except Exception as error:
        builder.tell_failed(error)
        raise


def _fill(builder: Builder, own: Sequence[int] | None, ranks: Ranks) -> None:
    """Make the shards that are not there."""
    size, total = builder.cut.size, builder.cut.total
    known = None if total is None else -(-total // size)
    work = total if own is None or total is None else sum(min(size, total - number * size) for number in own)
    rate = Rate(work, builder.cut.unit)
    label = "index" if ranks.count == 1 else f"index (1 of {ranks.count} processes)"
    shown = None if ranks.rank == 0 else False
    line: progress[Any] = progress(iter(()) if work is None else work, label, shown=shown)

    def advance(examples: int, size: int) -> None:
        builder.listen()
        rate.add(examples, size)
        line.step(by=examples)
        line.show(str(rate))

    with line:
        for number in count() if own is None else own:
            if own is None and number == known and builder.is_complete:
                break
            if builder.missing([number]):
                if not builder.make(number, advance, others=ranks.count > 1) and own is None:
                    break
            elif work is not None and total is not None:
                rate.before(max(min(size, total - number * size), 0))
                line.step(by=max(min(size, total - number * size), 0))
