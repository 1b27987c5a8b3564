"""StudyHall's own upkeep, for scheduled jobs and the command line: deletes what nobody needs any more, enqueues
documents whose flow is lost, and watches its health."""

import logging
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from . import db
from .jobs import study_flow
from .patterns import checkpoint, dead_letter, idempotency
from .patterns.claim_check import Blobs, SweptBlobs
from .patterns.core.store import read
from .patterns.dead_letter import dead_letters
from .patterns.deferred_reply import DeferredReplies
from .patterns.degraded.pending import pending_jobs
from .patterns.health.alerts import Alert, evaluate
from .patterns.health.senders import Sender, sender, to_all
from .patterns.job_ids import job_id
from .patterns.producer import Producer
from .patterns.reconciliation import Expected, Reconciled, reconcile
from .patterns.retention import DEFAULT, Retention
from .patterns.saga import store as saga_store
from .stages import STAGES
from .watching import RULES, signals

log = logging.getLogger("studyhall.maintenance")
SAGAS_KEPT = 60 * 24 * 3600.0  # seconds after its end; as long as the markers of jobs
CHAT_KEPT = 24 * 3600.0  # seconds after the end of its token for which a chat command is remembered
GRACE = 120.0  # seconds that an upload may be on its way into the queue
LAST = list(STAGES)[-1]


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Rows and files that were deleted."""

    markers: int
    dead_letters: int
    checkpoints: int
    chat_replies: int
    files: SweptBlobs
    sagas: int

    def numbers(self) -> dict[str, int]:
        """For a result, a log line or a table."""
        rows = {k: v for k, v in asdict(self).items() if k != "files"}
        return {**rows, **{f"files_{name}": n for name, n in asdict(self.files).items()}}


async def clean_up(store: AsyncEngine, blob_dir: Path, *, kept: Retention = DEFAULT, grace: float = 3600.0) -> Cleaned:
    """Purge what is past its retention, and files of documents that are gone. Safe to run twice at once."""

    async def in_use(blobs: Sequence[str]) -> set[str]:
        async with read(store) as connection:
            return await db.blobs_in_use(connection, blobs)

    return Cleaned(
        await idempotency.purge(store, kept.markers_age),
        await dead_letter.purge(store, kept.letters_age),
        await checkpoint.purge(store, kept.checkpoints_age),
        await DeferredReplies(store).purge(CHAT_KEPT),
        await Blobs(blob_dir).sweep("documents", in_use, grace=grace),
        await _forget_sagas(store),
    )


async def _forget_sagas(store: AsyncEngine) -> int:
    deleted = 0
    while batch := await saga_store.purge(store, SAGAS_KEPT):  # short transactions, until nothing is left
        deleted += batch
    return deleted


@dataclass(frozen=True, slots=True)
class Maintenance:
    producer: Producer
    store: AsyncEngine
    queues: Sequence[str]
    blob_dir: Path
    tell: Sender | None = None  # besides the log

    async def clean_up(self) -> Cleaned:
        return await clean_up(self.store, self.blob_dir)

    async def evaluate_health(self) -> list[Alert]:
        _, measured = await signals(self.producer.redis, self.store, self.queues, prefix=self.producer.prefix)
        return await evaluate(self.store, measured, RULES, to_all(_send, self.tell) if self.tell else _send)

    async def reconcile_documents(self, *, grace: float = GRACE) -> Reconciled:
        """The database says which documents are unfinished; one whose flow is in no queue is enqueued again.

        Stages that were done already find their marker and pass on the stored result.
        """
        owners: dict[str, str] = {}

        async def unfinished() -> AsyncIterator[Expected]:
            after = ""
            while True:
                async with read(self.store) as connection:
                    page = await db.unfinished_documents(connection, after=after, limit=500)
                for document in page:
                    owners[document.id] = document.owner
                    yield Expected(document.id, document.updated_at)
                if len(page) < 500:
                    return
                after = page[-1].id

        async def repair(document_id: str) -> None:
            await self.producer.enqueue(study_flow(document_id, owners[document_id]))

        return await reconcile(unfinished(), self._present, repair, grace=grace)

    async def _present(self, documents: Collection[str]) -> set[str]:
        """Those with a living flow: its last stage is in Redis, or a stage is a dead letter or waits to be queued."""
        queue = self.producer.queue(STAGES[LAST])
        async with self.producer.redis.pipeline(transaction=False) as batch:
            for document in documents:
                batch.exists(queue.toKey(job_id(LAST, document)))
            result = {document for document, exists in zip(documents, await batch.execute(), strict=True) if exists}
        stages = {job_id(name, document): document for document in documents for name in STAGES}
        letters = select(dead_letters.c.job_id).where(
            dead_letters.c.job_id.in_(stages), dead_letters.c.replayed_at.is_(None)
        )
        waiting = select(pending_jobs.c.id).where(pending_jobs.c.id.in_(stages))
        async with read(self.store) as connection:
            for query in (letters, waiting):
                result |= {stages[ident] for ident in (await connection.scalars(query)).all()}
        return result


def receivers(urls: str | None) -> Sender | None:
    """From the setting: addresses, comma separated."""
    addresses = [url.strip() for url in (urls or "").split(",") if url.strip()]
    return to_all(*map(sender, addresses)) if addresses else None


async def _send(alert: Alert) -> None:
    fields = {"signal": alert.signal, "value": round(alert.value, 3), "because": alert.because}
    (log.error if alert.raised else log.info)(
        "health alert" if alert.raised else "health alert cleared", extra={"fields": fields}
    )
