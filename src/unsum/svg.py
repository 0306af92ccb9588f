"""Writing SVG: text that fits its box, colours for light and dark, nothing that clashes with the page around it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from html import escape

_UID = "\x00"  # in the place of the picture's own name, which is made from its contents

# Widths of letters in a common sans-serif font, in thousandths of its size; what is not listed is as wide as a digit.
_WIDTHS = {
    **dict.fromkeys("ijl.,:;'|!I", 270),
    **dict.fromkeys("frt()[]{}/-· ", 350),
    **dict.fromkeys("cksvxyzJ", 520),
    **dict.fromkeys("mwMW", 860),
    **dict.fromkeys("ABCDEFGHKLNOPQRSTUVXYZ", 690),
    **dict.fromkeys("×→Σ+=<>_–…", 600),
    **dict.fromkeys("✂✎◉◆", 950),
}

STYLE = """
# { --paper: #ffffff; --panel: #f6f7f9; --ink: #1f2328; --faint: #5d6570; --line: #c3c9d1; --forward: #79828e;
  --coral: #d8432a; --grey: #e6e8ec; --grey-line: #8a929c; --teal: #d3f0e9; --teal-line: #0d8370; --purple: #ebe5fc;
  --purple-line: #7352c7; --op: #ffffff; --blue: #1760b5; background: var(--paper); }
@media (prefers-color-scheme: dark) {
  # { --paper: #14181d; --panel: #1b2027; --ink: #e8ecf1; --faint: #a3acb7; --line: #4a535e; --forward: #8d97a3;
    --coral: #ff8a72; --grey: #343a42; --grey-line: #9aa4af; --teal: #0e4239; --teal-line: #45c8b0; --purple: #35285c;
    --purple-line: #a98df5; --op: #242b34; --blue: #7db7ff; } }
# text { font: 13px system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; fill: var(--ink);
  font-variant-numeric: tabular-nums; }
# .small { font-size: 11.5px; } # .tiny { font-size: 10.5px; } # .faint { fill: var(--faint); }
# .bold { font-weight: 600; } # .middle { text-anchor: middle; } # .end { text-anchor: end; }
# .paper { fill: var(--paper); } # .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
# .name { paint-order: stroke; stroke: var(--panel); stroke-width: 4px; pointer-events: none; }
# .box { stroke-width: 1.5; }
# .data { fill: var(--grey); stroke: var(--grey-line); } # .parameter { fill: var(--teal); stroke: var(--teal-line); }
# .intermediate { fill: var(--purple); stroke: var(--purple-line); }
# .operation { fill: var(--op); stroke: var(--forward); }
# .group { fill: var(--panel); stroke: var(--line); stroke-width: 1.25; } # .holds { stroke: var(--teal-line); }
# .forward { fill: none; stroke: var(--forward); stroke-width: 1.5; } # .forward-tip { fill: var(--forward); }
# .backward { fill: none; stroke: var(--coral); stroke-width: 1.75; } # .backward-tip { fill: var(--coral); }
# .thrown-away { stroke-dasharray: 5 4; } # .coral { fill: var(--coral); } # .blue { fill: var(--blue); }
# .cut { stroke: var(--ink); stroke-width: 2.25; stroke-dasharray: 6 4; fill: none; }
# .lane { stroke: var(--line); fill: none; } # .event-forward { fill: var(--op); stroke: var(--forward); }
# .event-backward { fill: var(--op); stroke: var(--coral); }
# .hit { fill: none; stroke: transparent; stroke-width: 14; pointer-events: stroke; }
# g:focus { outline: none; }
# g:focus-visible > .box, # g:focus-visible > .group { stroke: var(--blue); stroke-width: 3; }
# g:focus-visible > .forward, # g:focus-visible > .backward, # .arrow:hover > .forward, # .arrow:hover > .backward {
  stroke-width: 3; }
