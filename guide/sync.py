"""`make sync`: regenerate what is derived from the pages, the modules and the figures. `--check` fails on drift.

Generated text stands between `<!-- sync:NAME -->` (or `<!-- sync:NAME ARGUMENTS -->`, see `quotes`) and
`<!-- /sync -->` in hand-written files.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import results as bench
from bench.figures import number
from guide import cards, dashboards, quotes, scaffold, stacks
from queuesmith.catalogue import ROOT, SKILLS, patterns

BENCH = ROOT / "bench" / "results.json"
PATTERNS = "studyhall/patterns"


def pattern_map() -> str:
    """The table pattern -> module -> proof of reference/README.md."""
    lines: list[str] = []
    for skill, title in SKILLS.items():
        lines += [f"### {title}", "", "| pattern | promise | module | proofs |", "|---|---|---|---|"]
        for one in sorted(patterns().values(), key=lambda one: one.id):
            if one.skill == skill:
                links = ", ".join(f"[`{name}`]({PATTERNS}/{name})" for name in (*one.own, *one.parts))
                files = ", ".join(
                    f"[{Path(name).stem.removeprefix('test_')}](../{name})" for name in one.proof_files
                )
                page = one.page.relative_to(ROOT).as_posix()
                lines.append(f"| [**{one.id}**](../{page}) {one.title} | {one.summary} | {links} | {files} |")
        lines.append("")
    return "\n".join(lines).rstrip()


# The proofs the README shows: pattern, name of the proof, the fault, what was measured, and of the usual way beside
# it. Every pattern's page shows all of its figures.
HEADLINES = (
    (
        "stall-budget",
        "random-kills",
        "{jobs} jobs, their worker SIGKILLed {kills} times",
        "{lost} lost, {failed} failed, {duplicated} duplicated",
        "{naive_duplicated} duplicated, {naive_failed} failed",
    ),
    (
        "stall-budget",
        "redis-killed",
        "{jobs} jobs, Redis SIGKILLed {redis_kills} times",
        "{lost} lost, {duplicated} duplicated, consuming again after {consuming_again_seconds} s",
        "",
    ),
    (
        "stall-budget",
        "recovery",
        "worker SIGKILLed, default settings",
        "its jobs run again after {recovery_seconds} s",
        "",
    ),
    (
        "shutdown",
        "sigterm",
        "{sigterms} SIGTERMs in mid-job, {jobs} jobs",
        "{lost} lost, {stalled} stalled, {duplicated} duplicated, slowest exit {slowest_exit_seconds} s",
        "",
    ),
    (
        "bullmq-worker",
        "idle",
        "a job after {idle_seconds} s of silence",
        "starts after {ours} s",
        "stock worker: after {stock} s",
    ),
    (
        "bullmq-worker",
        "close",
        "worker closed {trials} times under load",
        "{stranded} jobs stranded",
        "stock worker: {stranded_stock} stranded",
    ),
    (
        "idempotency",
        "kills-sqlite",
        "{events} deliveries, {kills} SIGKILLs at every point",
        "{lost} lost, {duplicated} duplicated",
        "SET NX: {naive_set_nx_lost} lost; with DEL: {naive_set_nx_del_lost} lost, "
        "{naive_set_nx_del_duplicated} duplicated",
    ),
    (
        "dead-letter",
        "kills-sqlite",
        "{jobs} dead jobs of {causes} causes, {kills} kills of {sweepers} sweepers",
        "{dead_letters} letters, {lost} lost, {duplicated} duplicated",
        "listener: sees {naive_filter_causes_seen} cause of {causes}",
    ),
    (
        "checkpoint",
        "kills",
        "{rows} rows, {kills} kills",
        "{reprocessed} rows done again, {kept_twice} kept twice",
        "{naive_kept_twice} copies too many of {naive_rows} rows",
    ),
    (
        "flow",
        "killed-workers",
        "{chains} chains of jobs, {kills} kills",
        "{chains_cut} cut, {steps_duplicated} steps duplicated",
        "{naive_chains_cut} chains cut",
    ),
    (
        "schedule",
        "leader-kills",
        "{instances} instances, {leader_kills} leaders killed in mid-tick, {ticks} ticks",
        "at most {most_effects_per_tick} effect per tick",
        "",
    ),
    (
        "outbox",
        "kills-postgresql",
        "{commits} commits, {rollbacks} rollbacks, relay SIGKILLed {kills} times",
        "{lost} lost, {ghosts} ghosts, {out_of_order} out of order",
        "",
    ),
    (
        "saga",
        "kills-postgresql",
        "{orders} orders, {kills} SIGKILLs at every step",
        "{inconsistent} inconsistent, {undone_twice} undone twice",
        "{naive_inconsistent} inconsistent after {naive_kills} kills",
    ),
    (
        "event-bus",
        "consumer kills, redis",
        "{events} events, consumer killed {kills} times",
        "{lost} lost, {duplicated} duplicated",
        "without inbox: {duplicated_without_inbox} duplicated",
    ),
    (
        "engine",
        "all-users-killed",
        "{rounds} rounds of SIGKILL for all {users} users of the embedded Redis",
        "{lost} of {acknowledged_writes} writes lost, {processes_left_behind} processes left behind",
        "{naive_processes_left_behind} left behind",
    ),
)


def proven() -> str:
    """What the last full fault run measured, for the README."""
    lines = ["| pattern | fault | measured | the usual way |", "|---|---|---|---|"]
    for ident, name, *texts in HEADLINES:
        entry = cards.measured(ident, (cards.COMMITTED,)).get(name)
        if entry is None or entry["mode"] != "full":
            continue
        numbers = {key: number(value) for key, value in entry["figures"].items()}
        fault, measured, usual = (text.format(**numbers) for text in texts)
        proof = entry["proof"].split("::")[0]
        lines.append(f"| [{ident}]({proof}) | {fault} | {measured} | {usual} |")
    return "\n".join(lines)


def side_by_side(only: str = "") -> str:
    """The peers of the last published benchmark, all or those that are named."""
    results = json.loads(BENCH.read_text())
    lines = [
        "| | no-op jobs/s, one process | 20 kills: lost | stuck | duplicated | a killed job runs again after, limits "
        "lowered | at its defaults |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for ident, about in results["peers"].items():
        if only and ident not in only.split():
            continue
        cells = [
            _median(results, "throughput", ident, "noop"),
            _median(results, "kills", ident, "lost"),
            _median(results, "kills", ident, "stuck"),
            _median(results, "kills", ident, "duplicated"),
            _median(results, "recovery", ident, "lowered", " s"),
            _median(results, "recovery", ident, "default", " s"),
        ]
        title = f"**{about['title']}**" if ident.startswith("queuesmith") else about["title"]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(path: str) -> str:
    """`stall-budget/recovery/recovery_seconds` of the last full fault run."""
    pattern, name, key = path.split("/")
    entry = cards.measured(pattern, (cards.COMMITTED,)).get(name)
    if entry is None or key not in entry["figures"]:
        raise SystemExit(f"reference/figures has no {path}; a full fault run (make faults) writes it")
    return number(entry["figures"][key])


def _median(results: dict[str, Any], section: str, row: str, key: str, unit: str = "") -> str:
    found = bench.figure(results, section, row, key)
    if not isinstance(found, list):
        return f"{found}{unit}" if found and found.startswith(">") else found or "–"
    return f"{number(round(statistics.median(found), 1))}{unit}"


# Name of a region -> its text, from the page it is on and its arguments.
REGIONS: dict[str, Callable[[Path, str], str]] = {
    "pattern-map": lambda _page, _: pattern_map(),
    "proven": lambda _page, _: proven(),
    "side-by-side": lambda _page, args: side_by_side(args),
    "stack": lambda _page, args: stacks.table(args),
    "stacks": lambda _page, _: stacks.matrix(),
    "tokens": lambda _page, _: quotes.token_table(),
    "quote": lambda _page, args: quotes.quote(args),
    "card": lambda page, _: quotes.card(quotes.pattern_of(page)),
    "files": lambda page, _: quotes.files(quotes.pattern_of(page)),
    "figure": lambda _page, args: figure(args),
}
# On lines of its own, or within one: <!-- sync:figure health/listing/naive_work_ms -->775<!-- /sync --> ms
REGION = re.compile(
    r"<!-- sync:(?P<name>[\w-]+)(?: (?P<args>[^\n]+?))? -->(?P<line>\n?).*?<!-- /sync -->", re.DOTALL
)


def targets() -> list[Path]:
    """Pages before the README, whose table of tokens counts them."""
    pages = sorted((ROOT / "skills").glob("*/SKILL.md")) + sorted(
        (ROOT / "skills").glob("*/references/**/*.md")
    )
    mapped = [ROOT / "reference" / "README.md", ROOT / "reference" / "stacks" / "README.md"]
    return [*pages, *mapped, ROOT / "README.md"]


def rendered(path: Path) -> str:
    def fill(match: re.Match[str]) -> str:
        name, args = match["name"], match["args"] or ""
        if name not in REGIONS:
            raise SystemExit(f"{path}: unknown region {name!r}; known: {', '.join(REGIONS)}")
        head = f"sync:{name} {args}".rstrip()
        return f"<!-- {head} -->{match['line']}{REGIONS[name](path, args)}{match['line']}<!-- /sync -->"

    return REGION.sub(fill, path.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing, exit 1 when something is out of date"
    )
    check = parser.parse_args().check
    stale = []
    made = {
        scaffold.PATH: scaffold.rendered,
        dashboards.ALERTS: dashboards.alerts,
        dashboards.DASHBOARD: dashboards.dashboard,
    }
    for path in [*made, *targets()]:
        text = made[path]() if path in made else rendered(path)
        if not path.exists() or text != path.read_text():
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(text)
    for path in stale:
        print(f"{'out of date, run make sync' if check else 'updated'}: {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
