"""The faults, one small class each. Each says what it hit: a fault that hit nothing has proved nothing."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .spec import Program, Request, Spec, fill

if TYPE_CHECKING:
    from .provider import Call
    from .service import Running
    from .world import Batch, Job, World

__all__ = ["FAULTS", "Fault"]


class Fault(ABC):
    """`cost`: about how many seconds it takes on a service that keeps its promises, beside waiting for recovery."""

    name = ""
    does = ""
    quick = False
    cost = 4.0
    # A job may end as a visible failure without breaking a promise.
    may_fail = False

    def missing(self, spec: Spec) -> str:
        """What the file would have to say for this fault to be possible; nothing: it is."""
        return ""

    @abstractmethod
    def run(self, world: World, batch: Batch) -> None: ...


class Nothing(Fault):
    name, does, quick, cost = "none", "no fault at all: does the set-up work?", True, 3

    def run(self, world: World, batch: Batch) -> None:
        world.submit(world.new_jobs(batch, max(2, world.spec.service.jobs // 2)))
        batch.hits.append("nothing was to be hit")


# the workers


class KillAtEffect(Fault):
    name, quick, cost = "kill-at-effect", True, 8
    does = "SIGKILL to the worker after a provider's effect, before its answer"

    def missing(self, spec: Spec) -> str:
        return "" if _effective(spec) else "needs a [provider.NAME] with an effect"

    def run(self, world: World, batch: Batch) -> None:
        for jobs in world.rounds(batch, 2):
            keys, struck = {job.key for job in jobs}, threading.Event()

            def strike(call: Call, keys: set[str] = keys, struck: threading.Event = struck) -> bool:
                if call.key not in keys or struck.is_set():
                    return False
                struck.set()
                slot = world.service.kill_owner(call.port, f" after {call.line} of {call.key}")
                if slot is None:  # somebody between us and the worker: all of them, then
                    world.service.kill(*world.service.workers(), why=f" after {call.line} of {call.key}")
                batch.hits.append(f"{slot.name if slot else 'all workers'} at {call.key}")
                return True

            for provider in world.providers.values():
                provider.on_effect = strike
            wait = world.submit_later(jobs)
            struck.wait(15)
            for provider in world.providers.values():
                provider.on_effect = None
            wait()
            _over(world, batch)


class KillAtCommit(Fault):
    name, quick, cost = "kill-at-commit", False, 8
    does = "SIGKILL to all workers the moment an effect is seen, before the job is acknowledged"

    def missing(self, spec: Spec) -> str:
        return (
            "needs an [effect] of the service's own, not a provider's"
            if spec.effect.kind == "provider"
            else ""
        )

    def run(self, world: World, batch: Batch) -> None:
        for jobs in world.rounds(batch, 2):
            if world.backlog(jobs, done=1):
                world.service.kill(*world.service.workers(), why=" when an effect was seen")
                _hit_work(world, batch, "all workers")
            _over(world, batch)


class KillRandom(Fault):
    name, quick, cost = "kill-random", True, 8
    does = "SIGKILL to all workers at a random moment of their work"

    def run(self, world: World, batch: Batch) -> None:
        for jobs in world.rounds(batch, 2):
            if world.backlog(jobs, done=world.rng.randrange(max(1, len(jobs) // 2))):
                time.sleep(world.rng.random() * 0.03)
                world.service.kill(*world.service.workers())
                _hit_work(world, batch, "all workers")
            _over(world, batch)


class KillAll(Fault):
    name, cost = "kill-all", 8
    does = "SIGKILL to everything at one moment: workers, api and Redis"

    def run(self, world: World, batch: Batch) -> None:
        world.backlog(world.new_jobs(batch, world.spec.service.jobs), done=1)
        if world.redis:
            world.timeline.add("fault", "SIGKILL Redis")
            world.redis.kill()
        world.service.kill(*world.service.all())
        _hit_work(world, batch, "everything")
        if world.redis:
            world.pause(1)
            world.redis.start()
            world.timeline.add("fault", "Redis is back")
        _over(world, batch, settle=False)


class Term(Fault):
    name, quick, cost = "term", True, 6
    does = "SIGTERM to the workers in the middle of their work, as in a deploy"

    def run(self, world: World, batch: Batch) -> None:
        promises, slowest = world.spec.promises, 0.0
        for _ in range(1 if world.quick else 2):
            world.service.wait_up()
            wait = world.submit_later(world.new_jobs(batch, max(2, world.spec.service.jobs // 2)))
            if world.busy(batch, 15) and (slot := _one_at_work(world)):
                _hit_work(world, batch, slot.name)
                code, took = world.service.terminate(slot, promises.shutdown)
                slowest = max(slowest, took)
                if code is None:
                    batch.broken.append(
                        ("shutdown", f"{slot.name} still ran {promises.shutdown:g} s after SIGTERM")
                    )
                elif code not in promises.exit_codes:
                    how = f"died of signal {-code}" if code < 0 else f"exit code {code}"
                    batch.broken.append(("shutdown", f"{slot.name}: {how} after {took:.1f} s"))
                slot.wanted = True
            wait()
        batch.facts.append(f"slowest exit {slowest:.1f} s")
        _over(world, batch, settle=False)


class Freeze(Fault):
    name = "freeze"
    does = "SIGSTOP to a worker in the middle of its work for longer than its lock, then SIGCONT"

    def run(self, world: World, batch: Batch) -> None:
        at_work = world.backlog(world.new_jobs(batch, world.spec.service.jobs))
        if at_work and (slot := _one_at_work(world)):
            world.service.freeze(slot)
            world.pause(0.5)
            _hit_work(world, batch, slot.name)
            world.wait(world.spec.service.lock + 2 * world.scale)
            world.service.thaw(slot)
        _over(world, batch, settle=False)


class Copies(Fault):
    name, cost = "copies", 6
    does = "two copies of every process"

    def run(self, world: World, batch: Batch) -> None:
        added = world.service.add_copies()
        world.pause(1)
        world.submit(world.new_jobs(batch, world.spec.service.jobs))
        if all(slot.alive for slot in added):
            batch.hits.append(f"{len(added)} more processes")
        _over(world, batch)
        for slot in added:
            world.service.remove(slot, world.spec.promises.shutdown)


class Rolling(Fault):
    name, cost = "rolling", 10
    does = "a rolling deploy: new workers start beside the old ones, which get SIGTERM, while work goes on"

    def run(self, world: World, batch: Batch) -> None:
        service = world.spec.service
        new = world.service.add_copies(Program(service.next or service.worker.run, service.worker.ready))
        old = [slot for slot in world.service.workers() if slot not in new]
        world.service.wait_up()
        for slot in old:
            wait = world.submit_later(world.new_jobs(batch, service.jobs // len(old) + 1))
            if world.busy(batch, 15) and slot.alive:
                _hit_work(world, batch, slot.name)
                world.service.terminate(slot, world.spec.promises.shutdown)
            wait()
        world.submit(world.new_jobs(batch, 2))
        _over(world, batch)
        for slot in old:
            slot.wanted = True
        for slot in new:
            world.service.remove(slot, world.spec.promises.shutdown)


class Poison(Fault):
    name, cost = "poison", 12
    does = "a job that kills its worker, among others"

    def missing(self, spec: Spec) -> str:
        return (
            ""
            if spec.service.poison
            else "needs `poison` in [service]: how to send a job that kills its worker"
        )

    def run(self, world: World, batch: Batch) -> None:
        exits = len(world.service.exits)
        world.submit(world.new_jobs(batch, 1, "failed"), world.spec.service.poison)
        world.submit(world.new_jobs(batch, max(2, world.spec.service.jobs // 2)))
        world.until(lambda: len(world.service.exits) > exits, 15)
        world.settle(batch, world.patience)
        deaths = [one for one in world.service.exits[exits:] if not one.ours]
        batch.facts.append(f"{len(deaths)} workers died")
        batch.hits += [f"{one.name} died with {one.code}" for one in deaths]
        if len(deaths) > world.spec.promises.crashes:
            batch.broken.append(
                ("poison", f"it killed {len(deaths)} workers, promised at most {world.spec.promises.crashes}")
            )
        _over(world, batch, settle=False)


# Redis


class _RedisAway(Fault):
    away, cost = 4.0, 9.0

    def missing(self, spec: Spec) -> str:
        return "" if spec.redis else "[servers] redis = false"

    def run(self, world: World, batch: Batch) -> None:
        assert world.redis is not None
        size = world.spec.service.jobs
        world.backlog(world.new_jobs(batch, max(2, size // 2)))
        clients = self._clients(world)
        world.timeline.add("fault", self.does)
        self.strike(world)
        during = world.new_jobs(batch, 2)
        wait = world.submit_later(during)
        world.pause(self.away)
        self.mend(world)
        world.timeline.add("fault", "Redis is back")
        if clients or _open(world, batch):
            batch.hits.append(f"{_many(clients, 'connection')}, {_many(len(batch.open()), 'open job')}")
        _over(world, batch, settle=False)
        wait()
        slow = max(job.slowest for job in during)
        batch.facts.append(f"submit took {slow:.1f} s meanwhile")
        if slow > world.spec.promises.enqueue:
            batch.broken.append(
                (
                    "enqueue",
                    f"a submit took {slow:.1f} s while Redis was away, promised {world.spec.promises.enqueue:g} s",
                )
            )
        world.submit(world.new_jobs(batch, max(2, size // 4)))

    @abstractmethod
    def strike(self, world: World) -> None: ...

    @abstractmethod
    def mend(self, world: World) -> None: ...

    def _clients(self, world: World) -> int:
        assert world.redis is not None
        with world.redis.client() as client:
            return len(client.client_list()) - 1


class RedisRestart(_RedisAway):
    name, does, quick, away = "redis-restart", "Redis is restarted", True, 0.2

    def strike(self, world: World) -> None:
        assert world.redis is not None
        world.redis.shutdown()

    def mend(self, world: World) -> None:
        assert world.redis is not None
        world.redis.start()


class RedisKill(RedisRestart):
    name, does, quick, away = "redis-kill", "Redis is killed, and away for 4 s", False, 4.0

    def strike(self, world: World) -> None:
        assert world.redis is not None
        world.redis.kill()


class RedisFreeze(_RedisAway):
    name, does, away = "redis-freeze", "Redis is frozen for 8 s: connections stay open, nothing answers", 8.0

    def strike(self, world: World) -> None:
        assert world.redis is not None
        world.redis.freeze()

    def mend(self, world: World) -> None:
        assert world.redis is not None
        world.redis.thaw()


class RedisFull(_RedisAway):
    name, does = "redis-full", "Redis has no memory left for 4 s: writes are refused"

    def strike(self, world: World) -> None:
        assert world.redis is not None
        world.redis.fill_memory()

    def mend(self, world: World) -> None:
        assert world.redis is not None
        world.redis.free_memory()


class RedisDemoted(_RedisAway):
    name, does = "redis-demoted", "Redis is a replica for 4 s: writes are refused with READONLY"

    def strike(self, world: World) -> None:
        assert world.redis is not None
        world.redis.demote()

    def mend(self, world: World) -> None:
        assert world.redis is not None
        world.redis.promote()


class RedisGone(Fault):
    name, cost = "redis-gone", 8
    does = "Redis is not there when the service starts, and comes 4 s later"

    def missing(self, spec: Spec) -> str:
        return "" if spec.redis else "[servers] redis = false"

    def run(self, world: World, batch: Batch) -> None:
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
        _over(world, batch, settle=False)
        # An api that is still down, or starting again, refuses: no fault of its promises.
        world.wait_for_api()
        world.submit(world.new_jobs(batch, max(2, world.spec.service.jobs // 2)))


# the providers


class _Answers(Fault):
    """`answer(call)`: what the provider says to a call of this fault's jobs."""

    def missing(self, spec: Spec) -> str:
        return "" if _effective(spec) else "needs a [provider.NAME] with an effect"

    def jobs(self, world: World, batch: Batch) -> list[Job]:
        return world.new_jobs(batch, world.spec.service.jobs)

    def run(self, world: World, batch: Batch) -> None:
        jobs = self.jobs(world, batch)
        self.keys, self.tried, self.first = {job.key for job in jobs}, dict[str, int](), 0.0
        self.scale = world.scale

        def script(call: Call) -> str | None:
            if call.key not in self.keys:
                return None
            self.first = self.first or call.at
            self.tried[call.key] = self.tried.get(call.key, 0) + 1
            return self.answer(call)

        for provider in world.providers.values():
            provider.scripts.append(script)
        world.timeline.add("fault", self.does)
        world.submit(jobs)
        self.meanwhile(world, batch)
        calls = [call for one in world.providers.values() for call in one.calls if call.key in self.keys]
        if said := Counter(call.answer for call in calls if call.failed):
            batch.hits.append(", ".join(f"{count} x {answer}" for answer, count in said.items()))
        _over(world, batch, settle=False)

    def meanwhile(self, world: World, batch: Batch) -> None:
        """Until every job has called once, or is done without: the fault is over then, not the jobs."""
        world.until(lambda: self.tried.keys() >= self.keys or not _open(world, batch), 20, 0.05)

    @abstractmethod
    def answer(self, call: Call) -> str | None: ...

    def first_time(self, call: Call) -> bool:
        return self.tried[call.key] == 1


