"""The pictures of how.md, drawn from what unsum itself does on a small network: `python docs/pictures.py`.

A real backward runs in a real `unsum.gradients` block. Three of the engine's functions are listened to while it does:
`find_cut`, `sweep` and `replay`. The nodes, gradients and owners in the pictures are what they were given and what they
returned; what torch stored stands beside them, and the script stops where the two do not agree.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unsum
from unsum.graph.nodes import below
from unsum.graph.owners import sweep
from unsum.graph.replay import replay
from unsum.learn.cut import find_cut

FOLDER = Path(__file__).parent / "pictures"
Node = Any


# ---- what happens ----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers, of which the first is two bare parameters."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Parameter(torch.randn(2, 2))
        self.shift = nn.Parameter(torch.randn(2, 1))
        self.head = nn.Linear(2, 2, bias=False)

    def forward(self, x):  # (3, 2): each sample is a row
        h = torch.tanh(self.inner @ x.t() + self.shift)  # (2, 3): a column
        return self.head(h.t())  # (3, 2): a row again


@dataclass
class Story:
    """One backward, and what was heard while it ran."""

    cut: Any = None
    owners: dict[Node, Tensor | None] = field(default_factory=dict)
    swept: dict[Node, list[Tensor]] = field(default_factory=dict)  # the gradient, then its copy
    replayed: list[tuple[Node, Tensor, list[Tensor | None]]] = field(default_factory=list)
    data: dict[Node, tuple[str, Tensor]] = field(default_factory=dict)  # the nodes that have saved x or y
    names: dict[int, str] = field(default_factory=dict)
    delta: Tensor | None = None  # what arrives at the cut in the user's backward
    grad: Tensor | None = None  # head.weight.grad, as torch stores it

    @property
    def spine(self) -> list[Node]:
        """The nodes that data has passed through, from the loss down."""
        return [n for n in self.cut.loss if n in self.cut.on_data] + [
            n for n in self.cut.model if self.owners.get(n) is not None
        ]

    def met_at(self, node: Node) -> list[str]:
        """The parameters that a node with owners leads to, directly or through nodes that are nobody's."""
        found = []
        for child, _ in node.next_functions:
            if child is not None and is_leaf(child):
                found.append(self.short(child))
            elif child in self.owners and self.owners[child] is None:
                found += self.met_at(child)
        return found

    def short(self, node: Node) -> str:
        """A node's name as it is said, or its parameter's."""
        return self.names[id(node.variable)] if is_leaf(node) else re.sub(r"Backward\d*$", "", node.name())


def is_leaf(node: Node) -> bool:
    """Whether this is where a parameter gets its gradient."""
    return hasattr(node, "variable")


def shape_of(node: Node) -> str:
    """The shape of the gradient that a node takes in."""
    shape = node.variable.shape if is_leaf(node) else node._input_metadata[0].shape
    return by(shape)


def by(shape: Sequence[int]) -> str:
    """A shape as it is said."""
    return "×".join(map(str, shape)) or "scalar"


COMPARING = ("unsum.travel.values", "unsum.learn.audit")  # which call nodes as well, to compare what is said of them


@contextmanager
def listening(function: Callable[..., Any], listener: Callable[..., Any]) -> Iterator[None]:
    """Put a listener in the place of a function, wherever unsum has imported it."""
    name = function.__name__
    with ExitStack() as stack:
        for module in [module for key, module in sys.modules.items() if key.startswith("unsum")]:
            if getattr(module, name, None) is function and module.__name__ not in COMPARING:
                stack.enter_context(mock.patch.object(module, name, listener))
        yield


def tell() -> Story:
    """Run the network and its backward, and listen."""
    story, sweeping = Story(), False

    def hear_cut(*args: Any, **kwargs: Any) -> Any:
        story.cut = find_cut(*args, **kwargs)
        swept()
        return story.cut

    def swept() -> None:
        """As where values decide for a whole graph: here the table would do."""
        nonlocal sweeping
        sweeping = True
        weights = {node for node in story.cut.model if [is_leaf(child) for _, child, _ in below(node)] == [True]}
        found = sweep(story.cut.model, story.cut.starts, 3, is_data=lambda node: node not in weights)
        sweeping = False
        story.owners = {node: owners and owners[0].owner() for node, owners in found.owners.items()}

    def hear_replay(node: Node, grads: Sequence[Tensor], *heard: Any, **how: Any) -> list[Tensor | None]:
        results = replay(node, grads, *heard, **how)
        if sweeping:
            story.swept.setdefault(node, []).append(grads[0].clone())
        else:
            story.replayed.append((node, grads[0].clone(), results))
        return results

    torch.manual_seed(3059)  # with two decimals, all numbers show and the sum still comes out
    net = Net().double()
    x, y = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    story.names = {id(parameter): name for name, parameter in net.named_parameters()}
    with listening(find_cut, hear_cut), listening(replay, hear_replay):
        with unsum.gradients(net, engine="graph"):
            out = net(x)
            out.retain_grad()
            loss = F.mse_loss(out, y) + 0.1 * net.head.weight.square().sum()
            story.data = {node: given for given in (("x", x), ("y", y)) for node in keepers(loss.grad_fn, given[1])}
            loss.backward()
    story.delta, story.grad = out.grad, net.head.weight.grad
    return story


