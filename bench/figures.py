"""Medians, spreads and ratios of a few rounds, unstable ratios, and how numbers are written."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

UNSTABLE = "unstable"
Value = float | int | str | None  # None: not in this peer


@dataclass(frozen=True)
class Column:
    """One measured thing: its name in the report and whether more of it is better."""

    label: str
    unit: str = ""
    better: Literal["more", "less", ""] = "more"
    ratio: bool = False  # also shown as a multiple of the stock worker


def less(label: str, unit: str = "") -> Column:
    """A column where less is better."""
    return Column(label, unit, "less")


@dataclass(frozen=True)
class Summary:
    """The rounds of one figure."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        return max(self.values) - min(self.values)


class Ratio(Summary):
    """`one` / `other`, round by round: the rounds of both ran side by side."""

    @property
    def stable(self) -> bool:
        return self.spread <= self.median

    def __str__(self) -> str:
        return f"{self.median:.2f} ×" if self.stable else UNSTABLE


def ratio(ours: Sequence[float], other: Sequence[float]) -> Ratio | None:
    """None when a round of one of them is missing or zero."""
    if not ours or len(ours) != len(other) or not all(other):
        return None
    return Ratio(tuple(a / b for a, b in zip(ours, other, strict=True)))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is not below `percent` of all (nearest rank)."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def number(value: object) -> str:
    """As every table, card and page writes it: commas for thousands, three digits below a hundred."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {number(inner)}" for key, inner in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.3g}"
