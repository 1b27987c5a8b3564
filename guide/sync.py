"""`make sync`: regenerate what is derived from the pages, the modules and the figures. `--check` fails on drift.

Quotes are fenced blocks that name their source; a pattern's page has two paragraphs from its entry and its figures
(see `quotes`). Tables made from several files are between `<!-- sync:NAME ARGUMENTS -->` and `<!-- /sync -->`.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from guide import cards, charts, dashboards, quotes, scaffold, scanned, stacks, which
from queuesmith.catalogue import ROOT, patterns

BENCH = ROOT / "bench" / "results.json"
THREE = "of three rounds"  # no figure of one round is in the README


# The experiments that the README shows, in the sentences of their cards. Every pattern's page shows all of its own.
HEADLINES = (
    ("stall-budget", "random-kills"),
    ("stall-budget", "redis-killed"),
    ("shutdown", "sigterm"),
    ("idempotency", "kills"),
    ("dead-letter", "kills"),
    ("schedule", "leader-kills"),
    ("outbox", "kills"),
    ("saga", "kills"),
)


def proven() -> str:
    """What the last full fault run measured, for the README."""
    lines = ["| pattern | measured |", "|---|---|"]
    for ident, wanted in HEADLINES:
        entries = {
            name: entry
            for name, entry in cards.measured(ident, (cards.COMMITTED,)).items()
            if cards.experiment(name)[0] == wanted and entry["mode"] == "full"
        }
        for text in cards.sentences(ident, entries):
            proof = next(iter(entries.values()))["proof"].split("::")[0]
            lines.append(f"| [{ident}]({proof}) | {text} |")
    return "\n".join(lines)


def steps() -> str:
    """The way of a job through StudyHall's worker, drawn from the arguments of its `Pipeline`."""
    [given] = [
        node.args
        for node in ast.walk(ast.parse((ROOT / "reference/studyhall/worker.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Pipeline"
    ]
    calls = [node.value if isinstance(node, ast.Starred) else node for node in given]
    names = [ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)]
    return "```mermaid\nflowchart LR\n    job --> " + " --> ".join([*names, "handler"]) + "\n```"


# Name of a region -> its text, from its arguments.
REGIONS: dict[str, Callable[[str], str]] = {
    "proven": lambda _: proven(),
    "side-by-side": lambda args: charts.table(
        json.loads(BENCH.read_text()), args.removeprefix(THREE), 3 if args.startswith(THREE) else 1
    ),
    "steps": lambda _: steps(),
    "stack": stacks.table,
    "stacks": lambda _: stacks.matrix(),
    "which": lambda args: which.brokers() if args == "brokers" else which.queues(),
    "scanned": lambda _: scanned.table(),
}
REGION = re.compile(r"<!-- sync:(?P<name>[\w-]+)(?: (?P<args>[^\n]+?))? -->\n.*?<!-- /sync -->", re.DOTALL)


def targets() -> list[Path]:
    """Every page with regions or quotes."""
    pages = sorted((ROOT / "skills").glob("*/SKILL.md")) + sorted((ROOT / "skills").glob("*/references/**/*.md"))
    mapped = [ROOT / "reference" / "README.md", ROOT / "reference" / "stacks" / "README.md"]
    return [*pages, *mapped, ROOT / "README.md"]


def rendered(path: Path) -> str:
    def fill(match: re.Match[str]) -> str:
        name, args = match["name"], match["args"] or ""
        if name not in REGIONS:
            raise SystemExit(f"{path}: unknown region {name!r}; known: {', '.join(REGIONS)}")
        head = f"sync:{name} {args}".rstrip()
        return f"<!-- {head} -->\n{REGIONS[name](args)}\n<!-- /sync -->"

    text = REGION.sub(fill, path.read_text())
    text = quotes.QUOTE.sub(lambda match: quotes.quote(match["args"]), text)
    if path.stem in patterns() and patterns()[path.stem].page == path:
        pattern = patterns()[path.stem]
        text = quotes.FILES.sub(lambda _: quotes.files(pattern), text)
        text = quotes.CARD.sub(lambda _: quotes.card(pattern), text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 when something is out of date")
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
