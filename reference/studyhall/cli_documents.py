"""`studyhall submit` and `studyhall status`: documents and their progress."""

import asyncio
import math
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import db
from .access import connected
from .patterns.core.store import read
from .stages import StageState, stage_states
from .terminal import AsJson, DataDir, ago, fail, run, say, settings_for, show_fields, show_json, show_table

if TYPE_CHECKING:
    from .app import App


def submit_command(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, readable=True)],
    owner: Annotated[str, typer.Option(help="Whose document it is.")] = "you",
    wait: Annotated[bool, typer.Option("--wait", help="Wait until every document is done.")] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Upload documents (PDF, DOCX, Markdown, text) and start their flow of jobs."""
    from .app import open_app
    from .patterns.degraded.pending import pending
    from .submissions import states, submit

    stopped: dict[str, str] = {}

    async def go() -> dict[str, str]:
        async with open_app(settings_for(data_dir), edge=True) as studyhall:
            made = {str(path): await submit(studyhall, path, owner) for path in files}
            if kept := (await pending(studyhall.store)).waiting:
                say(f"kept in the database until the queue takes them: {kept}", err=True)
                return made
            hint_at = time.monotonic() + 2
            for path, document_id in made.items() if wait else ():
                while not _ended(stages := await states(studyhall, document_id)):
                    await asyncio.sleep(0.2)
                    if time.monotonic() > hint_at:
                        hint_at = math.inf
                        if not await _somebody_works(studyhall):
                            say("no worker is running; start one with: studyhall worker", err=True)
                if any(stage.state != "completed" for stage in stages):
                    async with read(studyhall.store) as connection:
                        document = await db.document(connection, document_id, owner)
                    stopped[path] = (document and document.error) or "stopped; see studyhall status and dlq list"
            return made

    made = run(go())
    if as_json:
        show_json(made)
    else:
        for path, document_id in made.items():
            say(f"{document_id}  {path}")
    for path, why in stopped.items():
        fail(f"{path}: {why}", answered=True)
    if stopped:
        raise typer.Exit(1)


async def _somebody_works(studyhall: "App") -> bool:
    """Is a worker connected? They name their connections after their queues."""
    names = tuple(f"{studyhall.producer.prefix}:{queue}" for queue in studyhall.jobs.queues)
    connected: Any = await studyhall.producer.redis.client_list()
    return any(client["name"].startswith(names) for client in connected)


def _ended(stages: list[StageState]) -> bool:
    """All done, or one stopped: what waits for that one goes on only after a replay."""
    states = {stage.state for stage in stages}
    return states == {"completed"} or bool(states & {"failed", "cancelled", "gone"})


def _so_far(stages: dict[str, dict[str, Any]]) -> str:
    """`2 of 4, graph-generation active 40 %`"""
    done = sum(stage["state"] == "completed" for stage in stages.values())
    for name, stage in stages.items():
        if stage["state"] != "completed":
            return f"{done} of {len(stages)}, {name} {stage['state']} {stage['percent']:.0f} %"
    return f"{done} of {len(stages)}"


def status_command(
    document_id: Annotated[str | None, typer.Argument(metavar="ID", help="Only this document, stage by stage.")] = None,
    owner: Annotated[str, typer.Option(help="Whose documents.")] = "you",
    limit: Annotated[int, typer.Option(min=1, max=500)] = 20,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Documents and their progress."""
    from bullmq import Queue

    async def go() -> list[dict[str, Any]]:
        async with connected(data_dir) as studyhall:
            queue_of = cache(lambda name: Queue(name, {"connection": studyhall.redis}))
            async with read(studyhall.store) as connection:
                if document_id is None:
                    documents = await db.documents_of(connection, owner, limit=limit)
                elif document := await db.document(connection, document_id, owner):
                    documents = [document]
                else:
                    raise fail(f"there is no document {document_id} of {owner}; `studyhall status` lists them")
            return [
                {
                    "id": document.id,
                    "name": document.name,
                    "status": document.status,
                    "error": document.error,
                    "created_at": document.created_at,
                    "stages": {
                        s.name: {"state": s.state, "percent": s.percent, "message": s.message}
                        for s in await stage_states(queue_of, studyhall.store, document.id)
                    },
                }
                for document in documents
            ]

    rows = run(go())
    if as_json:
        show_json(rows if document_id is None else rows[0])
        return
    if document_id is not None:
        stages = rows[0].pop("stages")
        show_fields({**rows[0], "created_at": ago(rows[0]["created_at"])})
        columns = ["stage", "state", "percent", "message"]
        show_table("Stages", columns, [[name, *stage.values()] for name, stage in stages.items()], "")
        return
    show_table(
        f"Documents of {owner}",
        ["id", "name", "status", "stages", "uploaded"],
        [
            [row["id"], row["name"], row["error"] or row["status"], _so_far(row["stages"]), ago(row["created_at"])]
            for row in rows
        ],
        "Nothing uploaded yet. Try: studyhall submit reference/samples/*.md",
    )
