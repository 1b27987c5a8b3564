"""Bar charts as SVG, without a library: one bar per row, ours in another colour, readable on light and dark pages."""

from collections.abc import Mapping, Sequence
from html import escape
from math import log10

from bench.figures import number
from bench.report import OURS
from bench.results import Results, median

# section -> picture title, figures shown, logarithmic
PICTURES: dict[str, tuple[str, Sequence[str], bool]] = {
    "throughput": ("No-op jobs per second, one process (dark) and two (light)", ("noop", "noop2"), False),
    "latency": (
        "Enqueue to start on an idle queue, p50 (dark) and p99 (light), ms, logarithmic",
        ("idle_p50", "idle_p99"),
        True,
    ),
    "kills": ("Jobs lost (dark) and duplicated (light) by the same kills", ("lost", "duplicated"), False),
    "backlog": (
        "Median time to add (dark) and to fetch (light) one job while others wait, µs",
        ("add_us", "fetch_us"),
        False,
    ),
}
LEFT, WIDTH, BAR, GAP = 210, 720, 11, 9
# The guide overrides the colour of the letters with its own.
STYLE = (
    ".qb{color:#333}.qb text{font:12px system-ui,sans-serif;fill:currentColor}.qb .t{font-weight:600;font-size:14px}"
    ".qb .a{fill:#8592a3}.qb .b{fill:#bcc5cf}.qb .o.a{fill:#2563eb}.qb .o.b{fill:#86a9f3}"
    "@media(prefers-color-scheme:dark){.qb{color:#ddd}}"
)


def bars(title: str, rows: Mapping[str, Sequence[float | None]], *, ours: Sequence[str] = (), log: bool = False) -> str:
    """`rows`: label -> up to two values; `ours`: labels to stand out."""
    known = [value for values in rows.values() for value in values if value is not None]
    most = max(known, default=0.0) or 1.0
    least = min((value for value in known if value > 0), default=1.0)
    room = WIDTH - LEFT - 90

    def length(value: float) -> float:
        if not log:
            return room * value / most
        floor = 10 ** (int(log10(least)) - 1)
        return room * max(0.0, log10(max(value, floor) / floor)) / log10(most / floor)

    top, parts = 34, [f'<text class="t" x="0" y="16">{escape(title)}</text>']
    for label, values in rows.items():
        height = BAR * len(values)
        mark = " o" if label in ours else ""
        parts.append(f'<text x="{LEFT - 8}" y="{top + height / 2 + 4:g}" text-anchor="end">{escape(label)}</text>')
        for place, value in enumerate(values):
            y = top + place * BAR
            if value is None:
                parts.append(f'<text x="{LEFT}" y="{y + BAR - 1}">–</text>')
                continue
            long = max(1.0, length(value))
            parts.append(
                f'<rect class="{"ab"[place]}{mark}" x="{LEFT}" y="{y}" width="{long:.1f}" height="{BAR - 1}"/>'
                f'<text x="{LEFT + long + 5:.1f}" y="{y + BAR - 1}">{number(value)}</text>'
            )
        top += height + GAP
    inner = "\n".join(parts)
    return (
        f'<svg class="qb" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img" '
        f'aria-label="{escape(title)}">\n'
        f"<style>{STYLE}</style>\n{inner}\n</svg>\n"
    )


def pictures(results: Results) -> dict[str, str]:
    """Section -> SVG, of the sections that were run."""
    drawn = {}
    for name, (title, keys, log) in PICTURES.items():
        rows = {}
        for row in results["sections"].get(name, {}).get("rows", {}):
            label = results["peers"].get(row, {}).get("title", row)
            rows[label] = [median(results, name, row, key) for key in keys]
        if rows:
            ours = [results["peers"][row]["title"] for row in OURS if row in results["peers"]]
            drawn[name] = bars(title, rows, ours=ours, log=log)
    return drawn
