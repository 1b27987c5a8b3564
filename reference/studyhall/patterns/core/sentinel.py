"""Clients that ask Sentinel for the primary: `redis+sentinel://[user:password@]host:port,host2:port/service/db`
(`rediss+sentinel://` with TLS).

Promise: after a failover the next connection is to the promoted server. What the old one had not replicated is gone.
"""

from typing import Any
from urllib.parse import urlsplit

import redis
from redis.asyncio.connection import parse_url
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.sentinel import Sentinel as SyncSentinel

from .connections import C

__all__ = ["client"]


def client(kind: type[C], url: str, options: dict[str, Any]) -> C:
    """Options in the URL win over `options`."""
    scheme, _, rest = url.partition("+sentinel://")
    parts = urlsplit(f"{scheme}://{rest}")
    login, at, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not hosts or not service:
        raise ValueError("give hosts and the service name: redis+sentinel://host:26379,host2:26379/mymaster/0")
    pairs = [urlsplit(f"//{host}") for host in hosts.split(",")]
    server: dict[str, Any] = {**options, **parse_url(f"redis://{login}{at}/{db}?{parts.query}")}
    # Ask the next sentinel soon.
    asking = {"retry": type(options["retry"])(NoBackoff(), 0), "socket_connect_timeout": 0.5, "socket_timeout": 0.5}
    if "sentinel_password" in server:
        asking["password"] = server.pop("sentinel_password")
    if scheme == "rediss":
        server["ssl"], asking["ssl"] = True, True
    manager: Any = SyncSentinel if issubclass(kind, redis.Redis) else Sentinel
    sentinels = manager([(pair.hostname, pair.port or 26379) for pair in pairs], sentinel_kwargs=asking, **server)
    found: C = sentinels.master_for(service, redis_class=kind)
    return found
