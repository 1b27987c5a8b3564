"""The results in Markdown: a table per section with medians, spreads and ratios, the settings and the targets."""

from typing import Any

from bench import sections
from bench.figures import Summary, number
from bench.results import Results, compare, limit, made_earlier, median
from bench.targets import targets

BASE = "stock"
OURS = ("queuesmith", "queuesmith-bare")
SHARES = {
    ("throughput", "noop"): "work",
    ("throughput", "noop2"): "work",
    ("enqueue", "single"): "add",
    ("enqueue", "bulk"): "add",
}


def markdown(results: Results) -> str:
    parts = ["# Benchmark", _head(results), "## Targets", _targets(results)]
    for name, section in results["sections"].items():
        rounds = "" if section["rounds"] == results["rounds"] else f" Rounds: {section['rounds']}."
        made = f" Measured {section['made']}." if "made" in section else ""
        stolen = f" The host took {section['stolen']} % of the CPU time meanwhile." if section.get("stolen") else ""
        said = sections.load(name)
        parts += [f"## {said.TITLE}", said.ABOUT + rounds + made + stolen, table(results, name, section)]
        parts += [f"{_title(results, row)} failed: {why}" for row, why in section["failed"].items()]
    parts += ["## Settings", _settings(results)]
    return "\n\n".join(parts) + "\n"


def _head(results: Results) -> str:
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    text = (
        f"{results['mode'].capitalize()} run of {results['date']}, {results['rounds']} round(s), on {machine['cpus']} "
        f"× {machine['processor']}, {machine['system']}, load {machine['load_at_start']} at the start; {versions}. "
        "Same Redis (append-only file, fsync every second), same run; the peers take turns inside each round. "
        "Figures are medians, ± is the largest less the smallest of the rounds. A ratio is taken round by round; one "
        "whose spread exceeds it is not printed but called unstable."
    )
    return text + "".join(f"\n\nNot here: {sentence}" for sentence in results["missing"])


def _targets(results: Results) -> str:
    lines = ["| target | wanted | measured | |", "|---|---|---|---|"]
    lines += [f"| {t.text} | {t.wanted} | {t.measured} | {t.verdict} |" for t in targets(results)]
    return "\n".join(lines)


def _settings(results: Results) -> str:
    lines = ["| peer | version | settings |", "|---|---|---|"]
    lines += [f"| {p['title']} | {p['version']} | {p['settings']} |" for p in results["peers"].values()]
    return "\n".join(lines)


def table(results: Results, name: str, section: dict[str, Any]) -> str:
    said = sections.load(name)
    columns = said.COLUMNS
    rows = {
        row: said.words(row) | figures if hasattr(said, "words") else figures
        for row, figures in section["rows"].items()
    }
    shown = {key: column for key, column in columns.items() if any(key in row for row in rows.values())}
    heads, cells = [""], []
    for key, column in shown.items():
        heads.append(f"{column.label} ({column.unit})" if column.unit else column.label)
        if column.ratio:
            heads.append(f"× {_title(results, BASE)}")
        if (name, key) in SHARES and limit(results, SHARES[name, key]):
            heads.append("of the limit")
    for row, figures in rows.items():
        made = made_earlier(section, row)
        title = _title(results, row) + (f" ({made})" if made else "")
        line = [f"**{title}**" if row in OURS else title]
        for key, column in shown.items():
            line.append(cell(figures.get(key)))
            if column.ratio:
                ratio = compare(results, name, key, row, BASE)
                line.append("1" if row == BASE else str(ratio) if ratio else "–")
            if (name, key) in SHARES and (most := limit(results, SHARES[name, key])):
                rate = median(results, name, row, key)
                line.append(f"{rate / most:.0%}" if rate else "–")
        cells.append(line)
    numbers = [any(line[place][:1] in "0123456789–>" for line in cells) for place in range(len(heads))]
    rule = "|".join("---:" if place and numbers[place] else "---" for place in range(len(heads)))
    return "\n".join(
        ["| " + " | ".join(heads) + " |", f"|{rule}|", *("| " + " | ".join(line) + " |" for line in cells)]
    )


def cell(figure: list[float] | str | None) -> str:
    """Median ± spread of the rounds, or words instead."""
    if not isinstance(figure, list):
        return figure or "–"
    summary = Summary(tuple(figure))
    return number(summary.median) + (f" ± {number(summary.spread)}" if summary.spread else "")


def _title(results: Results, row: str) -> str:
    return str(results["peers"].get(row, {}).get("title", row))
