"""A circuit breaker that all processes share, so that a dead provider is left alone instead of hammered.

    closed --[`failures` within `window` s, at least `share` of the calls]--> open
    open --[`cooldown` s]--> half-open: exactly one probe --success--> closed, --failure--> open again

Promise: while it is open no call is made, by any process. Then exactly one caller probes; a probe whose process
dies or freezes frees its place after `lease` seconds. A refused caller gets `BreakerOpen`, a `ResourceBusy` with
`retry_after`: its job waits and consumes no attempt. Calls under way when it opens cannot be recalled,
so the dead provider sees at most `failures` plus those, and their later results do not count.

What counts: every exception except those below, and a call longer than `slow` seconds, even one that a deadline
cancelled. `Permanent` is the caller's fault and says nothing about the other side; `RateLimited` is an answer,
so the other side is alive. Neither opens it. `Cancelled`, `ResourceBusy`, `Snooze` and shutdown say nothing.

When it does not hold: Redis away (asked for at most `ANSWER_SECONDS`): `on_outage="allow"`, the default, lets the
call through, because a queue whose Redis is gone starts no new jobs anyway; "refuse" is for calls made elsewhere.
A probe frozen (SIGSTOP) for longer than its lease and then resumed finishes its call beside the next probe's.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from .core.errors import Cancelled, Permanent, RateLimited, ResourceBusy, Snooze
from .core.execution import CallNext, JobContext, Step

__all__ = ["BreakerOpen", "BreakerState", "CircuitBreaker", "guarded"]

log = logging.getLogger("circuit_breaker")
ANSWER_SECONDS = 1.0
NO_VERDICT = (Permanent, ResourceBusy, Snooze, Cancelled)
Verdict = Literal["ok", "failed", "none"]
P = ParamSpec("P")
T = TypeVar("T")


class BreakerOpen(ResourceBusy):
    """The other side failed too often and is left alone for now. The job waits and comes back by itself."""


@dataclass(frozen=True, slots=True)
class BreakerState:
    """For the console and the health check. `retry_after`: seconds until somebody may probe."""

    name: str
    state: Literal["closed", "open", "half-open", "unknown"]
    failures: int = 0
    retry_after: float = 0.0


@dataclass(frozen=True, slots=True)
class _Pass:
    """Permission for one call."""

    token: str
    epoch: int  # of the breaker; results of an earlier one do not count
    began: float
    renewing: asyncio.Task[None] | None = None


class CircuitBreaker:
    def __init__(
        self,
        redis: Redis,
        name: str,
        *,
        failures: int = 5,
        window: float = 30.0,
        cooldown: float = 10.0,
        share: float = 0.5,
        slow: float | None = None,
        lease: float = 10.0,
        on_outage: Literal["allow", "refuse"] = "allow",
    ) -> None:
        """`share` keeps 5 failures among 10,000 good calls from opening it."""
        if failures < 1 or min(window, cooldown, lease) <= 0 or not 0 <= share <= 1:
            raise ValueError("need failures >= 1, window, cooldown and lease above 0, and share within 0…1")
        self.name, self._failures, self._share = name, failures, share
        self._window, self._cooldown, self._slow, self._lease = window, cooldown, slow, lease
        self._slot = max(1, int(window * 100))  # ms; ten slots make the window
        self._on_outage = on_outage
        self._key = f"breaker:{name}"
        self._redis = redis
        self._ask, self._tell = redis.register_script(_CLOCK + _ASK), redis.register_script(_CLOCK + _TELL)
        self._renew = redis.register_script(_CLOCK + _RENEW)
        self._probing: set[str] = set()
        self._inside: dict[asyncio.Task[Any] | None, list[_Pass]] = {}  # one breaker serves many tasks at once

    async def call(self, fn: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        async with self:
            return await fn(*args, **kwargs)

    async def __aenter__(self) -> None:
        self._inside.setdefault(asyncio.current_task(), []).append(await self._enter())

    async def __aexit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        task = asyncio.current_task()
        permit = self._inside[task].pop()
        if not self._inside[task]:
            del self._inside[task]
        await self._leave(permit, self._verdict(error, time.monotonic() - permit.began))

    async def state(self) -> BreakerState:
        try:
            async with _bounded():
                raw: Any = await self._redis.hgetall(self._key)
        except (RedisError, OSError):
            return BreakerState(self.name, "unknown")
        oldest = f"{int((time.time() - self._window) * 1000 / self._slot)}"
        failed = sum(int(n) for field, n in raw.items() if field[:2] == "f:" and field[2:] > oldest)
        if "until" not in raw:
            return BreakerState(self.name, "closed", failed)
        wait = float(raw["until"]) / 1000 - time.time()
        return BreakerState(self.name, "open" if wait > 0 else "half-open", self._failures, round(max(wait, 0.0), 2))

    async def _enter(self) -> _Pass:
        token, began = uuid.uuid4().hex, time.monotonic()
        try:
            async with _bounded():
                state, number = await self._ask(keys=[self._key], args=[token, int(self._lease * 1000)])
        except (RedisError, OSError) as error:
            if self._on_outage == "refuse":
                raise BreakerOpen(f"{self.name}: its breaker cannot be asked", retry_after=1.0) from error
            return _Pass("", -1, began)
        match state:
            case "closed":
                return _Pass(token, int(number), began)
            case "probe":
                log.info("probing", extra={"fields": {"breaker": self.name}})
                self._probing.add(token)
                return _Pass(token, int(number), began, asyncio.create_task(self._keep(token)))
        raise BreakerOpen(f"{self.name} is {state}: {BreakerOpen.__doc__}", retry_after=max(int(number), 100) / 1000)

    async def _leave(self, permit: _Pass, verdict: Verdict) -> None:
        if permit.renewing is not None:
            self._probing.discard(permit.token)
            permit.renewing.cancel()
        if not permit.token or (verdict == "none" and permit.renewing is None):
            return
        limits = [self._failures, self._share, self._slot, int(self._cooldown * 1000)]
        # Shielded: a cancelled call must still report its verdict, or a probe's place stays taken for a lease.
        await asyncio.shield(asyncio.create_task(self._report([permit.token, permit.epoch, verdict, *limits])))

    async def _report(self, args: list[Any]) -> None:
        with contextlib.suppress(RedisError, OSError):
            async with _bounded():
                changed = await self._tell(keys=[self._key], args=args)
            if changed:
                log.warning("circuit breaker", extra={"fields": {"breaker": self.name, "now": changed}})

    async def _keep(self, token: str) -> None:
        """Renew a probe's lease while its call runs."""
        # Not `while True`: a cancellation in the middle of a command can get lost in the client, and a program
        # that wants to end would wait for this task forever.
        while token in self._probing:
            await asyncio.sleep(self._lease / 3)
            with contextlib.suppress(RedisError, OSError):
                async with _bounded():
                    await self._renew(keys=[self._key], args=[token, int(self._lease * 1000)])

    def _verdict(self, error: BaseException | None, spent: float) -> Verdict:
        if self._slow is not None and spent > self._slow and not isinstance(error, NO_VERDICT):
            return "failed"
        if error is None or isinstance(error, RateLimited):
            return "ok"
        # CancelledError and KeyboardInterrupt are not Exceptions: somebody else ended the call.
        return "none" if isinstance(error, NO_VERDICT) or not isinstance(error, Exception) else "failed"


