"""StudyHall's own upkeep: cleaning up, finding lost work, watching its health; and reminding people."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sqlalchemy.ext.asyncio import AsyncConnection

from studyhall import db
from studyhall.patterns.core.errors import Cancelled
from studyhall.patterns.core.store import read
from studyhall.patterns.pipeline import Done, JobContext
from studyhall.patterns.typed_jobs import Payload
from studyhall.services import Services

from .reference import DocumentReference

if TYPE_CHECKING:  # it enqueues flows of these jobs
    from studyhall.maintenance import Maintenance


class Nothing(Payload):
    """These jobs need no input but the tick."""


class Remind(DocumentReference):
    """Remind the owner to go over a document again."""


async def nightly_cleanup(ctx: JobContext, payload: Nothing) -> dict[str, int]:
    return (await _maintenance(ctx).clean_up()).numbers()


async def reconcile_documents(ctx: JobContext, payload: Nothing) -> dict[str, object]:
    """Documents whose flow is nowhere to be found are enqueued again."""
    report = await _maintenance(ctx).reconcile_documents()
    return {
        "checked": report.checked,
        "repaired": report.repaired[:100],
        "failed": dict(list(report.failed.items())[:20]),
    }


async def evaluate_health(ctx: JobContext, payload: Nothing) -> dict[str, object]:
    sent = await _maintenance(ctx).evaluate_health()
    return {"alerts": [{"signal": alert.signal, "raised": alert.raised} for alert in sent]}


async def study_reminder(ctx: JobContext, payload: Remind) -> Done:
    async with read(ctx.store) as connection:
        document = await db.document(connection, payload.document_id, payload.owner)
    if document is None or document.status != "ready":
        raise Cancelled("the document is gone or was never ready: nothing to go over")

    async def save(tx: AsyncConnection) -> None:
        await db.save_reminder(tx, payload.document_id, time.time())

    return Done({"document_id": payload.document_id, "title": document.title or document.name}, save)


def _maintenance(ctx: JobContext) -> Maintenance:
    services: Services = ctx.services
    assert services.maintenance is not None, "this worker does no maintenance"
    return services.maintenance
