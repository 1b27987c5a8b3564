"""How Redis clients are built, and the one for adding jobs; a worker's are in `worker_connections`. None is built
anywhere else, because each use needs other numbers than redis-py's defaults.

Promise: a producer answers or fails in under two seconds, even when Redis was never up; text never arrives as bytes;
no connection stays with a demoted server, whether Sentinel, DNS or a load balancer leads to the new one.

An `add` that timed out may still have landed: give every job a `jobId`, then repeating it is harmless.

URLs: `redis://`, `rediss://` (TLS), `unix:///path/to/socket?db=0`, and `redis+sentinel://` with the part `sentinel`.
Options in the URL (`?socket_timeout=1`) win over the numbers here. Redis Cluster: `NoCluster` says what works.
"""

import asyncio
from importlib import import_module
from typing import Any, TypeVar

import redis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ClusterCrossSlotError, MasterDownError, MovedError, ReadOnlyError, ResponseError
from redis.exceptions import ConnectionError as BrokenConnection
from redis.exceptions import TimeoutError as Unanswered

__all__ = ["NoCluster", "NotPrimary", "by_sentinel", "meaning", "producer_client", "watched"]

# A refused connection fails at once; these two bound a host that swallows packets and a frozen server.
# The larger is what a caller waits at worst. With BullMQ's own client an `add` was still pending after 330 s.
CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 1.5

C = TypeVar("C", bound=Redis | redis.Redis)

# Without decode_responses BullMQ hands out jobs whose name is None and whose data is {}. One job with broken UTF-8
# must not break the connection that every other job uses, hence "replace".
TEXT = {"decode_responses": True, "encoding_errors": "replace"}


class NotPrimary(BrokenConnection):
    """The server cannot take writes any more. The connection is dropped: the next may reach its successor."""


class NoCluster(RuntimeError):
    """BullMQ's scripts need all keys of a queue on one node, and this server belongs to a Redis Cluster. Use a server
    with cluster mode off (replicas and Sentinel are fine; spread queues over several servers by their URLs). If one
    node holds all slots, a prefix in braces works too: prefix="{bull}"."""


def meaning(error: Exception) -> Exception:
    """What the server's answer says about the connection it came on; else the error itself."""
    text = str(error)
    # A script on a 6.2 replica answers "ERR Error running script … -READONLY …". UNBLOCKED ends the waits of a
    # server that is being demoted, NOREPLICAS is a primary on the wrong side of a network split.
    demoted = "-READONLY " in text or text.startswith(("NOREPLICAS", "UNBLOCKED"))
    if demoted or isinstance(error, ReadOnlyError | MasterDownError):
        return NotPrimary(f"this server does not take writes any more: {text}")
    if isinstance(error, ClusterCrossSlotError | MovedError) or text.startswith(("CROSSSLOT", "MOVED ")):
        return NoCluster(f"{' '.join(str(NoCluster.__doc__).split())} ({text})")
    return error


def producer_client(url: str, *, answer: float = ANSWER_SECONDS) -> Redis:
    """For code that adds jobs: an answer or an error in time for a 503 or an outbox row; `answer`: a longer limit."""
    answer = max(answer, ANSWER_SECONDS)
    options: dict[str, Any] = {
        # After a restart of Redis every pooled connection is dead: the first request to notice must not pay for it.
        "retry": Retry(NoBackoff(), 1, supported_errors=(BrokenConnection,)),
        "socket_connect_timeout": answer * CONNECT_SECONDS / ANSWER_SECONDS,
        "socket_timeout": answer,
        **TEXT,
    }
    if client := by_sentinel(Redis, url, options):
        return watched(client)
    # The default pool refuses the 101st command at once; this one lets it wait for a free connection.
    pool = BlockingConnectionPool.from_url(url, max_connections=64, timeout=answer, **options)
    return watched(Redis.from_pool(pool))


def by_sentinel(kind: type[C], url: str, options: dict[str, Any]) -> C | None:
    """The client for a Sentinel URL; None for any other."""
    if "+sentinel://" not in url:
        return None
    try:
        client: C = import_module(".sentinel", __package__).client(kind, url, options)
    except ModuleNotFoundError as missing:
        raise ImportError("for Sentinel, `queuesmith add producer.sentinel` (or bullmq-worker.sentinel)") from missing
    return client


class _Watched:
    """On top of any redis-py connection: leaves a server whose answer says that it is not a primary. redis-py does so
    for Sentinel alone; behind one fixed address it stayed READONLY for 40 s and longer."""

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        # redis-py sends under `asyncio.wait_for`, which on Python 3.11 swallows a cancellation during the write:
        # Ctrl-C, a deadline or a stop then has no effect. It also costs a task for each command.
        connection: Any = self
        if not connection.is_connected:
            await connection.connect()
        if check_health:
            await connection.check_health()
        above: Any = super()
        limit, connection.socket_timeout = connection.socket_timeout, None
        try:
            async with asyncio.timeout(limit):
                await above.send_packed_command(command, check_health=False)
        except TimeoutError:  # redis-py has dropped the connection; its own timeout is not the builtin one
            raise Unanswered("Timeout writing to socket") from None
        finally:
            connection.socket_timeout = limit

    async def read_response(self, *args: Any, **options: Any) -> Any:
        connection: Any = super()
        try:
            return await connection.read_response(*args, **options)
        except ResponseError as error:
            if (why := meaning(error)) is error:
                raise
            await connection.disconnect(nowait=True)
            raise why from error


def watched(client: C, watch: type = _Watched) -> C:
    """The client with `watch` on top of each of its connections."""
    # Here and not as an option: a URL's scheme (TLS, socket) and Sentinel choose the class themselves.
    pool: Any = client.connection_pool
    kind = pool.connection_class
    pool.connection_class = type(kind.__name__, (watch, kind), {})
    return client
