"""What the command-line modules share: options, one way to print, one way to fail."""

import json
import os
import shutil
import sys
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import TextWrapper
from typing import Annotated, Any, TypeVar

import typer

from .patterns.core.errors import clean_text
from .patterns.observability import configure_logging
from .settings import Settings, load

T = TypeVar("T")

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", "-d", help="Where embedded Redis, SQLite and files live (default .studyhall)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]

STYLES = {"bold": 1, "dim": 2, "italic": 3, "red": 31, "green": 32, "yellow": 33}


def run(work: Coroutine[Any, Any, T]) -> T:
    import uvloop

    return uvloop.run(work)


def say(text: str, lead: str = "", style: str = "bold", *, err: bool = False) -> None:
    """A line of text; `lead` stands before it, in this style if a terminal shows it."""
    stream = sys.stderr if err else sys.stdout
    if lead and stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        lead = f"\x1b[{STYLES[style]}m{lead}\x1b[0m"
    print(lead + text, file=stream, flush=True)


def settings_for(data_dir: Path | None, *, quiet: bool = True, **options: object) -> Settings:
    """Settings from the environment and the command line. Commands for people log warnings only."""
    os.umask(0o077)  # whatever a command writes (database, uploads, keys) is for our own user alone
    settings = load(overrides={"data_dir": data_dir, **options})
    configure_logging("warning" if quiet else settings.log_level, style="human" if quiet else settings.log_format)
    return settings


def ask(question: str) -> None:
    """Go on only after a yes. A script says --yes: it has nobody to ask."""
    if not sys.stdin.isatty():
        raise fail("there is no terminal to ask; to go on anyway: --yes", 2)
    typer.confirm(question, abort=True, err=True)


def fail(message: str, code: int = 1, *, answered: bool = False) -> typer.Exit:
    """With --json the error is JSON too, unless an answer was printed already."""
    if "--json" in sys.argv and not answered:
        show_json({"error": message})
        return typer.Exit(code)
    say(f" {clean_text(message, limit=100_000)}", "error:", "red", err=True)
    return typer.Exit(code)


def show_json(value: object) -> None:
    print(json.dumps(value, indent=2, default=str))


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> None:
    """A table, or a line that says what to do when there is nothing to show. Columns that fit are side by side, the
    rest below their row: no line is too long, and ids stay whole, to be copied."""
    cells = [[clean_text(str(value), limit=100_000) for value in row] for row in rows]
    if not cells:
        say("", empty, "dim")
        return
    sizes = [max(map(len, values)) for values in zip(columns, *cells, strict=True)]
    inline, room = list[int](), _width() + 2
    for number, size in enumerate(sizes):
        if size + 2 <= room:
            inline, room = [*inline, number], room - size - 2

    def line(values: Sequence[str]) -> str:
        return "  ".join(f"{values[number]:<{sizes[number]}}" for number in inline).rstrip()

    say("", title, "italic")
    say("", line(columns))
    for row in cells:
        say(line(row))
        for number, value in enumerate(row):
            if number not in inline and value:
                say(_folded(f"{columns[number]}: {value}".removeprefix(": "), "    ", "      "))


def show_fields(fields: Mapping[str, object]) -> None:
    width = max(map(len, fields))
    for name, value in fields.items():
        for number, line in enumerate(clean_text(str(value), limit=100_000).splitlines() or [""]):
            folded = _folded(line, (width + 2) * " ", (width + 2) * " ")[width + 2 :]
            say(f"  {folded}", f"{'' if number else name:<{width}}")


def _folded(text: str, first: str, rest: str) -> str:
    """Wrapped to the terminal's width, with no word broken."""
    fold = TextWrapper(_width(), first, rest, break_long_words=False, break_on_hyphens=False)
    return fold.fill(text) or first


def _width() -> int:
    return shutil.get_terminal_size((80, 24)).columns


def ago(then: float) -> str:
    """`3 min ago` for a time in seconds since 1970."""
    seconds = max(0, time.time() - then)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
