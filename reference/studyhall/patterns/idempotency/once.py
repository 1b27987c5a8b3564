"""The step that makes a job take effect once: `once(inboxes(store))`. See `markers` for the promise."""

import asyncio
from collections.abc import Callable
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..core.execution import CallNext, JobContext, Step, gives, needs, uncancel
from ..core.failures import Cancelled, clean_text
from ..core.job import CANCELLED, Done, Outcome, cancelled, stop_reason
from .markers import Inbox, fingerprint

__all__ = ["Markers", "inboxes", "once"]

Markers = Callable[[str], Inbox]


def inboxes(store: AsyncEngine) -> Markers:
    """The inbox of each kind of job, by its name."""
    by_consumer: dict[str, Inbox] = {}

    def named(consumer: str) -> Inbox:
        if consumer not in by_consumer:
            by_consumer[consumer] = Inbox(store, consumer)
        return by_consumer[consumer]

    return named


def once(markers: Markers) -> Step:
    """The job takes effect once: its `Done.save`, its marker and its result are one transaction.

    A job that is cancelled leaves its marker too. The first of the two stands: work that is stored already is not
    undone, and what is cancelled never runs again.
    """

    @needs("payload")
    @gives("transaction")
    async def once(run: JobContext, call_next: CallNext) -> Any:
        inbox, mark = markers(run.kind or run.name), run.mark or fingerprint(run.body)
        if stored := await inbox.seen(run.key, mark):
            return _ended(run, stored.result, Outcome.DUPLICATE)
        run.store, run.transactional = inbox.store, True
        try:
            answer = await call_next(run)
        except (asyncio.CancelledError, Cancelled) as stopped:
            if (reason := stop_reason(stopped)) is None:
                raise
            uncancel()
            return _ended(run, await inbox.record(run.key, mark, {CANCELLED: clean_text(reason)}))
        result, save = (answer.result, answer.save) if isinstance(answer, Done) else (answer, None)
        if dump := getattr(result, "model_dump", None):
            result = dump(mode="json")
        saves = [save, *run.saves] if save else run.saves
        if not saves:
            # Nothing but the result to store: it shares a transaction with other jobs that end now.
            return _ended(run, await inbox.record(run.key, mark, result))

        async def effect(tx: AsyncConnection) -> Any:
            for save in saves:
                await save(tx)
            return result

        return _ended(run, await inbox.once(run.key, mark, effect))

    return once


def _ended(run: JobContext, result: Any, outcome: Outcome | None = None) -> Any:
    run.outcome = outcome if cancelled(result) is None else Outcome.CANCELLED
    return result
