"""The commands add, diff and adopt."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import catalogue, stacks, update
from .adopt import Adoption, Change, plan, write
from .catalogue import ROOT, Pattern
from .project import PROOFS, Project
from .record import Refused


def patterns_named(names: Sequence[str]) -> list[Pattern]:
    """Accepts `a,b` for `a b`."""
    return [catalogue.find(ident) for name in names for ident in name.split(",")]


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


# ---- add


def add(options: argparse.Namespace) -> int:
    named = [name for name in options.patterns if name in stacks.STACKS]
    wanted = [name for name in options.patterns if name not in stacks.STACKS]
    wanted += [pattern for name in named for pattern in stacks.STACKS[name].patterns]
    # The patterns first: they may be refused, and a stack's module without them would not run.
    code = _add_patterns(options, wanted) if wanted else 0
    for name in named if not code else ():
        stack = stacks.STACKS[name]
        for path in stacks.copy(stack, options.into or Path(), force=options.force, dry_run=options.dry_run):
            print(f"{'would write' if options.dry_run else 'wrote'} {path}")
        print(f"{name} needs: {stack.install}")
    return code


def _add_patterns(options: argparse.Namespace, names: Sequence[str]) -> int:
    wanted = [pattern.id for pattern in patterns_named(names)]
    project = _project(options)
    adoption = plan(project, wanted, with_proofs=not options.no_tests)
    return report(options, adoption, [] if options.dry_run else put(options, adoption))


def put(options: argparse.Namespace, adoption: Adoption) -> list[Change]:
    """Write it; edited files only if the user agrees, on the command line or when asked."""
    can_ask = sys.stdin.isatty() and not options.json
    if adoption.edited and not (options.force or options.keep or can_ask):
        for change in adoption.edited if not options.json else ():
            print(change.diff())
        names = ", ".join(change.path for change in adoption.edited)
        raise Refused(
            f"edited since it was copied, or not from here: {names}. Nothing was written. Leave these as they are and "
            "write the others with --keep, overwrite them with --force, or see the diffs with --dry-run. A second "
            "recipe goes into a folder below this one and uses its patterns/: --into "
            f"{adoption.project.path('nightly')}"
        )
    asks = can_ask and not options.keep
    return write(adoption, lambda place: options.force or (asks and _asked(place)))


def _project(options: argparse.Namespace) -> Project:
    try:
        return Project.find(options.into, package=options.package)
    except Refused as why:
        if options.into or not options.dry_run:
            raise
        if not options.json:
            print(f"{why}\nAs if it were --into .:\n")
        return Project.find(Path())


def _asked(change: Change) -> bool:
    if change.state != "edited":
        return False
    print(change.diff())
    return input(f"{change.path} was edited. Overwrite it? [y/N] ").strip().lower() in ("y", "yes")


def report(options: argparse.Namespace, adoption: Adoption, written: Sequence[Change]) -> int:
    """What was written, or would be, and what is left to do: packages, the import, the tests."""
    if options.json:
        print_json(as_json(adoption, written))
        return 0
    for change in adoption.changes:
        if change.state != "same":
            state = change.state if change in written or options.dry_run else "kept"
            print(f"  {state:<11} {change.path}")
            if options.dry_run and change.state != "new":
                print(change.diff())
    same = sum(change.state == "same" for change in adoption.changes)
    print("Nothing was written." if options.dry_run else f"{len(written)} files written, {same} were up to date.")
    _say_next(adoption)
    return 0


def as_json(adoption: Adoption, written: Sequence[Change]) -> dict[str, Any]:
    return {
        "patterns": adoption.patterns,
        "package": adoption.project.package,
        "imports": imports(adoption),
        "root": str(adoption.project.root),
        "files": {change.path: change.state for change in adoption.changes},
        "written": [change.path for change in written],
        "requirements": adoption.requirements,
        "test_requirements": adoption.test_requirements,
        "for_postgresql": adoption.on_request,
        "install": installs(adoption.project, adoption.requirements),
    }


def imports(adoption: Adoption) -> list[str]:
    """One line for each pattern: `from app.patterns.retry import AI, DEFAULT, decide`."""
    lines = []
    for ident in adoption.added:
        pattern = catalogue.find(ident)
        for module in (pattern.own[0], *(name for name in pattern.own if name in pattern.parts)):
            name, public = catalogue.public(module)
            lines.append(f"from {'.'.join(filter(None, (adoption.project.package, name)))} import {public}")
    return list(dict.fromkeys(lines))


def installs(project: Project, packages: Sequence[str], *, dev: bool = False) -> list[str]:
    """The commands that install these: pip's, and that of the project's own tool."""
    if not packages:
        return []
    words = " ".join(shlex.quote(package) for package in packages)
    lines = [f"pip install {words}"]
    settings = project.root / "pyproject.toml"
    text = settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else ""
    for tool, switch in (("uv", "--dev "), ("poetry", "--group dev ")):
        if (project.root / f"{tool}.lock").exists() or f"[tool.{tool}" in text:
            lines.insert(0, f"{tool} add {switch if dev else ''}{words}")
    return lines


def _say_next(adoption: Adoption) -> None:
    project = adoption.project
    if not adoption.requirements:
        print("\nThey need no package.")
    for title, packages, dev in (
        ("They need", adoption.requirements, False),
        ("For PostgreSQL also", adoption.on_request, False),
        ("Their tests need", adoption.test_requirements, True),
    ):
        lines = installs(project, packages, dev=dev)
        if lines:
            print(f"\n{title}:\n  " + "\n  or: ".join(lines))
    if any(change.path.startswith(PROOFS) for change in adoption.changes):
        where = "" if project.root == Path.cwd().resolve() else f"cd {shlex.quote(str(project.root))} && "
        print(f"\nRun them:\n  {where}python -m pytest {PROOFS}")
        print("\nWhat your service as a whole loses under faults:\n  queuesmith prove init")
    if adoption.added:
        print("\nImport (each module's docstring says what it promises and when not):")
        print("\n".join(f"  {line}" for line in imports(adoption)))


# ---- diff


def diff(options: argparse.Namespace) -> int:
    root = update.root_of(options.folder.resolve())
    if options.accept:
        done = update.accept(root, options.accept)
        if options.json:
            print_json({"accepted": done})
        else:
            print("\n".join(f"  accepted    {path}" for path in done))
        return 0
    return _apply(options, root) if options.apply else _show(options, root)


def _show(options: argparse.Namespace, root: Path) -> int:
    record, files = update.differences(root)
    news = [file for file in files if file.is_news]
    gone = record.gone(root)
    if options.json:
        print_json(
            {
                "copied": record.version,
                "now": catalogue.version(),
                "files": {file.path: file.state for file in files},
                "diffs": {file.path: file.diff for file in news},
                "renamed": record.renamed,
                "gone": sorted(gone),
            }
        )
        return 1 if news or gone else 0
    for file in news:
        print(file.diff, end="")
    for file in files:
        if file.state != "unchanged":
            print(f"  {file.state:<22} {file.path}")
    for old, new in record.renamed.items():
        print(f"{old}/patterns is {new}/patterns now.")
    for into, count in gone.items():
        print(
            f"None of the {count} modules recorded in {into}/patterns is there. If they are elsewhere, or removed for "
            "good: queuesmith adopt"
        )
    print(
        f"{len(news)} of {len(files)} files changed upstream (copied {record.version}, this is {catalogue.version()})."
    )
    if news:
        print("Take them with `queuesmith diff --apply`; edited files are never overwritten unasked.")
    return 1 if news or gone else 0


def _apply(options: argparse.Namespace, root: Path) -> int:
    can_ask = sys.stdin.isatty() and not options.json

    def overwrite(change: Change) -> bool:
        return change.state == "edited" and (options.force or (can_ask and _asked(change)))

    done = [(adoption, write(adoption, overwrite)) for adoption in update.plan_update(root)]
    kept = [c for adoption, written in done for c in adoption.edited if c not in written]
    if options.json:
        packages = {adoption.project.into: as_json(adoption, written) for adoption, written in done}
        print_json({"packages": packages, "kept": {change.path: change.diff() for change in kept}})
        return 1 if kept else 0
    for adoption, written in done:
        report(options, adoption, written)
    if kept:
        print("\nEdited here and changed upstream, so left as they are:")
        for change in kept:
            print(change.diff())
        names = " ".join(f"--accept {shlex.quote(change.path)}" for change in kept)
        print(f"Merge by hand, then: queuesmith diff {names}\nOr overwrite: queuesmith diff --apply --force")
    return 1 if kept else 0


# ---- adopt


def adopt(options: argparse.Namespace) -> int:
    root, copies = update.adopt(options.into, dry_run=options.dry_run)
    if options.json:
        print_json(
            {"root": str(root), "copies": {copy.path: {"module": copy.module, "state": copy.state} for copy in copies}}
        )
        return 0
    for copy in copies:
        print(f"  {copy.state:<10} {copy.path}  ({copy.module})")
    if copies:
        done = "would be recorded" if options.dry_run else "recorded"
        print(f"{len(copies)} copies {done} in {root}. What changed since: queuesmith diff")
    else:
        print(f"No unrecorded copy: looked for files like those in {ROOT / 'reference'}")
    return 0
