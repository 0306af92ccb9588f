"""What is stored in an index's folder: rows by their numbers, the tokens and examples that they belong to, texts."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unsum.errors import OptionError
from unsum.index import store, texts
from unsum.index.maker import curvature_at


class Stored:
    """The files of an index, and its manifest."""

    def __init__(self, folder: Path, info: Mapping[str, Any]) -> None:
        self.folder, self.info = folder, info

    @cached_property
    def shards(self) -> Sequence[store.Shard]:
        """Mapped into memory."""
        found = []
        for number, told in enumerate(self.info["shards"]):
            try:
                shard = store.Shard(self.folder, number)
                if shard.rows != told["rows"]:
                    raise ValueError(f"{shard.rows} rows, and the manifest says {told['rows']}")
            except store.DAMAGED as error:
                raise store.damaged(self.folder / told["file"], error) from error
            found.append(shard)
        return found

    @cached_property
    def starts(self) -> list[int]:
        """The number of each shard's first row."""
        return [0, *accumulate(told["rows"] for told in self.info["shards"])][:-1]

    @cached_property
    def first_examples(self) -> list[int]:
        """The number of each shard's first example."""
        return [0, *accumulate(told["examples"] for told in self.info["shards"])][:-1]

    def rows(self, start: int, stop: int) -> Tensor:
        """(stop - start, K), in float32."""
        found = []
        for first, shard in zip(self.starts, self.shards, strict=True):
            if first < stop and first + shard.rows > start:
                stored, scales = shard.stored()
                own = slice(max(start - first, 0), stop - first)
                found.append(stored[own].float() * scales[own, None])
        return torch.cat(found) if found else torch.zeros(0, self.info["width"])

    def tokens(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(rows,) twice: the example that each row belongs to, and the position in it."""
        if not self.info["tokens"]:
            return torch.arange(start, stop), torch.zeros(stop - start, dtype=torch.long)
        examples, positions = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, dtype=torch.long)]
        for first, before, shard in zip(self.starts, self.first_examples, self.shards, strict=True):
            if first < stop and first + shard.rows > start:
                own = slice(max(start - first, 0), stop - first)
                numbers, places = shard.tokens()
                examples.append(numbers[own].long() + before)
                positions.append(places[own].long())
        return torch.cat(examples), torch.cat(positions)

    def chosen(self, numbers: Tensor) -> Tensor:
        """(…, K), in float64: rows by their numbers."""
        found = [self._row(number) for number in numbers.flatten().tolist()]
        return torch.stack(found).double().view(*numbers.shape, -1) if found else torch.zeros(*numbers.shape, 0)

    def _row(self, number: int) -> Tensor:
        shard = bisect_right(self.starts, number) - 1
        stored, scales = self.shards[shard].stored()
        place = number - self.starts[shard]
        return stored[place].float() * scales[place]

    def places(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The examples and positions of rows."""
        if not self.info["tokens"]:
            return numbers, torch.zeros_like(numbers)
        pairs = [self.tokens(number, number + 1) for number in numbers.flatten().tolist()]
        ids, positions = (torch.tensor([int(pair[j]) for pair in pairs], dtype=torch.long) for j in (0, 1))
        return ids.view(numbers.shape), positions.view(numbers.shape)

    def rows_of(self, example: int) -> Tensor:
        """(t, K): the rows of an example's tokens."""
        shard = self._shard_of(example)
        own = (self.shards[shard].tokens()[0] == example - self.first_examples[shard]).nonzero()[:, 0]
        first = self.starts[shard] + (int(own[0]) if len(own) else 0)
        return self.rows(first, first + len(own))

    def summed(self, shard: int, scores: Tensor) -> Tensor:
        """(examples, …): the scores of a shard's rows, added up for each example."""
        own = self.shards[shard].tokens()[0].long().to(scores.device)
        return scores.new_zeros(self.info["shards"][shard]["examples"], *scores.shape[1:]).index_add_(0, own, scores)

    def named(self, ids: Tensor) -> dict[str, list[list[str]]]:
        """{"id": …, "text": …} of examples (queries, k), as far as the index has them."""
        if not texts.wanted(self.info):
            return {}
        found: dict[str, dict[int, str]] = {}
        wanted: dict[int, list[int]] = {}
        for example in ids.unique().tolist():
            wanted.setdefault(self._shard_of(example), []).append(example)
        for shard, examples in wanted.items():
            places = [example - self.first_examples[shard] for example in examples]
            for name, values in texts.of_examples(self.folder, shard, places).items():
                found.setdefault(name, {}).update(zip(examples, values, strict=True))
        return {name: [[known[k] for k in row] for row in ids.tolist()] for name, known in found.items()}

    def _shard_of(self, example: int) -> int:
        return bisect_right(self.first_examples, example) - 1

    def damaged(self, number: int) -> str | None:
        """The name of a shard's file that is damaged or missing, if one is."""
        told, shard = self.info["shards"][number], store.shard_at(self.folder, number)
        if shard is None or shard.told["crc"] != told["crc"] or shard.rows != told["rows"]:
            return str(told["file"])
        if texts.wanted(self.info) and not texts.is_whole(self.folder, number, shard.told):
            return store.texts_name(number)
        return None

    def damaged_beside(self) -> list[str]:
        """The names of files beside the shards that are damaged or missing."""
        wanted, whole = [store.PLAN], []
        with contextlib.suppress(OptionError):
            known = store.read_json(self.folder, store.PLAN)
            if known is not None and all(self.info.get(name) == value for name, value in known.items()):
                whole.append(store.PLAN)
        if self.info["sketch"]["kind"] == "eigenbasis":
            wanted.append(store.CURVATURE)
            with contextlib.suppress(OptionError):
                curvature_at(self.folder, self.info["sketch"])
                whole.append(store.CURVATURE)
        return [name for name in wanted if name not in whole]
