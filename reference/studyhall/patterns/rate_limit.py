"""Rate limits: one for a whole queue, and one per tenant that is fair.

Promises
- `queue_limit(max, per)` for `ReliableWorker(limiter=…)`: all workers of a queue together start at most `max` jobs
  in a window of `per` seconds, and lose no time between windows (the stock Python worker sleeps through some).
  A window opens with the first start after the one before it has ended, and lasts `per` by the server's clock.
- `queue_limit(max, per, evenly=True)`: at most `max` starts in ANY stretch of `per` seconds, wherever it begins;
  starts are `per / max` apart. For a provider that counts in sliding windows.
- `limited(tenant_limit(…))`, a step of a pipeline: a tenant starts at most `burst` jobs at once and `rate` per
  second after that. A job over the budget consumes no attempt; it gets its own turn in time, kept for it, and
  comes back exactly then. So a heavy tenant's backlog neither blocks a light one's job, nor comes back
  as a herd, nor starves: its jobs go in the order they were refused. `total` limits all tenants together.
- `limit.book(…)` at the producer hands turns out before the jobs are added: those beyond the budget wait as
  delayed jobs from the start. So a light tenant does not even wait while a heavy one's thousand are refused.
- Jobs that come back late (no worker, long queue) still go; the turns behind them slip by as much, so no backlog
  of overdue turns bursts out.

When they do not hold
- Without `book`, each job ahead of yours costs the time of one refusal, about a millisecond.
- BullMQ's limiter counts every job that is fetched, even one that the guard sends back: behind 300 refused jobs
  of a heavy tenant a light one waited for 300 tokens. On a queue with tenants use `total`, not `limiter`.
- Windows are adjacent: without `evenly` the end of one and the start of the next can bring up to
  `2 * max - 1` starts within less than `per`. With it there are no bursts: an idle queue starts one job, then waits.
- Starts are counted, when Redis hands a job out, not the calls that a job makes later.
- A turn that nobody takes (cancelled, or booked and not added) is lost. A run that crashed pays again.
- Redis away: `on_outage="wait"` sends the job back for a second and consumes no attempt; "allow" lets it go unlimited.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any, Literal

from redis.asyncio import Redis
from redis.exceptions import RedisError

from .core.errors import Permanent, ResourceBusy, Snooze
from .core.execution import CallNext, JobContext, Step, needs
from .core.request import JobRef, JobRequest

__all__ = ["TenantLimit", "TenantOverBudget", "UnknownTenant", "limited", "named_tenant", "queue_limit", "tenant_limit"]

TenantOf = Callable[[JobContext, Any], object]
Rate = tuple[float, int]  # per second, burst
ANSWER_SECONDS = 1.5
UNLIMITED: Rate = (0.0, 0)


class UnknownTenant(Permanent):
    """The job does not say whose it is, or names a tenant we do not have. Fix the producer; the job never ran."""


class TenantOverBudget(Snooze):
    """Not an error: the tenant's budget is used up for now, and this job's turn comes after `delay` seconds."""


def queue_limit(most: int, *, per: float, evenly: bool = False) -> dict[str, int]:
    """BullMQ's limiter option: at most `most` jobs in `per` seconds; `evenly`: wherever these seconds begin."""
    if most < 1 or per < 0.001:
        raise ValueError(f"a limit of {most} jobs per {per} s would stop the queue; pause it instead")
    window = math.ceil(per * 1000)
    if not evenly:
        return {"max": int(most), "duration": window}
    if most > window:
        raise ValueError(f"{most} jobs per {per} s, evenly, is more than one a millisecond; ask for fewer")
    # A window of one job opens with that job, so starts are a whole window apart.
    return {"max": 1, "duration": math.ceil(window / int(most))}


def named_tenant(tenant: object, known: Container[str] | None = None) -> str:
    """The tenant's name, or `UnknownTenant`. Call it at the producer too, where somebody can still fix it."""
    if not isinstance(tenant, str) or not tenant.strip():
        raise UnknownTenant(f"the tenant is empty or not text. {UnknownTenant.__doc__}")
    if known is not None and tenant not in known:
        # The name itself stays out of the logs.
        raise UnknownTenant(f"no such tenant. {UnknownTenant.__doc__}")
    return tenant


