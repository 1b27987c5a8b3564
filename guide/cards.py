"""What was measured: guarantee cards and single figures, read from the files that the proofs wrote.

`reference/figures` (the full fault suite) comes first, `build/figures` (the quick one on this machine) second; a
card says which. Nothing measured yet is said as such, never filled in.
"""

from __future__ import annotations

import functools
import html
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import plots, report
from bench import results as read
from bench.figures import number
from guide import sources
from queuesmith.catalogue import ROOT, Pattern

OWN = os.environ.get("GUIDE_FIGURES")  # another folder instead of both, for tests
COMMITTED = ROOT / "reference" / "figures"
FOLDERS = (Path(OWN),) if OWN else (COMMITTED, ROOT / "build" / "figures")
BENCH = os.environ.get("GUIDE_BENCH")  # the same for the results of the benchmark
BENCHES = (
    (Path(BENCH),) if BENCH else (ROOT / "bench" / "results.json", ROOT / "build" / "bench" / "results.json")
)
MOST_LOSSES = 4
CARD_LINES, CARD_NUMBERS = 3, 7  # of a brief card: what is worth its tokens; the figures have their own files
UNMEASURED = "not measured yet"
TWINS = (
    "naive",
    "stock",
    "without",
    "nested",
    "race",
    "executor",
    "inline",
    "usual",
    "no_jitter",
    "with_count",
)

Measured = dict[str, dict[str, Any]]


@functools.cache
def measured(pattern: str, folders: tuple[Path, ...] = FOLDERS) -> Measured:
    """proof name -> entry, of the best run there is."""
    for folder in folders:
        path = folder / f"{pattern}.json"
        if path.exists():
            entries: Measured = json.loads(path.read_text())
            return {name: entries[name] for name in sorted(entries) if _current(entries[name])}
    return {}


def _current(entry: dict[str, Any]) -> bool:
    """A figure whose test was renamed or removed proves nothing any more."""
    path, _, name = entry["proof"].partition("[")[0].partition("::")
    return (ROOT / path).is_file() and bool(sources.defines(path, name))


def of_proof(proof: str) -> list[tuple[str, dict[str, Any]]]:
    """Every entry that this test wrote, whatever file it is in."""
    plain = proof.partition("[")[0]
    names = sorted({path.stem for folder in FOLDERS for path in folder.glob("*.json")})
    return [
        (name, entry)
        for pattern in names
        for name, entry in measured(pattern).items()
        if entry["proof"].partition("[")[0] == plain
    ]


def card(pattern: Pattern, *, brief: bool = False) -> str:
    """The guarantee card of a pattern. `brief` is for the pages of skills, where every word is read by a model."""
    promise = f"**Promise.** {pattern.summary}\n\n"
    entries = measured(pattern.id, (COMMITTED,)) if brief else measured(pattern.id)
    if brief:
        return promise + _brief(pattern, {k: v for k, v in entries.items() if v["mode"] == "full"})
    head = f'<section class="qs-card" data-measured="{mode(entries)}" markdown>\n\n'
    if not entries:
        text = f"Figures: {UNMEASURED}. `make faults` runs the proofs below and writes them."
        return f"{head}{promise}{text}\n\n</section>"
    return head + promise + table(entries.items()) + "\n\n" + run(entries) + "\n\n</section>"


def _brief(pattern: Pattern, entries: Measured) -> str:
    """The most telling proofs, a line each; the same proof on two databases is one line."""
    if not entries:
        return f"**Measured** by `{pattern.proof_files[0]}`, run `make faults` in the Queuesmith repository."
    merged: dict[str, dict[str, dict[str, Any]]] = {}  # proof -> database ("" if it needs none) -> figures
    for name, entry in entries.items():
        plain, _, store = name.rpartition("-")
        known = store in ("sqlite", "postgresql")
        merged.setdefault(plain if known else name, {})[store if known else ""] = entry["figures"]
    first = sorted(merged, key=lambda name: (not any("kills" in one for one in merged[name].values()), name))
    date = max(entry["date"] for entry in entries.values())
    lines = [
        f"**Measured** (full fault run of {date}, real kills; `naive` is the usual version under the same fault):",
        "",
    ]
    for name in first[:CARD_LINES]:
        (store, figures), *others = sorted(merged[name].items())  # PostgreSQL's, where both were measured
        same = [other for other, numbers in others if numbers == figures]
        on = f" ({', '.join([store, *same])})" if store else ""
        lines.append(f"- {name.replace('-', ' ')}{on}: {_telling(figures)}")
    return "\n".join(lines)


