"""What a model's outputs are the parameters of: from which labels can be drawn, and which curvature the loss has in
them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unsum.errors import OptionError, UnsupportedError, WrongCount, WrongShape
from unsum.examples import refuse_not_finite

Forward = Callable[[Any, Any], Tensor]
Mask = Callable[[Any], Tensor]


class Likelihood(ABC):
    """`forward(model, batch)` returns outputs (n, …, C), one vector at each position; `mask(batch)`, of shape (n, …),
    says which positions count. Made by `categorical`, `gaussian` or `convex`.

    Examples:
        >>> tokens = categorical(lambda model, batch: model(batch), mask=lambda batch: batch != 0)
        >>> tokens.outputs(nn.Embedding(5, 3), torch.tensor([[1, 4, 0]])).shape
        torch.Size([1, 3, 3])
    """

    name: str

    def __init__(self, forward: Forward, mask: Mask | None = None) -> None:
        if not callable(forward) or isinstance(forward, nn.Module):
            raise OptionError("forward is a function of the model and a batch: lambda model, batch: model(batch[0])")
        if mask is not None and not callable(mask):
            raise OptionError("mask is a function of a batch that gives True where a place counts, of shape (n, ...)")
        self.forward, self.mask = forward, mask

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        """(n, …, C)."""
        return self._checked(self.forward(model, batch))

    def _checked(self, found: Any) -> Tensor:
        if not isinstance(found, Tensor) or found.dim() < 2 or not found.is_floating_point():
            what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise WrongShape(
                f"{self.name}: forward(model, batch) gives outputs of shape (n, ..., C); got {what}.",
                write="forward = lambda model, batch: model(batch[0])  # the model's outputs, not a loss",
            )
        return found

    def places(self, outputs: Tensor, batch: Any) -> Tensor:
        """(n, …): 1 at places that count, 0 elsewhere."""
        if self.mask is None:
            return outputs.new_ones(outputs.shape[:-1])
        mask = self.mask(batch)
        if not isinstance(mask, Tensor) or mask.shape != outputs.shape[:-1]:
            places = tuple(outputs.shape[:-1])
            raise WrongShape(
                f"{self.name}: mask(batch) has shape {tuple(getattr(mask, 'shape', ()))}, the places of the outputs "
                f"are {places}.",
                write=f"mask=lambda batch: batch[1] != -100  # a tensor of shape {places}",
            )
        if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
            raise OptionError(
                f"{self.name}: mask(batch) says which places count, True or False (1 or 0); it has other numbers.\n"
                "  weights of places: unsum.curvature.convex(forward, loss) for ggn, or likelihood=None for fit"
            )
        return mask.to(outputs.device, outputs.dtype)

    def refuse_not_finite(self, outputs: Tensor, first: int) -> None:
        """Raise if an example has outputs that are not finite; `first` is the number of the first one."""
        refuse_not_finite(outputs.reshape(len(outputs), -1).sum(1, dtype=torch.float64), first, "ggn", "output")

    @abstractmethod
    def drawn_losses(self, outputs: Tensor, batch: Any, generator: torch.Generator) -> Tensor:
        """(n,): the losses of labels that are drawn from the model, one at each place that counts."""

    @abstractmethod
    def hessian(self, outputs: Tensor, batch: Any, vector: Tensor) -> Tensor:
        """The second derivative of the sum of losses in the outputs, times a vector of their shape."""


class Categorical(Likelihood):
    """Outputs are logits."""

    name = "categorical"

    def refuse_not_finite(self, outputs: Tensor, first: int) -> None:
        """A logit of -inf is a class that never comes."""
        super().refuse_not_finite(outputs.masked_fill(outputs == -torch.inf, 0), first)

    def drawn_losses(self, outputs: Tensor, batch: Any, generator: torch.Generator) -> Tensor:
        places = self.places(outputs, batch)
        reached = outputs.detach().float().softmax(-1).flatten(0, -2).cumsum(-1)
        # Uniform numbers come from the processor, so that a seed gives the same labels on every device.
        drawn = torch.rand(len(reached), 1, generator=generator).to(outputs.device) * reached[:, -1:]
        labels = torch.searchsorted(reached, drawn, right=True)[:, 0].clamp_max(reached.shape[-1] - 1)
        losses = F.cross_entropy(outputs.flatten(0, -2), labels, reduction="none")
        return _by_sample(losses.view(places.shape) * places)

    def hessian(self, outputs: Tensor, batch: Any, vector: Tensor) -> Tensor:
        p = outputs.softmax(-1)
        found = p * (vector - (p * vector).sum(-1, keepdim=True))
        return found * self.places(outputs, batch).unsqueeze(-1)


class Gaussian(Likelihood):
    """Outputs are means, with unit variance: a loss is ½ |y − f|²."""

    name = "gaussian"

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        found = self.forward(model, batch)
        one_number_each = isinstance(found, Tensor) and found.dim() == 1
        return self._checked(found.unsqueeze(-1) if one_number_each else found)

    def drawn_losses(self, outputs: Tensor, batch: Any, generator: torch.Generator) -> Tensor:
        noise = torch.randn(outputs.shape, generator=generator, dtype=torch.float64).to(outputs)
        labels = outputs.detach() + noise
        return _by_sample((outputs - labels).square().sum(-1) / 2 * self.places(outputs, batch))

    def hessian(self, outputs: Tensor, batch: Any, vector: Tensor) -> Tensor:
        return vector * self.places(outputs, batch).unsqueeze(-1)


class Convex(Likelihood):
    """Any loss that is convex in the outputs: its second derivative comes from autograd."""

    name = "convex"

    def __init__(self, forward: Forward, loss: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__(forward)
        if not callable(loss):
            raise OptionError("loss is a function of the outputs and a batch that gives the losses (n,)")
        self._loss = loss

    def outputs(self, model: nn.Module, batch: Any) -> Tensor:
        found = self.forward(model, batch)
        return found if isinstance(found, Tensor) and found.dim() == 1 else self._checked(found)

    def drawn_losses(self, outputs: Tensor, batch: Any, generator: torch.Generator) -> Tensor:
        raise UnsupportedError(
            "convex: labels cannot be drawn from a loss; use categorical or gaussian, or likelihood=None (empirical)"
        )

    def hessian(self, outputs: Tensor, batch: Any, vector: Tensor) -> Tensor:
        leaf = outputs.detach().requires_grad_()
        with torch.enable_grad():
            loss = self._loss(leaf, batch)
            if not isinstance(loss, Tensor) or loss.shape != outputs.shape[:1]:
                what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise WrongCount(
                    f"convex: loss(outputs, batch) gives one loss for each sample, ({len(outputs)},); got {what}.",
                    write="return losses.flatten(1).sum(1)  # (n,)",
                )
            (slope,) = torch.autograd.grad(loss.sum(), leaf, create_graph=True)
            if not slope.requires_grad:
                return torch.zeros_like(vector)  # linear in the outputs
            (found,) = torch.autograd.grad(slope, leaf, vector, allow_unused=True)
        return torch.zeros_like(vector) if found is None else found


def _by_sample(losses: Tensor) -> Tensor:
    """(n,): summed over the places of each sample."""
    return losses if losses.dim() == 1 else losses.flatten(1).sum(1)


def categorical(forward: Forward, mask: Mask | None = None) -> Likelihood:
    """Outputs are logits (n, …, C): labels are drawn from their softmax.

    Examples:
        >>> categorical(lambda model, batch: model(batch[0])).name
        'categorical'
    """
    return Categorical(forward, mask)


def gaussian(forward: Forward, mask: Mask | None = None) -> Likelihood:
    """Outputs are means (n, …, C) with unit variance: a loss is ½ |y − f|².

    Examples:
        >>> gaussian(lambda model, batch: model(batch[0])).name
        'gaussian'
    """
    return Gaussian(forward, mask)


def convex(forward: Forward, loss: Callable[[Tensor, Any], Tensor]) -> Likelihood:
    """Any `loss(outputs, batch)` that is convex in the outputs, for exact Gauss–Newton products.

    Examples:
        >>> convex(lambda model, batch: model(batch[0]), lambda outputs, batch: outputs.exp().sum(1)).name
        'convex'
    """
    return Convex(forward, loss)
