"""`make sync`: regenerate what is derived from the catalogue, the modules and the figures. `--check` fails on drift.

Generated text stands between `<!-- sync:NAME -->` (or `<!-- sync:NAME ARGUMENTS -->`, see `quotes`) and
`<!-- /sync -->` in hand-written files. The modules that a skill brings along are copied as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import quotes
import scaffold

ROOT = Path(__file__).resolve().parents[1]
CATALOGUE = ROOT / "reference" / "catalogue.toml"
FIGURES = ROOT / "reference" / "figures"
PATTERNS = "studyhall/patterns"
SKILLS = {
    "background-jobs": "Background jobs",
    "event-driven": "Event-driven",
    "async-flow": "Async flow",
}


def catalogue() -> list[dict[str, Any]]:
    patterns: list[dict[str, Any]] = tomllib.loads(CATALOGUE.read_text())["pattern"]
    return patterns


def figures(pattern: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """proof name -> what it measured; empty when no full run was recorded."""
    path = FIGURES / pattern["figures"] if "figures" in pattern else None
    if path is None or not path.exists():
        return {}
    measured: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return measured


def pattern_map() -> str:
    """The table pattern -> module -> proof of reference/README.md."""
    lines: list[str] = []
    for skill, title in SKILLS.items():
        rows = [pattern for pattern in catalogue() if pattern["skill"] == skill]
        if not rows:
            continue
        lines += [f"### {title}", "", "| pattern | promise | module | proofs |", "|---|---|---|---|"]
        for pattern in sorted(rows, key=lambda row: str(row["id"])):
            modules = [pattern["module"], *pattern.get("also", [])]
            links = ", ".join(f"[`{name}`]({PATTERNS}/{name})" for name in modules)
            files = sorted({proof.split("::")[0] for proof in pattern["proofs"]})
            proofs = ", ".join(f"[{Path(name).stem.removeprefix('test_')}](../{name})" for name in files)
            lines.append(
                f"| **{pattern['id']}** {pattern['title']} | {pattern['summary']} | {links} | {proofs} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip()


# The proofs the README shows; every pattern's page shows its own in full.
HEADLINES = (
    ("stall-budget", "random-kills"),
    ("stall-budget", "redis-killed"),
    ("stall-budget", "recovery"),
    ("shutdown", "sigterm"),
    ("bullmq-worker", "idle"),
    ("bullmq-worker", "close"),
    ("idempotency", "kills-sqlite"),
    ("dead-letter", "kills-sqlite"),
    ("checkpoint", "kills"),
    ("flow", "killed-workers"),
    ("schedule", "leader-kills"),
    ("outbox", "kills-postgresql"),
    ("saga", "kills-postgresql"),
    ("event-bus", "consumer kills, redis"),
    ("engine", "all-users-killed"),
)


def proven() -> str:
    """What the last full fault run measured, for the README."""
    lines = ["| promise | measured | date |", "|---|---|---|"]
    patterns = {pattern["id"]: pattern for pattern in catalogue()}
    for ident, name in HEADLINES:
        entry = figures(patterns[ident]).get(name)
        if entry is None or entry["mode"] != "full":
            continue
        shown = {key: value for key, value in entry["figures"].items() if not isinstance(value, dict | list)}
        numbers = ", ".join(f"{key.replace('_', ' ')} {_number(value)}" for key, value in shown.items())
        lines.append(f"| **{ident}**: {name.replace('-', ' ')} | {numbers} | {entry['date']} |")
    return "\n".join(lines)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


REGIONS = {
    "pattern-map": lambda _: pattern_map(),
    "proven": lambda _: proven(),
    "tokens": quotes.token_table,
    "quote": quotes.quote,
    "card": quotes.card,
    "files": quotes.files,
}
REGION = re.compile(r"<!-- sync:(?P<name>[\w-]+)(?: (?P<args>[^\n]+?))? -->\n.*?<!-- /sync -->", re.DOTALL)


def targets() -> list[Path]:
    """Pages before the README, whose table of tokens counts them."""
    pages = sorted((ROOT / "skills").glob("*/SKILL.md")) + sorted((ROOT / "skills").glob("*/references/*.md"))
    return [*pages, ROOT / "reference" / "README.md", ROOT / "README.md"]


def rendered(path: Path) -> str:
    def fill(match: re.Match[str]) -> str:
        name, args = match["name"], match["args"] or ""
        if name not in REGIONS:
            raise SystemExit(f"{path}: unknown region {name!r}; known: {', '.join(REGIONS)}")
        head = f"sync:{name} {args}".rstrip()
        return f"<!-- {head} -->\n{REGIONS[name](args)}\n<!-- /sync -->"

    return REGION.sub(fill, path.read_text())


def copies() -> dict[Path, bytes | None]:
    """Every file in skills/*/modules, and what the templates know: its content, None when it has to go."""
    wanted: dict[Path, bytes | None] = {scaffold.PATH: scaffold.rendered().encode()}
    for skill in SKILLS:
        folder = ROOT / "skills" / skill / "modules"
        wanted |= dict.fromkeys(folder.glob("*.*"))
        wanted |= {folder / name: content for name, content in quotes.modules(skill).items()}
    return wanted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing, exit 1 when something is out of date"
    )
    check = parser.parse_args().check
    stale = []
    for path, content in copies().items():
        if (path.read_bytes() if path.exists() else None) != content:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink() if content is None else path.write_bytes(content)
    for path in targets():
        text = rendered(path)
        if text != path.read_text():
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(text)
    for path in stale:
        print(f"{'out of date, run make sync' if check else 'updated'}: {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
