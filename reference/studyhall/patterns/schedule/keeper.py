"""Recurring jobs: declared in code, kept by BullMQ's job scheduler, at most one effect per tick.

Promise
- `apply` may be called by any number of instances at any time: it writes only what changed, removes what is
  no longer declared, and takes over renamed schedules (`was`).
- Versions only go up: an instance that declares a lower `version` than the one in force changes nothing and says
  so once. So an old instance that restarts in the middle of a rolling deploy removes nothing of the new one.
- A tick is a slot of its schedule, the slot is part of the job's id, and that id is the idempotency key. So
  whoever runs it, late or again after a crash: one slot, at most one effect. There is no lock to lose: SET NX +
  DEL ran a job three times when it outlived the lock, and twice when a clock was 100 ms off.
- Slots are judged by the clock of the Redis server: a worker whose own clock is an hour ahead starts no tick
  early and plans none late.
- Every slot since the first is accounted for: started or reported as missed (`history`).
- A late tick runs once for all that were missed, or not at all (`when_late`).
- A tick that finds the one before it still running is skipped, or waits (`overlap`).

When it does NOT hold: effects outside the `save` of a handler, as in `idempotency`. Ticks wait for a worker:
with none running they are late, then missed. Two declarations of the same version: the last `apply` wins, so raise
`version` with every change, also to revert one. A stock worker on the same queue plans the next tick by its own
clock; `heal` corrects it. Daylight saving: see `slots`.
"""

import hashlib
import json
import logging
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from bullmq import Queue
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from ..core import bullmq_scheduler
from ..core.clock import Periodic
from ..core.errors import Cancelled, JobError, Snooze
from ..core.execution import CallNext, JobContext, Step, needs
from ..core.request import JobRequest, Outgoing
from ..lease import Lease
from . import history
from .registry import ScheduleRegistry
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
Sign = Callable[[str, str, dict[str, Any]], dict[str, Any]]


class _Producer(Protocol):
    """What is needed of a producer."""

    redis: Redis
    prefix: str

    def queue(self, name: str) -> Any: ...
    def outgoing(self, request: JobRequest) -> Outgoing: ...


class Jobs(Protocol):
    """What is needed of `typed_jobs.JobTypes`: each type's queue and attempts."""

    def __getitem__(self, name: str) -> Any: ...
    def encode(self, job: str, payload: Any) -> dict[str, Any]: ...


