"""`studyhall worker`: take jobs and run them."""

from typing import Annotated

import typer

from .patterns.parent_death import die_with_parent
from .supervisor import supervise
from .terminal import DataDir, run, settings_for
from .worker import process_command, work


def worker_command(
    data_dir: DataDir = None,
    processes: Annotated[int | None, typer.Option(help="Worker processes (default: one per core).")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Jobs at once per process and queue (default 20).")] = None,
    queue: Annotated[list[str] | None, typer.Option(help="Only these queues; may be repeated.")] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Take jobs and run them until SIGTERM; then running jobs finish or are released."""
    settings = settings_for(data_dir, quiet=False, processes=processes, concurrency=concurrency)
    if parent is not None:
        die_with_parent(parent)
    if settings.processes == 1:
        run(work(settings, queue or ()))
        return
    args = ["--data-dir", str(settings.data_dir), "--concurrency", str(settings.concurrency)]
    args += [part for name in queue or () for part in ("--queue", name)]
    raise typer.Exit(run(supervise(process_command(args), settings.processes, settings.grace_seconds)))
