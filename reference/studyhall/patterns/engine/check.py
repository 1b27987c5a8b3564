"""Judges a configured Redis or Valkey server before anything relies on it.

Promises
    An answer within three seconds, whatever the address does: refuse, hang, speak TLS or HTTP, want a
    password. What cannot work is a named `EngineError` that says what to do next. What would lose jobs sooner
    or later (eviction, no append-only file) is a warning with the command that fixes it. No message contains
    a password.

Does not hold
    It is one look at the start: a server reconfigured later, or a fail-over to a worse one, goes unnoticed.
    A provider that hides its settings (no `maxmemory_policy` in INFO) is trusted to have them right.
"""

import re
import socket
import ssl
import threading
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import redis

from ..core.worker_connections import lock_client

__all__ = [
    "BadUrl",
    "EngineError",
    "ReadOnlyReplica",
    "ServerTooOld",
    "TlsMismatch",
    "Unreachable",
    "WrongPassword",
    "check",
]

MINIMUM = (6, 2)  # BullMQ's scripts use commands of Redis 6.2
CHECK_SECONDS = 2.5
# Less patience than a worker has, and no HELLO, which a server before 6.0 answers with "unknown command".
OPTIONS = "socket_timeout=1.2&protocol=2"
UNSET = "or unset it and a local server is started"


class EngineError(RuntimeError):
    """No usable server; the message says what to do next."""


class BadUrl(EngineError):
    """The configured address cannot be read."""


class Unreachable(EngineError):
    """Nothing that speaks Redis answered in time."""


class WrongPassword(EngineError):
    """The server wants another user name or password."""


class TlsMismatch(EngineError):
    """One side speaks TLS and the other does not, or the certificate is not trusted."""


class ServerTooOld(EngineError):
    """The server lacks commands that the queue needs."""


class ReadOnlyReplica(EngineError):
    """Jobs cannot be written to a replica."""


def check(url: str) -> tuple[str, list[str]]:
    """(version, warnings) of the server at `url`, or an `EngineError`."""
    where = without_secrets(url)
    outcome: list[dict[str, Any] | EngineError] = []  # never the original: it may quote parts of the URL

    def look() -> None:
        try:
            with lock_client(f"{url}{'&' if '?' in url else '?'}{OPTIONS}") as client:
                client.ping()
                outcome.append(dict(client.info()))
        except Exception as error:
            outcome.append(_tls_mismatch(url, error) or _explained(where, error))

    # In a thread because name resolution has no time limit; a daemon because it may never return.
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(CHECK_SECONDS)
    info = outcome[0] if outcome else _explained(where, TimeoutError())
    if isinstance(info, EngineError):
        raise info from None
    if _numbers(info.get("redis_version", 0)) < MINIMUM:
        raise ServerTooOld(f"{where} is {version(info)}; the queue needs 6.2 or newer. Upgrade it.")
    if info.get("role") == "slave":
        primary = f"{info.get('master_host')}:{info.get('master_port')}"
        raise ReadOnlyReplica(f"{where} is a read-only replica. Point REDIS_URL at its primary, {primary}.")
    return version(info), _warnings(where, info)


def readable(url: str) -> None:
    """Raises `EngineError` for a URL that no client can be made of; asks no server."""
    try:
        lock_client(url).close()
    except Exception as error:
        raise _explained(without_secrets(url), error) from None


def version(info: dict[str, Any]) -> str:
    """Name and number, as in Valkey 9.1.2. Valkey also reports the Redis version it resembles."""
    if own := info.get("valkey_version"):
        return f"Valkey {own}"
    return f"Redis {info.get('redis_version', '?')}"


def without_secrets(url: str) -> str:
    """The address for messages: scheme, hosts, path. No user, password or query; when in doubt, nothing."""
    scheme, _, rest = url.partition("://")
    head = re.split(r"[?#]", rest)[0]
    address = head.rpartition("@")[2]
    # An unescaped / ? or # in a password moves the "@" to where no parser looks for it.
    sure = re.fullmatch(r"[\w.,:/\[\]-]+", address) and not address.startswith(":") and "@" not in rest[len(head) :]
    return f"{scheme}://{address}" if sure else "the configured server"


def _warnings(where: str, info: dict[str, Any]) -> list[str]:
    result = []
    if (policy := info.get("maxmemory_policy", "noeviction")) != "noeviction":
        result.append(
            f"{where} evicts keys when its memory is full (maxmemory-policy {policy}): jobs lose their data. "
            "Fix: CONFIG SET maxmemory-policy noeviction, then CONFIG REWRITE."
        )
    if not int(info.get("aof_enabled", 1)):
        result.append(
            f"{where} writes jobs to disk only now and then (appendonly no): a crash loses accepted jobs. "
            "Fix: CONFIG SET appendonly yes, then CONFIG REWRITE."
        )
    return result


def _explained(where: str, error: Exception) -> EngineError:  # noqa: PLR0911 (one line per case)
    """The named error for what redis-py raised."""
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return TlsMismatch(f"{where}: certificate not trusted. Add ?ssl_ca_certs=/path/to/ca.pem to REDIS_URL.")
    if "[SSL" in text:
        return TlsMismatch(f"{where} cannot agree on TLS with us. Look at the ssl_ options in REDIS_URL: {text}.")
    if isinstance(error, redis.AuthenticationError) or "NOAUTH" in text:
        return WrongPassword(f"{where} refuses this user name or password. Correct them in REDIS_URL.")
    if isinstance(error, redis.TimeoutError | TimeoutError):
        return Unreachable(f"{where} did not answer in time. Look for a firewall or a wrong REDIS_URL, {UNSET}.")
    if isinstance(error, redis.BusyLoadingError):
        return Unreachable(f"{where} is still loading its data. Try again in a moment.")
    if isinstance(error, redis.InvalidResponse):
        return Unreachable(f"{where} does not speak Redis. Correct the port in REDIS_URL, {UNSET}.")
    if isinstance(error, redis.ConnectionError | OSError):
        return Unreachable(f"{where} cannot be reached. Start it, correct REDIS_URL, {UNSET}.")
    if isinstance(error, ImportError):  # a part of ours that is not here; it says how to add it
        return EngineError(text)
    if isinstance(error, ValueError):
        return BadUrl(
            "REDIS_URL cannot be read. It looks like redis://user:password@host:6379/0, rediss:// with TLS; "
            "write special characters in the password percent-encoded."
        )
    return EngineError(f"{where} answers {type(error).__name__} to PING and INFO. Allow both for this user.")


def _tls_mismatch(url: str, error: Exception) -> TlsMismatch | None:
    """Neither side says so: a plain server waits for the end of what it takes for a command, a TLS server
    hangs up. So ask again in the other language, without a password."""
    if isinstance(error, redis.AuthenticationError):
        return None
    with suppress(OSError, ValueError):
        parts = urlsplit(url)
        address = (parts.hostname or "localhost", parts.port or 6379)
        if parts.scheme == "rediss" and isinstance(error, redis.TimeoutError):
            with socket.create_connection(address, 0.3) as plain:
                plain.sendall(b"PING\r\n")
                if plain.recv(1) in (b"+", b"-"):
                    return TlsMismatch(f"{without_secrets(url)} does not speak TLS. Write redis:// in REDIS_URL.")
        if parts.scheme == "redis" and isinstance(error, redis.ConnectionError):
            anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
            with socket.create_connection(address, 0.3) as plain, anyone.wrap_socket(plain):
                return TlsMismatch(f"{without_secrets(url)} speaks TLS. Write rediss:// in REDIS_URL.")
    return None


def _numbers(text: object) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", str(text))[:2])
