"""The table of `g.coverage()`: which parameter met data where, how its gradients were obtained, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from unsum.factors.factors import GroupFactors
from unsum.notebook import Table
from unsum.plan.plan import Meeting

HEADINGS = ("parameter", "share", "meets data at", "in module", "node", "how", "numbers per sample")


def rows(
    names: Mapping[int, str],
    parameters: Mapping[int, nn.Parameter],
    meetings: Mapping[int, Mapping[Meeting, None]],
    kept: Mapping[int, GroupFactors],
) -> tuple[list[tuple[str, ...]], str]:
    """The headings and one row for each parameter and meeting; and the share of numbers that rules cover, in words."""
    total = sum(p.numel() for p in parameters.values()) or 1
    found: list[tuple[str, ...]] = [HEADINGS]
    ruled = 0
    for key, name in names.items():
        size = parameters[key].numel()
        met = list(meetings.get(key, ()))
        ruled += size if met and all(meeting.how != "replay" for meeting in met) else 0
        numbers = sum(kind.numel() for kind in kept[key].kinds) if key in kept else None
        cost = f"{size:,}" if numbers is None or not met else f"{numbers:,} of {size:,}"
        if not met:
            found.append((name, f"{size / total:.1%}", "nothing", "", "", "-", ""))
        for k, meeting in enumerate(met):
            lead = (name, f"{size / total:.1%}") if k == 0 else ("", "")
            found.append(
                (*lead, meeting.operation, meeting.module, f"#{meeting.place}", meeting.how, cost if k == 0 else "")
            )
    return found, f"by rule: {ruled / total:.1%} of {total:,} parameters; the rest by replay"


def table(found: list[tuple[str, ...]], ruled: str) -> Table:
    """The rows as lines, and the share of the parameters that rules cover as the last one."""
    width = [max(len(row[i]) for row in found) for i in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, width, strict=True)).rstrip() for row in found]
    return Table("\n".join([*lines, ruled]), found[0], found[1:], ruled)
