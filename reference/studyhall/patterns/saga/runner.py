"""A saga: effects in several systems that all happen, or are all taken back, whatever dies meanwhile.

    buy_pack = Saga("buy-study-pack", steps=[
        DbStep("place-order", undo=cancel),
        DbStep("reserve-seats", do=reserve, undo=release),
        SagaStep("charge", do=charge, undo=refund, resolve=find_charge),
        DbStep("confirm", do=confirm),
    ])

Promises
- The intent is on disk before a step runs, so any process can go on where a killed one stopped.
- A step that was started "may have happened" until it is known: forward it is looked up with `resolve` or
  done again under the same key; backward it is undone even when no answer was ever seen.
- Undo runs in strict reverse order, one step at a time, and is retried. When it gives up or meets `Permanent`
  the saga waits as `needs_repair` for a human (`saga.repair`), never silently.
- One driver at a time: lease and fence number (`saga.store`). A stale holder cannot write.
- A `DbStep` takes effect in the transaction that records it: exactly once, never in doubt.

When they do not hold
- There is no isolation: others see the seat reserved while the charge runs.
- A `SagaStep` is called at least once: `ctx.key` must reach the provider as its idempotency key. `undo` must work
  for an effect that never happened (`ctx.result is None`) AND make the provider refuse it from then on: a
  paused process or a slow network may deliver the `do` later. Where a provider cannot refuse, that gap stays.
- `undo=None` says that there is nothing to take back. An effect that cannot be undone goes last.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..core.clock import Periodic, told_to_end
from ..core.errors import describe
from ..core.job import RetryPolicy, provider_key
from ..core.store import ANSWER, answers_within
from ..retry import decide, full_jitter
from .store import SagaLease, SagaLeaseLost, SagaRow, StepRow, claim, create, load, redact

__all__ = ["DbStep", "Saga", "SagaRunner", "SagaStep", "StepContext"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepContext:
    """What a step is told. `result`: what `do` returned, None while nobody knows whether it took effect."""

    saga_id: str
    data: Mapping[str, Any]
    step: str
    attempt: int
    key: str
    undo_key: str
    result: Mapping[str, Any] | None
    results: Mapping[str, Mapping[str, Any]]  # of all steps that were done, by step name
    error: str | None  # why the saga goes backward


Result = Mapping[str, Any] | None
Outside = Callable[[StepContext], Awaitable[Result]]
Inside = Callable[[StepContext, AsyncConnection], Awaitable[Result]]
# Named moments around an effect, for logs and for tests that kill here: (moment, saga id, step name).
Probe = Callable[[str, str, str], None]


TRY = RetryPolicy(base=0.5, cap=60, attempts=5, max_age=3600)
TRY_HARD = RetryPolicy(base=0.5, cap=60, attempts=20)  # for undo, where giving up calls for a person
OUTAGE = RetryPolicy(base=0.2, cap=5.0)


@dataclass(frozen=True)
class _Limits:
    _: KW_ONLY
    deadline: float = 10.0  # seconds for one try, and for a dead process to hold the saga
    retry: RetryPolicy = TRY
    undo_retry: RetryPolicy = TRY_HARD


@dataclass(frozen=True)
class SagaStep(_Limits):
    """An effect in another system. `resolve` asks there: the effect's result, or None if there is none."""

    name: str
    do: Outside
    undo: Outside | None = None
    resolve: Outside | None = None


@dataclass(frozen=True)
class DbStep(_Limits):
    """An effect in the saga's own database, made in the given transaction. Short, and no outside calls.

    `do=None`, for the first steps only: the transaction that starts the saga makes it true itself.
    """

    name: str
    do: Inside | None = None
    undo: Inside | None = None


@dataclass(frozen=True)
class Saga:
    """Steps in business order. Sagas in flight hold the step names: rename the saga when you change them."""

    name: str
    steps: Sequence[SagaStep | DbStep]

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"saga {self.name!r} needs steps with different names, got {names}")
        made = [step.do is None for step in self.steps]
        if made != sorted(made, reverse=True):
            raise ValueError(f"saga {self.name!r}: only its first steps may have do=None")


@dataclass(frozen=True)
class _Way:
    """What is different between doing a step and undoing it."""

    verb: str  # in the history and for probes
    under_way: str  # the state of the step
    counter: str  # the column of its attempts
    policy: Callable[[SagaStep | DbStep], RetryPolicy]

    def attempts(self, row: StepRow) -> int:
        return int(getattr(row, self.counter))


FORWARD = _Way("", "started", "attempts", lambda step: step.retry)
BACKWARD = _Way("undo ", "undoing", "undo_attempts", lambda step: step.undo_retry)


