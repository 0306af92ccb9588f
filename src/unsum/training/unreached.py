"""Parameters that no gradient reaches, in the first watched steps of a run."""

from __future__ import annotations

from unsum.training.observed import Observed

STEPS = 5  # a parameter may get none in one step: an expert without tokens, an adapter whose other half is still zero


class Unreached:
    """The trainable parameters that have had no gradient so far."""

    def __init__(self) -> None:
        self._left: list[str] | None = None
        self._steps = 0

    def __call__(self, seen: Observed) -> str | None:
        """Look at one more step. What to tell, once: after the first few."""
        sums = seen.squares.sum(1).tolist() if seen.squares.numel() else [0.0] * len(seen.names)
        reached = {name for name, total in zip(seen.names, sums, strict=True) if total != 0}
        reached |= {name for name, norm in seen.grads.items() if norm != 0}
        left = list(seen.weights) if self._left is None else self._left
        self._left = [name for name in left if name not in reached]
        self._steps += 1
        if self._steps != STEPS or not self._left:
            return None
        named = ", ".join(self._left[:6]) + (f" and {len(self._left) - 6:,} more" if len(self._left) > 6 else "")
        return (
            f"no gradient has reached {named} in the first {STEPS} watched steps: a detach(), or a layer that the loss "
            "does not use.\n  write: unsum.report(model, loss_fn, batch, 'report.html')  # its flags say which"
        )
