"""What private training covers: the parameters that the optimizer trains, and the gradients that blocks have left for
its next step."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from unsum.choice import choose, first_names
from unsum.errors import NoBackward, OptionError, UnsupportedError
from unsum.seams.tensors import have_hooks, version_of
from unsum.sites import Names
from unsum.training.updates import innermost
from unsum.training.weakly import weakly

_SHOWN = 6  # names that are listed


class Covered:
    """The parameters of a model that an optimizer trains."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def parameters(self) -> dict[str, nn.Parameter]:
        """{name: parameter}: the optimizer's that are not frozen now, tied ones once."""
        own = self._of_optimizer()
        strange = own - set(Names(self._model).parameters.values())
        if strange:
            shapes = ", ".join(str(tuple(p.shape)) for p in list(strange)[:_SHOWN])
            raise OptionError(
                f"unsum.private: the optimizer has {len(strange)} tensors that are not the model's, of shape "
                f"{shapes}: they would be trained without clipping and noise.\n  give one module that holds all that "
                "is trained"
            )
        found = {name: p for name, p in self._trainable().items() if p in own}
        if not found:
            raise OptionError("unsum.private: the optimizer has no trainable parameter of the model")
        return found

    def missing(self) -> list[str]:
        """Trainable parameters of the model that the optimizer has not got."""
        own = self._of_optimizer()
        return [name for name, p in self._trainable().items() if p not in own]

    def frozen(self) -> set[nn.Parameter]:
        """The optimizer's parameters that are frozen now."""
        return {p for p in self._of_optimizer() if not p.requires_grad}

    def _of_optimizer(self) -> set[nn.Parameter]:
        return {p for group in self._optimizer.param_groups for p in group["params"]}

    def _trainable(self) -> dict[str, nn.Parameter]:
        chosen = choose(Names(self._model), "*")
        return {name: chosen.parameters[name] for name in chosen.by_id.values()}

    def __str__(self) -> str:
        trained, names = self.parameters(), Names(self._model).parameters
        first = first_names(names)
        tied = [f"{name} = {first[id(p)]}" for name, p in names.items() if name != first[id(p)] and p.requires_grad]
        frozen = [first[id(p)] for p in dict.fromkeys(names.values()) if not p.requires_grad]
        lines = [f"  covered: {sum(p.numel() for p in trained.values()):,} parameters in {len(trained)} tensors"]
        for what, found in (
            ("shared (one gradient, clipped once)", tied), ("frozen (not trained)", frozen),
            ("not in the optimizer (not trained)", self.missing()),
        ):  # fmt: skip
            lines += [f"  {what}: {listed(found)}"] if found else []
        return "\n".join(lines)


class Left:
    """What blocks have left in `.grad` since the last step. Anything else there was not clipped."""

    def __init__(self) -> None:
        self._grads: dict[nn.Parameter, tuple[Tensor, int]] = {}  # with their versions

    def note(self, covered: dict[str, nn.Parameter]) -> None:
        """A block is closed."""
        for parameter in covered.values():
            if parameter.grad is not None:
                self._grads[parameter] = parameter.grad, version_of(parameter.grad)

    def clear(self) -> None:
        """A step was taken."""
        self._grads.clear()

    def settle(self, covered: dict[str, nn.Parameter], frozen: set[nn.Parameter]) -> None:
        """Raise if `.grad` is not what blocks have left there. What `zero_grad` took away is put back."""
        if any(p.grad is not None and bool(p.grad.any()) for p in frozen):
            raise NoBackward(
                "unsum.private: a frozen parameter of the optimizer has a .grad, which no block has clipped.",
                write="optimizer.zero_grad()",
            )
        for name, parameter in covered.items():
            grad, (left, version) = parameter.grad, self._grads.get(parameter, (None, 0))
            if left is not None and version_of(left) != version:
                raise NoBackward(
                    f"unsum.private: {name}.grad was changed after the block; dp.step() clears gradients itself.",
                    write="with dp: losses.sum().backward()  # every backward inside the block",
                )
            if grad is not None and grad is not left and bool(grad.any()):
                raise NoBackward(
                    f"unsum.private: {name}.grad was not made inside the block, so it is not clipped.",
                    write=[
                        "with dp: losses.sum().backward()  # every backward inside the block",
                        "optimizer.zero_grad()  # after other backwards",
                    ],
                )
            parameter.grad = left


def before_step(optimizer: torch.optim.Optimizer, method: Callable[[], None]) -> None:
    """Call a method before every step of an optimizer, as long as its object lives."""
    call = weakly(method)
    innermost(optimizer).register_step_pre_hook(lambda *_: call())


def refuse_unprotected(covered: dict[str, nn.Parameter]) -> None:
    """Raise where somebody would see a gradient before it is clipped, and for numbers that get no noise."""
    if any(p.is_complex() for p in covered.values()):
        names = [name for name, p in covered.items() if p.is_complex()]
        raise UnsupportedError(
            f"unsum.private: {listed(names)}: complex parameters cannot be trained privately; the noise is real.",
            write="torch.view_as_real(parameter)  # hold them as real parameters",
        )
    if have_hooks(list(covered.values())):
        names = [name for name, p in covered.items() if have_hooks([p])]
        raise UnsupportedError(
            f"unsum.private: {listed(names)}: hooks on a parameter see its gradient before it is clipped: remove them"
        )


def listed(names: list[str]) -> str:
    """Some names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def refuse_unserved(model: nn.Module, optimizer: object, scaler: object) -> None:
    """Raise where private training would not be private, or cannot be done."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"unsum.private: optimizer={type(optimizer).__name__}: expected a torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UnsupportedError(
            f"unsum.private: {type(optimizer).__name__} calls a closure, and looks at the data several times in a "
            "step: each time would need noise of its own.\n  use an optimizer that steps without one"
        )
    if scaler is not None:
        raise UnsupportedError(
            "unsum.private: scaler=: a GradScaler skips steps by the size of gradients, which reveals something about "
            "the data.\n"
            "  use bfloat16 (torch.autocast), which needs no scaler"
        )
    if Names(model).parts:
        raise UnsupportedError(
            "unsum.private: the model is fully sharded (FSDP2): no process has a whole gradient to put noise on.\n"
            "  use DistributedDataParallel, or one process"
        )