def keepers(node: Node, given: Tensor) -> set[Node]:
    """The nodes of a graph that have saved this tensor, or a view of it."""
    saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    found = {node for tensor in saved if isinstance(tensor, Tensor) and tensor.data_ptr() == given.data_ptr()}
    return found.union(*(keepers(child, given) for child, _ in node.next_functions if child is not None))


# ---- how it is drawn -------------------------------------------------------------------------------------------------

STYLE = """
svg { --paper: #ffffff; --panel: #f4f5f7; --ink: #1f2328; --faint: #646c76; --line: #c9cfd6; --coral: #ec5f44;
  --grey: #e4e6ea; --grey-line: #8a929c; --teal: #d3f0e9; --teal-line: #0f8f7a; --purple: #e8e1fb;
  --purple-line: #7352c7; --s0: #a9cdfb; --s1: #fbdc8f; --s2: #f7b6d8; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #14181d; --panel: #1e242b; --ink: #e8ecf1; --faint: #9aa4af; --line: #454d57; --coral: #ff8a72;
    --grey: #343a42; --grey-line: #9aa4af; --teal: #0e4239; --teal-line: #45c8b0; --purple: #35285c;
    --purple-line: #a98df5; --s0: #1d5599; --s1: #7d5a06; --s2: #8c2a63; } }
text { font: 13px system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; fill: var(--ink);
  font-variant-numeric: tabular-nums; }
.teal { fill: var(--teal-line); }
.small { font-size: 11.5px; } .faint { fill: var(--faint); } .bold { font-weight: 600; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.paper { fill: var(--paper); } .panel { fill: var(--panel); }
.box { stroke-width: 1.5; } .cell { stroke: var(--line); fill: none; }
.data { fill: var(--grey); stroke: var(--grey-line); }
.parameter { fill: var(--teal); stroke: var(--teal-line); }
.between { fill: var(--purple); stroke: var(--purple-line); }
.nobody { stroke-dasharray: 4 3; }
.s0 { fill: var(--s0); } .s1 { fill: var(--s1); } .s2 { fill: var(--s2); }
.arrow { fill: none; stroke: var(--coral); stroke-width: 1.75; } .tip { fill: var(--coral); }
.kept { fill: none; stroke: var(--grey-line); stroke-width: 1.25; }
.cut { stroke: var(--ink); stroke-width: 2; stroke-dasharray: 7 5; }
"""
WIDTH, BOX, TALL, ROW = 760, 80, 40, 22
ROWS = (150, 236, 322)  # of the graph: data's way, weights, parameters


class Svg:
    """A picture that grows by appending."""

    def __init__(self, title: str, description: str, height: int) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="desc">{escape(description)}</desc>',
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'markerUnits="userSpaceOnUse" orient="auto"><path class="tip" d="M0 0 8 4 0 8Z"/></marker></defs>',
            f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>',
        ]

    def __str__(self) -> str:
        return "\n".join([*self._lines, "</svg>", ""])

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self._lines.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def rect(self, x: float, y: float, wide: float, tall: float, kind: str, rx: float = 0) -> None:
        self._lines.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{wide:g}" height="{tall:g}" rx="{rx:g}"/>')

    def path(self, d: str, kind: str = "arrow") -> None:
        tip = ' marker-end="url(#tip)"' if kind == "arrow" else ""
        self._lines.append(f'<path class="{kind}" d="{d}"{tip}/>')

    def box(self, x: float, y: float, name: str, shape: str, kind: str) -> None:
        """A node, around its centre."""
        wide = width_of(name)
        self.rect(x - wide / 2, y - TALL / 2, wide, TALL, f"box {kind}", 6)
        self.text(x, y - 2 if shape else y + 5, name, "middle bold")
        if shape:
            self.text(x, y + 13, shape, "middle small faint")

    def grid(self, x: float, y: float, cells: list[list[str]], owners: list[list[int]], wide: float) -> None:
        """A tensor, from its left upper corner; owner -1 has no colour."""
        for i, line in enumerate(cells):
            for j, cell in enumerate(line):
                owner = owners[i][j]
                self.rect(x + j * wide, y + i * ROW, wide, ROW, f"cell s{owner}" if owner >= 0 else "cell")
                self.text(x + (j + 0.5) * wide, y + i * ROW + 15.5, cell, "middle faint" if cell == "0" else "middle")

    def chips(self, x: float, y: float, labels: Sequence[str]) -> None:
        """The colours of the samples, in a line."""
        for sample, label in enumerate(labels):
            self.rect(x, y - 11, 14, 14, f"cell s{sample}", 3)
            self.text(x + 20, y + 0.5, label)
            x += 46 + 7.2 * len(label)


