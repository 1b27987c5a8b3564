"""The work behind the scheduled jobs, for workers and command line alike."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from . import db
from .jobs import STAGES, study_flow
from .patterns import health
from .patterns.core.store import read
from .patterns.dead_letter import counts, dead_letters
from .patterns.degraded.pending import pending_jobs
from .patterns.health.alerts import Alert, Rule, evaluate
from .patterns.job_ids import job_id
from .patterns.outbox.quarantine import lag
from .patterns.producer import Producer
from .patterns.reconciliation import Expected, Reconciled, reconcile

__all__ = ["RULES", "Upkeep"]

log = logging.getLogger("studyhall.upkeep")
GRACE = 120.0  # seconds that an upload may be on its way into the queue
LAST = STAGES[-1]

RULES = (
    Rule(
        "*.oldest",
        raise_at=300,
        clear_at=60,
        because="jobs wait too long: add workers, or look for one that hangs",
    ),
    Rule("*.backlog", raise_at=10_000, clear_at=5_000, because="more comes in than is done"),
    Rule(
        "*.failure_rate", raise_at=0.2, clear_at=0.05, because="every fifth job fails: see studyhall dlq list"
    ),
    Rule(
        "dead_letters",
        raise_at=100,
        clear_at=20,
        because="failed jobs wait for a person: see studyhall dlq list",
    ),
    Rule("outbox.oldest", raise_at=60, clear_at=10, because="events are not published: does the relay run?"),
)


@dataclass(frozen=True, slots=True)
class Upkeep:
    producer: Producer
    store: AsyncEngine
    queues: Sequence[str]

    async def signals(self) -> tuple[health.Health, dict[str, float]]:
        """What is measured: the queues in detail, and every number that a rule may look at."""
        measured = await health.measure(
            self.producer.redis, self.queues, dead_letters=counts(self.store), prefix=self.producer.prefix
        )
        return measured, {**measured.signals(), "outbox.oldest": (await lag(self.store)).oldest}

    async def evaluate_health(self) -> list[Alert]:
        _, signals = await self.signals()
        return await evaluate(self.store, signals, RULES, _send)

    async def reconcile_documents(self, *, grace: float = GRACE) -> Reconciled:
        """The database says which documents are not through; whose flow is in no queue is enqueued again.

        Stages that were done already find their marker and hand on the stored result.
        """
        owners: dict[str, str] = {}

        async def unfinished() -> AsyncIterator[Expected]:
            after = ""
            while True:
                async with read(self.store) as connection:
                    page = await db.unfinished_documents(connection, after=after, limit=500)
                for one in page:
                    owners[one.id] = one.owner
                    yield Expected(one.id, one.updated_at)
                if len(page) < 500:
                    return
                after = page[-1].id

        async def repair(document_id: str) -> None:
            await self.producer.enqueue(study_flow(document_id, owners[document_id]))

        return await reconcile(unfinished(), self._present, repair, grace=grace)

    async def _present(self, documents: Collection[str]) -> set[str]:
        """Those whose flow lives: its last stage is in Redis, or a stage waits in the dead letters or to be queued."""
        queue = self.producer.queue(self.producer.queue_of(LAST))
        async with self.producer.redis.pipeline(transaction=False) as batch:
            for document in documents:
                batch.exists(queue.toKey(job_id(LAST, document)))
            found = {
                document for document, here in zip(documents, await batch.execute(), strict=True) if here
            }
        stages = {job_id(name, document): document for document in documents for name in STAGES}
        letters = select(dead_letters.c.job_id).where(
            dead_letters.c.job_id.in_(stages), dead_letters.c.replayed_at.is_(None)
        )
        waiting = select(pending_jobs.c.id).where(pending_jobs.c.id.in_(stages))
        async with read(self.store) as connection:
            for query in (letters, waiting):
                found |= {stages[ident] for ident in (await connection.scalars(query)).all()}
        return found


async def _send(alert: Alert) -> None:
    fields = {"signal": alert.signal, "value": round(alert.value, 3), "because": alert.because}
    (log.error if alert.raised else log.info)(
        "health alert" if alert.raised else "health alert cleared", extra={"fields": fields}
    )
