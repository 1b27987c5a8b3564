"""queuesmith list | new | add | diff | prove"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import adopt, catalogue, stacks
from .adopt import Change, Refused
from .catalogue import ROOT, UnknownPattern

__all__ = ["main"]

KINDS = tuple(catalogue.SKILLS)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.run is None:
        parser.print_help()
        return 2
    try:
        return int(options.run(options))
    except (Refused, UnknownPattern) as error:
        print(f"queuesmith: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # | head
        return 0
    except OSError as error:
        print(f"queuesmith: {error.filename or ''}: {error.strerror}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, EOFError):
        print("\nqueuesmith: stopped, nothing was written", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="queuesmith",
        description="Proven background-job and event patterns, into new and existing projects.",
        epilog="queuesmith new my-service --defaults; queuesmith list retry; queuesmith add retry --into src/app",
    )
    parser.add_argument("--version", action="version", version=f"queuesmith {catalogue.version()}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    listing = commands.add_parser("list", help="the patterns; what one promises and needs: list PATTERN")
    listing.add_argument("patterns", nargs="*", metavar="PATTERN", help="tell all about these")
    listing.add_argument("--skill", choices=KINDS, help="only these")
    listing.set_defaults(run=_list)

    add = commands.add_parser(
        "add", help="copy patterns, with what they need and their proofs, into a project"
    )
    add.add_argument("patterns", nargs="+", metavar="PATTERN", help="as `queuesmith list` names them")
    add.add_argument("--into", type=Path, required=True, metavar="FOLDER", help="the package, like src/app")
    add.add_argument("--no-tests", action="store_true", help="leave the proofs out")
    add.add_argument("--force", action="store_true", help="overwrite files that were edited")
    add.add_argument("--dry-run", action="store_true", help="show what would happen, with the diffs")
    add.set_defaults(run=_add)

    diff = commands.add_parser("diff", help="what changed upstream, and here, since the patterns were copied")
    diff.add_argument("folder", nargs="?", type=Path, default=Path(), help="the project (default: here)")
    diff.add_argument("--apply", action="store_true", help="take what changed upstream")
    diff.add_argument("--force", action="store_true", help="with --apply: also over files that were edited")
    diff.set_defaults(run=_diff, dry_run=False)

    new = commands.add_parser("new", help="a new service from the templates (needs copier)")
    new.add_argument("folder", type=Path, help="a new or empty one; the project is named after it")
    new.add_argument("--kind", choices=KINDS, help="default: asked, or background-jobs")
    new.add_argument("--job", help="the first job, like send-report")
    new.add_argument("--event", help="the first event, like order.placed (event-driven)")
    new.add_argument("--fields", help='what it carries, like "customer: str, pages: int"')
    new.add_argument("--package", help="name of the Python package")
    new.add_argument("--python", choices=("3.11", "3.12", "3.13"), help="lowest version it has to run on")
    new.add_argument("--broker", choices=("redis", "rabbitmq", "nats", "kafka"), help="event-driven only")
    new.add_argument("--database", choices=("sqlite", "postgres"))
    new.add_argument("--pattern", action="append", default=[], help="one more pattern; may be repeated")
    new.add_argument("--ci", choices=("github", "none"))
    new.add_argument("--no-container", action="store_true", help="no Dockerfile and compose.yaml")
    new.add_argument("--defaults", action="store_true", help="ask nothing")
    new.set_defaults(run=_new)

    prove = commands.add_parser(
        "prove", help="run a service under faults and see what it loses; `prove init` writes the file"
    )
    prove.add_argument("file", nargs="?", default="prove.toml", help="prove.toml, its folder, or `init`")
    prove.add_argument("folder", nargs="?", help="with init: the repository to look at (default: here)")
    prove.add_argument(
        "--quick", action="store_true", help="the faults that break most services, within a minute"
    )
    prove.add_argument("--soak", metavar="30m", help="for so long: plain work, then faults in random order")
    prove.add_argument("--seed", type=int, help="repeat a run, as far as signals allow")
    prove.add_argument(
        "--only", action="append", default=[], metavar="FAULT", help="these faults; may be repeated"
    )
    prove.add_argument("--list", action="store_true", help="the faults and the invariants")
    prove.add_argument("--junit", type=Path, metavar="FILE")
    prove.add_argument("--html", type=Path, metavar="FILE")
    prove.add_argument("--keep", action="store_true", help="keep the evidence also when all holds")
    prove.add_argument("--strict", action="store_true", help="exit code 1 also when a fault hit nothing")
    prove.add_argument("--force", action="store_true", help="with init: write the file again")
    prove.set_defaults(run=_prove)
    for command in (listing, add, diff, new, prove):
        command.add_argument("--json", action="store_true", help="for programs")
    return parser


def _list(options: argparse.Namespace) -> int:
    named = _found(options.patterns)
    rows = named or [one for one in catalogue.patterns().values() if options.skill in (None, one.skill)]
    if options.json:
        _print_json(
            [
                {
                    "id": one.id,
                    "skill": one.skill,
                    "title": one.title,
                    "promise": one.summary,
                    "modules": one.modules,
                    "requirements": catalogue.packages(one.modules),
                }
                for one in rows
            ]
        )
        return 0
    for one in named:
        print(f"{one.id}: {one.title}\n  {one.summary}\n  modules   {' '.join(one.modules)}")
        print(f"  packages  {', '.join(catalogue.packages(one.modules)) or 'none'}")
        for part in one.parts:
            name = f"{one.id}.{Path(part).stem}"
            print(f"  part      {name} ({', '.join(catalogue.packages([part])) or 'no package'})")
        print("\n".join(f"  proof     {path}" for path in one.proof_files))
    if named:
        return 0
    width = max((len(one.id) for one in rows), default=0)
    for skill in KINDS:
        mine = sorted((one for one in rows if one.skill == skill), key=lambda one: one.id)
        if mine:
            print(f"\n{skill}")
        for one in mine:
            print(f"  {one.id:<{width}}  {one.title}")
    print("\nAdd one to a project:  queuesmith add PATTERN --into src/app")
    return 0


def _found(names: Sequence[str]) -> list[catalogue.Pattern]:
    """Also `a,b` for `a b`."""
    return [catalogue.find(ident) for name in names for ident in name.split(",")]


def _add(options: argparse.Namespace) -> int:
    named = [name for name in options.patterns if name in stacks.STACKS]
    options.patterns = [name for name in options.patterns if name not in stacks.STACKS]
    options.patterns += [one for name in named for one in stacks.STACKS[name].patterns]
    # The patterns first: they may be refused, and a stack's module without them would not run.
    code = _add_patterns(options) if options.patterns else 0
    for name in named if not code else ():
        stack = stacks.STACKS[name]
        for path in stacks.copy(stack, options.into, force=options.force, dry_run=options.dry_run):
            print(f"{'would write' if options.dry_run else 'wrote'} {path}")
        print(f"{name} needs: {stack.install}")
    return code


def _add_patterns(options: argparse.Namespace) -> int:
    project = adopt.Project.find(options.into)
    wanted = [one.id for one in _found(options.patterns)]
    adoption = adopt.plan(project, wanted, with_proofs=not options.no_tests)
    if options.dry_run:
        return _report(options, adoption, [])
    _refuse_edited(options, adoption)
    written = adopt.write(adoption, lambda change: bool(options.force) or _asked(change))
    return _report(options, adoption, written)


def _refuse_edited(options: argparse.Namespace, adoption: adopt.Adoption) -> None:
    """Unless somebody can be asked."""
    if adoption.edited and not options.force and (options.json or not sys.stdin.isatty()):
        if not options.json:
            for change in adoption.edited:
                print(change.diff())
        names = ", ".join(change.path for change in adoption.edited)
        raise Refused(
            f"edited since it was copied, or not from here: {names}. Nothing was written. "
            "Merge what you need by hand, or let --force overwrite."
        )


def _asked(change: Change) -> bool:
    print(change.diff())
    return input(f"{change.path} was edited. Overwrite it? [y/N] ").strip().lower() in ("y", "yes")


def _report(options: argparse.Namespace, adoption: adopt.Adoption, written: Sequence[Change]) -> int:
    project = adoption.project
    if options.json:
        _print_json(
            {
                "patterns": adoption.patterns,
                "package": project.package,
                "root": str(project.root),
                "files": {change.path: change.state for change in adoption.changes},
                "written": [change.path for change in written],
                "requirements": adoption.requirements,
                "proofs_left_upstream": adoption.left,
            }
        )
        return 0
    for change in adoption.changes:
        if change.state != "same":
            done = change in written or options.dry_run
            print(f"  {change.state if done else 'kept':<8} {change.path}")
            if options.dry_run and change.state in ("updated", "edited"):
                print(change.diff())
    same = sum(change.state == "same" for change in adoption.changes)
    print(
        f"{len(written)} files written, {same} were up to date."
        if not options.dry_run
        else "Nothing was written."
    )
    if adoption.requirements:
        print("\nAdd these to your dependencies:")
    for requirement in adoption.requirements:
        print(f'  "{requirement}"')
    if any(change.path.startswith(adopt.PROOFS) for change in adoption.changes):
        print(
            f"\nRun the proofs (pytest, pytest-asyncio, hypothesis):\n  pytest -o asyncio_mode=auto {adopt.PROOFS}"
        )
    for proof, why in adoption.left.items():
        print(f"  stays upstream: {proof} ({why})")
    print(
        f"\nImport them from {project.package}; each module's docstring says what it promises and when not."
    )
    return 0


def _apply(options: argparse.Namespace) -> int:
    adoptions = adopt.plan_update(adopt.root_of(options.folder.resolve()))
    for adoption in adoptions:
        _refuse_edited(options, adoption)
    for adoption in adoptions:
        written = adopt.write(adoption, lambda change: bool(options.force) or _asked(change))
        _report(options, adoption, written)
    return 0


def _diff(options: argparse.Namespace) -> int:
    if options.apply:
        return _apply(options)
    copied, found = adopt.differences(adopt.root_of(options.folder.resolve()))
    news = [one for one in found if "upstream" in one.state or "both" in one.state]
    if options.json:
        _print_json(
            {
                "copied": copied,
                "now": catalogue.version(),
                "files": {one.path: one.state for one in found},
                "diffs": {one.path: one.diff for one in news},
            }
        )
        return 1 if news else 0
    for one in news:
        print(one.diff, end="")
    for one in found:
        if one.state != "unchanged":
            print(f"  {one.state:<22} {one.path}")
    print(
        f"{len(news)} of {len(found)} files changed upstream (copied {copied}, this is {catalogue.version()})."
    )
    if news:
        print("Take them with `queuesmith diff --apply`; edited files are never overwritten unasked.")
    return 1 if news else 0


def _new(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    if folder.exists() and not folder.is_dir():
        raise Refused(f"{folder} is a file. Name a new folder")
    if folder.is_dir() and any(one.name != ".git" for one in folder.iterdir()):
        raise Refused(f"{folder} is not empty. Name a new folder; for an existing project: queuesmith add")
    answers = _answers(options)
    command = [*_copier(), "copy", "--quiet"]
    for name, value in answers.items():
        if value is not None:
            command += ["--data", f"{name}={json.dumps(value) if isinstance(value, list | bool) else value}"]
    if options.defaults or options.json or not sys.stdin.isatty():
        command.append("--defaults")
    command += ["--vcs-ref", _revision(), str(ROOT), str(folder.absolute())]
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    done = None
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE if options.json else None,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        if done is None or done.returncode:
            _undo(folder, missing)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["copier gave no reason"]
        why = re.sub(r"^\w+: (Validation error for question '(\w+)': )?", r"\2: ", said[-1])
        why = re.sub(r"^\[Errno \d+\] ", "", why.removeprefix(": "))
        raise Refused(f"{why}\nNothing was made.")
    if options.json:
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        files = [path for path in files if not path.startswith(".git/")]
        _print_json({"folder": str(folder), "files": files, "next": ["make run", "make test"]})
    else:
        there = shlex.quote(str(folder))
        print(
            f"\n{folder} is ready:\n\n  cd {there}\n  make run     # http://127.0.0.1:8000/docs\n  make test"
        )
    return 0


def _prove(options: argparse.Namespace) -> int:
    try:
        from .prove import command
    except ModuleNotFoundError as error:
        raise Refused(f"prove needs the package {error.name}. Do: pip install {error.name}") from None
    return command.run(options)


def _answers(options: argparse.Namespace) -> dict[str, Any]:
    """What was said on the command line, for copier; None: it asks, or takes the default."""
    events = [name for name in ("broker", "event") if getattr(options, name)]
    kind = options.kind or ("event-driven" if events else None)
    if events and kind != "event-driven":
        raise Refused(f"--{' and --'.join(events)}: for event-driven services, this one is {kind}")
    if options.job and kind == "event-driven":
        raise Refused(
            "an event-driven service starts with an event: use --event thing.happened instead of --job"
        )
    return {
        "project_name": _plain(options.folder.resolve().name),
        "kind": kind,
        "job": options.job,
        "event": options.event,
        "fields": options.fields,
        "package": options.package,
        "python_version": options.python,
        "broker": options.broker,
        "database": options.database,
        "patterns": [one.id for one in _found(options.pattern)] or None,
        "ci": options.ci,
        "container": False if options.no_container else None,
    }


def _plain(name: str) -> str | None:
    """`Übung 2` -> `ubung-2`: what the template, which knows no accents, would make `bung-2`. None: it can do it."""
    if name.isascii():
        return None
    letters = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub(r"^[^a-z]+", "", re.sub(r"[^a-z0-9]+", "-", letters))[:40].rstrip("-") or None


def _revision() -> str:
    """The commit of this checkout, not its latest tag; a folder without git is taken as it is, whatever we say.

    By its hash: for the word HEAD copier includes uncommitted changes as a commit that it then throws away, and a
    project that records such a commit can never be updated.
    """
    if not (ROOT / ".git").exists() or not (git := shutil.which("git")):
        return "HEAD"

    def ask(*args: str) -> str:
        return subprocess.run(
            [git, "-C", str(ROOT), *args], capture_output=True, text=True, check=False
        ).stdout.strip()

    commit = ask("rev-parse", "HEAD")
    if commit and ask("status", "--porcelain"):
        print(
            f"queuesmith: uncommitted changes in {ROOT} are left out: the project comes from {commit[:9]}",
            file=sys.stderr,
        )
    return commit or "HEAD"


def _undo(folder: Path, missing: Sequence[Path]) -> None:
    """Copier removes a folder that it made. One that was there and empty is empty again, and its parents go."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in missing:
        if path.is_dir():
            path.rmdir()


def _copier() -> list[str]:
    how = "Do one of: pip install copier; pipx install copier; install uv (uvx runs it)"
    beside = Path(sys.executable).with_name("copier")
    if beside.exists():
        return [str(beside)]
    if found := shutil.which("copier"):
        return [found]
    if uvx := shutil.which("uvx"):
        tried = subprocess.run([uvx, "copier", "--version"], capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return [uvx, "copier"]
        why = "\n  ".join(tried.stderr.strip().splitlines()[-4:])
        raise Refused(f"the templates need copier, and uvx could not get it. {how}\n  {why}")
    raise Refused(f"the templates need copier. {how}")


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


if __name__ == "__main__":
    sys.exit(main())
