"""The Redis clients of a worker: for its commands, for waiting, for events, and for the thread that renews locks.

Promise: a blocking read outlives its own block time, and no connection stays with a server that was demoted. Only
the worker knows what may be repeated, so no client repeats a command (except reading events, which is harmless).

For a user with few rights this line suffices (add the prefixes of other patterns you use as `~prefix:*`).

    ACL SETUSER worker on >password ~bull:* +@all -@dangerous +info +client|unblock

Without INFO the server's version goes unchecked, without CLIENT SETNAME dashboards do not see the worker, and without
CLIENT ID or CLIENT UNBLOCK a delayed job starts up to 0.1 s late and an idle worker drains in up to 2 s. A worker says
once what is missing.
"""

from typing import Any

import redis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry as SyncRetry

from .connections import CONNECT_SECONDS, TEXT, C, by_sentinel, meaning, watched

__all__ = ["blocking_client", "events_client", "lock_client", "worker_client"]

# Longer than any block time in this project. redis-py 8 sets 5 s, exactly the block time of a BullMQ worker:
# idle workers then ran into timeouts and their back-off, and a job delayed by 9 s ran after 471 s.
BLOCKING_SECONDS = 30.0


def worker_client(url: str, kind: type[C], *, name: str | None = None) -> C:
    """For a worker's own commands, with its own client class. No retries: only it knows what may be repeated."""
    # RESP2: push messages must not come between pipelined replies, which are matched by order alone.
    client = _client(
        kind,
        url,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        client_name=name,
        max_connections=500,  # beyond it redis-py raises instead of waiting; processors log and read concurrently
        socket_connect_timeout=2.0,
        socket_timeout=5.0,
    )
    return watched(client, _Named)


def blocking_client(url: str, *, name: str | None = None, patience: float = BLOCKING_SECONDS) -> Redis:
    """For BZPOPMIN and XREADGROUP: its own connection, so that a wait never blocks a command.

    `patience` is how long an answer may take, and must exceed the longest block time. It is also how long a
    connection that died silently (a NAT forgot it) goes unnoticed.
    """
    client = _client(
        Redis, url, retry=Retry(NoBackoff(), 0), client_name=name, socket_connect_timeout=2.0, socket_timeout=patience
    )
    return watched(client, _Named)


def events_client(url: str) -> Redis:
    """For `QueueEvents`, which ends for good on the first error: reconnect forever, at most 1 s apart.

    Repeating is safe here and only here: reading a stream from a known id changes nothing.
    """
    forever = Retry(ExponentialWithJitterBackoff(base=0.1, cap=1.0), retries=-1)
    return _client(Redis, url, retry=forever, socket_connect_timeout=2.0, socket_timeout=BLOCKING_SECONDS)


def lock_client(url: str, *, name: str | None = None) -> redis.Redis:
    """Synchronous, for the thread that renews locks: it must notice a dead server well within one lock."""
    options: dict[str, Any] = {
        "decode_responses": True,
        "client_name": name,
        "retry": SyncRetry(NoBackoff(), 0),
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": 2.0,
    }
    return watched(by_sentinel(redis.Redis, url, options) or redis.Redis.from_url(url, **options), _WatchedSync)


def _client(kind: type[C], url: str, **options: Any) -> C:
    options |= TEXT
    client: Any = by_sentinel(kind, url, options) or kind.from_url(url, **options)
    assert isinstance(client, kind)
    return watched(client)


class _Named:
    """A connection with a name, or without where the server refuses it."""

    async def on_connect_check_health(self, *args: Any, **options: Any) -> None:
        connection: Any = super()
        try:
            await connection.on_connect_check_health(*args, **options)
        except ResponseError:
            # Most likely CLIENT SETNAME, which would fail every connection. A name is a courtesy: go without.
            self.client_name = None
            await connection.on_connect_check_health(*args, **options)


class _WatchedSync:
    """`_Named` and `connections._Watched`, for the thread that renews locks."""

    def on_connect_check_health(self, *args: Any, **options: Any) -> None:
        connection: Any = super()
        try:
            connection.on_connect_check_health(*args, **options)
        except ResponseError:
            self.client_name = None
            connection.on_connect_check_health(*args, **options)

    def read_response(self, *args: Any, **options: Any) -> Any:
        connection: Any = super()
        try:
            return connection.read_response(*args, **options)
        except ResponseError as error:
            if (why := meaning(error)) is error:
                raise
            connection.disconnect()
            raise why from error
