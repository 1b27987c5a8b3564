"""Bar charts of the benchmark for the guide: drawn at build time, for phones and screen readers too.

Each bar has its label and its words above it, so that nothing depends on colour and it fits a phone.
"""

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from bench import results as read
from bench.figures import number
from bench.report import OURS

WIDTH, ROW, BAR = 400, 38, 12
DAMAGE = ("lost", "stuck", "duplicated")
# Head, section, figure and unit.
COLUMNS = (
    ("no-op jobs/s, one process", "throughput", "noop", ""),
    ("20 kills, tuned: lost", "kills", "lost", ""),
    ("stuck", "kills", "stuck", ""),
    ("duplicated", "kills", "duplicated", ""),
    ("killed job runs again after, tuned", "recovery", "lowered", " s"),
    ("default", "recovery", "default", " s"),
)


@dataclass(frozen=True)
class Bar:
    label: str
    words: str
    parts: Sequence[tuple[str, float]]  # class of the colour, length
    ours: bool = False
    endless: bool = False  # it did not end while watched


def chart(title: str, bars: Iterable[Bar]) -> str:
    """One SVG; its description says all that is drawn."""
    bars = list(bars)
    most = max((sum(value for _, value in bar.parts) for bar in bars), default=0.0) or 1.0
    ident = "qs-" + re.sub(r"\W+", "-", title.lower()).strip("-")
    description = "; ".join(f"{bar.label}: {bar.words}" for bar in bars)
    drawn = []
    for place, bar in enumerate(bars):
        top, left = place * ROW, 0.0
        bold = ' class="qs-ours"' if bar.ours else ""
        drawn.append(
            f'<text x="0" y="{top + 14}"{bold}>{escape(bar.label)}</text>'
            f'<text x="{WIDTH}" y="{top + 14}" text-anchor="end"{bold}>{escape(bar.words)}</text>'
            f'<rect class="qs-track" x="0" y="{top + 20}" width="{WIDTH}" height="{BAR}" rx="3"/>'
        )
        for kind, value in bar.parts:
            long = WIDTH if bar.endless else WIDTH * value / most
            if value or bar.endless:
                area = f'x="{left:.1f}" y="{top + 20}" width="{max(long, 2):.1f}" height="{BAR}"'
                drawn.append(f'<rect class="qs-{kind}" {area} rx="3"/>')
                left += long
    inner = "".join(drawn)
    return (
        f'<figure class="qs-chart"><figcaption id="{ident}">{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {len(bars) * ROW}" role="img" aria-labelledby="{ident}" '
        f'aria-describedby="{ident}-told">'
        f'<desc id="{ident}-told">{escape(description)}</desc>{inner}</svg></figure>'
    )


def damage(results: dict[str, Any]) -> str:
    """What the same kills cost each peer."""
    bars = []
    for row, title in _peers(results, "kills"):
        values = {key: read.median(results, "kills", row, key) or 0 for key in DAMAGE}
        words = ", ".join(f"{number(value)} {key}" for key, value in values.items() if value)
        bars.append(Bar(title, words or "nothing", list(values.items()), row in OURS))
    kills = max((read.median(results, "kills", row, "kills") or 0 for row, _ in _peers(results, "kills")), default=0)
    title = f"Jobs lost, stuck or duplicated by the same {number(kills)} kills"
    return chart(title, sorted(bars, key=lambda bar: sum(value for _, value in bar.parts)))


def recovery(results: dict[str, Any], settings: str = "default") -> str:
    """How long a killed worker's job waits before it runs again."""
    bars = []
    for row, title in _peers(results, "recovery"):
        seconds = read.median(results, "recovery", row, settings)
        words = read.figure(results, "recovery", row, settings)
        if seconds is None and not isinstance(words, str):
            continue
        unit = " s" if seconds is not None or str(words).startswith(">") else ""
        shown = number(seconds) if seconds is not None else str(words)
        bars.append(Bar(title, shown + unit, [("wait", seconds or 0)], row in OURS, seconds is None))
    words = "default settings" if settings == "default" else "tuned"
    order = sorted(bars, key=lambda bar: (bar.endless, bar.words == "never", sum(value for _, value in bar.parts)))
    return chart(f"A killed worker's job runs again after, {words}", order)


def throughput(results: dict[str, Any]) -> str:
    bars = []
    for row, title in _peers(results, "throughput"):
        rate = read.median(results, "throughput", row, "noop")
        if rate is not None:
            bars.append(Bar(title, f"{number(rate)} jobs/s", [("rate", rate)], row in OURS))
    return chart("No-op jobs per second, one process", sorted(bars, key=lambda bar: -bar.parts[0][1]))


def _peers(results: dict[str, Any], section: str) -> list[tuple[str, str]]:
    rows = results.get("sections", {}).get(section, {}).get("rows", {})
    return [(row, results["peers"].get(row, {}).get("title", row)) for row in rows]


def table(results: dict[str, Any], only: str = "", rounds: int = 1) -> str:
    """The same and more as a table: all peers, or those named. No figure of fewer `rounds`."""
    shown = [cell for cell in COLUMNS if results["sections"].get(cell[1], {}).get("rounds", 0) >= rounds]
    lines = [f"| | {' | '.join(cell[0] for cell in shown)} |", f"|---|{'---:|' * len(shown)}"]
    for ident, about in results["peers"].items():
        if only and ident not in only.split():
            continue
        cells = [median_of(results, section, ident, key, unit) for _, section, key, unit in shown]
        title = f"**{about['title']}**" if ident.startswith("queuesmith") else about["title"]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def median_of(results: dict[str, Any], section: str, row: str, key: str, unit: str = "") -> str:
    value = read.figure(results, section, row, key)
    if not isinstance(value, list):
        return f"{value}{unit}" if value and value.startswith(">") else value or "–"
    return f"{number(round(statistics.median(value), 1))}{unit}"