def width_of(name: str) -> int:
    """How wide a node's box is."""
    return max(BOX, 9 * len(name))


def number(value: float) -> str:
    """Two decimals, with a real minus."""
    return "0" if value == 0 else f"{value:.2f}".replace("-", "−")


def numbers(tensor: Tensor) -> list[list[str]]:
    """The cells of a tensor."""
    return [[number(value) for value in line] for line in tensor.tolist()]


def plain(tensor: Tensor) -> list[list[int]]:
    """No colours."""
    return torch.full(tensor.shape, -1).tolist()


def places(story: Story) -> tuple[dict[Node, tuple[float, int]], list[tuple[Node, Node]], float]:
    """Where each node is drawn, from which to which the arrows go, and where the cut is."""
    step = 102
    before = sum(node in story.cut.on_data for node in story.spine)
    place: dict[Node, tuple[float, int]] = {
        node: (63 + step * i + 22 * (i >= before), ROWS[0]) for i, node in enumerate(story.spine)
    }
    nodes = [node for node in (*story.cut.loss, *story.cut.model) if not is_leaf(node)]
    edges = [(node, child) for node in nodes for child, _ in node.next_functions if child is not None]
    for parent, child in edges:  # in order: what is above has its place already
        x, y = place[parent]
        if child not in place and not is_leaf(child):
            place[child] = (x, y + ROWS[1] - ROWS[0]) if y < ROWS[2] else (x + step, y)
    for child in [child for _, child in edges if is_leaf(child)]:
        place[child] = (max(place[node][0] for node, other in edges if other is child), ROWS[2])
    return place, edges, 63 + step * (before - 0.5) + 11


def draw_cut(story: Story) -> Svg:
    """The graph: data's way through it in a line, what hangs on weights alone below, parameters at the bottom."""
    svg = Svg(
        "The cut",
        "The autograd graph of a small network, from the loss on the left to the parameters at the bottom. A dashed "
        "line, the cut, crosses the edge at which the loss's code enters the network's output, whose three rows belong "
        "to three samples. A penalty on head.weight reaches its parameter without crossing the line.",
        420,
    )
    place, edges, line = places(story)
    svg.rect(14, 14, line - 14, 352, "panel", 8)
    svg.rect(line, 14, WIDTH - line - 14, 352, "panel", 8)
    svg.text(28, 38, "the loss's code", "bold")
    svg.text(WIDTH - 28, 38, "the model", "bold end")
    for parent, child in sorted(edges, key=lambda edge: (place[edge[0]], place[edge[1]])):
        (x, y), (to_x, to_y) = place[parent], place[child]
        half = width_of(story.short(child)) / 2
        across, down = f"M{x + BOX / 2:g} {y}H{to_x - half:g}", f"M{x:g} {y + TALL / 2:g}V{to_y - TALL / 2:g}"
        svg.path(across if y == to_y else down)
    for node, (name, given) in story.data.items():
        x, y = place[node]
        svg.path(f"M{x:g} 98V{y - TALL / 2:g}", "kept")
        svg.box(x, 78, name, by(given.shape), "data")
    for node, (x, y) in sorted(place.items(), key=lambda item: item[1]):  # the engine's own order may vary
        kind = "parameter" if is_leaf(node) else "between" if node in story.spine else "between nobody"
        svg.box(x, y, story.short(node), shape_of(node), kind)
    owners = next(iter(story.cut.starts.values())).owner()
    svg.path(f"M{line:g} 24V{ROWS[1] + 44}", "cut")
    svg.text(line + 12, 38, "the cut", "bold")
    svg.grid(line + 12, 50, [["", ""]] * 3, owners.tolist(), 26)
    for i, sample in enumerate(owners[:, 0].tolist()):
        svg.text(line + 72, 65.5 + i * ROW, f"sample {sample}", "small")
    svg.text(line - 12, ROWS[1] - 4, "the penalty", "small faint end")
    svg.text(line - 12, ROWS[1] + 11, "goes round", "small faint end")
    legend = {"data": "data", "parameter": "parameter", "between": "node", "between nobody": "node of weights alone"}
    x = 28
    for kind, label in legend.items():
        svg.rect(x, 384, 18, 16, f"box {kind}", 4)
        svg.text(x + 26, 397, label)
        x += 60 + 7.2 * len(label)
    svg.path(f"M{x:g} 392h26")
    svg.text(x + 34, 397, "backward")
    return svg


