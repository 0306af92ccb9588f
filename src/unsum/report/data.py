"""What a report holds, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from torch import Tensor

from unsum.check import Checked
from unsum.notebook import LARGEST, element, framed
from unsum.report.measure import Stats


@dataclass(frozen=True)
class Flag:
    """Something to look at."""

    kind: str  # dead, unreached, vanishing, exploding, silent, nan, outlier, interacting, check
    where: str  # a site, a parameter, a sample
    text: str


@dataclass(frozen=True)
class Layer:
    """One call of one module: statistics of its output and of the gradient there."""

    name: str  # with the call and the path where there are several: "enc@1", "attn[0]"
    module: str
    kind: str  # the module's class
    is_leaf: bool
    activation: Stats
    gradient: Stats | None
    weight_norm: float | None  # over the module's own parameters
    weight_gradient_norm: float | None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Statistics:
    """What one forward and one backward have shown."""

    losses: Tensor  # (n,)
    layers: list[Layer]
    inputs: dict[str, Stats]  # of modules without modules in them, by name
    backwards: list[tuple[str, Stats]]  # what came back, in the order in which it came
    parameters: dict[str, float]  # the norms of their gradients; NaN where one is not finite
    elements: int  # of all that flowed
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Similarity:
    """Cosines of the gradients of some samples with one another."""

    rows: list[int]  # which samples
    cosines: Tensor  # (len(rows), len(rows))
    how: str


@dataclass(frozen=True)
class BySample:
    """The gradient of each sample."""

    ids: list[int]
    norms: Tensor  # (n,)
    by_parameter: dict[str, Tensor]  # {name: (n,)}: norms of each parameter's part
    outliers: list[int]
    limit: float  # above which a norm is an outlier
    tokens: Tensor | None  # (n, t)
    left_out: list[str]  # parameters whose positions are not the input's
    similarity: Similarity | None
    coverage: list[tuple[str, ...]]  # heading first
    ruled: str
    interacting: str | None


@dataclass(frozen=True, repr=False)
class Report:
    """The result of `unsum.report`: the path of the page, and its contents as data. It prints as a summary; in a
    notebook it shows the page.

    Examples:
        >>> import tempfile, torch, unsum
        >>> model, x = torch.nn.Linear(3, 1), torch.eye(3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = unsum.report(model, lambda model, x: model(x)[:, 0].square(), x, f"{folder}/report.html")
        >>> made.norms.shape, made.flags
        (torch.Size([3]), [])
    """

    path: Path
    title: str
    flags: list[Flag]
    layers: list[Layer]
    losses: Tensor  # (n,)
    samples: BySample | None
    check: Checked | None
    picture: str  # SVG; empty if there is none
    foldable: str  # the same as a page in which groups fold
    text: list[list[str]] | None
    ahead: int  # how far after a position its token is in the text
    labels: list[str] | None  # a few words on each sample
    missing: dict[str, str]  # section -> why it is not there

    @property
    def norms(self) -> Tensor | None:
        """(n,): the norm of each sample's gradient."""
        return None if self.samples is None else self.samples.norms

    @property
    def outliers(self) -> list[int]:
        """The samples whose gradients are far larger than the others'."""
        return [] if self.samples is None else self.samples.outliers

    def __str__(self) -> str:
        counts = {"layer": len(self.layers), "sample": len(self.losses), "flag": len(self.flags)}
        said = ", ".join(f"{count:,} {what}{'' if count == 1 else 's'}" for what, count in counts.items())
        lines = [f"{self.path}: {said}"]
        lines += [f"  {flag.kind:<11} {flag.where}: {flag.text}" for flag in self.flags]
        lines += [f"  no {section}: {' '.join(why.split())}" for section, why in self.missing.items()]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The page in a frame, below a line that says where it is; without one, the summary."""
        try:
            page = self.path.read_text(encoding="utf-8")
        except OSError:
            page = ""
        if not 0 < len(page) <= LARGEST:
            gone = "" if page else '<div class="note">The page is no longer there.</div>'
            return element(f"<pre>{escape(str(self))}</pre>{gone}")
        told = f'<div class="note">{escape(str(self).splitlines()[0])}</div>'
        return element(told + framed(page, f"{self.title}: report"))
