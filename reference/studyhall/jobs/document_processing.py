"""document-processing: fast and reliable. Text out of an uploaded file, in a process that can be killed."""

from sqlalchemy.ext.asyncio import AsyncConnection

from studyhall import db
from studyhall.documents import DocumentRejected, Extracted, extract
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.deadline import DeadlineExceeded
from studyhall.patterns.isolation import ProcessDied
from studyhall.patterns.pipeline import Done, JobContext
from studyhall.services import Services

from .reference import DocumentReference, UnknownDocument

MEMORY = 2 * 1024**3  # of the extraction process; a file that needs more is built to


class ProcessDocument(DocumentReference):
    """Extract the text of an uploaded document."""


async def process_document(ctx: JobContext, payload: ProcessDocument) -> Done:
    services: Services = ctx.services
    async with read(ctx.store) as connection:
        document = await db.document(connection, payload.document_id, payload.owner)
    if document is None:
        raise UnknownDocument(str(UnknownDocument.__doc__))

    await ctx.progress("parsing", 10, "finding out what kind of file this is")
    limit = ctx.remaining()  # before the wait for a process, which does not count
    try:
        async with services.shares.of(payload.owner):
            extracted: Extracted = await services.pool.run(
                extract,
                await services.upload(document),
                services.max_document_bytes,
                # A second less than the job has: the pool can then say what happened before it is cut off itself.
                timeout=max(0.1, limit - 1),
                memory_limit=MEMORY,
            )
    except DocumentRejected as refusal:
        # Not in `save`: that is for jobs that end well. Telling the owner twice does no harm.
        await _tell_owner(ctx, payload, refusal.code, str(refusal))
        raise
    except (ProcessDied, DeadlineExceeded):
        if ctx.attempt >= ctx.attempts:
            await _tell_owner(ctx, payload, "unreadable", "This file stops our reader. Save it again and upload that.")
        raise

    count = len(extracted.text.split())
    await ctx.progress("extracting", 80, f"{count:,} words", kind=extracted.kind.value, pages=extracted.pages)

    async def save(tx: AsyncConnection) -> None:
        await db.save_text(tx, payload.document_id, payload.owner, extracted)

    await ctx.progress("saving", 95, "storing the text")
    return Done(
        {
            "document_id": payload.document_id,
            "kind": extracted.kind.value,
            "title": extracted.title,
            "pages": extracted.pages,
            "words": count,
        },
        save,
    )


async def _tell_owner(ctx: JobContext, payload: ProcessDocument, code: str, message: str) -> None:
    async with begin(ctx.store) as tx:
        await db.reject(tx, payload.document_id, payload.owner, code, message)