"""


def width_of(text: str, size: float = 13, *, bold: bool = False) -> float:
    """How wide a text is, about.

    Examples:
        >>> width_of("mm") > width_of("il")
        True
    """
    return (
        sum(_WIDTHS.get(letter, 570) for letter in text) * size / 1000 * (1.2 if bold else 1.1)
    )  # some fonts are wide


def shorten(text: str, room: float, size: float = 13, *, bold: bool = False) -> str:
    """The text, with its middle left out where it is too long.

    Examples:
        >>> shorten("transformer.h.0.attn.c_attn.weight", 120)
        'transfor…n.weight'
    """
    if width_of(text, size, bold=bold) <= room:
        return text
    left, right = (len(text) + 1) // 2, len(text) // 2
    while left + right > 4 and width_of(f"{text[:left]}…{text[len(text) - right :]}", size, bold=bold) > room:
        left, right = (left - 1, right) if left >= right else (left, right - 1)
    return f"{text[:left]}…{text[len(text) - right :]}"


def by(shape: Sequence[int]) -> str:
    """A shape as it is said.

    Examples:
        >>> by((3, 4)), by(())
        ('3×4', 'scalar')
    """
    return "×".join(map(str, shape)) or "scalar"


def number(value: float) -> str:
    """Three figures.

    Examples:
        >>> number(0.012345), number(1234.5), number(1e-7), number(0.0)
        ('0.0123', '1230', '1e-7', '0')
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{float(f'{value:.3g}'):g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def attributes(**values: object) -> str:
    """As they stand in a tag; `data_role` is written `data-role`, None is left out."""
    given = ((name.rstrip("_").replace("_", "-"), value) for name, value in values.items() if value is not None)
    return "".join(f' {name}="{escape(_text(value))}"' for name, value in given)


def _text(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


class Svg:
    """A picture that grows by appending."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def open(self, hover: str | None = None, **values: object) -> None:
        """Begin a group; `hover` is its title, and what a screen reader says."""
        label = {} if hover is None else {"tabindex": "0", "role": "img", "aria_label": hover}
        values = {**label, **values}
        self._lines.append(f"<g{attributes(**values)}>" + ("" if hover is None else f"<title>{escape(hover)}</title>"))

    def close(self) -> None:
        self._lines.append("</g>")

    def text(self, x: float, y: float, text: str, kind: str = "", *, upwards: bool = False) -> None:
        """A line of text that begins here; `upwards`: read from below."""
        turned = f"rotate(-90 {x:.1f} {y:.1f})" if upwards else None
        place = attributes(class_=kind or None, x=float(x), y=float(y), transform=turned)
        self._lines.append(f"<text{place}>{escape(text)}</text>")

    def title(self, x: float, y: float, name: str, kind: str) -> None:
        """A name, and in smaller letters what it is."""
        rest = f'<tspan class="small faint" dx="8">{escape(kind)}</tspan>' if kind else ""
        self._lines.append(
            f"<text{attributes(class_='name', x=float(x), y=float(y))}>"
            f'<tspan class="bold">{escape(name)}</tspan>{rest}</text>'
        )

    def rect(
        self, x: float, y: float, wide: float, tall: float, kind: str, rx: float = 6, *, opacity: str | None = None
    ) -> None:
        where = {"x": float(x), "y": float(y), "width": float(wide), "height": float(tall), "rx": float(rx)}
        self._lines.append(f"<rect{attributes(class_=kind, **where, fill_opacity=opacity)}/>")

    def path(self, d: str, kind: str, *, tip: str | None = None) -> None:
        end = None if tip is None else f"url(#{_UID}-{tip})"
        self._lines.append(f"<path{attributes(class_=kind, d=d, marker_end=end)}/>")

    def finish(self, title: str, description: str, wide: float, tall: float, *, style: str = "") -> str:
        """The whole, under a name made from its contents: two pictures on one page do not disturb each other. `style`
        has more rules, each after a `# ` as those of `STYLE`."""
        size = attributes(viewBox=f"0 0 {wide:.0f} {tall:.0f}", width=f"{wide:.0f}", height=f"{tall:.0f}")
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" id="{_UID}" class="unsum-picture"{size} '
            f'style="max-width:100%;height:auto" role="graphics-document document" '
            f'aria-labelledby="{_UID}-title {_UID}-desc">',
            f'<title id="{_UID}-title">{escape(title)}</title>',
            f'<desc id="{_UID}-desc">{escape(description)}</desc>',
            f"<style>{(STYLE + style).replace('# ', f'#{_UID} ')}</style>",
            "<defs>",
            *(
                f'<marker id="{_UID}-{way}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
                f'markerUnits="userSpaceOnUse" orient="auto"><path class="{way}-tip" d="M0 0.5 8 4 0 7.5Z"/></marker>'
                for way in ("forward", "backward")
            ),
            "</defs>",
            f'<rect class="paper" width="{wide:.0f}" height="{tall:.0f}" rx="8"/>',
        ]
        whole = "\n".join([*head, *self._lines, "</svg>", ""])
        name = "unsum-" + hashlib.sha256(whole.encode()).hexdigest()[:10]
        return whole.replace(_UID, name)


def wrapped(text: str, room: float, size: float = 11.5) -> list[str]:
    """Lines that are no wider than `room`."""
    lines: list[str] = []
    for word in text.split():
        if lines and width_of(f"{lines[-1]} {word}", size) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
