"""What the command-line modules share: options, one way to print, one way to fail."""

import json
import os
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import uvloop
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .patterns.core.errors import clean_text
from .patterns.observability import configure_logging
from .settings import Settings, load

T = TypeVar("T")

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", "-d", help="Where embedded Redis, SQLite and files live (default .studyhall)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]

out = Console()
err = Console(stderr=True)


def run(work: Coroutine[Any, Any, T]) -> T:
    return uvloop.run(work)


def settings_for(data_dir: Path | None, *, quiet: bool = True, **options: object) -> Settings:
    """Settings from the environment and the command line. Commands for people log warnings only."""
    os.umask(0o077)  # whatever a command writes (database, uploads, keys) is for our own user alone
    settings = load(overrides={"data_dir": data_dir, **options})
    configure_logging("warning" if quiet else settings.log_level, style="human" if quiet else settings.log_format)
    return settings


def fail(message: str, code: int = 1) -> typer.Exit:
    err.print(f"[red]error:[/] {_shown(message)}", highlight=False, soft_wrap=True)
    return typer.Exit(code)


def show_json(value: object) -> None:
    print(json.dumps(value, indent=2, default=str))


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> None:
    """A table, or a line that says what to do when there is nothing to show. Prose is folded into what room there is;
    ids and numbers are left whole, to be copied."""
    shown = [[_shown(value) for value in row] for row in rows]
    if not shown:
        out.print(f"[dim]{escape(empty)}[/]")
        return
    table = Table(title=title, title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0))
    for column, values in zip(columns, zip(*shown, strict=True), strict=True):
        whole = not any(" " in value.strip() for value in values if len(value) > 20)
        width = max(len(column), *map(len, values)) if whole else None
        table.add_column(column, overflow="fold", no_wrap=whole, min_width=width)
    for row in shown:
        table.add_row(*row)
    out.print(table, crop=False)


def show_fields(fields: Mapping[str, object]) -> None:
    width = max(map(len, fields))
    for name, value in fields.items():
        out.print(f"[bold]{name:<{width}}[/]  {_shown(value)}", highlight=False, soft_wrap=True)


def _shown(value: object) -> str:
    """For a terminal: no markup of ours, no control characters of somebody else's."""
    return escape(clean_text(str(value), limit=100_000))


def ago(then: float) -> str:
    """`3 min ago` for a time in seconds since 1970."""
    seconds = max(0, time.time() - then)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
