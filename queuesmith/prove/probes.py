"""What happened to each key, read from where the service keeps it: a database, Redis, an address, a log, a provider."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import socket
import sqlite3
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .spec import Probe, fill

if TYPE_CHECKING:
    from .world import World


class Unreadable(Exception):
    """It cannot be read now: its server is down, or the query is wrong."""


def read(probe: Probe, world: World, keys: Iterable[str]) -> dict[str, Any]:
    """Key -> how often (or the reason, in [failures]). A missing key has no effect yet."""
    try:
        return _READERS[probe.kind](probe, world, list(keys))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None
    except Exception as error:  # drivers have errors of their own
        if type(error).__module__.split(".")[0] in ("redis", "psycopg", "sqlite3"):
            raise Unreadable(f"{type(error).__name__}: {error}") from None
        raise


def _sql(probe: Probe, world: World, keys: list[str]) -> dict[str, Any]:
    address, query = fill(probe.target, world.values()), fill(probe.query, world.values())
    if address.startswith("sqlite"):
        path = Path(address.removeprefix("sqlite:///"))
        if not path.exists():
            raise Unreadable(f"there is no {path} yet")
        with contextlib.closing(sqlite3.connect(path, timeout=1, isolation_level=None)) as connection:
            rows = connection.execute(query).fetchall()
    else:
        import psycopg

        with psycopg.connect(re.sub(r"\+\w+:", ":", address), connect_timeout=2, autocommit=True) as session:
            session.execute("set statement_timeout = '5s'; set lock_timeout = '200ms'")
            rows = session.execute(query.encode()).fetchall()
    return _rows(world, rows)


def _redis(probe: Probe, world: World, keys: list[str]) -> dict[str, Any]:
    if world.redis is None:
        raise Unreadable("[servers] redis = false, but the effect is read from it")
    with world.redis.client(2) as client:

        def ask(text: str) -> Any:
            return client.execute_command(*shlex.split(text))

        if "{key}" in probe.target:
            return {key: _amount(ask(fill(probe.target, {**world.values(), "key": key}))) for key in keys}
        answer = ask(fill(probe.target, world.values()))
    if isinstance(answer, Mapping):
        return _rows(world, answer.items())
    return _rows(world, ((item,) for item in answer or ()))


def _http(probe: Probe, world: World, keys: list[str]) -> dict[str, Any]:
    counts = {}
    for key in keys:
        address = fill(probe.target, {**world.values(), "key": world.name_of(key)})
        status, body = http("GET", address, timeout=3)
        if status == 404:
            continue
        if status >= 300:
            raise Unreadable(f"{probe.target}: {status}")
        counts[key] = _amount(inside(body, probe.count) if probe.count else 1)
    return counts


def inside(body: bytes, where: str) -> Any:
    """`json:a.b` -> its value, or None."""
    value: Any = json.loads(body)
    for part in filter(None, where.removeprefix("json:").split(".")):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _command(probe: Probe, world: World, keys: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        shlex.split(fill(probe.target, world.values())),
        capture_output=True,
        text=True,
        timeout=15,
        env=world.environment(),
        cwd=world.spec.folder,
        check=False,
    )
    if done.returncode:
        raise Unreadable(f"{probe.target}: exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    return _rows(world, (line.split(None, 1) for line in done.stdout.splitlines() if line.strip()))


def _log(probe: Probe, world: World, keys: list[str]) -> dict[str, Any]:
    lines, counts = world.log_lines(), Counter[str]()
    for key in keys:
        pattern = re.compile(re.escape(probe.target).replace(r"\{key\}", re.escape(key)))
        counts[key] = sum(bool(pattern.search(line)) for line in lines)
    return dict(counts)


def _provider(probe: Probe, world: World, keys: list[str]) -> dict[str, Any]:
    """Of several: done when each has done it. Duplicates are judged per provider."""
    counts = [world.providers[name].counts() for name in probe.target.split()]
    return {key: min(count[key] for count in counts) for key in counts[0]}


_READERS: dict[str, Callable[[Probe, World, list[str]], dict[str, Any]]] = {
    "sql": _sql,
    "redis": _redis,
    "http": _http,
    "command": _command,
    "log": _log,
    "provider": _provider,
}


def _rows(world: World, rows: Iterable[Any]) -> dict[str, Any]:
    """(key, count) or (key, reason) rows, or one row for each time."""
    counted: dict[str, Any] = {}
    for row in rows:
        key, value = world.key_of(str(row[0])), row[1] if len(row) > 1 else 1
        if key:
            amount = _amount(value)
            counted[key] = counted.get(key, 0) + amount if isinstance(amount, int) else amount
    return counted


def _amount(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return int(bool(value))
    if isinstance(value, list | dict | set):
        return len(value)
    with contextlib.suppress(ValueError, TypeError):
        return int(value)
    return value if value else 0


def http(
    method: str, url: str, headers: Mapping[str, str] | None = None, body: Any = None, timeout: float = 10
) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=timeout) as response:
            return response.status, response.read(2**20)
    except urllib.error.HTTPError as error:
        return error.code, error.read(2**16)


def listens(url: str) -> bool:
    address = urlsplit(url)
    with contextlib.suppress(OSError), socket.create_connection((address.hostname or "", address.port or 80), 1):
        return True
    return False


def bullmq_states(world: World, keys: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Key -> (state, reason) of the jobs of the named BullMQ queue that carry it."""
    service = world.spec.service
    if not service.queue or world.redis is None:
        return {}
    wanted, base, result = set(keys), f"{service.prefix}:{service.queue}", {}
    with world.redis.client() as client:
        with client.pipeline(transaction=False) as batch:
            for state, command in _STATES.items():
                batch.execute_command(command, f"{base}:{state}", 0, -1)
            members = batch.execute()
        states = {str(member): state for state, ids in zip(_STATES, members, strict=True) for member in ids}
        # In two round trips, whatever earlier faults left behind: this is called again and again.
        names = [name for name in client.scan_iter(f"{base}:*", count=2000, _type="hash") if name != f"{base}:meta"]
        with client.pipeline(transaction=False) as batch:
            for name in names:
                batch.hmget(name, "data", "opts", "failedReason")
            jobs = batch.execute()
    for name, (data, opts, reason) in zip(names, jobs, strict=True):
        ident = name.removeprefix(f"{base}:")
        for key in world.keys_in(f"{ident} {data} {opts}") & wanted:
            result[key] = (states.get(ident, "nowhere"), reason or "")
    return result


