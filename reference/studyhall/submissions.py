"""Uploading a document: the file, its row and its flow of jobs."""

import uuid
from pathlib import Path

from . import db
from .app import App
from .documents import TooLarge
from .jobs import study_flow
from .jobs.reference import UnknownDocument
from .patterns.claim_check import Blobs
from .patterns.core.store import begin
from .stages import StageState, stage_states


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


async def states(app: App, document_id: str) -> list[StageState]:
    """The stages of one document, in order."""
    return await stage_states(app.producer.queue, app.store, document_id)
