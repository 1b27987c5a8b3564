"""What was measured: guarantee cards and single figures, read from the files that the proofs wrote.

`reference/figures` (the full fault suite) comes first, `build/figures` (the quick one on this machine) second; a
card says which. What is not measured yet is marked as such, never filled in.
"""

import functools
import html
import json
import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import report
from bench import results as read
from bench.figures import number
from guide import charts as draw
from guide import sources
from queuesmith.catalogue import ROOT, Pattern

OWN = os.environ.get("GUIDE_FIGURES")  # another folder instead of both, for tests
COMMITTED = ROOT / "reference" / "figures"
FOLDERS = (Path(OWN),) if OWN else (COMMITTED, ROOT / "build" / "figures")
BENCH = os.environ.get("GUIDE_BENCH")  # the same for the results of the benchmark
BENCHES = (Path(BENCH),) if BENCH else (ROOT / "bench" / "results.json", ROOT / "build" / "bench" / "results.json")
BRIEF = 2  # sentences of a brief card, to save tokens; the figures have their own files
STORES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
# How figures read in sentences, in this order.
READ_AS = (
    (
        re.compile(r"(?<![\d.,])0(?= (?:lost|duplicated|failed|stalled|inconsistent|missed|kept|undone|out of)\b)"),
        "nothing",
    ),
    (re.compile(r"(?<![\d.,])0 of (?=[\d,]+|them)"), "none of "),
    (re.compile(r"(?<![\d.,])0(?= [a-z]{3})"), "no"),
    (re.compile(r"(?<![\d.,])1 times\b"), "once"),
    (re.compile(r"(?<![\d.,])2 times\b"), "twice"),
    (re.compile(r"(?<![\d.,])1 ([a-z]{3,})s\b"), r"1 \1"),
)
UNMEASURED = "not measured yet"
TWINS = ("naive", "stock", "without", "nested", "race", "executor", "inline", "usual", "no_jitter", "with_count")

Measured = dict[str, dict[str, Any]]


@functools.cache
def measured(pattern: str, folders: tuple[Path, ...] = FOLDERS) -> Measured:
    """proof name -> entry, of the best run."""
    for folder in folders:
        path = folder / f"{pattern}.json"
        if path.exists():
            entries: Measured = json.loads(path.read_text())
            runs = entries.pop("runs")
            for entry in entries.values():
                entry["proof"] = _file_of().get(entry["proof"].partition("[")[0], "") + "::" + entry["proof"]
                entry["date"], entry["mode"], entry["seed"] = (run := entry.get("run") or next(iter(runs))).split()
                entry["versions"] = runs[run]
            # A figure whose test was renamed or removed proves nothing any more.
            current = [name for name in sorted(entries) if not entries[name]["proof"].startswith("::")]
            return {name: entries[name] | {"pattern": pattern} for name in current}
    return {}