def draw_sweep(story: Story) -> Svg:
    """Every node that the sweep called: the gradient, its copy, and what their ratio says."""
    order: list[Node] = []
    for node in (node for node in story.spine if node in story.owners):
        below = [child for child, _ in node.next_functions if story.owners.get(child, node) is None]
        order += [node, *below]
    assert set(order) == set(story.owners) == set(story.swept)
    start = story.swept[order[0]]
    first = story.owners[order[0]]
    factors = {n: float((start[1] / start[0])[first == n][0]) for n in range(int(first.max()) + 1)}
    tall = [max(ROW * len(story.swept[node][0]), TALL) for node in order]
    gap, top, left, wide = 24, 112, (172, 324, 476), 46
    svg = Svg(
        "The sweep",
        "Each node below the cut with the gradient that the sweep sends through it, the copy in which every sample is "
        "multiplied by its own power of two, and the ratio of the two. Samples are rows at first and columns after the "
        "transposition; at the weight's own transposition the ratios are no powers of two, so it is nobody's.",
        top + sum(tall) + gap * (len(order) - 1) + 28,
    )
    svg.chips(28, 38, [f"sample {n}: × {ratio(f)}" for n, f in factors.items()])
    for x, heading in zip(left, ("a gradient", "its copy", "the ratio: whose?"), strict=True):
        svg.text(x, 84, heading, "bold")
    svg.path(f"M14 {top - 16}H{WIDTH - 14}", "cut")
    svg.text(28, 84, "the cut", "bold")
    y, place = top, {}
    for node, height in zip(order, tall, strict=True):
        place[node] = (70 if story.owners[node] is not None else 116, y + height / 2)
        y += height + gap
    for node, child in ((n, c) for n in order for c, _ in n.next_functions if c in place):
        (x, y), (to_x, to_y) = place[node], place[child]
        aside = 0 if to_x == x else 48
        svg.path(f"M{x - 20 + aside:g} {y + TALL / 2:g}V{to_y - TALL / 2:g}")
    for node in order:
        x, y = place[node]
        owner, (gradient, copy) = story.owners[node], story.swept[node]
        quotient = copy / gradient
        for n, factor in {} if owner is None else factors.items():  # the picture must not say more than the sweep did
            assert torch.allclose(quotient[owner == n], torch.tensor(factor, dtype=quotient.dtype), rtol=1e-9)
        svg.box(x, y, story.short(node), shape_of(node), "between" if owner is not None else "between nobody")
        high = y - ROW * len(gradient) / 2
        svg.grid(left[0], high, numbers(gradient), plain(gradient), wide)
        svg.grid(left[1], high, numbers(copy), plain(copy), wide)
        spelt = [[ratio(value) for value in line] for line in quotient.tolist()]
        svg.grid(left[2], high, spelt, plain(gradient) if owner is None else owner.tolist(), wide)
        met = [] if owner is None else story.met_at(node)
        aside = "no power of two" if owner is None else f"meets {', '.join(met)}" if met else ""
        svg.text(left[2] + 3 * wide + 14, y - 3 if aside else y + 4.5, layout(owner))
        svg.text(left[2] + 3 * wide + 14, y + 13, aside, "small teal" if met else "small faint")
    return svg


def ratio(value: float) -> str:
    """A power of two as it is said; any other number with two decimals."""
    near = round(value, 9)
    return {0.5: "½", 0.25: "¼"}.get(near, f"{near:g}" if near in (2.0, 4.0, 8.0) else number(value))


def layout(owner: Tensor | None) -> str:
    """How a node's samples lie, in words."""
    if owner is None:
        return "nobody's"
    if bool((owner == owner[:, :1]).all()):
        return "a row each"
    return "a column each" if bool((owner == owner[:1]).all()) else "mixed"


