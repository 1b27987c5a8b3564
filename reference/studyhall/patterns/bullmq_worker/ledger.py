"""Every change of a job's state, written with BullMQ's own scripts.

Promise: a change is written once, also when Redis goes away in the middle: it is repeated until Redis
answers, and a repetition that finds the first one done is a success. A worker that no longer owns the job
changes nothing (`LockLost`). Where a script can hand out the next job in the same call, it does.
It does not hold when Redis loses acknowledged writes (no AOF): then the job runs again. And a job that was
handed out in a reply that got lost waits for its lock to expire; then it is found as stalled.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import msgpack
from bullmq.abort_controller import AbortController
from bullmq.job import Job
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, ResponseError

from .events import is_outage

__all__ = ["Found", "JobLedger", "LockLost", "ChangeRefused", "Run", "ServerClock"]

READ_CLOCK_EVERY = 1.0

# In the order in which BullMQ's scripts expect them.
_QUEUE_KEYS = ("wait", "active", "prioritized", "events", "stalled", "limiter", "delayed", "paused", "meta", "pc")


class LockLost(Exception):
    """The job's lock expired or another worker holds it: this run's outcome was thrown away."""


class ChangeRefused(Exception):
    """BullMQ's script refused the change although the lock is ours; `code` is its answer."""

    FAILED_CHILDREN: ClassVar[int] = -9

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(eq=False)
class Run:
    """One execution of one job by this worker."""

    job: Job
    job_id: str
    token: str
    abort: AbortController | None = field(default=None, init=False)  # for a processor that takes a signal
    task: asyncio.Task[None] | None = field(default=None, init=False)
    processing: bool = field(default=True, init=False)  # the processor has not come back: cancelling makes sense
    cancelled: str | None = field(default=None, init=False)  # why this worker cancelled it
    draining: bool = field(default=False, init=False)  # … because it drains
    lost: bool = field(default=False, init=False)  # … because the lock is gone


class Found(NamedTuple):
    """What a script answered to "and the next one?"."""

    fields: dict[str, str] | None = None  # the raw job, or None
    job_id: str = ""
    limited_ms: float = 0  # rate limit: nothing starts for this long
    next_at_ms: float = 0  # epoch of the next delayed job