class Lost(_Answers):
    name, does, quick, cost = "lost", "the answer is lost after the effect, once per job", True, 6

    def answer(self, call: Call) -> str | None:
        return "lost" if self.first_time(call) else None


class Slow(_Answers):
    name, does, cost = "slow", "every first answer takes 6 s, the effect comes after 3 s", 12

    def answer(self, call: Call) -> str | None:
        return "slow" if self.first_time(call) else None


class RateLimited(_Answers):
    name, does, cost = "429", "429 with Retry-After, once per job", 6

    def answer(self, call: Call) -> str | None:
        return "429" if self.first_time(call) else None


class Outage(_Answers):
    name, does, cost = "outage", "500 to every call for 6 s", 12
    lasts = 6.0

    def answer(self, call: Call) -> str | None:
        return "500" if call.at - self.first < self.lasts * self.scale else None

    def meanwhile(self, world: World, batch: Batch) -> None:
        if world.until(lambda: self.first, 20):
            world.until(lambda: world.timeline.now() - self.first > self.lasts * self.scale, 60)


class Hang(_Answers):
    name, does, cost = "hang", "no answer at all for 20 s, once for each of two jobs", 25

    def answer(self, call: Call) -> str | None:
        hung = sorted(self.keys)[:2]
        return "hang" if call.key in hung and self.first_time(call) else None


