"""Ticks while instances are killed: one effect per slot, every slot accounted for; cron locks run twice and more."""

import asyncio
import collections
import contextlib
import json
import random
import sys
from pathlib import Path

import pytest
from sqlalchemy import select

from harness.pipelines import full_producer
from harness.processes import Spawned
from harness.waiting import until
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import read
from studyhall.patterns.schedule import Schedules
from studyhall.patterns.schedule.history import missed_slots
from studyhall.patterns.signed_payload import Signer

pytestmark = pytest.mark.fault

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(PROGRAMS))

import schedule_instances  # noqa: E402

AHEAD = 3600  # seconds
PROGRAM = PROGRAMS / "schedule_instances.py"


class Fleet:
    def __init__(self, redis_url, directory, spawn, every, cron=""):
        self.redis_url, self.spawn, self.every = redis_url, spawn, every
        self.when = {"cron": cron} if cron else {"every": every}
        self.store_url = f"sqlite:///{directory / 'ticks.db'}"
        self.instances: list[Spawned] = []
        self.gone: list[Spawned] = []

    @contextlib.asynccontextmanager
    async def open(self):
        self.store = open_store(self.store_url)
        await create_all(self.store)
        jobs = schedule_instances.job_types()
        self.producer = full_producer(jobs, self.redis_url, signer=Signer(schedule_instances.KEYS), timeout=10)
        self.schedules: Schedules = schedule_instances.schedules(jobs, **self.when)
        self.queue = self.producer.queue(schedule_instances.QUEUE)
        try:
            yield self
        finally:
            for instance in self.instances:
                instance.close()
            await self.producer.close()
            await close(self.store)

    async def start(self, count, **options):
        # Not forked: the instances of a deployment start seconds apart, and heal in between.
        fresh = [
            self.spawn.command(
                sys.executable,
                PROGRAM,
                "ours",
                f"--redis={self.redis_url}",
                f"--store={self.store_url}",
                *(f"--{key}={value}" for key, value in self.when.items()),
                *(f"--{key}={value}" for key, value in options.items()),
            )
            for _ in range(count)
        ]
        for instance in fresh:
            await instance.line('"ready"')
        self.instances += fresh

    def starts(self, instance):
        return [json.loads(line)["slot"] for line in instance.lines() if '"start"' in line]

    def earliest(self, instance):
        """Seconds by which the earliest start of a tick came before its slot."""
        starts = [json.loads(line)["early"] for line in instance.lines() if '"start"' in line]
        return max(starts, default=float("-inf"))

    async def kill_leader(self):
        """SIGKILL the instance in the middle of a tick. True if that tick was not done yet."""
        seen = {each.pid: len(self.starts(each)) for each in self.instances}

        def leader():
            return next((each for each in self.instances if len(self.starts(each)) > seen[each.pid]), None)

        victim = await until(leader, 20, "a tick starts somewhere", every=0.002)
        victim.kill()
        self.instances.remove(victim)
        self.gone.append(victim)
        return self.starts(victim)[-1] not in await self.effects()

    async def effects(self):
        async with read(self.store) as connection:
            rows = await connection.execute(select(schedule_instances.tick_effects.c.slot))
            return collections.Counter(row.slot for row in rows)

    async def missed(self):
        async with read(self.store) as connection:
            return {row.slot for row in await connection.execute(select(missed_slots))}

    async def state(self):
        (state,) = await self.schedules.states(self.producer, self.store)
        return state

    async def idle(self):
        """No more ticks, and those under way are through."""
        await self.queue.removeJobScheduler("beat")

        async def nothing_left():
            counts = await self.queue.getJobCounts()
            return not any(counts[name] for name in ("waiting", "prioritized", "delayed", "active"))

        await until(nothing_left, 40, "every tick under way ends", every=0.1)