_STATES = {
    "wait": "LRANGE",
    "active": "LRANGE",
    "paused": "LRANGE",
    "delayed": "ZRANGE",
    "prioritized": "ZRANGE",
    "waiting-children": "ZRANGE",
    "completed": "ZRANGE",
    "failed": "ZRANGE",
}


def queued(world: World, keys: set[str]) -> dict[str, str]:
    """Key -> where in Redis its job still is: by BullMQ's state, or where the run without faults left no job."""
    try:
        if world.spec.service.queue:
            final = ("completed", "failed", "nowhere")
            states = bullmq_states(world, keys)
            return {key: f"BullMQ: {state}" for key, (state, _) in states.items() if state not in final}
        by_key = in_redis(world, keys)
    except Exception as error:  # any error of a Redis that just came back
        return dict.fromkeys(keys, f"unknown: {type(error).__name__}")
    unusual = {
        key: [place for place in places if shape(world, place) not in world.resting] for key, places in by_key.items()
    }
    return {key: places[0] for key, places in unusual.items() if places}


def in_redis(world: World, keys: set[str]) -> dict[str, list[str]]:
    """Key -> the Redis keys whose content names it: work that is not lost, only stuck."""
    by_key: dict[str, list[str]] = {}
    if world.redis is None or not keys:
        return by_key
    with world.redis.client() as client:
        for name in client.scan_iter(count=500):
            kind = str(client.type(name))
            command = _WHOLE.get(kind)
            content = client.execute_command(*(part.replace("NAME", name) for part in command)) if command else ""
            # Only in the name, it is a marker or a lock, not a job.
            for key in world.keys_in(str(content)) & keys:
                by_key.setdefault(key, []).append(f"{kind} {name}")
    # where it waits says more than the job's own record
    return {key: sorted(places, key=lambda place: place.startswith("hash")) for key, places in by_key.items()}


def due(world: World, key: str, place: str) -> str:
    """When BullMQ runs a job that it keeps as delayed."""
    name = place.partition(" ")[2]
    if world.redis is None or not name.endswith(":delayed"):
        return ""
    with world.redis.client() as client:
        scores = [
            score for member, score in client.zrange(name, 0, -1, withscores=True) if key in world.keys_in(member)
        ]
    return f", due in {scores[0] / 4_096_000 - time.time():.0f} s" if scores else ""


def shape(world: World, place: str) -> str:
    """`hash rq:job:5c1…` and `hash rq:job:9e0…` are places of one kind, and so are those named by two of our keys."""
    # First, or keys of two worlds, such as k2e86-0002 and kd2de-0004, would be places of two kinds.
    for key in world.keys_in(place):
        place = place.replace(world.name_of(key), "*").replace(key, "*")
    return re.sub(r"[0-9a-f-]{16,}|\d+", "*", place)


_WHOLE = {
    "string": ("GET", "NAME"),
    "list": ("LRANGE", "NAME", "0", "-1"),
    "set": ("SMEMBERS", "NAME"),
    "hash": ("HGETALL", "NAME"),
    "zset": ("ZRANGE", "NAME", "0", "-1"),
    "stream": ("XRANGE", "NAME", "-", "+"),
}
