"""A lease: one holder at a time, renewed while it lives, with a number that exposes a stale holder.

Promise: `async with Lease(redis, "reports", ttl=10) as held` lets one process in. The lease is renewed in the
background, ends `ttl` seconds after its holder died, and is released only by the token that took it. Each
holder gets a higher `held.fence`; a write that calls `check_fence(tx, name, held.fence)` in its transaction
is refused once a later holder has written. Wrong clocks do no harm: the server counts `ttl`, a holder counts by
its monotonic clock.

Why the number: no lock in another process can stop a holder that is frozen (SIGSTOP, swapped out, a paused
virtual machine) between its last look at the lock and its write. It wakes up, unaware, and writes. The
database that takes the write is the only place that can say no.

When it does NOT hold
- Effects that do not check the fence: for these the lease is an optimisation, not a guarantee.
- Redis loses its data: two holders may overlap for one `ttl`. Fences stay ordered: they follow the clock of
  the Redis server, so they do not start again at 1.
- An event loop that is blocked for longer than `ttl` loses the lease and learns it late, by `held.lost`.
"""

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from uuid import uuid4

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import BigInteger, Column, String, Table
from sqlalchemy.ext.asyncio import AsyncConnection

from .core.errors import Permanent, ResourceBusy
from .core.store import insert, metadata

__all__ = ["Held", "Lease", "LeaseLost", "LeaseTaken", "StaleFence", "check_fence", "fences"]

SHORTEST_TTL = 0.1

fences = Table(
    "fences",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("fence", BigInteger, nullable=False),  # of the last holder that wrote
)

# The fence follows the server's clock in µs, and is never repeated: data loss must not make it start again.
_TAKE = """
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
local now = redis.call('TIME')
local fence = math.max(tonumber(redis.call('GET', KEYS[2]) or 0) + 1, now[1] * 1000000 + now[2])
redis.call('SET', KEYS[2], string.format('%.0f', fence))
return fence
"""
_RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class LeaseTaken(ResourceBusy):
    """Somebody else holds the lease. Come back later; it ends `ttl` seconds after its holder died."""


class LeaseLost(ResourceBusy):
    """The lease ran out under its holder: another may hold it. Stop, and start over by taking it again."""


class StaleFence(Permanent):
    """A later holder of this lease has written already: this write was refused, nothing of it is stored."""


@dataclass(slots=True)
class Held:
    """What a holder knows. `lost` is set as soon as the lease can no longer be trusted."""

    name: str
    fence: int
    ends_at: float  # monotonic; moved on by each renewal
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def remaining(self) -> float:
        """Seconds that the lease still holds if it is not renewed."""
        return 0.0 if self.lost.is_set() else max(0.0, self.ends_at - time.monotonic())


class Lease:
    """Takes the lease `name`, once. With `cancel_on_loss` the body is cancelled, and `LeaseLost` raised.

    `label` is readable by others while the lease is held (`holder()`); `wait` is how long to wait for it."""

    def __init__(
        self,
        redis: Redis,
        name: str,
        *,
        ttl: float = 10.0,
        wait: float = 0.0,
        label: str = "",
        cancel_on_loss: bool = False,
        prefix: str = "lease",
    ) -> None:
        if not SHORTEST_TTL <= ttl < 86_400:
            raise ValueError(f"ttl must be between {SHORTEST_TTL} s and a day, got {ttl!r}")
        self._redis, self.name, self._ttl, self._wait = redis, name, ttl, wait
        self._keys = [f"{prefix}:{name}", f"{prefix}:{name}:fence"]
        self._token = f"{label}|{uuid4().hex}"
        self._cancel_on_loss = cancel_on_loss
        self._renewal: asyncio.Task[None] | None = None
        self._cancelled_body = False

    async def __aenter__(self) -> Held:
        began = time.monotonic()
        while True:
            asked_at = time.monotonic()  # from before the call: the server's ttl starts later, never earlier
            try:
                fence = await self._call(_TAKE, *self._keys, keys=2)
            except BaseException:  # cancelled, or the answer was lost: it may still be ours
                await self._release()
                raise
            if fence:
                break
            if time.monotonic() - began >= self._wait:
                raise LeaseTaken(f"{self.name}: {LeaseTaken.__doc__}", retry_after=min(1.0, self._ttl / 2))
            await asyncio.sleep(random.uniform(0.02, 0.1))
        held = Held(self.name, int(fence), asked_at + self._ttl)
        self._renewal = asyncio.create_task(self._renew(held, asyncio.current_task()))
        return held

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._renewal is not None
        while not self._renewal.done():  # once is not enough: a cancellation can vanish inside redis-py
            self._renewal.cancel()
            await asyncio.wait({self._renewal}, timeout=0.1)
        await self._release()
        if self._cancelled_body and kind is asyncio.CancelledError:
            task = asyncio.current_task()
            # Only our own cancellation becomes LeaseLost; one from outside (a shutdown) goes on as it is.
            if task is None or task.uncancel() == 0:
                raise LeaseLost(f"{self.name}: {LeaseLost.__doc__}", retry_after=1.0) from error

    async def holder(self) -> str | None:
        """The label of whoever holds the lease now, or None."""
        token = await self._redis.get(self._keys[0])
        return None if token is None else str(token).rpartition("|")[0]

    async def _renew(self, held: Held, body: asyncio.Task[Any] | None) -> None:
        while True:
            await asyncio.sleep(min(self._ttl / 3, max(0.01, held.remaining() - self._ttl / 10)))
            asked_at = time.monotonic()
            with contextlib.suppress(RedisError, OSError):
                async with asyncio.timeout(held.remaining()):  # TimeoutError is an OSError
                    renewed = await self._call(_RENEW, self._keys[0])
                if not renewed:
                    break  # it ran out, whoever has it now
                held.ends_at = asked_at + self._ttl
            if time.monotonic() >= held.ends_at - self._ttl / 10:  # Redis is away, or we were frozen
                break
        held.lost.set()
        if self._cancel_on_loss and body is not None:
            self._cancelled_body = True
            body.cancel(f"the lease {self.name} is lost")

    async def _release(self) -> None:
        with contextlib.suppress(RedisError, OSError):  # then it runs out by itself
            await self._call(_RELEASE, self._keys[0])

    async def _call(self, script: str, *names: str, keys: int = 1) -> Any:
        return await self._redis.eval(script, keys, *names, self._token, str(int(self._ttl * 1000)))


async def check_fence(tx: AsyncConnection, name: str, fence: int) -> None:
    """Refuse the transaction unless no later holder has written. Call it first, in the write's transaction:
    it locks the row, so that of two holders the later number wins whatever their order of arrival."""
    claim = insert(tx, fences).values(name=name, fence=fence)
    claim = claim.on_conflict_do_update(
        index_elements=["name"], set_={"fence": claim.excluded.fence}, where=fences.c.fence <= fence
    )
    if (await tx.execute(claim.returning(fences.c.fence))).first() is None:
        raise StaleFence(f"{name} with fence {fence}: {StaleFence.__doc__}")