@pytest.mark.slow
async def test_leader_kills_leave_at_most_one_run_per_tick_and_every_missed_tick_reported(
    redis_url, tmp_path, spawn, scale, seed, figures
):
    ticks, kills, rng = scale(25, 100), scale(3, 5), random.Random(seed)
    async with Fleet(redis_url, tmp_path, spawn, every=0.3).open() as fleet:
        await fleet.start(3)
        in_mid_tick = 0
        for number in range(1, kills + 1):
            mark = ticks * number // (kills + 2)

            async def reached(mark=mark):
                return len(await fleet.effects()) >= mark

            await until(reached, 60, f"{mark} ticks before kill {number}", every=0.05)
            await asyncio.sleep(rng.random() * fleet.every)
            in_mid_tick += await fleet.kill_leader()
            await fleet.start(1)
        # And an outage of all: no instance is there for these slots.
        for instance in fleet.instances:
            instance.kill()
        await asyncio.sleep(4 * fleet.every)
        fleet.gone += fleet.instances
        fleet.instances.clear()
        missed_before = (await fleet.state()).missed
        await fleet.start(3)

        ran = len(await fleet.effects())

        async def enough():
            return len(await fleet.effects()) >= max(ticks, ran + 5)

        await until(enough, 90, f"{ticks} ticks, some of them after the outage", every=0.1)
        await fleet.idle()
        effects, missed, state = await fleet.effects(), await fleet.missed(), await fleet.state()
        failures = [job.failedReason for job in await fleet.queue.getFailed()]
    runs = sum(len(fleet.starts(each)) for each in [*fleet.instances, *fleet.gone])
    assert in_mid_tick > 0, "no kill hit an unfinished tick: this run proves nothing"
    assert max(effects.values()) == 1, "a tick took effect twice"
    assert failures == []
    # Every slot since the first is accounted for: it ran, or it was reported as missed.
    step = round(fleet.every * 1000)
    every_slot = set(range(min(effects), max(effects) + 1, step))
    span = len(every_slot)
    assert set(effects).isdisjoint(missed), "a slot that ran is still reported as missed"
    assert set(effects) | missed == every_slot, "a slot neither ran nor was reported"
    assert state.missed == len(missed)
    assert state.missed - missed_before >= 3, "the outage of all is in the report"
    figures(
        "schedule",
        name="leader-kills",
        instances=len(fleet.instances),
        ticks=len(effects),
        leader_kills=kills,
        kills_in_mid_tick=in_mid_tick,
        most_effects_per_tick=max(effects.values()),
        runs_started=runs,
        slots=span,
        missed_and_reported=state.missed,
        unaccounted=span - len(effects) - state.missed,
    )


@pytest.mark.slow
@pytest.mark.parametrize("cron", ["", "* * * * * *"])
@pytest.mark.parametrize("first", ["right", "ahead"])
async def test_a_worker_an_hour_ahead_starts_no_tick_early_and_silences_nobody(
    redis_url, tmp_path, spawn, first, cron, figures
):
    """`first` declares the schedule; then both work, then only the worker whose clock is right."""
    async with Fleet(redis_url, tmp_path, spawn, every=1.0, cron=cron).open() as fleet:

        async def more_ticks(what):
            seen = len(await fleet.effects())

            async def three():
                return len(await fleet.effects()) >= seen + 3

            await until(three, 30, what, every=0.1)

        await fleet.start(1, ahead=AHEAD if first == "ahead" else 0)
        await more_ticks(f"ticks of one worker, its clock {first}")
        await fleet.start(1, ahead=0 if first == "ahead" else AHEAD)
        await more_ticks("ticks of both")
        fleet.instances[0 if first == "ahead" else 1].kill()
        await more_ticks("ticks of the worker whose clock is right")
        await fleet.idle()
        effects, missed = await fleet.effects(), await fleet.missed()
    early = max(fleet.earliest(instance) for instance in fleet.instances)
    assert early < 0.1, f"a tick was started {early:.1f} s before its slot"
    assert max(effects.values()) == 1
    slots = set(range(min(effects), max(effects) + 1, 1000))
    assert set(effects) | missed == slots, "a slot neither ran nor was reported"
    figures(
        "schedule",
        name=f"clock-ahead-{first}-{'cron' if cron else 'every'}",
        seconds_ahead=AHEAD,
        ticks=len(effects),
        earliest_start_ms=round(early * 1000),
        unaccounted=len(slots) - len(effects) - len(missed),
    )