class SagaRunner:
    """Starts sagas and drives every due one, in any number of processes at once."""

    def __init__(
        self,
        store: AsyncEngine,
        *sagas: Saga,
        owner: str | None = None,
        lease_margin: float = 5.0,
        probe: Probe = lambda moment, saga_id, step: None,
    ) -> None:
        self.store = store
        self.owner = owner or f"{socket.gethostname()}:{os.getpid()}:{os.urandom(2).hex()}"
        self._sagas = {saga.name: saga for saga in sagas}
        self._margin = lease_margin
        self._probe = probe
        self._stopping = False
        self._rounds: Periodic | None = None

    async def start(self, tx: AsyncConnection, name: str, saga_id: str, data: Mapping[str, Any]) -> bool:
        """Begin a saga when the caller's transaction commits. False: this saga was started before."""
        if name not in self._sagas:
            raise ValueError(f"no saga {name!r} here, known: {', '.join(sorted(self._sagas))}")
        return await create(
            tx, saga_id, name, data, {step.name: step.do is None for step in self._sagas[name].steps}
        )

    async def run(self, saga_id: str) -> SagaRow:
        """Drive one saga as far as it goes now. It may wait for a retry, or be in another process's hands."""
        for lease in await self._claim(1, saga_id):
            await self._drive(lease)
        return await load(self.store, saga_id)

    async def resume_due(self, limit: int = 10) -> int:
        """Drive the sagas that are due: new ones, retries, those of dead processes. Returns how many."""
        leases = await self._claim(limit)
        await asyncio.gather(*(self._drive(lease) for lease in leases))
        return len(leases)

    async def run_forever(self, *, poll: float = 0.5, limit: int = 10) -> None:
        """Drive up to `limit` sagas side by side until `stop()` or cancellation; errors are waited out."""
        driving: set[asyncio.Task[None]] = set()
        failures = 0  # in a row

        def ended(task: asyncio.Task[None]) -> None:
            driving.discard(task)
            rounds.wake()

        async def start_due() -> bool:
            nonlocal failures
            # Only what can run at once: a claimed saga that waits here would lose its lease.
            leases = await self._claim(limit - len(driving)) if len(driving) < limit else []
            for lease in leases:
                driving.add(task := asyncio.create_task(self._drive(lease)))
                task.add_done_callback(ended)
            failures = 0
            return bool(leases) and len(driving) < limit

        def store_failed(error: BaseException) -> float:
            nonlocal failures
            failures += 1
            pause = max(poll, full_jitter(OUTAGE, failures))
            log.warning("saga runner: store failed, next try in %.1f s: %s", pause, describe(error))
            return pause

        rounds = Periodic("saga runner", start_due, every=poll, on_error=store_failed)
        self._rounds = rounds
        if self._stopping:
            rounds.stop()
        with answers_within():
            await rounds.run()
            await asyncio.gather(*driving, return_exceptions=True)

    def stop(self) -> None:
        """Finish the steps at hand, then release the sagas."""
        self._stopping = True
        if self._rounds is not None:
            self._rounds.stop()

    async def _claim(self, limit: int, saga_id: str | None = None) -> list[SagaLease]:
        names, seconds = list(self._sagas), self._margin
        return await claim(
            self.store, owner=self.owner, names=names, seconds=seconds, limit=limit, saga_id=saga_id
        )

    async def _drive(self, lease: SagaLease) -> None:
        try:
            saga: SagaRow | None = await load(self.store, lease.saga_id)
            while saga is not None and (saga := await self._next(lease, saga)) is not None:
                if self._stopping:
                    await lease.note(None, None, owner=None, due_at=time.time())
                    return
        except SagaLeaseLost as lost:
            log.warning("%s", lost)
        except (Exception, asyncio.CancelledError):
            if told_to_end():
                raise
            # The store failed between two steps. Nothing is lost: the lease ends, then the saga is due again.
            log.exception("saga %s: left to the next runner", lease.saga_id)

    async def _next(self, lease: SagaLease, saga: SagaRow) -> SagaRow | None:
        """One step forward or backward. The saga as it is then; None when it ended or waits."""
        defined = {step.name: step for step in self._sagas[saga.name].steps}
        if list(defined) != [row.name for row in saga.steps]:
            return await self._needs_repair(
                lease, "its steps are not the definition's: rename a changed saga"
            )
        if not saga.backward:
            for row in saga.steps:
                if row.state != "done":
                    return await self._attempt(lease, saga, row, defined[row.name])
            return await self._end(lease, "completed")
        for row in reversed(saga.steps):
            if row.state in ("started", "done", "undoing"):
                if _took_no_effect(defined[row.name], row):
                    await lease.note(row, "nothing to undo", step={"state": "undone"})
                    return _with(saga, row, state="undone")
                return await self._attempt(lease, saga, row, defined[row.name])
        return await self._end(lease, "compensated")

    async def _attempt(
        self, lease: SagaLease, saga: SagaRow, row: StepRow, step: SagaStep | DbStep
    ) -> SagaRow | None:
        """Intent, effect, record: forward or backward. The saga when it can go on at once."""
        way = BACKWARD if saga.backward else FORWARD
        policy, tried = way.policy(step), way.attempts(row)
        if tried >= policy.attempts:  # counted before the effect, so a step that kills its process ends too
            return await self._failed(lease, saga, row, f"gave up after {tried} attempts")
        since = row.since or time.time()
        intent = {"state": way.under_way, way.counter: tried + 1, "since": since}
        self._probe(f"before {way.verb}intent", saga.id, row.name)
        until = time.time() + step.deadline + self._margin
        await lease.note(row, f"{way.verb}started", f"attempt {tried + 1}", step=intent, due_at=until)
        self._probe(f"after {way.verb}intent", saga.id, row.name)
        try:
            ended = await self._take_effect(lease, saga, row, step, way)
        except SagaLeaseLost:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if told_to_end():
                raise
            next_try = decide(error, policy, tried, age=time.time() - since)
            if next_try.delay is None:
                return await self._failed(lease, saga, row, next_try.reason)
            uncounted = {} if next_try.consume_attempt else {way.counter: tried}
            why = f"{next_try.reason}; next try in {next_try.delay:.1f} s"
            again = time.time() + next_try.delay
            await lease.note(row, f"{way.verb}failed", why, step=uncounted, owner=None, due_at=again)
            return None
        if isinstance(step, SagaStep):
            event, values = ended
            self._probe(f"after {way.verb}effect", saga.id, row.name)
            await lease.note(row, event, step=values)
        self._probe(f"after {way.verb}record", saga.id, row.name)
        return _with(saga, row, **{**intent, **ended[1]})

    async def _take_effect(
        self, lease: SagaLease, saga: SagaRow, row: StepRow, step: SagaStep | DbStep, way: _Way
    ) -> tuple[str, dict[str, Any]]:
        """The event and the new values of the step. A `DbStep` is recorded with its effect."""
        async with _time_for(step):
            if isinstance(step, SagaStep):
                return _outcome(saga, *await _outside(step, saga, row))
            async with lease.write() as tx:
                event, values = _outcome(saga, await _inside(step, saga, row, tx))
                self._probe(f"after {way.verb}effect", saga.id, row.name)
                await lease.set_step(tx, row, event, **values)
            return event, values

    async def _failed(self, lease: SagaLease, saga: SagaRow, row: StepRow, why: str) -> SagaRow | None:
        if saga.backward:
            return await self._needs_repair(lease, why, row)
        error = redact(f"{row.name}: {why}")
        back = {"state": "compensating", "backward": True, "error": error}
        await lease.note(row, "compensating", why, step={"since": None}, **back)
        # Read again: a COMMIT whose answer was lost has happened or not, and only the table knows.
        return await load(self.store, lease.saga_id)

    async def _needs_repair(self, lease: SagaLease, why: str, row: StepRow | None = None) -> SagaRow | None:
        error = redact(f"undo of {row.name}: {why}" if row else why)
        await lease.note(row, "needs repair", why, state="needs_repair", error=error, owner=None, due_at=None)
        log.error("saga %s needs repair: %s", lease.saga_id, error)
        return None

    async def _end(self, lease: SagaLease, state: str) -> SagaRow | None:
        await lease.note(None, state, state=state, owner=None, due_at=None)
        return None