def draw_replay(story: Story) -> Svg:
    """The node at which head.weight meets data, called once for each sample; the parts add up to what torch stores."""
    meeting = next(node for node in story.spine if node in story.owners)
    weight = next(child for child, _ in meeting.next_functions if story.owners.get(child, meeting) is None)
    met = [(grad, results) for node, grad, results in story.replayed if node is meeting]
    passed = [(grad, results) for node, grad, results in story.replayed if node is weight]
    ((penalty, of_penalty, shared),) = [call for call in story.replayed if call[0] in story.cut.loss]
    parts = [results[0] for _, results in passed]
    assert torch.allclose(sum(parts) + shared[0], story.grad)
    svg = Svg(
        "A replay at a meeting",
        "The gradient that arrives at the meeting is split into three: each keeps one sample's row and is zero "
        "elsewhere. The node is called with each, and what comes out passes through the weight's transposition. The "
        "three results and the penalty's part add up to head.weight.grad.",
        556,
    )
    owner, (wide, left) = story.owners[meeting], (48, (28, 180, 404, 636))
    mid = [110 + 100 * i for i in range(5)]
    for x, heading in zip(left, ("what arrives", "one sample's part of it", "handed on", "head.weight"), strict=True):
        svg.text(x, 38, heading, "bold")
    svg.grid(left[0], mid[1] - 1.5 * ROW, numbers(story.delta), owner.tolist(), wide)
    svg.text(left[0], mid[1] + 1.5 * ROW + 20, f"at {story.short(meeting)}, in your", "small faint")
    svg.text(left[0], mid[1] + 1.5 * ROW + 36, "own backward", "small faint")
    for n, ((grad, _), (handed, _), part) in enumerate(zip(met, passed, parts, strict=True)):
        assert torch.equal(grad, torch.where(owner == n, story.delta, 0))
        y, rows = mid[n], torch.where(owner == n, n, -1).tolist()
        from_x = left[0] + 2 * wide
        svg.path(f"M{from_x + 6} {mid[1]}C{from_x + 34} {mid[1]} {left[1] - 40} {y} {left[1] - 5} {y}")
        svg.grid(left[1], y - 1.5 * ROW, numbers(grad), rows, wide)
        arrow(svg, left[1] + 2 * wide, left[2], y, story.short(meeting), "between")
        svg.grid(left[2], y - ROW, numbers(handed), torch.full(handed.shape, n).tolist(), wide)
        arrow(svg, left[2] + 2 * wide, left[3], y, story.short(weight), "between nobody")
        svg.grid(left[3], y - ROW, numbers(part), torch.full(part.shape, n).tolist(), wide)
        svg.text(left[3] + wide, y - ROW - 7, f"sample {n}", "small faint middle")
    svg.grid(left[2], mid[3] - ROW, numbers(of_penalty), plain(of_penalty), wide)
    svg.text(left[2] - 12, mid[3] + 4.5, "along the penalty's own edges", "end")
    arrow(svg, left[2] + 2 * wide, left[3], mid[3], story.short(penalty), "between nobody")
    svg.grid(left[3], mid[3] - ROW, numbers(shared[0]), plain(shared[0]), wide)
    svg.text(left[3] + wide, mid[3] - ROW - 7, "nobody's", "small faint middle")
    for above in mid[:3]:
        svg.text(left[3] - 14, above + 56, "+", "bold middle")
    svg.rect(left[3] - 8, mid[4] - ROW - 8, 2 * wide + 16, 2 * ROW + 16, "box parameter", 6)
    svg.grid(left[3], mid[4] - ROW, numbers(story.grad), plain(story.grad), wide)
    svg.text(left[3] - 22, mid[4] + 4.5, "head.weight.grad, as torch stores it  =", "end bold")
    return svg


def arrow(svg: Svg, x: float, to: float, y: float, name: str, kind: str) -> None:
    """An arrow from one tensor to another, through a node."""
    middle = (x + to) / 2
    svg.path(f"M{x + 6} {y}H{to - 6}")
    svg.box(middle, y, name, "", kind)


def draw() -> dict[str, str]:
    """The pictures, by the name of their file."""
    story = tell()
    pictures = {"cut.svg": draw_cut, "sweep.svg": draw_sweep, "replay.svg": draw_replay}
    return {name: str(draw_one(story)) for name, draw_one in pictures.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in draw().items():
        (FOLDER / name).write_text(text)
