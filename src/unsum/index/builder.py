"""Builds an index shard by shard. A shard is a function of the plan and its number, so any process can make it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unsum.curvature import Curvature
from unsum.errors import EmptyData, OptionError, UnsumError, UnsupportedError
from unsum.examples import First
from unsum.fingerprint import content
from unsum.index import locks, plan, store, texts
from unsum.index.data import Cut, Part
from unsum.index.journal import Journal, Record
from unsum.index.maker import Maker
from unsum.index.ranks import Ranks
from unsum.seams.modes import exactly
from unsum.seams.sharding import is_sharded, on_any_rank, tell_failed

_PADDING = 1e-5  # of the gradients of tokens: what those of padding may have, which is left out


class Builder:
    """What is built, of what, and where."""

    def __init__(
        self, folder: Path, maker: Maker, cut: Cut, dtype: str, curvature: Curvature | None, *,
        ranks: Ranks, tokens: bool = False, ids: texts.Source = None, text: texts.Source = None,
    ) -> None:  # fmt: skip
        self.folder, self._maker, self.cut, self._dtype = folder, maker, cut, dtype
        self._curvature, self._tokens, self._ids, self._text = curvature, tokens, ids, text
        self.plan: Mapping[str, Any] = {}
        self._mark = ""  # what shards say they belong to
        self._ranks, self._is_stepping = ranks, False
        cut.needs_lengths = tokens
        self._whole: dict[int, tuple[int, int]] = {}  # shards of which every byte was read, by time and size
        self.is_complete = (folder / store.MANIFEST).exists()

    def prepare(self, shard_size: int | None, shards: int | None) -> None:
        """Make the plan, or compare with the one that is there."""
        asked = self._ranks.together(self._asked)
        self._ranks.same(asked, self._differ)
        known = self._ranks.from_first(self._known)
        if known is None:
            made = self._ranks.together(lambda: plan.make(asked, self._maker, self.cut, shard_size, shards))
            known = self._ranks.from_first(lambda: self._keep(made))
        else:
            self._ranks.together(lambda: plan.refuse_other(self.folder, known, asked, self.cut, shard_size, shards))
            self._ranks.from_first(lambda: plan.keep_curvature(self.folder, self._curvature, known["sketch"]))
        self._maker.keep(known["columns"])
        self.plan, self._mark = known, plan.mark(known)
        self.cut.size = known["cut"]["size"]
        self._ranks.together(self._refuse_other_rows)

    def _asked(self) -> dict[str, Any]:
        asked = plan.wanted(self._maker, self.cut, self._dtype, tokens=self._tokens)
        first = self.cut.first() if callable(self._ids) or callable(self._text) else None
        asked["texts"] = {"ids": texts.mark(self._ids, first), "text": texts.mark(self._text, first)}
        return asked

    def _differ(self, rank: int, first: Mapping[str, Any], other: Mapping[str, Any]) -> Exception:
        return OptionError(
            f"build: the ranks do not ask for the same index. Rank {rank} beside rank 0: "
            f"{plan.difference(first, other)}.\n  give every rank the same model and all of the data; build divides it"
        )

    def _known(self) -> dict[str, Any] | None:
        is_begun = any(self.folder.glob("shard-*"))
        # Read after that look: who makes a shard has written the plan before.
        try:
            known, damage = store.read_json(self.folder, store.PLAN), None
        except OptionError as error:
            known, damage = None, error
        if known is None:  # the manifest of a build that was complete says it as well
            known = plan.from_manifest(self.folder)
            if known is not None:
                store.write_json(self.folder, store.PLAN, known)
            elif damage is not None:
                raise damage
            elif is_begun:
                raise OptionError(f"{self.folder}: has shards and no {store.PLAN}; give another path")
        return known

    def _keep(self, made: dict[str, Any]) -> dict[str, Any]:
        """Write the plan down, or take that of a process that came first."""
        with locks.short(self.folder, "plan"):
            store.sweep(self.folder, f".{store.PLAN}.*.part", f".{store.CURVATURE}*")
            other = store.read_json(self.folder, store.PLAN)
            if other is not None:
                return other
            plan.keep_curvature(self.folder, self._curvature, made["sketch"])
            store.write_json(self.folder, store.PLAN, made)
            return made

    def _refuse_other_rows(self) -> None:
        """Raise if the first batch of a shard that is there no longer gives the same rows: another loss_fn, other
        samples=, another mode of the model. Across machines rounding may differ."""
        is_there = self._ranks.from_first(lambda: self._at(0) is not None)
        first = self.cut.first()
        if first is None or not is_there:
            return
        shard = store.Shard(self.folder, 0)
        tensors = self._tensors(first, 0, 0)
        stored, scales = shard.stored()
        if self._tokens:
            here = torch.isin(shard.tokens()[0], tensors["examples"])
        else:
            here = torch.zeros(len(stored), dtype=torch.bool)
            here[tensors["order"] if "order" in tensors else slice(len(tensors["rows"]))] = True
        known = (stored.float() * scales[:, None])[here]
        order = tensors["order"].argsort() if "order" in tensors else slice(None)
        made = (tensors["rows"].float() * tensors["scales"][:, None])[order]
        off = known.double() - made.double() if known.shape == made.shape else known.new_ones(1)
        if known.shape != made.shape or float(off.norm()) > 0.02 * float(known.double().norm()):
            raise OptionError(
                f"{self.folder}: the first examples no longer give the rows that are there: loss_fn, samples=, the "
                "model's mode (train, eval) or the data is another.\n  give the same, or another path"
            )

    def missing(self, numbers: Iterable[int], *, every_byte: bool = True) -> list[int]:
        """Those of these shards that are not there whole. Without `every_byte` headers and lengths decide: for shards
        that other processes of this run have just written."""
        return [number for number in numbers if self._at(number, every_byte=every_byte) is None]

    def _at(self, number: int, *, every_byte: bool = True) -> store.Shard | None:
        """A shard that is there whole. Its bytes are read once."""
        known = every_byte and self._stamp(number)
        found = texts.shard_at(
            self.folder, number, self.plan, self._mark, every_byte=every_byte and self._whole.get(number) != known
        )
        if found is not None and known:
            self._whole[number] = known
        return found

    def _stamp(self, number: int) -> tuple[int, int] | None:
        try:
            told = (self.folder / store.shard_name(number)).stat()
        except OSError:
            return None
        return told.st_mtime_ns, told.st_size

    def make(self, number: int, advance: Callable[[int, int], None], *, others: bool = False) -> bool:
        """Make a shard, or go on with it; False if there is no data for it. `advance(examples, bytes)` hears of each
        batch. With `others`, a shard that another process makes is left to it."""
        with locks.shard(self.folder, number) as got:
            if not got and others:
                return True
            if not got:
                raise OptionError(
                    f"{self.folder}: another process makes shard {number} ({locks.maker_of(self.folder, number)}).\n"
                    "  wait for it, or stop it; what it has written stays"
                )
            if self._at(number) is not None:
                return True
            store.sweep_shard(self.folder, number)
            journal = Journal(self.folder, number)
            is_done = False
            try:
                made, named, examples = self._filled(number, journal, advance)
                if made:
                    with exactly():
                        self._write(number, made, named, examples)
                is_done = True
                return bool(made)
            finally:
                journal.close(done=is_done)

    def come_along(self) -> None:
        """Where parameters are spread over processes, every process takes part in every forward: go through the first
        batch for as long as another process has work."""
        first = None
        while on_any_rank(self._maker.model, False):
            first = first or self.cut.first()
            assert first is not None
            self._stepped(first, 0)

    def tell_failed(self, error: Exception) -> None:
        """The other processes are told that this one takes no more part: where parameters are spread over processes,
        in the collective call that begins every batch, and only there, since who heard of it elsewhere would leave
        this process alone in that call; otherwise by a file, for which each looks after every batch."""
        if not is_sharded(self._maker.model):
            self._ranks.tell(self.folder)
        elif not self.is_out_of_reach(error):
            tell_failed(self._maker.model)

    def listen(self) -> None:
        """Raise if another process has left word that it failed."""
        if not is_sharded(self._maker.model):
            self._ranks.listen(self.folder)

    def is_out_of_reach(self, error: Exception) -> bool:
        """Whether the others wait, by now, for a part of the model that this process will not send: a forward or a
        backward broke off in the middle."""
        return self._is_stepping and is_sharded(self._maker.model) and not isinstance(error, UnsumError)

    def _stepped(self, part: Part, first: First) -> Tensor:
        """The rows of a batch, of a forward and backward in which every process takes part."""
        self._is_stepping = True
        found = self._maker.rows(part.batch, "build", first)
        self._is_stepping = False
        return found

    def _filled(
        self, number: int, journal: Journal, advance: Callable[[int, int], None]
    ) -> tuple[list[Record], list[texts.Named], int]:
        """What the batches of a shard give, from the journal what was done before; and how many examples they have."""
        made = list(journal.records())
        named: list[texts.Named] = []
        examples = 0
        for k, part in enumerate(self.cut.parts(number)):
            if k < len(made):
                self._refuse_other_content(number, made[k], part)
            else:
                record = Record(self._tensors(part, number, examples), content(part.batch))
                journal.add(record)
                made.append(record)
            some = self._examples(part, made[k], examples)
            if texts.wanted(self.plan):
                named.append(texts.read(part, some, self._ids, self._text, number * self.cut.size))
            examples += some
            advance(1 if self.cut.unit == "batches" else len(part.examples or ()), _bytes(made[k]))
        return made, named, examples

    def _refuse_other_content(self, number: int, record: Record, part: Part) -> None:
        if record.content != content(part.batch):
            raise OptionError(
                f"{self.folder}: shard {number} was begun with other data.\n  give the same data set, or another path"
            )

    def _tensors(self, part: Part, number: int, before: int) -> dict[str, Tensor]:
        """What is stored of a batch, of whose shard so many examples came before: rows and scales; and `order`, where
        each row belongs in the shard, if examples of like length were put together."""
        on_any_rank(self._maker.model, True)
        rows = self._stepped(part, lambda k: self._called(k, part, number, before))
        found: dict[str, Tensor] = {}
        if self._tokens:
            rows, found = self._by_token(rows, part, before)
        elif part.is_sorted:
            if len(part.numbers or ()) != len(rows):
                raise UnsupportedError(
                    f"build(batch_tokens=...): {len(part.numbers or ())} examples gave {len(rows)} rows, so that their "
                    "order is lost when examples of like length are put together.\n  give batch_size= instead"
                )
            found["order"] = torch.tensor(part.numbers)
        stored, scales = store.scaled(rows, store.DTYPES[self._dtype])
        return {"rows": stored.contiguous(), "scales": scales, **found}

    def _called(self, k: int, part: Part, number: int, before: int) -> str:
        """The number of the k-th sample of a batch, in words."""
        is_numbered = part.numbers is not None and not self._maker.has_documents
        place = part.number(k) if is_numbered else before + k
        first = None if self._maker.has_documents and number else self.cut.before(number)
        if first is None:  # the shards before it know, if they are there
            shards = [store.shard_at(self.folder, each, every_byte=False) for each in range(number)]
            known = [shard.told["examples"] for shard in shards if shard is not None]
            first = sum(known) if len(known) == number else None
        return str(first + place) if first is not None else f"{place} of shard {number}"

    def _by_token(self, rows: Tensor, part: Part, before: int) -> tuple[Tensor, dict[str, Tensor]]:
        """(n, t, K) as one row for each token that an example has; padding has none, where lengths are known."""
        n, t = rows.shape[:2]
        if part.numbers is not None and len(part.numbers) != n:
            raise UnsupportedError(
                f"build(tokens=True): {len(part.numbers)} examples gave {n} samples: packed documents have no rows for "
                "tokens"
            )
        lengths = part.lengths if part.lengths is not None and max(part.lengths, default=0) <= t else [t] * n
        is_token = torch.arange(t) < torch.tensor(lengths)[:, None]
        if float(rows[~is_token].norm()) > _PADDING * float(rows.norm()):
            raise OptionError(
                "build(tokens=True): positions beyond an example's length have gradients, which would be lost: pad on "
                "the right and leave padding out of the loss and of attention, or, if length is that of something "
                "else, give length=, a function from an example to the number of its tokens"
            )
        numbers = torch.tensor(part.numbers if part.numbers is not None else range(before, before + n))
        examples = numbers[:, None].expand(n, t)[is_token]
        positions = torch.arange(t).expand(n, t)[is_token]
        order = examples * (1 << 32) + positions
        return rows[is_token], {"examples": examples.int(), "positions": positions.int(), "order": order}

    def _write(self, number: int, made: Sequence[Record], named: Sequence[texts.Named], examples: int) -> None:
        tensors = {name: torch.cat([record.tensors[name] for record in made]) for name in made[0].tensors}
        if "order" in tensors:
            order = tensors.pop("order")
            if not bool((order[1:] > order[:-1]).all()):
                tensors = {name: value[order.argsort()] for name, value in tensors.items()}
        told = {
            "dtype": self._dtype, "number": number, "data": content([record.content for record in made]),
            "examples": examples, "plan": self._mark,
        }  # fmt: skip
        if named:
            told["texts"] = texts.write(self.folder, number, named)
        store.write_shard(self.folder, number, tensors, told)

    def _examples(self, part: Part, record: Record, before: int) -> int:
        """How many examples a batch has, after so many of its shard: also those that have no tokens count."""
        if not self._tokens:
            return len(record.tensors["rows"])
        if part.numbers is not None:
            return len(part.numbers)
        own = record.tensors["examples"]
        return int(own.max()) + 1 - before if len(own) else 0

    def finish(self) -> bool:
        """Write the manifest if every shard is there."""
        count = self.cut.shards()
        shards = []
        with locks.short(self.folder, "finish"):
            store.sweep(self.folder, f".{store.MANIFEST}.*.part")
            if count is not None and sum(1 for _ in self.folder.glob("shard-*")) < count:
                return False  # before any is opened: every process of an array of jobs comes here
            for number in range(count) if count is not None else _forever():
                try:
                    shard = store.Shard(self.folder, number)
                except FileNotFoundError:
                    if count is None:
                        break
                    return False
                except store.DAMAGED:
                    return False
                shards.append({
                    "file": shard.path.name, "rows": shard.rows, "examples": shard.told["examples"],
                    "crc": shard.told["crc"], "data": shard.told["data"],
                })  # fmt: skip
            rows = sum(shard["rows"] for shard in shards)
            if not rows:
                raise EmptyData(
                    "build: the data is empty.", write="unsum.index.build(model, loss_fn, TensorDataset(x, y), path)"
                )
            examples = sum(shard["examples"] for shard in shards)
            manifest = {**self.plan, "shards": shards, "rows": rows, "examples": examples}
            if self._manifest() != manifest:
                store.write_json(self.folder, store.MANIFEST, manifest)
            for number in range(len(shards)):  # who was killed between a shard and its journal's end leaves the journal
                Journal.remove(self.folder, number)
        return True

    def _manifest(self) -> dict[str, Any] | None:
        """The one that is there; a damaged one is written anew."""
        try:
            return store.read_json(self.folder, store.MANIFEST)
        except OptionError:
            return None


def _forever() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def _bytes(record: Record) -> int:
    return sum(value.numel() * value.element_size() for value in record.tensors.values())
