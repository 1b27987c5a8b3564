"""Uploading a document: the file, its row and its flow of jobs."""

import uuid
from dataclasses import dataclass
from pathlib import Path

from . import db
from .app import App
from .documents import TooLarge
from .jobs import STAGES, study_flow
from .jobs.reference import UnknownDocument
from .patterns.claim_check import Blobs
from .patterns.core.job import cancelled
from .patterns.core.store import begin
from .patterns.dead_letter import archive
from .patterns.job_ids import job_id


async def submit(
    app: App, path: Path, owner: str = "you", *, name: str | None = None, document_id: str | None = None
) -> str:
    """Store the file, write its row, add its flow. Returns the document's id; the same one again is the same
    upload, finished if it was left half done."""
    size = path.stat().st_size  # noqa: ASYNC240  one look at a local file
    if size > app.settings.max_document_bytes:
        raise TooLarge(f"{path.name} has {size:,} bytes, the limit is {app.settings.max_document_bytes:,}")
    document_id = document_id or uuid.uuid4().hex
    flow = study_flow(document_id, owner)
    await app.degraded.admit(flow)
    # The claim check: the file outside the queue first, then the row that names it, then jobs that name the row.
    # Killed in between, we leave a file without a row, which the sweep collects.
    claim = await Blobs(app.settings.blob_dir).put(path, ("documents", document_id))
    async with begin(app.store) as tx:
        if await db.document(tx, document_id, owner) is not None:
            return document_id  # its flow was accepted in the same transaction
        await db.add_document(
            tx,
            document_id=document_id,
            owner=owner,
            name=name or path.name,
            blob=claim.ref,
            size=claim.size,
            sha256=claim.sha256,
        )
        # The row and its flow are accepted together: killed here, or with Redis away, a drainer queues the flow.
        await app.degraded.accept(tx, flow)
    await app.degraded.hand_over(flow)
    return document_id


async def replace_file(app: App, document_id: str, path: Path, owner: str = "you") -> None:
    """Another file for a document, before its failed job is replayed. The old one is left to the sweep."""
    claim = await Blobs(app.settings.blob_dir).put(path, ("documents", document_id))
    async with begin(app.store) as tx:
        replaced = await db.replace_blob(tx, document_id, owner, blob=claim.ref, size=claim.size, sha256=claim.sha256)
    if not replaced:
        raise UnknownDocument(str(UnknownDocument.__doc__))


@dataclass(frozen=True, slots=True)
class StageState:
    """Where one stage of a document's flow is."""

    name: str
    state: str
    percent: float
    message: str


async def states(app: App, document_id: str) -> list[StageState]:
    """The stages of one document, in order."""
    return [await _state(app, name, document_id) for name in STAGES]


async def _state(app: App, name: str, document_id: str) -> StageState:
    queue = app.producer.queue(app.jobs[name].queue)
    ident = job_id(name, document_id)
    # The state first: a job that ends in between is shown as running, never as completed without its result.
    state = str(await queue.getJobState(ident))
    job = await queue.getJob(ident)
    if job is None:
        dead = archive.dead_letters.c
        letters = await archive.find(app.store, (dead.job_id == ident) & dead.replayed_at.is_(None), limit=1)
        return StageState(name, "failed", 0.0, letters[0].reason) if letters else StageState(name, "gone", 0.0, "")
    if (why := cancelled(job.returnvalue)) is not None:
        return StageState(name, "cancelled", 0.0, why)
    progress = job.progress if isinstance(job.progress, dict) else {}
    percent = 100.0 if state == "completed" else float(progress.get("percent", 0.0))
    return StageState(name, state, percent, str(job.failedReason if state == "failed" else progress.get("message", "")))
