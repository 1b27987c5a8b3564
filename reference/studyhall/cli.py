"""The `studyhall` command."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from .patterns.engine import EngineError
from .patterns.errors import JobError
from .patterns.observability import configure_logging
from .patterns.parent_death import die_with_parent
from .settings import Settings, SettingsError, load

T = TypeVar("T")
UNUSABLE = 2  # exit code: a restart will not help

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="StudyHall: a study assistant whose background work survives crashes, duplicates and outages.",
)
dlq = typer.Typer(no_args_is_help=True, help="Dead letters: jobs that failed for good.")
app.add_typer(dlq, name="dlq")

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", "-d", help="Where embedded Redis, SQLite and files live.", show_default=".studyhall"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
out = Console()
err = Console(stderr=True)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop; errors people can act on become one line and an exit code."""
    return uvloop.run(work)


def main() -> None:
    try:
        app(standalone_mode=True)
    except (SettingsError, EngineError) as error:
        err.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(UNUSABLE)
    except JobError as error:
        err.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)


def settings_for(data_dir: Path | None, **options: object) -> Settings:
    settings = load(data_dir=data_dir, **options)
    configure_logging(settings.log_level, json=settings.log_format == "json")
    return settings


@app.command()
def worker(
    data_dir: DataDir = None,
    processes: Annotated[
        int | None, typer.Option(help="Worker processes.", show_default="one per core")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Jobs at once per process and queue.", show_default="20")
    ] = None,
    queue: Annotated[list[str] | None, typer.Option(help="Only these queues (may be repeated).")] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Take jobs from the queues and run them until SIGTERM; running jobs finish or are given back."""
    from .worker import supervise, work, worker_command

    settings = settings_for(data_dir, processes=processes, concurrency=concurrency)
    if parent is not None:
        die_with_parent(parent)
    if settings.processes == 1:
        run(work(settings, queue or ()))
        return
    args = ["--data-dir", str(settings.data_dir), "--concurrency", str(settings.concurrency)]
    for name in queue or ():
        args += ["--queue", name]
    sys.exit(run(supervise(worker_command(args), settings.processes, settings.grace_seconds)))
