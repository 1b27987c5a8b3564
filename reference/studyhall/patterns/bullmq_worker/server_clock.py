"""The time of day of the Redis server: the one clock that all instances share.

Promise: `ServerClock.millis()` costs no round trip, is at most one answer's travel time behind the server, and does
not depend on this machine's time of day: a worker whose clock is an hour ahead, or is set while it runs, starts
nothing early. Between two readings the monotonic clock carries the time on.

When it does NOT hold: until the next `read` after the server's own clock was set, after a failover to a server
with another clock, and after this machine was suspended.
"""

from __future__ import annotations

import time

from redis.asyncio import Redis

__all__ = ["ServerClock"]

READ_EVERY = 1.0


class ServerClock:
    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()  # a guess until the first reading
        self._read_at = float("-inf")

    def millis(self) -> int:
        """Epoch milliseconds."""
        return int((time.monotonic() + self._offset) * 1000)

    async def keep(self, redis: Redis) -> None:
        """`read`, unless the last reading is fresh."""
        if time.monotonic() - self._read_at > READ_EVERY:
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