@functools.cache
def _file_of() -> dict[str, str]:
    """test -> its file; a test that writes figures has a name of its own."""
    return {
        name: path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def of_proof(proof: str) -> list[tuple[str, dict[str, Any]]]:
    """Every entry that this test wrote, in whatever file."""
    plain = proof.partition("[")[0]
    names = sorted({path.stem for folder in FOLDERS for path in folder.glob("*.json")})
    return [
        (name, entry)
        for pattern in names
        for name, entry in measured(pattern).items()
        if entry["proof"].partition("[")[0] == plain
    ]


def card(pattern: Pattern, *, brief: bool = False) -> str:
    """The guarantee card of a pattern: its promise, and what was measured, in sentences.

    `brief` is for skill pages, where a model reads every word: the most telling sentences of a full run.
    """
    promise = f"**Promise.** {pattern.summary}"
    if not brief:
        return box(measured(pattern.id), promise)
    entries = {name: entry for name, entry in measured(pattern.id, (COMMITTED,)).items() if entry["mode"] == "full"}
    if not entries:
        return f"{promise}\n\n**Measured** by its proof: `make faults`."
    return f"{promise}\n\n**Measured.** {' '.join(sentences(pattern.id, entries)[:BRIEF])}"


def box(entries: Measured, promise: str = "") -> str:
    """Sentences; the raw figures, their origin and how to repeat them are one click away."""
    head = f'<section class="qs-card" data-measured="{mode(entries)}" markdown>\n\n'
    if not entries:
        text = f"Figures: {UNMEASURED}. `make faults` runs the proofs and writes them."
        return f"{head}{promise}\n\n{text}\n\n</section>"
    listed = "\n".join(f"- {text}" for pattern in _by_pattern(entries) for text in sentences(*pattern))
    raw = f"{table(entries.items())}\n\n{run(entries)}"
    details = f'<details class="qs-raw" markdown><summary>Raw figures</summary>\n\n{raw}\n\n</details>'
    return f"{head}{promise}\n\n{listed}\n\n{details}\n\n</section>"


def _by_pattern(entries: Measured) -> list[tuple[str, Measured]]:
    """An anti-pattern's experiment may have written figures for several patterns."""
    grouped: dict[str, Measured] = {}
    for name, entry in entries.items():
        grouped.setdefault(entry["pattern"], {})[name] = entry
    return list(grouped.items())


@functools.cache
def templates() -> dict[str, dict[str, str]]:
    return tomllib.loads((Path(__file__).parent / "sentences.toml").read_text())


def sentences(pattern: str, entries: Measured) -> list[str]:
    """One per experiment, in the order of sentences.toml; the same experiment on two databases is one."""
    merged: dict[str, dict[str, str]] = {}
    for name, entry in sorted(entries.items(), reverse=True):  # SQLite first: its twin always ran
        plain, store = experiment(name)
        merged.setdefault(plain, {})[store] = sentence(pattern, plain, entry["figures"])
    order = [*templates().get(pattern, {})]
    result = []
    for plain in sorted(merged, key=lambda name: (order.index(name) if name in order else len(order), name)):
        (store, text), *others = merged[plain].items()
        same = [STORES[other] for other, sentence in others if sentence == text]
        on = f" ({' and '.join([STORES[store], *same])})" if store else ""
        result.append(f"{text.removesuffix('.')}{on}.")
    return result


def experiment(name: str) -> tuple[str, str]:
    """`kills-sqlite` -> `kills`, `sqlite`."""
    plain, _, store = name.rpartition("-")
    return (plain, store) if store in STORES else (name, "")


def sentence(pattern: str, name: str, figures: dict[str, Any]) -> str:
    """What this experiment measured; only the figures if there is no template."""
    shown = ", ".join(f"{key.replace('_', ' ')} {number(value)}" for key, value in figures.items())
    return filled(pattern, name, figures) or f"{name.replace('-', ' ').capitalize()}: {shown}."


def filled(pattern: str, name: str, figures: dict[str, Any]) -> str:
    """Its template with its figures; empty if there is none, or a figure is missing."""
    try:
        text = templates()[pattern][name].format_map({key: _shown(value) for key, value in figures.items()})
    except KeyError:
        return ""
    for wording, words in READ_AS:
        text = wording.sub(words, text)
    return text


class _Moments(dict[str, str]):
    """Kills by the moment they hit: `{kills_by_point}` is how many moments."""

    def __format__(self, _: str) -> str:
        words = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight"]
        return words[len(self)] if len(self) < len(words) else str(len(self))


def _shown(value: object) -> object:
    if isinstance(value, dict):
        return _Moments({key: number(inner) for key, inner in value.items()})
    return number(value)


def table(entries: Iterable[tuple[str, dict[str, Any]]]) -> str:
    lines = ["| fault | measured | without it |", "|---|---|---|"]
    for name, entry in entries:
        ours = {key: value for key, value in entry["figures"].items() if not is_twin(key)}
        twin = {key: value for key, value in entry["figures"].items() if is_twin(key)}
        link = sources.proof_link(entry["proof"]).partition("](")[2].removesuffix(")")
        title = html.escape(name.replace("-", " "))
        lines.append(f"| [{title}]({link}) | {_cells(ours)} | {_cells(twin)} |")
    return "\n".join(lines)


def is_twin(key: str) -> bool:
    """Is this figure about the naive version that ran in the same test?"""
    return any(word in key for word in TWINS)


def figure(path: str) -> str:
    """`stall-budget/recovery/recovery_seconds` -> its value, linked to the test that wrote it."""
    pattern, name, key = path.split("/")
    entry = measured(pattern).get(name)
    if entry is None or key not in entry["figures"]:
        return f'<span class="qs-figure" data-figure="{path}">{UNMEASURED}</span>'
    link = sources.proof_link(entry["proof"]).partition("](")[2].removesuffix(")")
    title = f"{entry['mode']} run of {entry['date']}, seed {entry['seed']}"
    value = number(entry["figures"][key])
    return f'<a class="qs-figure" data-figure="{path}" href="{link}" title="{title}">{value}</a>'


def bench(path: str) -> str:
    """`throughput/queuesmith/noop` -> its median in the last benchmark, linked to the page with all of them."""
    section, row, key = path.split("/")
    figure = read.figure(results(), section, row, key)
    if figure is None:
        return f'<span class="qs-figure" data-bench="{path}">{UNMEASURED}</span>'
    title = f"{results()['mode']} run of {results()['date']}"
    median = read.median(results(), section, row, key)
    shown = html.escape(str(figure)) if median is None else number(median)
    return f'<a class="qs-figure" data-bench="{path}" href="page:benchmark" title="{title}">{shown}</a>'


def benchmark() -> str:
    """The report of the last benchmark, below its charts."""
    drawn = charts("throughput damage recovery")
    if not results():
        return drawn
    text = report.markdown(results()).partition("\n\n")[2].strip()  # the page has its own title
    return f"{drawn}\n\n{text}"


def charts(names: str) -> str:
    """`damage recovery`: charts of the benchmark, side by side if there is room."""
    drawn = {"damage": draw.damage, "recovery": draw.recovery, "throughput": draw.throughput}
    if not results():
        return f"The benchmark: {UNMEASURED}; `make bench-full` writes it."
    return f'<div class="qs-charts">{"".join(drawn[name](results()) for name in names.split())}</div>'


def peers() -> str:
    """The figures behind the charts, one click away."""
    if not results():
        return ""
    head = '<details class="qs-raw" markdown><summary>The figures as a table</summary>'
    return f"{head}\n\n{draw.table(results())}\n\n</details>"


@functools.cache
def results() -> dict[str, Any]:
    """The committed run, else this machine's."""
    for path in BENCHES:
        if path.exists():
            result: dict[str, Any] = json.loads(path.read_text())
            return result
    return {}


def mode(entries: Measured) -> str:
    if not entries:
        return "none"
    return "full" if all(entry["mode"] == "full" for entry in entries.values()) else "quick"


def run(entries: Measured) -> str:
    dates = sorted({entry["date"] for entry in entries.values()})
    seeds = sorted({entry["seed"] for entry in entries.values()})
    versions = next(iter(entries.values()))["versions"]
    kind = {"full": "Full fault suite", "quick": "Quick fault suite"}[mode(entries)]
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"<small>{kind}, run of {when}, seed {', '.join(seeds)}; {versions}. "
        "Repeat it: `make faults ARGS='-k …'` with `QUEUESMITH_SEED` set.</small>"
    )


def _cells(figures: dict[str, object]) -> str:
    return "<br>".join(f"{key.replace('_', ' ')} **{number(value)}**" for key, value in figures.items()) or "–"
