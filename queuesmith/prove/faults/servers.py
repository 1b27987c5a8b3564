"""Faults of the servers: Redis and the brokers away, the database locked, away or full, the service without them."""

from __future__ import annotations

import contextlib
import resource
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from queuesmith.prove.processes import family
from queuesmith.prove.servers import Server
from queuesmith.prove.spec import Spec, fill

from .fault import Fault, fault, half, many, over, still_open

if TYPE_CHECKING:
    from queuesmith.prove.world import Batch, Job, World


def _needs_redis(spec: Spec) -> str:
    return "" if spec.redis else "no Redis was started"


def _needs_broker(spec: Spec) -> str:
    here = spec.rabbitmq or spec.nats or spec.kafka
    return "" if here else "needs {rabbitmq}, {nats} or {kafka}; the local SQS keeps nothing"


def _freezable(spec: Spec) -> str:
    return "" if spec.sqs else _needs_broker(spec)


def _away(
    name: str,
    does: str,
    away: float,
    strike: str,
    mend: str,
    needs: Callable[[Spec], str] = _needs_redis,
    *,
    quick: bool = False,
) -> Fault:
    """The server is hit in the middle of work, and restored after `away` seconds. `strike`, `mend`: its methods."""

    @fault(name, does, needs, quick=quick, cost=away + 5, backlog=True)
    def run(world: World, batch: Batch) -> None:
        server: Server | None = world.redis if needs is _needs_redis else world.broker
        assert server is not None
        world.backlog(world.new_jobs(batch, half(world)))
        working = still_open(world, batch)
        world.timeline.add("fault", does)
        getattr(server, strike)()
        during = world.new_jobs(batch, 2)
        wait = world.submit_later(during)
        world.pause(away)
        getattr(server, mend)()
        world.timeline.add("fault", f"{server.name} is back")
        # an idle worker is connected too, and must notice
        batch.hits.append(f"{many(working, 'open job')}, {many(len(world.service.workers()), 'worker')}")
        over(world, batch)
        wait()
        world.wait_for_api()
        after = world.new_jobs(batch, 2)
        world.submit(after)
        _enqueued(world, batch, during, after, server.name)

    return run


def _enqueued(world: World, batch: Batch, during: list[Job], after: list[Job], server: str) -> None:
    """Compared with a later submit: on a crowded machine most of it is the start of the process."""
    slow, promised = max(job.slowest for job in during), world.spec.promises.enqueue
    usual = max(world.normal, *(job.slowest for job in after))
    batch.facts.append(f"submit took {slow:.1f} s meanwhile, {usual:.1f} s without")
    if slow - usual > promised:
        batch.broke(
            "enqueue",
            f"a submit took {slow:.1f} s with {server} away and {usual:.1f} s afterwards, promised {promised:g} s",
        )


redis_restart = _away("redis-restart", "Redis is restarted", 0.2, "shutdown", "start", quick=True)
redis_kill = _away("redis-kill", "Redis is killed, and away for 4 s", 4, "kill", "start", quick=True)
redis_freeze = _away(
    "redis-freeze", "Redis is frozen for 8 s: connections stay open, nothing answers", 8, "freeze", "thaw"
)
redis_full = _away(
    "redis-full", "Redis has no memory left for 4 s: writes are refused", 4, "fill_memory", "free_memory"
)
redis_demoted = _away(
    "redis-demoted", "Redis is a replica for 4 s: writes are refused with READONLY", 4, "demote", "promote"
)
broker_restart = _away("broker-restart", "the broker is restarted", 0.2, "shutdown", "start", _needs_broker)
broker_kill = _away(
    "broker-kill", "the broker is killed, and away for 4 s", 4, "kill", "start", _needs_broker, quick=True
)
broker_freeze = _away("broker-freeze", "the broker is frozen for 8 s", 8, "freeze", "thaw", _freezable)


@fault("redis-gone", "Redis is not there when the service starts, and comes 4 s later", _needs_redis, cost=8)
def redis_gone(world: World, batch: Batch) -> None:
    assert world.redis is not None
    world.service.stop_all()
    world.timeline.add("fault", "Redis is gone")
    world.redis.shutdown()
    world.service.resume_all()
    world.until(lambda: all(slot.alive for slot in world.service.all()), 5)
    started = sum(slot.alive for slot in world.service.all())
    world.pause(4)
    world.redis.start()
    world.timeline.add("fault", "Redis is back")
    batch.hits.append(f"{started} processes started without it")
    over(world, batch)
    # An api that is still down, or starting again, may refuse: that breaks no promise.
    world.wait_for_api()
    world.submit(world.new_jobs(batch, half(world)))


# the database


def _needs_sql(spec: Spec) -> str:
    return "" if spec.effect.kind == "sql" else "needs an [effect] by sql"


def _store(name: str, does: str, hold: Callable[[World], Any], needs: Callable[[Spec], str]) -> Fault:
    """What `hold(world)` does to the database lasts for 4 s of work."""

    @fault(name, does, needs, cost=8, backlog=True)
    def run(world: World, batch: Batch) -> None:
        jobs = world.new_jobs(batch, world.spec.service.jobs)
        world.backlog(jobs[:2])
        with hold(world):
            world.timeline.add("fault", f"database: {does}")
            wait = world.submit_later(jobs[2:])
            # If processes start slowly, none would be up before it is over.
            world.until(lambda: still_open(world, batch), 15, 0.05)
            world.pause(4)
            waiting = still_open(world, batch)
        world.timeline.add("fault", "database is back")
        wait()
        if waiting:
            batch.hits.append(many(waiting, "open job"))
        over(world, batch)

    return run


def _file(world: World) -> Path | None:
    address = fill(world.spec.effect.target, world.values())
    return Path(address.removeprefix("sqlite:///")) if address.startswith("sqlite") else None


@contextlib.contextmanager
def _locked(world: World) -> Iterator[None]:
    if (file := _file(world)) is None:
        assert world.postgres is not None
        with world.postgres.tables_locked():
            yield
        return
    with contextlib.closing(sqlite3.connect(file, timeout=10, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")


@contextlib.contextmanager
def _frozen(world: World) -> Iterator[None]:
    assert world.postgres is not None
    world.postgres.freeze()
    yield
    world.postgres.thaw()


@contextlib.contextmanager
def _full(world: World) -> Iterator[None]:
    """The service can write to no file: EFBIG, of which SQLite makes an I/O error or a full disk."""
    if _file(world) is None:
        assert world.postgres is not None
        with world.postgres.read_only():
            yield
        return
    pids = {pid for slot in world.service.all() if slot.child for pid in family(slot.child.pid)}
    _limit_files(pids, 0)
    yield
    _limit_files(pids, resource.RLIM_INFINITY)


def _limit_files(pids: set[int], soft: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def _needs_postgres(spec: Spec) -> str:
    return _needs_sql(spec) or ("" if spec.postgres else "needs {postgres}: a file is never away")


store_locked = _store(
    "store-locked", "the database is locked for 4 s: SQLite by a writer, PostgreSQL table by table", _locked, _needs_sql
)
store_away = _store("store-away", "PostgreSQL is frozen for 4 s", _frozen, _needs_postgres)
store_full = _store(
    "store-full",
    "the disk of the database is full for 4 s: SQLite cannot grow, PostgreSQL is read-only",
    _full,
    _needs_sql,
)
