"""The `studyhall` command."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from . import (
    cli_api,
    cli_cancel,
    cli_chat,
    cli_dlq,
    cli_events,
    cli_health,
    cli_limits,
    cli_orders,
    cli_relay,
    cli_saga,
    cli_schedule,
    db,
)
from .app import App, open_app
from .housekeeping import clean_up
from .patterns.core.errors import JobError
from .patterns.core.store import read
from .patterns.degraded.pending import pending
from .patterns.engine import EngineError
from .patterns.parent_death import die_with_parent
from .settings import SettingsError
from .submissions import StageState, states, submit
from .supervisor import UNUSABLE, supervise
from .terminal import (
    AsJson,
    DataDir,
    ago,
    err,
    fail,
    out,
    run,
    settings_for,
    show_fields,
    show_json,
    show_table,
)
from .worker import work, worker_command

__all__ = ["main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="StudyHall: a study assistant whose background work survives crashes, duplicates and outages.",
)
app.add_typer(cli_chat.app, name="chat")
app.add_typer(cli_dlq.app, name="dlq")
app.add_typer(cli_schedule.app, name="schedule")
app.command()(cli_cancel.cancel)
app.command()(cli_cancel.remind)
app.command()(cli_health.health)
app.add_typer(cli_orders.order, name="order")
app.add_typer(cli_orders.outbox, name="outbox")
app.add_typer(cli_events.app, name="events")
app.add_typer(cli_saga.app, name="saga")
app.command("relay")(cli_relay.relay_command)
app.command("api")(cli_api.api_command)
app.command("limits")(cli_limits.limits_command)


def main() -> None:
    try:
        app()
    except (SettingsError, EngineError) as error:
        fail(str(error))
        sys.exit(UNUSABLE)
    except JobError as error:
        fail(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
def worker(
    data_dir: DataDir = None,
    processes: Annotated[int | None, typer.Option(help="Worker processes (default: one per core).")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Jobs at once per process and queue (default 20).")
    ] = None,
    queue: Annotated[list[str] | None, typer.Option(help="Only these queues; may be repeated.")] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Take jobs and run them until SIGTERM; then running jobs finish or are given back."""
    settings = settings_for(data_dir, quiet=False, processes=processes, concurrency=concurrency)
    if parent is not None:
        die_with_parent(parent)
    if settings.processes == 1:
        run(work(settings, queue or ()))
        return
    args = ["--data-dir", str(settings.data_dir), "--concurrency", str(settings.concurrency)]
    args += [part for name in queue or () for part in ("--queue", name)]
    raise typer.Exit(run(supervise(worker_command(args), settings.processes, settings.grace_seconds)))


@app.command("submit")
def submit_(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, readable=True)],
    owner: Annotated[str, typer.Option(help="Whose document it is.")] = "you",
    wait: Annotated[bool, typer.Option("--wait", help="Wait until every document is through.")] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Upload documents (PDF, DOCX, Markdown, text) and start their flow of jobs."""

    stopped: dict[str, str] = {}

    async def go() -> dict[str, str]:
        async with open_app(settings_for(data_dir), edge=True) as studyhall:
            made = {str(path): await submit(studyhall, path, owner) for path in files}
            if kept := (await pending(studyhall.store)).waiting:
                err.print(f"kept in the database until the queue takes them: {kept}", highlight=False)
                return made
            hint_at = time.monotonic() + 2
            for path, document_id in made.items() if wait else ():
                while not _ended(stages := await states(studyhall, document_id)):
                    await asyncio.sleep(0.2)
                    if time.monotonic() > hint_at:
                        hint_at = math.inf
                        if not await _somebody_works(studyhall):
                            err.print("no worker is running; start one with: studyhall worker")
                if any(stage.state != "completed" for stage in stages):
                    async with read(studyhall.store) as connection:
                        document = await db.document(connection, document_id, owner)
                    stopped[path] = (
                        document and document.error
                    ) or "stopped; see studyhall status and dlq list"
            return made

    made = run(go())
    if as_json:
        show_json(made)
    else:
        for path, document_id in made.items():
            out.print(f"{document_id}  {path}", highlight=False)
    for path, why in stopped.items():
        fail(f"{path}: {why}")
    if stopped:
        raise typer.Exit(1)


async def _somebody_works(studyhall: App) -> bool:
    """Is a worker connected? They name their connections after their queues."""
    names = tuple(f"{studyhall.producer.prefix}:{queue}" for queue in studyhall.jobs.queues)
    connected: Any = await studyhall.producer.redis.client_list()
    return any(one["name"].startswith(names) for one in connected)


def _ended(stages: list[StageState]) -> bool:
    """All through, or one stopped: what waits for that one goes on only when it is replayed."""
    found = {stage.state for stage in stages}
    return found == {"completed"} or bool(found & {"failed", "cancelled", "gone"})


def _so_far(stages: dict[str, dict[str, Any]]) -> str:
    """`2 of 4, graph-generation active 40 %`"""
    done = sum(stage["state"] == "completed" for stage in stages.values())
    for name, stage in stages.items():
        if stage["state"] != "completed":
            return f"{done} of {len(stages)}, {name} {stage['state']} {stage['percent']:.0f} %"
    return f"{done} of {len(stages)}"


@app.command()
def status(
    owner: Annotated[str, typer.Option(help="Whose documents.")] = "you",
    limit: Annotated[int, typer.Option(min=1, max=500)] = 20,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Documents and how far they are."""

    async def go() -> list[dict[str, Any]]:
        async with open_app(settings_for(data_dir)) as studyhall:
            async with read(studyhall.store) as connection:
                documents = await db.documents_of(connection, owner, limit=limit)
            return [
                {
                    "id": document.id,
                    "name": document.name,
                    "status": document.status,
                    "error": document.error,
                    "created_at": document.created_at,
                    "stages": {
                        s.name: {"state": s.state, "percent": s.percent}
                        for s in await states(studyhall, document.id)
                    },
                }
                for document in documents
            ]

    rows = run(go())
    if as_json:
        show_json(rows)
        return
    show_table(
        f"Documents of {owner}",
        ["id", "name", "status", "stages", "uploaded"],
        [
            [
                row["id"],
                row["name"],
                row["error"] or row["status"],
                _so_far(row["stages"]),
                ago(row["created_at"]),
            ]
            for row in rows
        ],
        "Nothing uploaded yet. Try: studyhall submit reference/samples/*.md",
    )


@app.command()
def cleanup(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Throw away what is past its retention: markers, dead letters, checkpoints, files of deleted documents."""

    async def go() -> dict[str, int]:
        async with open_app(settings_for(data_dir)) as studyhall:
            return (await clean_up(studyhall.store, studyhall.settings.blob_dir)).numbers()

    done = run(go())
    show_json(done) if as_json else show_fields(done)


@app.command("demo")
def demo_(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave everything running at the end, until Ctrl-C.")
    ] = False,
) -> None:
    """A guided tour: documents flow, a worker is killed in the middle, a poison document is replayed."""
    from .demo import tour

    raise typer.Exit(run(tour(settings_for(None), keep=keep, console=out)))
