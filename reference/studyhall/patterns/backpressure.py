"""Backpressure: new jobs are refused at the edge before the queue is too long to be worth waiting in.

Promise: a queue holds at most `depth` jobs that have not started, and no job is queued behind work that is already
`age` seconds late; the caller gets `Overloaded` with `retry_after` (an HTTP 503 + Retry-After) and nothing was
stored. One small script per queue and second answers all callers of a process. Work that outlived its `max_age`
is dropped by the pipeline as `Expired`: it ends in the dead letters, never in silence.

- `depth` counts waiting, paused, prioritized, delayed and waiting-for-children: all that fills Redis. An alert on
  "waiting" alone saw 0 of a backlog of 5,000 prioritized jobs.
- `age` is the age of the oldest job that would run before the new one: same priority or higher. Old low-priority
  work does not block a critical job.

When it does not hold
- Each process looks every `cache` seconds and counts its own adds in between, so several producers together can
  exceed the limit by what they add in that time.
- Ask at the edge only. A full queue whose jobs must add follow-up jobs to it before they end would never drain.
- Redis full anyway (other data): the add fails with `QueueUnavailable`.
- Clocks: `age` and `max_age` compare the Redis server's clock (on a stock worker: that worker's own) with the time the
  producer wrote. If the producer's clock is behind, its work looks older by as much and is dropped early; if ahead,
  it looks younger. Dropped work is in the dead letters and can be replayed.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from .core.errors import Expired, Overloaded
from .core.execution import CallNext, JobContext, Step
from .core.request import Outgoing

__all__ = ["Admission", "Limits", "Load", "Overloaded", "max_age"]

LOWEST = 2_097_151  # the lowest priority BullMQ takes: 2097152 throws in Node, passes in Python


@dataclass(frozen=True, slots=True)
class Limits:
    """What a queue may hold. `age` in seconds; None: no limit."""

    depth: int | None = 10_000
    age: float | None = 300.0


@dataclass(slots=True)
class Load:
    """How full a queue is, by the server's clock. `ages`: priority (0: none) -> age of its oldest ready job."""

    depth: int
    states: dict[str, int]
    ages: dict[int, float] = field(default_factory=dict)

    def oldest(self, priority: int = LOWEST) -> float:
        """Age of the oldest ready job of this priority or a higher one."""
        return max((age for tier, age in self.ages.items() if tier <= priority), default=0.0)


class Admission:
    """`producer.admission = Admission(…)` is asked before each add. `limits`: one for all, or by queue."""

    def __init__(
        self,
        redis: Redis,
        limits: Limits | Mapping[str, Limits],
        *,
        prefix: str = "bull",
        cache: float = 1.0,
        retry_after: float = 5.0,
    ) -> None:
        self._limits, self._prefix, self._cache, self._retry_after = limits, prefix, cache, retry_after
        self._script = redis.register_script(_LOAD)
        self._seen: dict[str, tuple[float, asyncio.Task[Load]]] = {}

    async def __call__(self, jobs: Iterable[Outgoing], *, only_ask: bool = False) -> None:
        """Raises `Overloaded` when a queue cannot take its part of these jobs. Redis errors pass through."""
        for (queue, priority), count in Counter((job.ref.queue, job.opts["priority"]) for job in jobs).items():
            await self.admit(queue, 0 if only_ask else count, priority)

    async def ask(self, jobs: Iterable[Outgoing]) -> None:
        """The same for jobs that are added later, elsewhere: nothing is counted."""
        await self(jobs, only_ask=True)

    async def admit(self, queue: str, jobs: int = 1, priority: int = LOWEST) -> None:
        """Raises `Overloaded` when the queue cannot take `jobs` more (0: only ask)."""
        limits = self._limits if isinstance(self._limits, Limits) else self._limits.get(queue)
        if limits is None:
            return
        load = await self._cached(queue)
        late = load.oldest(priority)
        if limits.depth is not None and load.depth + max(jobs, 1) > limits.depth:
            raise self._refusal(f"{queue} holds {load.depth} jobs of {limits.depth}")
        if limits.age is not None and late > limits.age:
            raise self._refusal(f"work in {queue} is {late:.0f} s late, the limit is {limits.age:g} s")
        load.depth += jobs  # until the next look

    async def load(self, queue: str) -> Load:
        """A fresh look, for consoles and health checks."""
        reply: Any = await self._script(keys=[f"{self._prefix}:{queue}:"])
        states = dict(
            zip(("waiting", "paused", "prioritized", "delayed", "children"), map(int, reply[:5]), strict=True)
        )
        tiers = [int(part) for part in reply[5:]]
        ages = {tier: age / 1000 for tier, age in zip(tiers[::2], tiers[1::2], strict=True)}
        return Load(sum(states.values()), states, ages)

    async def _cached(self, queue: str) -> Load:
        # Concurrent callers share one look. Shielded: one that gives up must not end it for the others.
        at, looking = self._seen.get(queue, (0.0, None))
        failed = looking is not None and looking.done() and (looking.cancelled() or looking.exception())
        if looking is None or failed or time.monotonic() - at > self._cache:
            looking = asyncio.create_task(self.load(queue))
            self._seen[queue] = (time.monotonic(), looking)
            # asyncio would complain if nobody is left to read its error.
            looking.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(looking)

    def _refusal(self, why: str) -> Overloaded:
        # Spread: refused callers must not all come back in the same second.
        wait = self._retry_after * random.uniform(1.0, 2.0)
        return Overloaded(f"{why}. Nothing was stored: send it again in {wait:.0f} s.", retry_after=wait)