class UnknownSchedule(JobError):
    """No schedule of this id is declared. `schedule list` shows the declared ones."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """`jitter`: seconds over which instances of a fleet are spread; the same for one slot in every run."""

    id: str
    job: str
    cron: str | None = None
    tz: str = "UTC"
    every: float | None = None
    payload: Any = field(default_factory=dict)  # a mapping, or a model of the job type
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
    """What `apply` or `heal` changed. `later`: the version in force, if later than ours."""

    written: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    later: int | None = None


class Schedules:
    """The schedules of one application. `owner` keeps those of two applications on one Redis apart."""

    def __init__(
        self,
        jobs: Jobs,
        schedules: Sequence[Schedule],
        *,
        owner: str = "app",
        version: int = 0,
        lease: float = 10.0,
        sign: Sign | None = None,
    ) -> None:
        """`version` of this declaration: raise it with every change, so that two versions of the application
        that run side by side do not undo each other. `lease`: the seconds for which a run that was killed keeps
        the next tick of its schedule out. `sign` is `signer.sign` where workers run signed jobs only."""
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise InvalidSchedule(f"version {version!r}: a whole number from 0, raised with every change")
        self._jobs, self._owner, self._version, self._lease = jobs, owner, version, lease
        self._sign = sign
        self._warned = False  # that a later version is in force
        self._all: dict[str, Schedule] = {}
        taken = [name for schedule in schedules for name in (schedule.id, *schedule.was)]
        for schedule in schedules:
            _check(schedule, jobs)
            if taken.count(schedule.id) > 1:
                raise InvalidSchedule(f"two schedules are, or were, called {schedule.id!r}")
            self._all[schedule.id] = schedule

    def __iter__(self) -> Iterator[Schedule]:
        return iter(self._all.values())

    def __getitem__(self, schedule_id: str) -> Schedule:
        if result := self._all.get(schedule_id):
            return result
        known = ", ".join(sorted(self._all)) or "none"
        raise UnknownSchedule(f"no schedule {schedule_id!r} (declared: {known})")

    # -- keeping them in Redis -----------------------------------------------------------------------------

    async def apply(self, producer: _Producer, store: AsyncEngine) -> Applied:
        """Make Redis hold exactly what is declared, unless a later `version` is in force. Call it at the start
        of every instance."""
        registry = self._registry(producer)
        if later := await registry.claim(self._version, self._declaration()):
            return self._outdated(later)
        done, (_, _, entries) = Applied(), await registry.read()
        for schedule in self:
            if schedule.was:
                await history.take_over(store, schedule.id, schedule.was)
        for old, entry in entries.items():
            if old not in self._all or self._jobs[self._all[old].job].queue != entry["queue"]:
                await producer.queue(entry["queue"]).removeJobScheduler(old)
                await registry.drop(old)
                done.removed.append(old)
        for schedule in self:
            before = next((entries[name] for name in (schedule.id, *schedule.was) if name in entries), None)
            await self._keep(schedule, before, producer, store, done)
        return done

    async def heal(self, producer: _Producer, store: AsyncEngine) -> Applied:
        """Repair what is lost or wrong, and leave alone what another version of the app declared.

        Call it now and then: a scheduler whose next job was lost with Redis' data never fires again.
        """
        version, declaration, entries = await self._registry(producer).read()
        if version > self._version:
            return self._outdated(version)
        if version < self._version or declaration == self._declaration():
            return await self.apply(producer, store)
        done = Applied()
        for schedule in self:
            entry = entries.get(schedule.id)
            if entry and entry["fingerprint"] == self._fingerprint(schedule):
                await self._keep(schedule, entry, producer, store, done)
        return done

    async def _keep(
        self, schedule: Schedule, entry: dict[str, Any] | None, producer: _Producer, store: AsyncEngine, done: Applied
    ) -> None:
        """Write the schedule if it is new, changed or broken; `entry`: how it stood in the registry."""
        queue = producer.queue(self._jobs[schedule.job].queue)
        fingerprint, when = self._fingerprint(schedule), str(schedule.cadence)
        same = entry is not None and entry["fingerprint"] == fingerprint
        score = await producer.redis.zscore(queue.toKey("repeat"), schedule.id)
        row = (await history.past(store)).get(schedule.id)
        now = await server_millis(producer.redis)  # read last: both were noted before it
        # A last slot in the future was noted by a clock that was ahead.
        last = row.last_slot if row and row.last_slot <= now + history.EARLY else 0
        slot = schedule.cadence.next_after(max(now, last))
        if same and await _is_sound(queue, schedule, score, slot, now):
            done.unchanged.append(schedule.id)
            return
        changed = entry is not None and entry.get("when", when) != when
        since = now if changed else (entry or {}).get("since", 0)
        if score is not None and score > now:
            # For an interval, BullMQ would keep the slot a job waits for, even an hour too late.
            await queue.removeJobScheduler(schedule.id)
        job_id = f"repeat:{schedule.id}:{slot}"
        if await queue.getJobState(job_id) in ("completed", "failed"):
            await queue.remove(job_id)  # it ran early, by a clock that was ahead: free its id
        repeat: dict[str, Any] = {"pattern": schedule.cron, "tz": schedule.tz}
        if schedule.every is not None:
            repeat = {"every": round(schedule.every * 1000)}
        options, data = self._options(schedule, producer), self._data(schedule, since)
        await bullmq_scheduler.add(queue, schedule.id, slot, schedule.job, data, options, repeat=repeat, now=now)
        entry = {"queue": queue.name, "fingerprint": fingerprint, "when": when, "since": since}
        await self._registry(producer).put(schedule.id, entry)
        done.written.append(schedule.id)

    def _options(self, schedule: Schedule, producer: _Producer) -> dict[str, Any]:
        job_type = self._jobs[schedule.job]
        request = JobRequest(
            schedule.job, schedule.payload, schedule.id, priority=schedule.priority, queue=job_type.queue
        )
        return producer.outgoing(request).opts | {"attempts": job_type.retry.attempts}

    def _data(self, schedule: Schedule, since: int) -> dict[str, Any]:
        cadence = {key: value for key, value in asdict(schedule.cadence).items() if value is not None}
        body = self._jobs.encode(schedule.job, schedule.payload)
        data = {**body, FIELD: {"id": schedule.id, **cadence, "since": since}}
        return self._sign(schedule.job, f"repeat:{schedule.id}", data) if self._sign else data

    def _fingerprint(self, schedule: Schedule) -> str:
        body = self._jobs.encode(schedule.job, schedule.payload)
        when, queue = asdict(schedule.cadence), self._jobs[schedule.job].queue
        parts = [schedule.job, queue, when, str(schedule.priority), body]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def _declaration(self) -> str:
        lines = sorted(f"{schedule.id} {self._fingerprint(schedule)}" for schedule in self)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def _outdated(self, later: int) -> Applied:
        if not self._warned:
            self._warned = True
            text = "version %d of the schedules is in force: this instance declares version %d and changes nothing"
            log.warning(text, later, self._version)
        return Applied(later=later)

    def _registry(self, producer: _Producer) -> ScheduleRegistry:
        return ScheduleRegistry(producer.redis, f"{producer.prefix}-schedules:{self._owner}")

    # -- running a tick ------------------------------------------------------------------------------------

    async def begin(self, run: JobContext, store: AsyncEngine) -> Lease | None:
        """Counts what was missed, spreads, keeps ticks apart; returns the lease to hold while this one runs."""
        tick = tick_of(run.job_id, run.job.data)
        schedule = self._all.get(tick.schedule) if tick else None
        if tick is None or schedule is None:  # another application's, or one that was removed a moment ago
            return None
        now = await server_millis(run.job.queue.client)
        wait = tick.slot + _spread(schedule, tick.slot) - now
        if wait > history.EARLY:
            raise Snooze(wait / 1000, "its slot has not come")
        await history.note_start(store, tick, partial(server_millis, run.job.queue.client))
        if schedule.when_late == "skip" and tick.cadence.next_after(tick.slot) <= now:
            await history.count_skipped(store, schedule.id)
            raise Cancelled("skipped: the next tick is due as well")
        lease = Lease(run.job.queue.client, f"schedule:{schedule.id}", ttl=self._lease, label=str(tick.slot))
        holder = await lease.holder()
        if holder is not None and schedule.overlap == "skip" and holder != str(tick.slot):
            await history.count_skipped(store, schedule.id)
            raise Cancelled("skipped: the tick before it still runs")
        return lease  # held by the pipeline while the handler runs; when it is taken, the tick waits

    # -- looking -------------------------------------------------------------------------------------------

    async def states(self, producer: _Producer, store: AsyncEngine) -> list[ScheduleState]:
        """Every declared schedule with its next slot and the counts of earlier ones."""
        states, past = [], await history.past(store)
        for schedule in self:
            repeat = producer.queue(self._jobs[schedule.job].queue).toKey("repeat")
            score, row = await producer.redis.zscore(repeat, schedule.id), past.get(schedule.id)
            counts = (row.last_slot, row.ticks, row.missed, row.skipped) if row else ()
            states.append(ScheduleState(schedule, None if score is None else int(score), *counts))
        return states


async def server_millis(redis: Redis) -> int:
    seconds, micros = await redis.time()
    return int(seconds) * 1000 + int(micros) // 1000


def _check(schedule: Schedule, jobs: Jobs) -> None:
    if not isinstance(schedule.id, str) or not re.fullmatch(r"[a-z0-9-]{1,60}", schedule.id):
        raise InvalidSchedule(f"schedule id {schedule.id!r}: lower-case letters, digits and dashes, up to 60")
    try:
        cadence = schedule.cadence
        jobs.encode(schedule.job, schedule.payload)
    except JobError as error:
        raise InvalidSchedule(f"schedule {schedule.id}: {error}") from None
    if schedule.overlap not in ("skip", "queue") or schedule.when_late not in ("run", "skip"):
        raise InvalidSchedule(f"schedule {schedule.id}: overlap is skip or queue, when_late is run or skip")
    if not 0 <= schedule.jitter < 86_400 or (cadence.every is not None and schedule.jitter >= cadence.every):
        raise InvalidSchedule(f"schedule {schedule.id}: jitter {schedule.jitter!r} must be shorter than its interval")


def _spread(schedule: Schedule, slot: int) -> float:
    """In milliseconds, the same in every process."""
    return random.Random(f"{schedule.id}:{slot}").random() * schedule.jitter * 1000


async def _is_sound(queue: Queue, schedule: Schedule, score: float | None, expected: int, now: int) -> bool:
    """Is a job for the right slot on its way? `score` was read before `now`."""
    if score is None:
        return False
    slot = int(score)
    state = str(await queue.getJobState(f"repeat:{schedule.id}:{slot}"))
    if state in ("completed", "failed", "unknown"):
        # Its successor is added when it starts, so a moment later all is well: only an old one is a dead end.
        return now - 60_000 < slot <= now + history.EARLY and state != "unknown"
    if slot <= now or slot == expected:
        return True
    # Or the expected one was taken a little early, and waits or runs already.
    state = str(await queue.getJobState(f"repeat:{schedule.id}:{expected}"))
    return state != "unknown" and slot == schedule.cadence.next_after(expected)


def ticking(schedules: Schedules, store: AsyncEngine) -> Step:
    """The step for the ticks of `schedules`; other jobs pass. Goes between what reads the job and `once`."""

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

    def __init__(self, schedules: Schedules, producer: _Producer, store: AsyncEngine, *, every: float = 30.0) -> None:
        super().__init__("looking after the schedules", self._look, every=every, retry=1.0)
        self._schedules, self._producer, self._store = schedules, producer, store
        self._how = schedules.apply

    async def _look(self) -> None:
        done = await self._how(self._producer, self._store)
        if done.written or done.removed:
            log.info("schedules changed", extra={"fields": {"written": done.written, "removed": done.removed}})
        self._how = self._schedules.heal