def guarded(breaker: CircuitBreaker, jobs: Container[str] | None = None) -> Step:
    """Run the jobs of these names (None: all) only while the breaker lets calls through; they wait otherwise."""

    async def guarded(run: JobContext, call_next: CallNext) -> Any:
        if jobs is not None and run.name not in jobs:
            return await call_next(run)
        async with breaker:
            return await call_next(run)

    return guarded


@contextlib.asynccontextmanager
async def _bounded() -> AsyncIterator[None]:
    async with asyncio.timeout(ANSWER_SECONDS):
        yield


# One hash: until (open until then), probe and probe_until (who probes), epoch, and per slot of time f:<n>, s:<n>
# (failures and successes). Forgotten after a day without a call.
_CLOCK = """
local time = redis.call('TIME')
local now = math.floor(time[1] * 1000 + time[2] / 1000)
local key = KEYS[1]
redis.call('PEXPIRE', key, 86400000)
"""
_ASK = """
local got = redis.call('HMGET', key, 'until', 'probe_until', 'epoch')
local epoch = tonumber(got[3]) or 0
if not got[1] then return {'closed', epoch} end
if now < tonumber(got[1]) then return {'open', tonumber(got[1]) - now} end
if got[2] and now < tonumber(got[2]) then return {'being probed', tonumber(got[2]) - now} end
redis.call('HSET', key, 'probe', ARGV[1], 'probe_until', now + ARGV[2])
return {'probe', epoch}
"""
_RENEW = """
if redis.call('HGET', key, 'probe') == ARGV[1] then redis.call('HSET', key, 'probe_until', now + ARGV[2]) end
"""
_TELL = """
local token, verdict, most = ARGV[1], ARGV[3], tonumber(ARGV[4])
local share, slot, cooldown = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local got = redis.call('HMGET', key, 'until', 'probe', 'epoch')
local epoch = tonumber(got[3]) or 0

local function start_over(open)
  redis.call('DEL', key)
  redis.call('HSET', key, 'epoch', epoch + 1)
  if open then redis.call('HSET', key, 'until', now + cooldown) end
  redis.call('PEXPIRE', key, 86400000)
  return open and 'open' or 'closed'
end

if got[1] then
  if got[2] ~= token then return '' end
  redis.call('HDEL', key, 'probe', 'probe_until')
  if verdict == 'none' then return '' end
  return start_over(verdict == 'failed')
end
if epoch ~= tonumber(ARGV[2]) then return '' end
local this = math.floor(now / slot)
redis.call('HINCRBY', key, (verdict == 'ok' and 's:' or 'f:') .. this, 1)
redis.call('PEXPIRE', key, 86400000)
local failed, all, fields = 0, 0, redis.call('HGETALL', key)
for i = 1, #fields, 2 do
  local kind, n = string.match(fields[i], '^([fs]):(%d+)$')
  if kind and tonumber(n) <= this - 10 then
    redis.call('HDEL', key, fields[i])
  elseif kind then
    all = all + fields[i + 1]
    if kind == 'f' then failed = failed + fields[i + 1] end
  end
end
if verdict == 'failed' and failed >= most and failed >= share * all then return start_over(true) end
return ''
"""
