"""A saga: effects in several systems that all happen, or are all taken back, whatever dies meanwhile.

    buy_pack = Saga("buy-study-pack", steps=[
        DbStep("place-order", undo=cancel),
        DbStep("reserve-seats", do=reserve, undo=release),
        SagaStep("charge", do=charge, undo=refund, resolve=find_charge, longest=30),
        DbStep("confirm", do=confirm),
    ])

Promises
- The intent is on disk before a request leaves, so any process can go on where a killed one stopped.
- A started step "may have happened" until its outcome is known. That is not guessed: nothing is done while the
  request may still be running (`longest`), then it is looked up with `resolve`, or repeated under the same key while
  the provider remembers it, or the saga waits for a human. Going back, it is undone, or known not to exist.
- Undo runs in strict reverse order, one step at a time, and is retried. When it gives up or meets `Permanent`,
  `independent` steps are still undone, then the saga waits as `needs_repair` for a human (`saga.repair`), never
  silently.
- `cancel` takes back a running or completed saga, but never races a call its driver is making.
- A process that dies consumes no attempt, up to the step's `crashes`.
- One driver at a time: lease and fence number (`saga.store`). A stale holder cannot write.
- A `DbStep` takes effect in the transaction that records it: exactly once, never in doubt.

When they do not hold
- There is no isolation: others see the seat reserved while the charge runs.
- A `SagaStep` is called at least once: `ctx.key` must reach the provider as its idempotency key, or `resolve` must
  find the effect. With `longest=0`, `undo` must work for an effect that never happened (`ctx.result is None`) AND make
  the provider refuse it from then on, because a paused process or slow network may deliver `do` later.
- `undo=None` says that there is nothing to take back. An effect that cannot be undone goes last, and is `final`.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy.exc import DataError, IntegrityError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..core.clock import Periodic, apart, told_to_end
from ..core.failures import describe
from ..core.group_commit import GroupCommit
from ..core.job import RetryPolicy
from ..core.store import ANSWER, answers_within, begin, in_one_hop, turn_holders
from ..outside_call.ledger import NotMade
from ..retry import full_jitter
from .course import Action, Course, Draft
from .definition import Result, Saga, SagaStep
from .repair import cancel
from .store import (
    CancelAsked,
    Change,
    ClaimedSaga,
    Crowded,
    SagaConflict,
    SagaLeaseLost,
    SagaRow,
    UnknownSaga,
    claim,
    create,
    finish,
    load,
    release,
    write,
)

__all__ = ["SagaConflict", "SagaRunner", "UnknownSaga"]

log = logging.getLogger(__name__)
# Named moments around an effect, for logs and for tests that kill here: (moment, saga id, step name).
Probe = Callable[[str, str, str], None]
OUTAGE = RetryPolicy(base=0.2, cap=5.0)
POISON = (Crowded, DataError, IntegrityError, ProgrammingError, ValueError)  # what one bad change can cause


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
        self._course = Course(self._sagas, lease_margin)
        self._probe = probe
        # Sagas driven side by side share their commits.
        self._commits = GroupCommit(self._write, max_batch=100, poison=POISON)
        # Of the pool's eight connections, commits and claims need one each, and more are opened and closed.
        self._turns = asyncio.Semaphore(6)
        # Sagas whose driver met a failing store: released when it works.
        self._left: list[SagaRow] = []
        self._stopping = False
        self._rounds: Periodic | None = None

    async def start(self, tx: AsyncConnection, name: str, saga_id: str, data: Mapping[str, Any]) -> bool:
        """Start a saga when the caller's transaction commits. False: it was started before.

        Then `wake()` the runner, here or through a job; without that it begins at the next poll.
        """
        steps = self._defined(name).steps
        return await create(tx, saga_id, name, data, {step.name: step.do is None for step in steps})

    async def cancel(self, tx: AsyncConnection, saga_id: str, *, by: str, reason: str) -> bool:
        """Take a running or completed saga back when the caller's transaction commits. False: it is going back.

        The driver finishes its current step first. `TooLate`: a `final` step has begun.
        """
        return await cancel(tx, self._sagas, saga_id, by=by, reason=reason)

    async def run(self, saga_id: str) -> SagaRow:
        """Drive one saga as far as it goes now. It may wait for a retry, or another process may hold it."""
        for held in await self._claim(1, saga_id):
            await self._drive(held)
        return await load(self.store, saga_id)

    async def resume_due(self, limit: int = 10) -> int:
        """Drive the sagas that are due: new ones, retries, those of dead processes. Returns how many."""
        claimed = await self._claim(limit)
        await asyncio.gather(*(self._drive(held) for held in claimed))
        return len(claimed)

    async def run_forever(self, *, poll: float = 0.5, limit: int = 32) -> None:
        """Drive up to `limit` sagas side by side until `stop()` or cancellation; errors are waited out."""
        driving: set[asyncio.Task[None]] = set()
        failures = 0  # in a row

        def ended(task: asyncio.Task[None]) -> None:
            driving.discard(task)
            if len(driving) <= limit * 3 // 4:  # one claim for several
                rounds.wake()

        async def start_due() -> bool:
            nonlocal failures
            # Only what can run at once: a claimed saga that waits here would lose its lease.
            claimed = await self._claim(limit - len(driving)) if len(driving) < limit else []
            for held in claimed:
                driving.add(task := asyncio.create_task(self._drive(held)))
                task.add_done_callback(ended)
            failures = 0
            return bool(claimed) and len(driving) < limit

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

    def wake(self) -> None:
        """There is a new saga: do not wait for the next poll. Call it after the commit, from the loop's thread."""
        if self._rounds is not None:
            self._rounds.wake()

    def stop(self) -> None:
        """Finish the steps at hand, then release the sagas."""
        self._stopping = True
        if self._rounds is not None:
            self._rounds.stop()

    def _defined(self, name: str) -> Saga:
        if name not in self._sagas:
            raise ValueError(f"no saga {name!r} here, known: {', '.join(sorted(self._sagas))}")
        return self._sagas[name]

    async def _claim(self, limit: int, saga_id: str | None = None) -> list[ClaimedSaga]:
        names, seconds = list(self._sagas), self._course.lease
        if left := self._left[:]:
            # Otherwise the end of a lease counts as a crash, and enough crashes make a step give up.
            await release(self.store, left, full_jitter(OUTAGE, 3))
            del self._left[: len(left)]
        return await claim(self.store, owner=self.owner, names=names, seconds=seconds, limit=limit, saga_id=saga_id)

    async def _drive(self, held: ClaimedSaga) -> None:
        draft = Draft(held.saga, self.owner)
        try:
            if held.taken_over:
                self._course.crashed(draft)
            action = await self._settle(draft, self._course.next)
            while action is not None:
                perform = self._outside if isinstance(action.step, SagaStep) else self._inside
                action = await perform(draft, action)
        except SagaLeaseLost as lost:
            log.warning("%s", lost)
        except (Exception, asyncio.CancelledError):
            if told_to_end():
                raise
            # The store failed between two steps. Nothing is lost: the saga is released, or its lease ends.
            log.exception("saga %s: left to the next runner", held.saga.id)
            self._left.append(held.saga)

    async def _settle(self, draft: Draft, then: Callable[[Draft], Action | None]) -> Action | None:
        """Write what is known together with what comes next, in one commit."""
        before = draft.copy()
        self._reach("before", "intent", draft, action := then(draft))
        try:
            if (change := draft.unwritten()) is not None:
                await self._commits.submit(change)
        except CancelAsked as asked:
            return await self._settle(_cancelled(draft, before, asked), then)
        self._told(draft)
        self._reach("after", "intent", draft, action)
        return action

    async def _write(self, changes: Sequence[Change]) -> Sequence[None]:
        await in_one_hop(self.store, lambda tx: write(tx, changes), write=True)
        return [None] * len(changes)

    async def _outside(self, draft: Draft, action: Action) -> Action | None:
        """Look up, do or undo, then record the outcome."""
        step = action.step
        assert isinstance(step, SagaStep)
        context = self._course.context(draft, action)
        try:
            call = step.resolve if action.kind == "look up" else step.undo if draft.saga.backward else step.do
            limit = _time_for(action)
            with answers_within(max(ANSWER, limit)):
                async with asyncio.timeout(limit):
                    result = await apart(call, context) if call else None
        except (Exception, asyncio.CancelledError) as error:
            if told_to_end():
                raise
            failed = error
            return await self._settle(draft, lambda draft: self._course.failed(draft, action, failed))
        backward = draft.saga.backward
        if action.kind == "look up":
            after = await self._settle(draft, lambda draft: self._course.found(draft, action, result))
            if result is not None and not backward:
                self._reach("after", "record", draft, action, backward)
            return after
        self._reach("after", "effect", draft, action)
        after = await self._settle(draft, lambda draft: self._done(draft, action, result))
        self._reach("after", "record", draft, action, backward)
        return after

    async def _inside(self, draft: Draft, action: Action) -> Action | None:
        """The effect, its record and the next step's intent: one transaction."""
        before, backward = draft.copy(), draft.saga.backward
        call: Any = action.step.undo if backward else action.step.do
        context = self._course.context(draft, action)
        driver = asyncio.current_task()

        async def step(tx: AsyncConnection) -> Result:
            for holders in turn_holders.values():
                if driver in holders:  # a `begin` in here would wait for ours
                    holders.add(asyncio.current_task())
            return await call(context, tx) if call else None

        try:
            with answers_within(max(ANSWER, action.step.deadline)):
                async with self._turns, begin(self.store) as tx:
                    # Only now: waiting for a connection is not the step's fault.
                    async with asyncio.timeout(action.step.deadline):
                        result = await apart(step, tx)
                    self._reach("after", "effect", draft, action)
                    self._reach("before", "intent", draft, after := self._done(draft, action, result))
                    change = draft.unwritten()
                    assert change is not None
                    await finish(tx, lambda connection: write(connection, [change]))
        except SagaLeaseLost:
            raise
        except CancelAsked as asked:
            return await self._settle(_cancelled(draft, before, asked), self._course.next)
        except (Exception, asyncio.CancelledError) as error:
            if told_to_end():
                raise
            failed = error
            # A COMMIT whose answer was lost has happened or not, and only the table knows.
            stands = await load(self.store, draft.saga.id, wait=True)
            draft.become(before)
            if stands.fence == before.saga.fence and stands.steps[action.row.position].state != action.row.state:
                draft.become(Draft(stands, self.owner))
                return await self._settle(draft, self._course.next)
            return await self._settle(draft, lambda draft: self._course.failed(draft, action, failed))
        self._told(draft)
        self._reach("after", "record", draft, action, backward)
        self._reach("after", "intent", draft, after)
        return after

    def _done(self, draft: Draft, action: Action, result: Result) -> Action | None:
        return self._course.done(draft, action, result, stop=self._stopping)

    def _reach(self, when: str, what: str, draft: Draft, action: Action | None, backward: bool | None = None) -> None:
        # A look-up has no intent and no effect of its own, but its result is recorded.
        if action is not None and (action.kind != "look up" or what == "record"):
            undo = "undo " if (draft.saga.backward if backward is None else backward) else ""
            self._probe(f"{when} {undo}{what}", draft.saga.id, action.row.name)

    def _told(self, draft: Draft) -> None:
        if draft.saga.state == "needs_repair":
            log.error("saga %s needs repair: %s", draft.saga.id, draft.saga.error)


def _cancelled(draft: Draft, before: Draft, asked: CancelAsked) -> Draft:
    draft.become(before)
    draft.saga = replace(draft.saga, cancel=str(asked))
    return draft


def _time_for(action: Action) -> float:
    limit = action.step.deadline
    if isinstance(action.step, SagaStep) and action.kind == "send" and action.step.longest:
        limit = min(limit, action.began + action.step.longest - time.monotonic())
        if limit <= 0:  # other processes count from the intent
            raise NotMade("this process stood still between the intent and the request")
    return limit
