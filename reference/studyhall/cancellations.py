"""Cancelling a document with all its stages, or any job by its id; and reminders, which are delayed jobs."""

import contextlib

from . import db
from .app import App
from .jobs import STAGES
from .jobs.reference import UnknownDocument
from .patterns import delayed
from .patterns.cancel import Cancellation, NoSuchJob, cancel, rule_out
from .patterns.core.store import begin, read
from .patterns.degraded import pending as pending_jobs
from .patterns.job_ids import job_id
from .patterns.producer import JobRef, JobRequest
from .schedules import schedules


async def cancel_document(app: App, document_id: str, reason: str) -> list[Cancellation]:
    """Stop all remaining work on a document. Stored results stay."""
    document = await _document(app, document_id)
    reference = {"document_id": document_id, "owner": document.owner}
    outcomes = []
    # The markers first, in the database: they hold whether the flow is queued, waits to be, or runs.
    for name in reversed(STAGES):
        ident, payload = job_id(name, document_id), app.jobs.encode(name, reference)["payload"]
        outcomes.append(await rule_out(app.store, app.jobs[name].queue, name, ident, document_id, payload, reason))
    if all(cancelled.state == "too-late" for cancelled in outcomes):
        return outcomes
    async with begin(app.store) as tx:
        await db.reject(tx, document_id, document.owner, "cancelled", f"Cancelled: {reason}")
    await pending_jobs.forget(app.store, job_id(STAGES[-1], document_id))
    states = {cancelled.job_id: cancelled for cancelled in outcomes}
    for name in reversed(STAGES):
        ident = job_id(name, document_id)
        try:
            for cancelled in await cancel(app.producer.redis, app.store, app.jobs[name].queue, ident, reason):
                states[cancelled.job_id] = cancelled
            break  # this cancelled the whole flow
        except NoSuchJob:
            continue  # not queued yet, or finished and forgotten
    with contextlib.suppress(delayed.AlreadyStarted):
        await forget_reminder(app, document_id)
    return list(states.values())


async def cancel_job(app: App, ident: str, reason: str) -> list[Cancellation]:
    """Cancel a job by its id, such as `graph-generation.<document>`, and with it its flow."""
    return await cancel(app.producer.redis, app.store, _queue_of(app, ident), ident, reason)


def _queue_of(app: App, ident: str) -> str:
    if ident.startswith("repeat:"):
        return app.jobs[schedules(app.jobs, app.settings, app.signer)[ident.split(":")[1]].job].queue
    for job_type in app.jobs:
        if ident.startswith(f"{job_type.name}."):
            return job_type.queue
    raise NoSuchJob(f"{ident!r} is neither a document nor a job id such as graph-generation.<document>")


async def remind(app: App, document_id: str, delay: float) -> JobRef:
    """Remind the owner `delay` seconds from now; a second request moves the reminder."""
    document = await _document(app, document_id)
    request = JobRequest(
        "study-reminder", {"document_id": document_id, "owner": document.owner}, key=document_id, delay=delay
    )
    ref = await app.producer.enqueue(request)
    if delay:  # an existing one only gets a new time
        await delayed.reschedule(app.producer, ref, delay)
    return ref


async def forget_reminder(app: App, document_id: str) -> None:
    ident = job_id("study-reminder", document_id)
    await delayed.withdraw(app.producer, JobRef("reminders", "study-reminder", ident, document_id))


async def _document(app: App, document_id: str) -> db.Document:
    async with read(app.store) as connection:
        result = await db.document_of_anybody(connection, document_id)
    if result is None:
        raise UnknownDocument(f"there is no document {document_id!r}: see studyhall status")
    return result
