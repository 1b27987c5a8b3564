"""Recurring jobs: declared in code, kept by BullMQ's job scheduler, at most one effect per tick.

Promise
- `apply` may be called by any number of instances at any time: it writes only what changed, removes what is
  no longer declared, and takes over renamed schedules (`was`).
- A tick is a slot of its schedule, the slot is part of the job's id, and that id is the idempotency key. So
  whoever runs it, early, late or again after a crash: one slot, at most one effect. There is no lock to lose:
  SET NX + DEL ran a job three times when it outlived the lock, and twice when a clock was 100 ms off.
- Every slot since the first is accounted for: its tick was started, or it is `missed`, logged and counted; never
  both. One that was reported and comes after all (its worker was killed or hung) is taken off the missed ones.
- A late tick runs once for all that were missed, or not at all (`when_late`).
- A tick that finds the one before it still running is skipped, or waits (`overlap`).

When it does NOT hold: effects outside the `save` of a handler, as in `idempotency`. Ticks wait for a worker:
with none running they are late, then missed. Clocks: a worker's clock that is ahead starts a tick early by
as much, at most a second. Daylight saving: see `schedule_slots`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from bullmq import Queue
from bullmq.job_scheduler import JobScheduler
from pydantic import BaseModel
from redis.asyncio import Redis
from sqlalchemy import BigInteger, Column, Integer, String, Table, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..core.clock import Periodic
from ..core.errors import Cancelled, JobError, Snooze
from ..core.execution import CallNext, JobContext, Step, needs
from ..core.job import JobRef, JobRequest, Outgoing
from ..core.store import begin, is_postgres, metadata, read
from ..lease import Lease
from ..typed_jobs import JobTypes
from .slots import FIELD, Cadence, InvalidSchedule, check_slot, tick_of

__all__ = [
    "Applied",
    "InvalidSchedule",
    "Schedule",
    "ScheduleKeeper",
    "ScheduleState",
    "Schedules",
    "UnknownSchedule",
    "ticking",
]

log = logging.getLogger("schedule")
EARLY = 1.0  # seconds by which a worker's clock may be ahead before its tick is made to wait
REMEMBERED = (
    1_000  # missed slots of a schedule that are known by name; a tick that is later than these is lost
)

schedule_state = Table(
    "schedule_state",
    metadata,
    Column("id", String(60), primary_key=True),
    Column("last_slot", BigInteger, nullable=False),  # the latest slot that was started
    Column("ticks", Integer, nullable=False),
    Column("missed", Integer, nullable=False),
    Column("skipped", Integer, nullable=False),
)
missed_slots = Table(
    "schedule_missed",
    metadata,
    Column("id", String(60), primary_key=True),
    Column("slot", BigInteger, primary_key=True),
)


Sign = Callable[[str, str, dict[str, Any]], dict[str, Any]]


class Queues(Protocol):
    """What is needed of a producer."""

    redis: Redis
    prefix: str

    def queue(self, name: str) -> Any: ...
    def outgoing(self, ref: JobRef, request: JobRequest) -> Outgoing: ...


class UnknownSchedule(JobError):
    """No schedule of this id is declared. `schedule list` names those that are."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """`jitter`: seconds over which instances of a fleet are spread; the same for one slot in every run."""

    id: str
    job: str
    cron: str | None = None
    tz: str = "UTC"
    every: float | None = None
    payload: Mapping[str, Any] | BaseModel = field(default_factory=dict)
    overlap: Literal["skip", "queue"] = "skip"
    when_late: Literal["run", "skip"] = "run"  # a tick whose successor is due as well
    jitter: float = 0.0
    priority: str | int = "low"
    was: Sequence[str] = ()  # earlier ids of this schedule

    @property
    def cadence(self) -> Cadence:
        return Cadence(self.cron, self.tz, self.every)


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """A declared schedule as it stands."""

    schedule: Schedule
    next_slot: int | None  # epoch ms; None: not in Redis
    last_slot: int | None = None
    ticks: int = 0
    missed: int = 0
    skipped: int = 0


@dataclass(slots=True)
class Applied:
    """What `apply` or `heal` changed."""

    written: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)


class Schedules:
    """The schedules of one application. `owner` keeps those of two applications on one Redis apart."""

    def __init__(
        self,
        jobs: JobTypes,
        schedules: Sequence[Schedule],
        *,
        owner: str = "app",
        lease: float = 10.0,
        sign: Sign | None = None,
    ) -> None:
        """`lease`: for so many seconds a run that was killed keeps the next tick of its schedule out.
        `sign` is `signer.sign` where workers run signed jobs only."""
        self._jobs, self._owner, self._lease, self._sign = jobs, owner, lease, sign
        self._all: dict[str, Schedule] = {}
        taken = [name for one in schedules for name in (one.id, *one.was)]
        for one in schedules:
            _check(one, jobs)
            if taken.count(one.id) > 1:
                raise InvalidSchedule(f"two schedules are, or were, called {one.id!r}")
            self._all[one.id] = one

    def __iter__(self) -> Iterator[Schedule]:
        return iter(self._all.values())

    def __getitem__(self, schedule_id: str) -> Schedule:
        if found := self._all.get(schedule_id):
            return found
        known = ", ".join(sorted(self._all)) or "none"
        raise UnknownSchedule(f"no schedule {schedule_id!r} (declared: {known})")

    # -- keeping them in Redis -----------------------------------------------------------------------------

    async def apply(self, producer: Queues, engine: AsyncEngine) -> Applied:
        """Make Redis hold exactly what is declared. Call it at the start of every instance."""
        done = Applied()
        redis: Any = producer.redis
        applied = await self._applied(producer)
        await self._take_over_renamed(engine)
        for old, text in applied.items():
            queue = json.loads(text)["queue"]
            if old not in self._all or self._jobs[self._all[old].job].queue != queue:
                await producer.queue(queue).removeJobScheduler(old)
                await redis.hdel(self._registry(producer), old)
                done.removed.append(old)
        for one in self:
            mine = self._fingerprint(one)
            same = one.id in applied and json.loads(applied[one.id])["fingerprint"] == mine
            written = await self._write(one, producer, engine, only_if_broken=same)
            (done.written if written else done.unchanged).append(one.id)
            entry = json.dumps({"queue": self._jobs[one.job].queue, "fingerprint": mine})
            await redis.hset(self._registry(producer), one.id, entry)
        return done

    async def heal(self, producer: Queues, engine: AsyncEngine) -> Applied:
        """Put right what is lost or wrong, and leave alone what a newer version of the app declared.

        Call it now and then: a scheduler whose next job was lost with Redis' data never fires again.
        """
        applied = await self._applied(producer)
        if not applied:
            return await self.apply(producer, engine)
        done = Applied()
        for one in self:
            said = applied.get(one.id)
            if said and json.loads(said)["fingerprint"] == self._fingerprint(one):
                written = await self._write(one, producer, engine, only_if_broken=True)
                (done.written if written else done.unchanged).append(one.id)
        return done

    async def _write(
        self, one: Schedule, producer: Queues, engine: AsyncEngine, *, only_if_broken: bool
    ) -> bool:
        queue = producer.queue(self._jobs[one.job].queue)
        state = (await self._states(engine)).get(one.id)
        now = await _server_millis(producer.redis)  # one clock for all instances
        expected = one.cadence.next_after(max(now, state.last_slot if state else 0))
        if only_if_broken and await _sound(queue, one, expected, now):
            return False
        repeat: dict[str, Any] = {"pattern": one.cron, "tz": one.tz}
        if one.every is not None:
            repeat = {"every": round(one.every * 1000), "startDate": expected}
        job_type = self._jobs[one.job]
        ref = JobRef(job_type.queue, one.job, f"repeat:{one.id}", "")
        options = producer.outgoing(ref, JobRequest(one.job, one.payload, key="", priority=one.priority)).opts
        options |= {"attempts": job_type.retry.attempts}
        del options["jobId"]
        scheduler = JobScheduler(queue, repeat_strategy=lambda _millis, _opts: expected)
        await scheduler.upsertJobScheduler(one.id, repeat, one.job, self._data(one), options)
        return True

    def _data(self, one: Schedule) -> dict[str, Any]:
        said = {"id": one.id, **{k: v for k, v in asdict(one.cadence).items() if v is not None}}
        data = {**self._jobs.encode(one.job, one.payload), FIELD: said}
        return self._sign(one.job, f"repeat:{one.id}", data) if self._sign else data

    def _fingerprint(self, one: Schedule) -> str:
        body = self._jobs.encode(one.job, one.payload)
        what = [one.job, self._jobs[one.job].queue, asdict(one.cadence), str(one.priority), body]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

    async def _applied(self, producer: Queues) -> dict[str, str]:
        client: Any = producer.redis
        found: dict[str, str] = await client.hgetall(self._registry(producer))
        return found

    def _registry(self, producer: Queues) -> str:
        return f"{producer.prefix}-schedules:{self._owner}"

    async def _take_over_renamed(self, engine: AsyncEngine) -> None:
        """The last slot moves to the new id: a slot that ran under the old one is not run again."""
        for one in self:
            async with begin(engine) as tx:
                for old in one.was:
                    taken = select(schedule_state.c.id).where(schedule_state.c.id == one.id)
                    if (await tx.execute(taken)).first() is None:
                        for table in (schedule_state, missed_slots):
                            await tx.execute(update(table).where(table.c.id == old).values(id=one.id))
                    for table in (schedule_state, missed_slots):
                        await tx.execute(delete(table).where(table.c.id == old))

    # -- running a tick ------------------------------------------------------------------------------------

    async def begin(self, ctx: JobContext, store: AsyncEngine) -> Lease | None:
        """Counts what was missed, spreads, keeps ticks apart: the lease to hold while this one runs."""
        tick = tick_of(ctx.job_id, ctx.job.data)
        one = self._all.get(tick.schedule) if tick else None
        if tick is None or one is None:  # another application's, or one that was removed a moment ago
            return None
        wait = tick.slot / 1000 + _spread(one, tick.slot) - time.time()
        if wait > (0.05 if one.jitter else EARLY):
            raise Snooze(wait, "its slot has not come")
        await self._note(store, one, tick.slot)
        if one.when_late == "skip" and one.cadence.next_after(tick.slot) <= time.time() * 1000:
            await self._count(store, one.id, "skipped")
            raise Cancelled("skipped: the next tick is due as well")
        lease = Lease(ctx.job.queue.client, f"schedule:{one.id}", ttl=self._lease, label=str(tick.slot))
        holder = await lease.holder()
        if holder is not None and one.overlap == "skip" and holder != str(tick.slot):
            await self._count(store, one.id, "skipped")
            raise Cancelled("skipped: the tick before it still runs")
        return lease  # held by the pipeline while the handler runs; when it is taken, the tick waits

    async def _note(self, engine: AsyncEngine, one: Schedule, slot: int) -> None:
        dialect = postgresql if is_postgres(engine) else sqlite
        t, mine = schedule_state.c, schedule_state.c.id == one.id
        fresh = dialect.insert(schedule_state).values(id=one.id, last_slot=slot, ticks=1, missed=0, skipped=0)
        missed: Sequence[int] = ()
        async with begin(engine) as tx:
            if (await tx.execute(fresh.on_conflict_do_nothing().returning(t.id))).first() is not None:
                return
            last = await tx.scalar(select(t.last_slot).where(mine).with_for_update())
            if last is None:
                return  # renamed this very moment
            values: dict[str, Any] = {"ticks": t.ticks + 1}
            if slot > last:
                missed = one.cadence.between(last, slot)
                values |= {"last_slot": slot, "missed": t.missed + len(missed)}
                await _remember(tx, one.id, missed)
            elif await _forget(tx, one.id, slot):
                values["missed"] = t.missed - 1
            else:
                return  # the same slot again, after a crash or a retry
            await tx.execute(update(schedule_state).where(mine).values(**values))
        if missed:
            fields = {"schedule": one.id, "missed": len(missed), "slot": slot}
            log.warning("ticks missed", extra={"fields": fields})

    async def _count(self, engine: AsyncEngine, schedule_id: str, column: str) -> None:
        mine, counter = schedule_state.c.id == schedule_id, schedule_state.c[column]
        async with begin(engine) as tx:
            await tx.execute(update(schedule_state).where(mine).values({column: counter + 1}))

    # -- looking -------------------------------------------------------------------------------------------

    async def states(self, producer: Queues, engine: AsyncEngine) -> list[ScheduleState]:
        """Every declared schedule with its next slot, and what became of the earlier ones."""
        found, kept = [], await self._states(engine)
        for one in self:
            score = await producer.redis.zscore(
                producer.queue(self._jobs[one.job].queue).toKey("repeat"), one.id
            )
            row, slot = kept.get(one.id), None if score is None else int(score)
            past = (row.last_slot, row.ticks, row.missed, row.skipped) if row else ()
            found.append(ScheduleState(one, slot, *past))
        return found

    async def _states(self, engine: AsyncEngine) -> dict[str, Any]:
        async with read(engine) as connection:
            return {row.id: row for row in await connection.execute(select(schedule_state))}


def _check(one: Schedule, jobs: JobTypes) -> None:
    if not isinstance(one.id, str) or not re.fullmatch(r"[a-z0-9-]{1,60}", one.id):
        raise InvalidSchedule(f"schedule id {one.id!r}: lower-case letters, digits and dashes, up to 60")
    try:
        cadence = one.cadence
        jobs.encode(one.job, one.payload)
    except JobError as error:
        raise InvalidSchedule(f"schedule {one.id}: {error}") from None
    if one.overlap not in ("skip", "queue") or one.when_late not in ("run", "skip"):
        raise InvalidSchedule(f"schedule {one.id}: overlap is skip or queue, when_late is run or skip")
    if not 0 <= one.jitter < 86_400 or (cadence.every is not None and one.jitter >= cadence.every):
        raise InvalidSchedule(f"schedule {one.id}: jitter {one.jitter!r} must be shorter than its interval")


async def _remember(tx: AsyncConnection, schedule_id: str, slots: Sequence[int]) -> None:
    if not slots:
        return
    rows = [{"id": schedule_id, "slot": slot} for slot in slots[-REMEMBERED:]]
    await tx.execute(insert(missed_slots), rows)
    mine = missed_slots.c.id == schedule_id
    too_many = select(missed_slots.c.slot).where(mine).order_by(missed_slots.c.slot.desc())
    oldest = await tx.scalar(too_many.offset(REMEMBERED).limit(1))
    if oldest is not None:
        await tx.execute(delete(missed_slots).where(mine, missed_slots.c.slot <= oldest))


async def _forget(tx: AsyncConnection, schedule_id: str, slot: int) -> bool:
    """True: the slot was reported as missed, and from now on it is not."""
    this = missed_slots.c.id == schedule_id, missed_slots.c.slot == slot
    return (await tx.execute(delete(missed_slots).where(*this))).rowcount == 1


def _spread(one: Schedule, slot: int) -> float:
    return random.Random(f"{one.id}:{slot}").random() * one.jitter  # the same in every process


async def _sound(queue: Queue, one: Schedule, expected: int, now: int) -> bool:
    """Is a job for the right slot on its way?"""
    client: Any = queue.client
    score = await client.zscore(queue.toKey("repeat"), one.id)
    if score is None:
        return False
    slot = int(score)
    state = str(await queue.getJobState(f"repeat:{one.id}:{slot}"))
    if state in ("completed", "failed", "unknown"):
        # Its successor is added when it starts, so a moment later all is well: only an old one is a dead end.
        return slot > now - 60_000 and state != "unknown"
    return slot <= now or slot == expected or one.every is not None


async def _server_millis(redis: Redis) -> int:
    seconds, micros = await redis.time()
    return int(seconds) * 1000 + int(micros) // 1000


def ticking(schedules: Schedules, store: AsyncEngine) -> Step:
    """The step for the ticks of `schedules`; jobs that are none pass. Between what reads the job and `once`."""

    @needs("payload")
    async def ticking(run: JobContext, call_next: CallNext) -> Any:
        check_slot(run.job_id, run.job.data)
        lease = await schedules.begin(run, store)
        if lease is None:
            return await call_next(run)
        async with lease:
            return await call_next(run)

    return ticking


class ScheduleKeeper(Periodic):
    """Applies the schedules when its process starts and heals them from time to time; drains like a worker."""

    def __init__(
        self, schedules: Schedules, producer: Queues, store: AsyncEngine, *, every: float = 30.0
    ) -> None:
        super().__init__("looking after the schedules", self._keep, every=every)
        self._schedules, self._producer, self._store = schedules, producer, store
        self._how = schedules.apply

    async def _keep(self) -> None:
        done = await self._how(self._producer, self._store)
        if done.written or done.removed:
            log.info(
                "schedules changed", extra={"fields": {"written": done.written, "removed": done.removed}}
            )
        self._how = self._schedules.heal