def max_age(seconds: float | None = None) -> Step:
    """Drop work older than the `max_age` of its request, counted from when it was due; than `seconds` where the
    request names none, as those of other producers."""

    def max_age(run: JobContext, call_next: CallNext) -> Awaitable[Any]:
        worth = run.meta.get("max_age", seconds)
        if worth is not None and isinstance(worth, int | float) and run.waited > worth:
            raise Expired(f"waited {run.waited:.0f} s, worth {worth:g} s: {Expired.__doc__}")
        return call_next(run)

    return max_age


# The head of each priority: `prioritized` is scored priority * 2^32 + a counter, so one look per priority finds
# its oldest job. A delayed job is as old as the moment from which it was due; BullMQ sets its `delay` to 0 then,
# so that is read from its options. Jobs that started before (retries, snoozed ones) waited by their own rules
# and say nothing about the queue: the oldest of the next few that never started counts.
_LOAD = """
local base, time = KEYS[1], redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local FEW = 10
local reply = {redis.call('LLEN', base .. 'wait'), redis.call('LLEN', base .. 'paused'),
               redis.call('ZCARD', base .. 'prioritized'), redis.call('ZCARD', base .. 'delayed'),
               redis.call('ZCARD', base .. 'waiting-children')}

local function note(priority, ids)
  for _, id in ipairs(ids) do
    local job = redis.call('HMGET', base .. id, 'timestamp', 'opts', 'ats')
    if job[1] and (tonumber(job[3]) or 0) == 0 then
      local known, opts = pcall(cjson.decode, job[2] or '{}')
      local delay = known and type(opts) == 'table' and tonumber(opts['delay']) or 0
      reply[#reply + 1] = priority
      reply[#reply + 1] = math.max(0, now - job[1] - delay)
      return
    end
  end
end

local last = {}
for _, id in ipairs(redis.call('LRANGE', base .. 'wait', -FEW, -1)) do table.insert(last, 1, id) end
note(0, last)
local from = '-inf'
for _ = 1, 16 do
  local head = redis.call('ZRANGEBYSCORE', base .. 'prioritized', from, '+inf', 'LIMIT', 0, 1)
  if not head[1] then break end
  local priority = math.floor(redis.call('ZSCORE', base .. 'prioritized', head[1]) / 4294967296)
  local after = string.format('%.0f', (priority + 1) * 4294967296)
  note(priority, redis.call('ZRANGEBYSCORE', base .. 'prioritized', from, '(' .. after, 'LIMIT', 0, FEW))
  from = after
end
return reply
"""
