"""The ledger in Redis, for services without a database: a string per call, two sorted sets per provider.

    ledger = RedisLedger(producer_client(url))

Give that server `appendonly yes` and `appendfsync always`: with `everysec` a crash of Redis takes back up to a
second of claims, and a provider without idempotency keys is then called twice.
"""

import json
from dataclasses import asdict
from typing import Any

from redis.asyncio import Redis

from .ledger import Call, State

__all__ = ["RedisLedger"]

# ARGV: the version that must be stored, the call, its key, its state, when it was last sent.
_WRITE = """
local stands = redis.call('GET', KEYS[1])
local version = stands and cjson.decode(stands)['version'] or 0
if version ~= tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('ZREM', KEYS[2], ARGV[3])
redis.call('ZREM', KEYS[3], ARGV[3])
if ARGV[4] == 'unclear' then redis.call('ZADD', KEYS[2], ARGV[5], ARGV[3]) end
if ARGV[4] == 'done' or ARGV[4] == 'refused' then redis.call('ZADD', KEYS[3], ARGV[5], ARGV[3]) end
return 1
"""


class RedisLedger:
    def __init__(self, redis: Redis, *, prefix: str = "outside") -> None:
        self._redis, self._prefix = redis, prefix
        self._write = redis.register_script(_WRITE)

    async def read(self, provider: str, key: str) -> Call:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.get(self._name(provider, "call", key))
            pipe.time()
            stored, (seconds, micros) = await pipe.execute()
        now = seconds + micros / 1e6
        return _call(stored, now) if stored else Call(provider, key, now=now)

    async def write(self, call: Call) -> bool:
        names = [self._name(call.provider, kind) for kind in ("unclear", "ended")]
        arguments = (call.version - 1, json.dumps(asdict(call)), call.key, str(call.state), call.since)
        keys = [self._name(call.provider, "call", call.key), *names]
        written: Any = await self._write(keys=keys, args=arguments)
        return bool(written)

    async def unclear(self, provider: str, limit: int) -> list[Call]:
        keys: Any = await self._redis.zrange(self._name(provider, "unclear"), 0, limit - 1)
        texts = await self._redis.mget([self._name(provider, "call", key) for key in keys]) if keys else []
        return [call for text in texts if text and (call := _call(text)).state is State.UNCLEAR]

    async def purge(self, provider: str, older_than: float) -> int:
        ended, deleted = self._name(provider, "ended"), 0
        seconds, _ = await self._redis.time()
        while True:
            keys: Any = await self._redis.zrangebyscore(ended, "-inf", seconds - older_than, start=0, num=500)
            if not keys:
                return deleted
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(*(self._name(provider, "call", key) for key in keys))
                pipe.zrem(ended, *keys)
                deleted += (await pipe.execute())[0]

    def _name(self, provider: str, *parts: str) -> str:
        return ":".join((self._prefix, provider, *parts))


def _call(text: Any, now: float = 0.0) -> Call:
    fields = json.loads(text)
    return Call(**{**fields, "state": State(fields["state"]), "now": now})