def _telling(figures: dict[str, Any]) -> str:
    plain = {key: value for key, value in figures.items() if isinstance(value, int | float | str)}
    telling = ["jobs", "events", "orders", "kills", "lost", "duplicated"]
    order = sorted(
        plain, key=lambda key: (telling.index(key) if key in telling else len(telling), "naive" not in key)
    )
    return ", ".join(f"{key.replace('_', ' ')} {number(plain[key])}" for key in order[:CARD_NUMBERS])


def table(entries: Iterable[tuple[str, dict[str, Any]]]) -> str:
    lines = ["| fault | measured | without it |", "|---|---|---|"]
    for name, entry in entries:
        ours = {key: value for key, value in entry["figures"].items() if not is_twin(key)}
        twin = {key: value for key, value in entry["figures"].items() if is_twin(key)}
        link = sources.proof_link(entry["proof"]).partition("](")[2].removesuffix(")")
        title = html.escape(name.replace("-", " "))
        lines.append(f"| [{title}]({link}) | {_cells(ours)} | {_cells(twin)} |")
    return "\n".join(lines)


def loss(pattern: str) -> str:
    """What the naive twins of a pattern's proofs lost or duplicated, below its drawing."""
    shown = []
    for name, entry in measured(pattern).items():
        twin = {key: value for key, value in entry["figures"].items() if is_twin(key)}
        if twin and "postgresql" not in name:  # the same experiment on another database
            shown.append(f"{html.escape(name.replace('-', ' '))}: {_cells(twin).replace('<br>', ', ')}")
    return "Measured without it. " + "; ".join(shown[:MOST_LOSSES]) + "." if shown else ""


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
    """The report of the last benchmark, its pictures drawn into the page."""
    found = results()
    if not found:
        return f"The benchmark: {UNMEASURED}; `make bench-full` writes it."
    text = report.markdown(found, {name: f"{name}.svg" for name in plots.pictures(found)})
    for name, svg in plots.pictures(found).items():
        picture = f'<div class="qs-plot">{svg.strip()}</div>'
        title = found["sections"][name]["title"]
        text = text.replace(f"![{title}]({name}.svg)", picture)
    return text.partition("\n\n")[2].strip()  # the page has its own title


@functools.cache
def results() -> dict[str, Any]:
    """The committed run; else the one of this machine."""
    for path in BENCHES:
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text())
            return found
    return {}


def mode(entries: Measured) -> str:
    if not entries:
        return "none"
    return "full" if all(entry["mode"] == "full" for entry in entries.values()) else "quick"


def run(entries: Measured) -> str:
    dates = sorted({entry["date"] for entry in entries.values()})
    seeds = sorted({str(entry["seed"]) for entry in entries.values()})
    versions = next(iter(entries.values()))["versions"]
    kind = {"full": "Full fault suite", "quick": "Quick fault suite"}[mode(entries)]
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    shown = ", ".join(f"{key} {value}" for key, value in versions.items())
    return (
        f"<small>{kind}, run of {when}, seed {', '.join(seeds)}; {shown}. "
        "Repeat it: `make faults ARGS='-k …'` with `QUEUESMITH_SEED` set.</small>"
    )


def _cells(figures: dict[str, object]) -> str:
    return (
        "<br>".join(f"{key.replace('_', ' ')} **{number(value)}**" for key, value in figures.items()) or "–"
    )