class Refused(_Answers):
    name, does, cost, may_fail = (
        "refused",
        "422 to every call of two jobs: they must end as visible failures",
        8,
        True,
    )

    def jobs(self, world: World, batch: Batch) -> list[Job]:
        return [*world.new_jobs(batch, 2, "failed"), *world.new_jobs(batch, 2)]

    def answer(self, call: Call) -> str | None:
        return "422" if call.key in sorted(self.keys)[:2] else None


class Mixed(_Answers):
    name, does, cost, may_fail = "answers", "answers in the file's own mix", 8, False

    def missing(self, spec: Spec) -> str:
        mixed = any(len(route.answers) > 1 for one in spec.providers for route in one.routes)
        return super().missing(spec) or (
            "" if mixed else 'the file gives no mix: answers = "ok 92%, lost 3%, …"'
        )

    def jobs(self, world: World, batch: Batch) -> list[Job]:
        return world.new_jobs(batch, world.spec.service.jobs * 2)

    def answer(self, call: Call) -> str | None:
        return "mix"


class Failing(Fault):
    name, does, cost, may_fail = "failing", "jobs that cannot succeed must end as visible failures", 6, True

    def missing(self, spec: Spec) -> str:
        return (
            ""
            if spec.service.failing
            else "needs `failing` in [service]: how to send a job that cannot succeed"
        )

    def run(self, world: World, batch: Batch) -> None:
        world.submit(world.new_jobs(batch, 2, "failed"), world.spec.service.failing)
        world.submit(world.new_jobs(batch, 2))
        batch.hits.append("2 jobs sent")
        _over(world, batch, settle=False)


