"""Which declaration of an application's schedules is in force, and what it wrote: one hash in Redis.

Promise: versions only go up. A `claim` is atomic; of two that meet, the later version is in force in the end, and
whoever declared it repairs with its next `heal` what the other one wrote after losing.
Does not hold when Redis loses its data: then the first to claim is in force until a later version claims.
"""

import json
from typing import Any

from redis.asyncio import Redis

__all__ = ["ScheduleRegistry"]

# A field beside the schedules, whose ids have no colon: version and fingerprint of the declaration.
IN_FORCE = ":in-force"
_CLAIM = """
local version = tonumber(string.match(redis.call('HGET', KEYS[1], ARGV[1]) or '', '^%d+'))
if version and version > tonumber(ARGV[2]) then return version end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
return 0
"""


class ScheduleRegistry:
    def __init__(self, redis: Redis, key: str) -> None:
        self._redis: Any = redis
        self._key = key

    async def claim(self, version: int, fingerprint: str) -> int:
        """Put the declaration in force and return 0; or return the later version that is, and change nothing."""
        return int(await self._redis.eval(_CLAIM, 1, self._key, IN_FORCE, version, fingerprint))

    async def read(self) -> tuple[int, str, dict[str, dict[str, Any]]]:
        """Version (-1: none) and fingerprint of the declaration in force, and the entries of its schedules."""
        fields: dict[str, str] = await self._redis.hgetall(self._key)
        version, _, fingerprint = fields.pop(IN_FORCE, "-1 ").partition(" ")
        return int(version), fingerprint, {name: json.loads(text) for name, text in fields.items()}

    async def put(self, schedule_id: str, entry: dict[str, Any]) -> None:
        await self._redis.hset(self._key, schedule_id, json.dumps(entry))

    async def drop(self, schedule_id: str) -> None:
        await self._redis.hdel(self._key, schedule_id)
