"""A process that builds indexes in forks of itself, which tests kill. It has imported torch once, so a fork starts at
once.

Each line of its input is JSON. {"case", "path", "part", "point", "at", "cut"} starts a build; the answer is the fork's
process id. With a `point`, the fork kills itself there, at the so-manieth time. A process id waits for that fork; the
answer is how it has ended. Until then its id is not given to another process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unsum
from curvature_nets import Examples, classified, ids, mlp, numbers
from rank_checks import Net
from unsum.index import journal, store

POINTS = ("before fsync", "after fsync", "before rename", "after rename", "in a journal", "in a file")
COUNT = 160


class Texts(torch.utils.data.Dataset):
    """Examples of different lengths."""

    def __init__(self) -> None:
        lengths = (2 + (7 * k * k + 3 * k) % 9 for k in range(COUNT))
        self.ids = [ids(k, length) for k, length in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, k: int) -> torch.Tensor:
        return self.ids[k]


def padded(examples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read, and what is guessed; padding is not."""
    pad = nn.utils.rnn.pad_sequence
    return pad(examples, True), pad([example[1:] for example in examples], True, padding_value=-100)


def word_losses(model: nn.Module, batch: Any) -> torch.Tensor:
    read, guess = batch
    return nn.functional.cross_entropy(model(read)[:, :-1].transpose(1, 2), guess, reduction="none").sum(1)


def cases() -> dict[str, tuple[nn.Module, Any, Any, dict[str, Any]]]:
    rows, model = Examples(numbers(0, COUNT, 4), ids(1, COUNT, high=3)), mlp()
    small: dict[str, Any] = {"project": 3, "batch_size": 2, "shard_size": 5}
    of_texts = {"project": 2, "shard_size": 10, "collate": padded, "length": len}
    c = unsum.curvature.fit(model, classified, rows)
    return {
        "rows": (model, classified, rows, small),
        "token budget": (Net(), word_losses, Texts(), of_texts | {"batch_tokens": 24}),
        "rows for tokens": (Net(), word_losses, Texts(), of_texts | {"batch_size": 4, "tokens": True}),
        "texts": (model, classified, rows, small | {"text": lambda example: str(example), "ids": range(COUNT)}),
        "curvature": (model, classified, rows, small | {"curvature": c}),
    }


class Cut:
    """A file in which one write ends in the middle, with the process."""

    def __init__(self, file: Any, die: Any, cut: float) -> None:
        self._file, self._die, self._cut = file, die, cut

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Cut:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        self._die(lambda: (self._file.write(data[: int(len(data) * self._cut)]), self._file.flush()))
        return int(self._file.write(data))


def arm(point: str, at: int, cut: float) -> None:
    """From now on this process kills itself when it comes to the point for the so-manieth time."""
    left = at

    def die(before: Any = lambda: None) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            before()
            os.kill(os.getpid(), signal.SIGKILL)

    when, _, what = point.partition(" ")
    if what in ("fsync", "rename"):
        name = {"fsync": "fsync", "rename": "replace"}[what]
        real = getattr(os, name)

        def call(*given: Any) -> Any:
            if when == "before":
                die()
            found = real(*given)
            if when == "after":
                die()
            return found

        setattr(os, name, call)
    elif point == "in a journal":
        begin = journal.Journal.__init__

        def opened(self: Any, *given: Any) -> None:
            begin(self, *given)
            self._file = Cut(self._file, die, cut)

        journal.Journal.__init__ = opened  # type: ignore[method-assign]
    else:
        open_real = store.Path.open

        def open_cut(path: Path, *given: Any, **named: Any) -> Any:
            file = open_real(path, *given, **named)
            return Cut(file, die, cut) if given == ("wb",) else file

        store.Path.open = open_cut  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    known = cases()
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            print(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]), flush=True)
            continue
        pid = os.fork()
        if not pid:
            code = 1
            try:
                model, loss_fn, data, options = known[asked["case"]]
                if asked["point"] is not None:
                    arm(asked["point"], asked["at"], asked["cut"])
                unsum.index.build(
                    model, loss_fn, data, asked["path"], **options, part=asked["part"] and tuple(asked["part"])
                )
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