class ServerClock:
    """The Redis server's time of day, the one clock that all instances share, without a round trip per look.

    At most one answer's travel time behind, and independent of this machine's time of day: a worker whose clock is an
    hour ahead, or is set while it runs, starts nothing early. It does not hold until the next `read` after the server's
    own clock was set, after a failover to a server with another clock, and after this machine was suspended.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()  # a guess until the first reading
        self._read_at = float("-inf")

    def millis(self) -> int:
        """Epoch milliseconds."""
        return int((time.monotonic() + self._offset) * 1000)

    async def keep(self, redis: Redis) -> None:
        """`read`, unless the last reading is fresh."""
        if time.monotonic() - self._read_at > READ_CLOCK_EVERY:
            await self.read(redis)

    async def read(self, redis: Redis) -> None:
        asked = time.monotonic()
        seconds, micros = await redis.time()
        server = int(seconds) + int(micros) / 1_000_000
        self._read_at = time.monotonic()
        earliest, latest = server - self._read_at, server - asked
        # A slow answer leaves a wide gap and teaches nothing: only what contradicts the offset corrects it.
        if not earliest <= self._offset <= latest:
            self._offset = earliest


@dataclass(slots=True)
class JobLedger:
    backend: Any  # bullmq.backends.RedisBackend
    lock_ms: int
    limiter: dict[str, int] | None
    on_outage: Callable[[BaseException], None]
    clock: ServerClock = field(default_factory=ServerClock)
    metrics: Mapping[str, int] | None = None
    worker: str | None = None  # written to every job that is taken: who has it
    give_up_at: float = float("inf")  # monotonic; a draining worker sets it
    _keys: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)

    async def take(self, token: str) -> Found:
        """The next waiting job, locked and active. One try: the caller decides how to wait."""
        key = self.backend.keys
        args = [key[""], self.clock.millis(), self._claim(token)]
        keys = [key[name] for name in (*_QUEUE_KEYS, "marker")]
        try:
            return _found(await self._script("moveToActive", keys, args))
        except ResponseError as error:
            next_job = await self._half_taken(token, error)
            return next_job if next_job.fields else await self.take(token)

    async def repair(self, run: Run, fields: Mapping[str, str]) -> None:
        """Overwrite fields that the scripts could not work with."""
        await self.repeat(lambda: self.backend.conn.hset(self.backend.toKey(run.job_id), mapping=fields))

    def completed(self, run: Run, value: str, keep: Any, *, fetch: bool) -> Awaitable[Found]:
        return self._finish(run, "completed", value, keep=keep, fetch=fetch, fields=None)

    def failed(self, run: Run, reason: str, keep: Any, fields: dict[str, str], *, fetch: bool) -> Awaitable[Found]:
        return self._finish(run, "failed", reason, keep=keep, fetch=fetch, fields=fields)

    async def delayed(
        self, run: Run, delay_ms: int, *, consume: bool, fields: dict[str, str] | None, fetch: bool
    ) -> Found:
        options: dict[str, Any] = {"skipAttempt": not consume, "fieldsToUpdate": fields, "fetchNext": fetch}
        scripts = self.backend.scripts
        now = self.clock.millis()
        keys, args = scripts.moveToDelayedArgs(run.job_id, now, run.token, delay_ms, options)
        if fetch:
            args[-1] = self._claim(run.token)  # bullmq leaves the worker's name out
        next_job = _found(await self._write(run, "moveToDelayed", keys, args, ("delayed", "waiting", "prioritized")))
        run.job.attemptsMade += consume
        return next_job

    async def waiting(self, run: Run, fields: dict[str, str]) -> None:
        """Back to waiting at once, consuming an attempt. This script hands out no next job."""
        lifo = bool(run.job.opts.get("lifo"))
        scripts = self.backend.scripts
        keys, args = scripts.retryJobArgs(run.job_id, lifo, run.token, {"fieldsToUpdate": fields})
        args[1] = self.clock.millis()  # bullmq used its own clock; the script starts delayed jobs by it
        await self._write(run, "retryJob", keys, args, ("waiting", "prioritized"))
        run.job.attemptsMade += 1

    async def repeat(self, call: Callable[[], Awaitable[Any]], failed: Exception | None = None) -> Any:
        """`call` until Redis answers: jittered, at most 1 s apart, so that work resumes right after it."""
        pause = 0.05
        while True:
            try:
                if failed is not None:
                    raise failed
                return await call()
            except Exception as error:
                if not is_outage(error) or time.monotonic() > self.give_up_at:
                    raise
                self.on_outage(error)
            failed = None
            await asyncio.sleep(random.uniform(pause / 2, pause))
            pause = min(pause * 2, 1.0)

    async def _finish(
        self, run: Run, state: str, value: str, *, keep: Any, fetch: bool, fields: dict[str, str] | None
    ) -> Found:
        job, prefix, opts = run.job, self.backend.keys[""], run.job.opts
        before, after = self._keys.get(state) or self._keys_to_finish(state)
        more = {
            "keepJobs": _keep(keep),
            "attempts": job.attempts,
            "attemptsMade": job.attemptsMade,
            "maxMetricsSize": (self.metrics or {}).get("maxDataPoints") or "",
            "fpof": opts.get("failParentOnFailure", False),
            "cpof": opts.get("continueParentOnFailure", False),
            "idof": opts.get("ignoreDependencyOnFailure", False),
            "rdof": opts.get("removeDependencyOnFailure", False),
        }
        now, prop = self.clock.millis(), "returnvalue" if state == "completed" else "failedReason"
        fetch_next = "1" if fetch else ""
        args = [run.job_id, now, prop, value, state, fetch_next, prefix, self._claim(run.token, **more)]
        if fields:
            args.append(msgpack.packb([part for pair in fields.items() for part in pair]))
        keys = [*before, prefix + run.job_id, *after]
        # "unknown": a finished job that its retention rule removed at once.
        next_job = _found(await self._write(run, "moveToFinished", keys, args, (state, "unknown")))
        job.finishedOn, job.attemptsMade = now, job.attemptsMade + 1
        return next_job

    def _keys_to_finish(self, state: str) -> tuple[list[str], list[str]]:
        key = self.backend.keys
        before = [key[name] for name in (*_QUEUE_KEYS, state)]
        self._keys[state] = (before, [f"{key['']}metrics:{state}", key["marker"]])
        return self._keys[state]

    async def _write(self, run: Run, script: str, keys: list[str], args: list[Any], done: tuple[str, ...]) -> Any:
        """Run a script that changes `run`'s job; `done`: the states that say an earlier try got through."""
        tries = 1

        def again() -> Awaitable[Any]:
            nonlocal tries
            tries += 1
            return self._script(script, keys, args)

        try:
            try:
                reply = await self._script(script, keys, args)
            except Exception as failed:
                reply = await self.repeat(again, failed)
        except ResponseError as broken:
            # If our change got through, it was the next job that broke the script.
            if await self.repeat(lambda: self.backend.getState(run.job_id)) not in done:
                raise
            return await self._half_taken(run.token, broken)
        if not isinstance(reply, int) or reply >= 0:
            return reply
        if reply in (-1, -2, -3, -6):  # no such job, no lock, not active, another's lock
            # After an outage this can be the echo of our own first try, whose reply was lost on the way.
            if tries > 1 and await self.repeat(lambda: self.backend.getState(run.job_id)) in done:
                return None
            raise LockLost(f"job {run.job_id} is no longer ours ({script}: {reply}); its outcome is dropped")
        error = self.backend.scripts.finishedErrors({"code": reply, "jobId": run.job_id, "command": script})
        raise ChangeRefused(str(error), reply)

    async def _half_taken(self, token: str, error: ResponseError) -> Found:
        """The script that hands out a job failed midway (`HINCRBY ats` on text): the job is active and locked by us.
        If its key is not a hash (WRONGTYPE) there is no job: nobody could end it, so its id leaves the queue."""
        conn, key = self.backend.conn, self.backend.keys
        no_hash = str(error).startswith("WRONGTYPE")
        if no_hash or "not an integer" in str(error):
            active = await conn.lrange(key["active"], 0, -1)
            locks = await conn.mget([f"{key['']}{job_id}:lock" for job_id in active]) if active else ()
            for job_id, lock in zip(active, locks, strict=True):
                if lock == token and no_hash:
                    await conn.lrem(key["active"], 0, job_id)
                    await conn.delete(f"{key['']}{job_id}:lock")
                    self.on_outage(ValueError(f"{key['']}{job_id} is not a hash: removed from the queue"))
                    return Found()
                if lock == token:
                    return Found(await conn.hgetall(key[""] + job_id), job_id)
        raise error

    async def _script(self, name: str, keys: list[str], args: list[Any]) -> Any:
        script = self.backend.connection.commands[name]
        try:
            return await self.backend.conn.execute_command("EVALSHA", script.sha, len(keys), *keys, *args)
        except NoScriptError:  # a restarted server: redis-py's own call, 10 us slower, loads it first
            return await script(keys=keys, args=args)

    def _claim(self, token: str, **more: Any) -> bytes:
        claim = {"token": token, "lockDuration": self.lock_ms, "limiter": self.limiter, **more}
        if self.worker:
            claim["name"] = self.worker
        return msgpack.packb(claim)  # type: ignore[no-any-return]


def _keep(rule: Any) -> dict[str, int]:
    """BullMQ's removeOnComplete / removeOnFail: True = remove, number = keep that many, {"count", "age"}."""
    if isinstance(rule, dict):
        return rule
    if isinstance(rule, bool) or rule is None:
        return {"count": 0 if rule else -1}
    return {"count": int(rule)}


def _found(reply: Any) -> Found:
    if isinstance(reply, Found):
        return reply
    if not isinstance(reply, list):
        return Found()
    raw, job_id, limited, next_at = (*reply, 0, 0)[:4]
    fields = dict(zip(pairs := iter(raw or ()), pairs, strict=True)) or None
    return Found(fields, str(job_id), float(limited or 0), float(next_at or 0))