def _owner(_ctx: JobContext, payload: Any) -> object:
    return payload.owner


def tenant_limit(
    redis: Redis,
    rate: float,
    burst: int,
    *,
    tenant_of: TenantOf = _owner,
    total: Rate | None = None,
    jobs: Container[str] | None = None,
    known: Container[str] | None = None,
    horizon: float = 3600.0,
    on_outage: Literal["wait", "allow"] = "wait",
    name: str = "limit",
) -> TenantLimit:
    """For `limited`: `rate` jobs per second and tenant, `burst` of them at once.

    `total` is (rate, burst) of all tenants together, `jobs` the job names it is for (None: all), `known` the
    tenants there are. No turn is given further ahead than `horizon`: such a job asks again by then.
    """
    for per_second, at_once in ((rate, burst), total or UNLIMITED):
        if (per_second, at_once) != UNLIMITED and not (per_second > 0 and at_once >= 1):
            raise ValueError(f"a limit needs a rate above 0 and a burst of 1 at least, got {per_second}, {at_once}")
    return TenantLimit(redis, (rate, burst), total or UNLIMITED, tenant_of, jobs, known, horizon, on_outage, name)


def limited(tenants: TenantLimit) -> Step:
    """Jobs of a tenant that is over its budget wait for their turn, and consume no attempt."""

    @needs("payload")
    async def limited(run: JobContext, call_next: CallNext) -> Any:
        await tenants.take(run)
        return await call_next(run)

    return limited


class TenantLimit:
    """Made by `tenant_limit`."""

    def __init__(
        self,
        redis: Redis,
        each: Rate,
        total: Rate,
        tenant_of: TenantOf,
        jobs: Container[str] | None,
        known: Container[str] | None,
        horizon: float,
        on_outage: Literal["wait", "allow"],
        name: str,
    ) -> None:
        self._each, self._total, self._horizon = each, total, horizon
        self._tenant_of, self._jobs, self._known = tenant_of, jobs, known
        self._on_outage, self._name = on_outage, name
        self._redis, self._script = redis, redis.register_script(_TAKE_TURN)

    async def take(self, run: JobContext) -> None:
        """Take the token of this job's tenant, or raise `TenantOverBudget` with the time of its turn."""
        if self._jobs is not None and run.name not in self._jobs:
            return
        try:
            tenant = self._tenant_of(run, run.payload)
        except (AttributeError, LookupError, TypeError) as error:
            raise UnknownTenant(f"{type(error).__name__}. {UnknownTenant.__doc__}") from None
        wait = await self.turn(named_tenant(tenant, self._known), f"{run.queue}/{run.job_id}")
        if wait > 0:
            raise TenantOverBudget(wait, f"the tenant's budget is used up; its turn is in {wait:.1f} s")

    async def turn(self, tenant: str, job: str) -> float:
        """0: go, the token is yours. Else the seconds until the turn that is now kept for this job."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                kept, wait = await self._script(**self._ask(tenant, job))
        except (RedisError, OSError) as error:
            if self._on_outage == "allow":
                return 0.0
            # The queue lives in the same Redis: nothing can be acknowledged now, so waiting loses nothing.
            raise ResourceBusy(f"the rate limit cannot be asked ({type(error).__name__})", retry_after=1.0) from error
        return self._seconds(kept, wait)

    async def book(
        self, ref: Callable[[JobRequest], JobRef], tenant: str, requests: Sequence[JobRequest]
    ) -> list[JobRequest]:
        """The tenant's requests, each delayed until its turn, for `enqueue_many`; `ref` is `producer.ref`.
        With Redis away they stay as they are: adding them will fail, and the guard decides anyway."""
        named_tenant(tenant, self._known)
        refs = [ref(request) for request in requests]
        try:
            async with (
                asyncio.timeout(ANSWER_SECONDS + len(refs) / 1_000),
                self._redis.pipeline(transaction=False) as batch,
            ):
                for job in refs:
                    await self._script(client=batch, **self._ask(tenant, f"{job.queue}/{job.id}", "book"))
                turns = await batch.execute()
        except (RedisError, OSError):
            return list(requests)
        waits = [self._seconds(*turn) for turn in turns]
        return [replace(request, delay=max(request.delay, wait)) for request, wait in zip(requests, waits, strict=True)]

    def _ask(self, tenant: str, job: str, how: str = "") -> dict[str, Any]:
        # A digest: names are of any length, and many are e-mail addresses.
        lines = [f"{self._name}:{hashlib.sha256(tenant.encode()).hexdigest()[:32]}", f"{self._name}:total"]
        keys = [key for line in lines for key in (line, f"{line}:turns")]
        limits = [part for rate, burst in (self._each, self._total) for part in (1000 / rate if rate else 0, burst)]
        return {"keys": keys, "args": [job, self._horizon * 1000, *limits, how]}

    def _seconds(self, kept: Any, wait: Any) -> float:
        # No turn is kept beyond the horizon. Spread, or all of them would ask at the same moment.
        return int(wait) / 1000 if kept else self._horizon * random.uniform(0.5, 1.0)


# Two lines, the tenant's and everybody's; a turn in the second is only given to a job whose first has come, or a
# heavy tenant's backlog would fill it. A line is a hash {next, slip} and a sorted set job -> turn, in ms of the
# server's clock. `next` is when the bucket will be full again (GCRA): taking a token moves it one interval on.
# A job that was booked while there was a token has the score BOOKED + the time: larger than any time in ms (1e15 is in
# the year 33658), so one set holds both kinds, and each kind is forgotten by its own age.
_TAKE_TURN = """
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local job, horizon, book = ARGV[1], tonumber(ARGV[2]), ARGV[7] == 'book'
local KEEP, BOOKED = 3600000, 1e15

