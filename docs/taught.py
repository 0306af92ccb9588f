"""The picture of influence.md: the image that was asked about, and the training examples with the highest scores.

Drawn from the variables of the page, after its code has run (`docs/drawn.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from unsum.svg import Svg

PIXEL, GAP, LEVELS = 12, 30, 8  # of an image; between two; of ink, in eighths
LEFT, TOP = 24, 62


def _image(svg: Svg, x: float, y: float, image: Tensor, frame: str) -> None:
    """Pixels as squares of ink, those of one darkness in one path; in a frame."""
    tall, wide = image.shape
    svg.rect(x - 4, y - 4, wide * PIXEL + 8, tall * PIXEL + 8, frame, 5)
    levels = (image * LEVELS).round().int()
    for level in range(1, LEVELS + 1):
        squares = (levels == level).nonzero().tolist()
        if squares:
            d = "".join(f"M{x + c * PIXEL:g} {y + r * PIXEL:g}h{PIXEL}v{PIXEL}h-{PIXEL}z" for r, c in squares)
            svg.open(opacity=level / LEVELS)
            svg.path(d, "ink")
            svg.close()


def draw(page: Mapping[str, Any]) -> str:
    """The SVG, from what the page has computed."""
    images, labels, planted, best = page["images"], page["labels"], page["is_planted"], page["best"]
    asked, answer, truth = page["new_images"][page["asked"]], page["answers"][page["asked"]], page["truth"]
    tall, wide = (size * PIXEL for size in asked.shape)
    first, step, down = LEFT + wide + 64, wide + GAP, tall + 72
    svg = Svg()
    svg.text(LEFT, 28, "query", "bold")
    _image(svg, LEFT, TOP, asked, "box operation")
    svg.text(LEFT, TOP + tall + 24, f"read as {answer}", "bold")
    svg.text(LEFT, TOP + tall + 41, f"truth: {truth[page['asked']]}", "small faint")
    svg.text(first, 28, "the ten training examples with the highest scores", "bold")
    for place, (k, score) in enumerate(zip(best.ids[0].tolist(), best.scores[0].tolist(), strict=True)):
        x, y = first + place % 5 * step, TOP + place // 5 * down
        _image(svg, x, y, images[k], "box wrong" if planted[k] else "box operation")
        svg.text(x, y + tall + 24, f"label {labels[k]}", "bold coral" if planted[k] else "bold")
        svg.text(x, y + tall + 41, f"score {score:.0f}", "small faint")
    below = TOP + 2 * down + 4
    svg.rect(first - 4, below - 12, 16, 14, "box wrong", 3)
    svg.text(first + 20, below, "planted: a crossed seven labelled 2", "small")
    told = ", ".join(f"label {labels[k]}{' (planted)' if planted[k] else ''}" for k in best.ids[0].tolist())
    whole = svg.finish(
        "The examples behind a wrong answer",
        f"A crossed seven, read as {answer}, and the ten training examples with the highest scores: {told}.",
        first + 5 * step - GAP + LEFT,
        below + 22,
    )
    own = ".ink { fill: var(--ink); } # .wrong { fill: var(--op); stroke: var(--coral); stroke-width: 2.5; }"
    name = whole.partition('id="')[2].partition('"')[0]
    return whole.replace("</style>", f"#{name} {own.replace('# ', f'#{name} ')}</style>", 1)