# the senders


class Twice(Fault):
    name, does, quick, cost = "twice", "the same request twice: at once, and again after its effect", True, 5

    def run(self, world: World, batch: Batch) -> None:
        jobs = world.new_jobs(batch, max(2, world.spec.service.jobs // 2))
        half = len(jobs) // 2
        world.submit([job for job in jobs for _ in range(2 if jobs.index(job) < half else 1)])
        world.settle(batch, world.patience)
        world.submit(jobs[half:])
        batch.hits.append(f"{len(jobs)} requests, each sent twice")
        _over(world, batch, settle=False)


class Burst(Fault):
    name, does, quick, cost = "burst", "the same request many times at once", True, 6

    def run(self, world: World, batch: Batch) -> None:
        # A process each: more of them would measure how many this machine can start.
        times = 20 if isinstance(world.spec.service.submit, Request) else 6
        jobs = world.new_jobs(batch, 1)
        world.submit(jobs * times, one_by_one=times)
        batch.hits.append(f"{times} equal requests")
        _over(world, batch, settle=False)


class Foreign(Fault):
    name, does, cost = (
        "foreign",
        "jobs on the queue that nobody can read: no data, broken JSON, an unknown name",
        6,
    )

    def missing(self, spec: Spec) -> str:
        return "" if spec.service.queue else "needs `queue` in [service]: the name of the BullMQ queue"

    def run(self, world: World, batch: Batch) -> None:
        assert world.redis is not None
        service = world.spec.service
        base = f"{service.prefix}:{service.queue}"
        now = str(int(time.time() * 1000))
        with world.redis.client() as client:
            for number, (name, data) in enumerate(
                [("", "{}"), ("nobody-knows-this", '{"a": 1}'), ("x", "{broken"), ("x", "null")]
            ):
                ident = f"foreign-{number}"
                fields = {
                    "name": name,
                    "data": data,
                    "opts": "{}",
                    "timestamp": now,
                    "delay": "0",
                    "priority": "0",
                }
                client.hset(f"{base}:{ident}", mapping=fields)
                client.lpush(f"{base}:wait", ident)
                client.zadd(f"{base}:marker", {"0": 0})
            world.timeline.add("fault", "4 foreign jobs put on the queue")
            world.submit(world.new_jobs(batch, max(2, service.jobs // 2)))
            gone = world.until(lambda: not client.llen(f"{base}:wait"), 10, 0.05)
        batch.hits.append(f"4 foreign jobs{', all fetched' if gone else ', not all fetched'}")
        _over(world, batch, settle=False)


class Quiet(Fault):
    name, does, cost = "quiet", "nothing to do for 40 s, then one job", 45

    def run(self, world: World, batch: Batch) -> None:
        world.pause(40)
        job = world.new_jobs(batch, 1)[0]
        world.submit([job])
        world.settle(batch, world.patience)
        batch.hits.append(f"{40 * world.scale:g} s of silence")
        if job.seen:
            took = job.seen[0] - job.at
            batch.facts.append(f"taken up after {max(took, 0):.1f} s")
            if took > world.spec.promises.wake:
                batch.broken.append(
                    (
                        "wake",
                        f"the job after the silence took {took:.1f} s, promised {world.spec.promises.wake:g} s",
                    )
                )
        _over(world, batch, settle=False)


class StoreAway(Fault):
    name, does, cost = "store-away", "the database is locked (SQLite) or frozen (PostgreSQL) for 4 s", 8

    def missing(self, spec: Spec) -> str:
        return "" if spec.effect.kind == "sql" else "needs an [effect] by sql"

    def run(self, world: World, batch: Batch) -> None:
        address = fill(world.spec.effect.target, world.values())
        jobs = world.new_jobs(batch, world.spec.service.jobs)
        world.backlog(jobs[:2])
        with _locked(address) if address.startswith("sqlite") else _frozen(world):
            world.timeline.add("fault", f"database: {self.does}")
            wait = world.submit_later(jobs[2:])
            world.pause(4)
        world.timeline.add("fault", "database is back")
        wait()
        batch.hits.append(_many(_open(world, batch), "open job"))
        _over(world, batch, settle=False)


@contextlib.contextmanager
def _locked(address: str) -> Iterator[None]:
    path = Path(address.removeprefix("sqlite:///"))
    with contextlib.closing(sqlite3.connect(path, timeout=10, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")


@contextlib.contextmanager
def _frozen(world: World) -> Iterator[None]:
    assert world.postgres is not None
    world.postgres.freeze()
    yield
    world.postgres.thaw()


def _effective(spec: Spec) -> bool:
    return any(route.effect for one in spec.providers for route in one.routes)


def _over(world: World, batch: Batch, settle: bool = True) -> None:
    """The fault has ended: recovery is counted from here."""
    batch.end_fault(world.timeline.now())
    if settle:
        world.settle(batch, world.patience)


def _open(world: World, batch: Batch) -> int:
    world.look()
    return len(batch.open())


def _hit_work(world: World, batch: Batch, whom: str) -> None:
    """Does the signal come while work is left?"""
    world.look()
    at_provider = sum(provider.in_flight for provider in world.providers.values())
    if batch.open() or at_provider:
        batch.hits.append(f"{whom} with {_many(max(len(batch.open()), at_provider), 'open job')}")


def _many(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _one_at_work(world: World) -> Running | None:
    """A worker that talks to a provider right now, or any that lives."""
    from .processes import family, owner

    calls = [call for one in world.providers.values() for call in one.calls[-20:] if not call.done_at]
    for slot in world.service.workers():
        if slot.child and slot.alive and any(owner(call.port, family(slot.child.pid)) for call in calls):
            return slot
    living = [slot for slot in world.service.workers() if slot.alive]
    return world.rng.choice(living) if living else None


# The order of a run: what breaks most services first.
FAULTS: dict[str, type[Fault]] = {
    one.name: one
    for one in (
        Nothing,
        KillAtEffect,
        Lost,
        Twice,
        Burst,
        KillRandom,
        Term,
        RedisRestart,
        KillAtCommit,
        Failing,
        Refused,
        Outage,
        RateLimited,
        RedisKill,
        Freeze,
        KillAll,
        RedisGone,
        RedisFreeze,
        RedisFull,
        RedisDemoted,
        StoreAway,
        Slow,
        Mixed,
        Copies,
        Rolling,
        Poison,
        Foreign,
        Hang,
        Quiet,
    )
}
