"""`studyhall cancel` and `studyhall remind`: work that should not happen, or only later."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from . import cancellations, db
from .app import open_app
from .patterns import delayed
from .patterns.cancel import Cancellation
from .patterns.core.store import read
from .terminal import AsJson, DataDir, fail, run, say, settings_for, show_json, show_table


def cancel_command(
    target: Annotated[str, typer.Argument(help="Id of a document, or of a job.")],
    reason: Annotated[str, typer.Option(help="Shown to whoever looks at the job.")] = "by the operator",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Stop a document's work, or a job and its flow: waiting, delayed or running. It does not come back."""

    async def go() -> list[Cancellation]:
        async with open_app(settings_for(data_dir)) as studyhall:
            async with read(studyhall.store) as connection:
                document = await db.document_of_anybody(connection, target)
            if document is not None:
                return await cancellations.cancel_document(studyhall, target, reason)
            return await cancellations.cancel_job(studyhall, target, reason)

    done = run(go())
    if as_json:
        show_json([asdict(cancelled) for cancelled in done])
    else:
        show_table(
            "Cancelled",
            ["job", "state"],
            [[cancelled.job_id, cancelled.state] for cancelled in done],
            "Nothing to cancel.",
        )
    if all(cancelled.state == "too-late" for cancelled in done):
        raise fail("too late: everything is done already")


def remind_command(
    document: Annotated[str, typer.Argument(help="Id of a document.")],
    days: Annotated[float, typer.Option(help="Days from now.")] = 3.0,
    off: Annotated[bool, typer.Option("--off", help="No reminder after all.")] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Remind the owner to go over a document in some days; asked again, the reminder moves."""

    async def go() -> float | None:
        async with open_app(settings_for(data_dir)) as studyhall:
            if off:
                await cancellations.forget_reminder(studyhall, document)
                return None
            ref = await cancellations.remind(studyhall, document, delayed.after(days=days))
            return await delayed.due_at(studyhall.producer, ref)

    due = run(go())
    at = datetime.fromtimestamp(due, UTC).isoformat(timespec="seconds") if due else None
    if as_json:
        show_json({"document": document, "due": at})
    else:
        say(f"reminder at {at}" if at else "no reminder")