def _took_no_effect(step: SagaStep | DbStep, row: StepRow) -> bool:
    """There is nothing to undo. A `DbStep` without a result was rolled back."""
    return step.undo is None or (isinstance(step, DbStep) and row.result is None)


@asynccontextmanager
async def _time_for(step: SagaStep | DbStep) -> AsyncIterator[None]:
    with answers_within(max(ANSWER, step.deadline)):
        async with asyncio.timeout(step.deadline):
            yield


async def _inside(step: DbStep, saga: SagaRow, row: StepRow, tx: AsyncConnection) -> Result:
    action = step.undo if saga.backward else step.do
    return await action(_context(saga, row), tx) if action else None


async def _outside(step: SagaStep, saga: SagaRow, row: StepRow) -> tuple[Result, bool]:
    """Run `do` or `undo`, asking first what came of an earlier try. The flag: it was found done."""
    context, found = _context(saga, row), None
    if step.resolve is not None and row.result is None and row.state != "pending":
        found = await step.resolve(context)
    if saga.backward:
        return (await step.undo(_context(saga, row, found)) if step.undo else None), False
    return (await step.do(context), False) if found is None else (found, True)


def _outcome(saga: SagaRow, result: Result, found: bool = False) -> tuple[str, dict[str, Any]]:
    """The event and the new values of a step that took effect."""
    if saga.backward:
        return "undone", {"state": "undone", "since": None}
    ended = {"state": "done", "result": json.loads(json.dumps(dict(result or {}))), "since": None}
    return ("found done" if found else "done"), ended


def _with(saga: SagaRow, row: StepRow, **values: Any) -> SagaRow:
    changed = replace(row, **values)
    return replace(saga, steps=tuple(changed if each is row else each for each in saga.steps))


def _context(saga: SagaRow, row: StepRow, found: Result = None) -> StepContext:
    key = provider_key(f"{saga.name}/{saga.id}", row.name)
    known = {step.name: step.result for step in saga.steps if step.result is not None}
    attempt = 1 + (row.undo_attempts if saga.backward else row.attempts)
    result = row.result if found is None else found
    return StepContext(saga.id, saga.data, row.name, attempt, key, f"{key}-undo", result, known, saga.error)