@pytest.mark.slow
@pytest.mark.parametrize("versions", [(1, 2), (0, 0)])
async def test_an_old_instance_that_restarts_in_a_rolling_deploy_removes_nothing_of_the_new_one(
    redis_url, tmp_path, spawn, versions
):
    """The naive twin has no versions: there the last one to start wins, and nobody repairs what it removed."""
    old, new = versions
    async with Fleet(redis_url, tmp_path, spawn, every=1.0).open() as fleet:

        async def scheduled():
            return set(await fleet.producer.redis.zrange(fleet.queue.toKey("repeat"), 0, -1))

        async def has_both():
            return await scheduled() == {"beat", "report"}

        # The twin's new instance does not heal: one that was looking at this very moment would write it again.
        heal = 0.1 if old != new else 0.0
        await fleet.start(1, version=old, heal=heal)
        await fleet.start(1, version=new, also="report", heal=heal)
        assert await has_both()
        fleet.instances[0].kill()
        await fleet.start(1, version=old, heal=heal)
        restarted = fleet.instances[2]
        if old == new:
            assert await scheduled() == {"beat"}
            return
        assert await has_both(), "the old instance removed a schedule of the new version"
        # Redis loses its data; whichever instance heals first, in the end the new version is in force.
        await fleet.producer.redis.flushall()
        await until(has_both, 20, "the schedules of the new version come back")
        ran = len(await fleet.effects())

        async def ticks():
            return len(await fleet.effects()) >= ran + 2

        await until(ticks, 30, "ticks after the loss")
        assert await has_both()
        lines = [line for line in restarted.lines() if "changes nothing" in line]
    assert lines == ["version 2 of the schedules is in force: this instance declares version 1 and changes nothing"]


@pytest.mark.slow
async def test_cron_locks_run_a_tick_again_when_the_job_outlives_the_lock_or_a_clock_is_off(
    redis_url, spawn, scale, figures
):
    """The naive twin, which fails in two ways: one lock for all instances, SET NX and DEL."""
    ticks = scale(2, 20)
    redis = producer_client(redis_url)

    async def most_runs(every, seconds, ttl, skew):
        await redis.flushall()
        instances = [
            spawn(
                PROGRAM,
                "cron-lock",
                f"--redis={redis_url}",
                f"--every={every}",
                f"--seconds={seconds}",
                f"--ttl={ttl}",
                f"--skew={number * -skew}",
                f"--ticks={ticks}",
            )
            for number in range(3)
        ]
        for instance in instances:
            await instance.line('"done"', 60)
        runs = collections.Counter(await redis.lrange("cron-runs", 0, -1))
        return max(runs.values()), sum(runs.values())

    long_most, long_runs = await most_runs(every=2.4, seconds=1.5, ttl=0.4, skew=0.5)
    skewed_most, skewed_runs = await most_runs(every=0.8, seconds=0.02, ttl=5, skew=0.1)
    await redis.aclose()
    assert long_most == 3, "a job that outlives its lock runs in every instance"
    assert skewed_most >= 2, "a lock that was released is taken by the instance whose clock is behind"
    figures(
        "schedule",
        name="cron-lock",
        ticks=ticks,
        naive_most_runs_of_a_tick_longer_than_its_lock=long_most,
        naive_runs_of_ticks_longer_than_their_lock=long_runs,
        naive_runs_with_clocks_100_ms_apart=skewed_runs,
    )