local function turn(line, turns, interval, burst)
  if interval == 0 then return 1, 0 end
  -- Later than that, and the line slips: as many overdue jobs as make a burst may come at once, and no more.
  local LATE = math.min(2000, math.max(100, burst * interval))
  local state = redis.call('HMGET', line, 'next', 'slip')
  local slip = tonumber(state[2]) or 0
  local turn_at = tonumber(redis.call('ZSCORE', turns, job) or nil)
  if turn_at and turn_at >= BOOKED then -- booked while there was a token: it may come when it likes
    if not book then redis.call('ZREM', turns, job) end
    return 1, 0
  end
  if turn_at then
    local late = now - turn_at - slip
    if book then return 1, math.max(math.ceil(-late), 0) end
    if late < -20 then return 1, math.ceil(-late) end
    if late > LATE then redis.call('HSET', line, 'slip', slip + late) end
    redis.call('ZREM', turns, job)
    return 1, 0
  end
  local next_free = math.max(tonumber(state[1]) or 0, now - slip)
  turn_at = next_free - (burst - 1) * interval
  local wait = turn_at + slip - now
  if wait > horizon then return 0, 0 end
  redis.call('HSET', line, 'next', next_free + interval, 'slip', slip)
  if wait > 0 then
    redis.call('ZADD', turns, turn_at, job)
  elseif book then
    redis.call('ZADD', turns, BOOKED + now, job)
  end
  redis.call('ZREMRANGEBYSCORE', turns, '-inf', now - slip - KEEP)
  redis.call('ZREMRANGEBYSCORE', turns, BOOKED, BOOKED + now - KEEP)
  local life = math.ceil(math.max(next_free + interval + slip - now, 0)) + KEEP
  redis.call('PEXPIRE', line, life)
  redis.call('PEXPIRE', turns, life)
  return 1, math.max(math.ceil(wait), 0)
end

local kept, wait = 1, 0
if not redis.call('ZSCORE', KEYS[4], job) then
  kept, wait = turn(KEYS[1], KEYS[2], tonumber(ARGV[3]), tonumber(ARGV[4]))
end
if wait == 0 and kept == 1 and not book then
  kept, wait = turn(KEYS[3], KEYS[4], tonumber(ARGV[5]), tonumber(ARGV[6]))
end
return {kept, wait}
"""
