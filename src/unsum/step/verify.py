"""`verify=True`: the model is run again with other inputs, and a backward that starts from outputs that mix samples is
refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from unsum.errors import InteractionError, UnsupportedError
from unsum.graph.nodes import Edge
from unsum.learn.probe import CannotBeAsked, OwnersOf, mixing
from unsum.learn.state import State
from unsum.nested import leaves
from unsum.seams.modules import without_hooks
from unsum.seams.sharding import whole
from unsum.step.known import Number, copied, number


class Verification:
    """Asks a model, after each outermost call, which of its outputs mix samples."""

    def __init__(self, model: nn.Module, owners_of: OwnersOf) -> None:
        self._model, self._owners_of = model, owners_of
        self._call: tuple[nn.Module, Any, Any, State] | None = None  # the one under way, and the state before it
        self._asked: dict[Number, str | None] = {}  # outputs: how they mix samples, in words, if they do
        self.is_running = False  # whether the model is being run for its own sake
        self.has_told = False  # whether its outputs changed with its inputs, so that the answer holds for other calls

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """An outermost call begins."""
        try:
            self._call = module, args, kwargs, State(self._model)
        except UnsupportedError as error:  # it holds what cannot be put back
            raise CannotBeAsked(str(error)) from error

    def ask(self, output: Any, n: int | None) -> None:
        """The call has returned this, of n samples: run the model again. Raises where that cannot be done."""
        call, self._call = self._call, None
        if call is None or n is None or output is None:
            return
        module, args, kwargs, before = call
        after = State(self._model)

        def run(args: Any, kwargs: Any) -> Any:
            before.restore()
            try:
                return without_hooks(module)(*args, **kwargs)
            finally:
                after.restore()

        self.is_running = True
        try:
            with whole(self._model):  # FSDP's hooks, which gather parameters, are not called either
                found, has_changed = mixing(run, args, kwargs, output, self._owners_of, n)
        finally:
            self.is_running = False
        self.has_told |= has_changed
        for path, tensor in leaves(output):
            if tensor.grad_fn is not None:
                self._asked[number(tensor.grad_fn, tensor.output_nr)] = found.get(path)
                for edge in copied(tensor):
                    self._asked.setdefault(number(*edge), found.get(path))

    def refuse_mixing(self, starts: Sequence[Edge]) -> None:
        """Raise where a backward starts from outputs that mix samples, or from what could not be asked."""
        for node, output in starts:
            key = number(node, output)
            if key not in self._asked:
                raise CannotBeAsked(
                    f"verify=True: the samples of this loss start at {node.name()}, which is no output of the model: "
                    "it cannot be asked again whether they interact there.\n  return what the loss is made of, or "
                    "leave verify=True out"
                )
            if (found := self._asked[key]) is not None:
                raise InteractionError(
                    f"samples interact: {found}, though the graph shows no trace of it (detached statistics, mixup; or "
                    "dropout inside a packed sequence, whose masks move with the lengths).",
                    write='with unsum.gradients(model, interacting="exact") as g: ...  # the derivative of each '
                    "sample's part of the loss; without verify=True",
                )
