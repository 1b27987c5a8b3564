"""Where each stage of a document's flow is, from Redis and the dead letters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .patterns.core.job import cancelled
from .patterns.dead_letter import archive
from .patterns.job_ids import job_id

if TYPE_CHECKING:
    from bullmq import Queue
    from sqlalchemy.ext.asyncio import AsyncEngine

STAGES = {  # in order, each with its queue
    "document-processing": "documents",
    "graph-generation": "graphs",
    "quiz-creation": "quizzes",
    "connection-explanations": "explanations",
}


@dataclass(frozen=True, slots=True)
class StageState:
    """Where one stage of a document's flow is."""

    name: str
    state: str
    percent: float
    message: str


async def stage_states(queue_of: "Callable[[str], Queue]", store: "AsyncEngine", document_id: str) -> list[StageState]:
    """The stages of one document, in order."""
    return [await _state(queue_of(queue), store, name, document_id) for name, queue in STAGES.items()]


async def _state(queue: "Queue", store: "AsyncEngine", name: str, document_id: str) -> StageState:
    ident = job_id(name, document_id)
    # The state first: a job that ends in between is shown as running, never as completed without its result.
    state = str(await queue.getJobState(ident))
    job = await queue.getJob(ident)
    if job is None:
        dead = archive.dead_letters.c
        letters = await archive.find(store, (dead.job_id == ident) & dead.replayed_at.is_(None), limit=1)
        return StageState(name, "failed", 0.0, letters[0].reason) if letters else StageState(name, "gone", 0.0, "")
    if (why := cancelled(job.returnvalue)) is not None:
        return StageState(name, "cancelled", 0.0, why)
    progress = job.progress if isinstance(job.progress, dict) else {}
    percent = 100.0 if state == "completed" else float(progress.get("percent", 0.0))
    return StageState(name, state, percent, str(job.failedReason if state == "failed" else progress.get("message", "")))
