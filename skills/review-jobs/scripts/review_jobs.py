#!/usr/bin/env python3
"""Find in a codebase what loses, duplicates or strands background work. Python by syntax tree, TypeScript and Go by pattern.

    review_jobs.py [PATH…] [--json] [--fail-on critical|high|medium|low] [--include-tests] [--list-rules]

Exit code: 0 nothing at or above --fail-on (default: high), 1 findings, 2 wrong usage. Standard library only.
What a script can see is a start: every finding needs a look, and a clean report is no proof; the report says what
was read and what was not. Silence a finding that is wrong with a comment on its line or the one before:
`# queuesmith: ignore[rule] because …`.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

# Isolated mode (-I) leaves the folder of the script out.
sys.path.insert(0, str(Path(__file__).resolve().parent))
from job_review import go, python_brokers, python_bullmq, python_code, scripts
from job_review.project import Project, Read
from job_review.python_tree import Tree
from job_review.rules import RULES, SEVERITIES, Hit

__all__ = ["RULES", "SEVERITIES", "Finding", "Report", "main", "report", "review"]

# A command that prints what its caller asked for is not a log.
TERMINAL = re.compile(r"(^|/)(cmd|commands?|cli|scripts|bin|management)(/|\.\w+$)")


@dataclass(frozen=True)
class Finding:
    rule: str
    severity: str
    file: str
    line: int
    code: str
    why: str
    fix: str
    proof: str
    page: str


@dataclass(frozen=True)
class Report:
    findings: list[Finding]
    read: Read


def hits(path: Path, text: str, project: Project) -> Iterator[Hit]:
    if path.suffix == ".go":
        yield from go.findings(text, project.uses[path])
    elif path.suffix != ".py":
        yield from scripts.findings(path, text, project)
    else:
        try:
            tree = Tree(text, ast.parse(text), project.uses[path])
        except (SyntaxError, ValueError):
            return  # named in the report
        yield from python_code.findings(tree)
        yield from python_bullmq.findings(tree, project)
        yield from python_brokers.findings(tree, project)


def report(paths: Iterable[Path], include_tests: bool = False) -> Report:
    """All findings, the worst first, and what was read."""
    project = Project(paths, include_tests)
    findings: list[Finding] = []
    for path, text in [*project.python.items(), *project.scripts.items(), *project.go.items()]:
        lines = text.splitlines()
        for rule, line in sorted(set(hits(path, text, project)), key=lambda hit: hit[1]):
            shown = [lines[i - 1] for i in (line - 1, line) if 0 < i <= len(lines)]
            if any(re.search(rf"queuesmith: ignore\[[^\]]*\b{re.escape(rule)}\b", text) for text in shown):
                continue
            if rule == "secret-logged" and TERMINAL.search(path.as_posix()):
                continue
            about = RULES[rule]
            code = lines[line - 1].strip()[:120] if line <= len(lines) else ""
            findings.append(
                Finding(rule, about.severity, str(path), line, code, about.why, about.fix, about.proof, about.page)
            )
    findings.sort(key=lambda item: (SEVERITIES.index(item.severity), item.file, item.line))
    return Report(findings, project.read)


def review(paths: Iterable[Path], include_tests: bool = False) -> list[Finding]:
    return report(paths, include_tests).findings


def show(made: Report) -> None:
    for finding in made.findings:
        print(f"{finding.severity}: {finding.file}:{finding.line}: {finding.rule}\n    {finding.code}")
        print(f"    why    {finding.why}\n    fix    {finding.fix} ({finding.page})\n    prove  {finding.proof}\n")
    read = made.read
    print("read: " + (", ".join(f"{count} {name}" for name, count in read.files.items()) or "nothing"))
    if read.frameworks:
        print("recognised: " + ", ".join(f"{name} ({count})" for name, count in read.frameworks.items()))
    for name, version in read.versions.items():
        print(f"version: {name} {version}")
    for warning in read.warnings():
        print(f"note: {warning}")
    counts = ", ".join(f"{sum(f.severity == s for f in made.findings)} {s}" for s in SEVERITIES)
    print(f"{len(made.findings)} findings: {counts}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[Path()], help="files or folders (default: here)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--fail-on", choices=SEVERITIES, default="high", help="exit 1 from this severity on")
    parser.add_argument("--include-tests", action="store_true", help="look at test code too")
    parser.add_argument("--list-rules", action="store_true", help="print what is looked for")
    options = parser.parse_args(argv)
    if options.list_rules:
        for rule in RULES.values():
            print(f"{rule.severity:8}  {rule.id:24}  {rule.why}")
        return 0
    missing = [str(path) for path in options.paths if not path.exists()]
    if missing:
        print(f"no such file or folder: {', '.join(missing)}", file=sys.stderr)
        return 2
    made = report(options.paths, options.include_tests)
    if options.json:
        read = asdict(made.read) | {"warnings": made.read.warnings()}
        print(json.dumps({"findings": [asdict(finding) for finding in made.findings], "read": read}, indent=2))
    else:
        show(made)
    worst = SEVERITIES.index(options.fail_on)
    return 1 if any(SEVERITIES.index(finding.severity) <= worst for finding in made.findings) else 0


if __name__ == "__main__":
    sys.exit(main())
