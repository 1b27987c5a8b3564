"""Relays that are killed, duplicated and poisoned, beside what people write instead."""

import asyncio
import json
import random
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import redis as sync_redis
from sqlalchemy import Column, Integer, String, Table, delete, func, insert, select, update

from harness.waiting import until
from studyhall.patterns.core.errors import Transient
from studyhall.patterns.core.event import Event
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.open_store import create_all
from studyhall.patterns.core.store import begin, is_postgres, metadata, read
from studyhall.patterns.outbox import add, outbox
from studyhall.patterns.outbox.quarantine import lag
from studyhall.patterns.outbox.relay import Relay

PROGRAM = Path(__file__).parent / "programs" / "outbox_relays.py"
aggregates = Table(
    "proof_aggregates", metadata, Column("key", String, primary_key=True), Column("version", Integer, nullable=False)
)


class Undo(Exception):
    pass


class Relays:
    """Relay processes of one mode on one store, started in step and replaced when killed."""

    def __init__(self, spawn, store_url, redis_url):
        self._spawn, self._urls = spawn, (store_url, redis_url)
        self.redis = sync_redis.Redis.from_url(redis_url, decode_responses=True)
        self._started = 0
        self.publish_seconds = 0.002
        self.lease_seconds = 30.0

    def start(self, mode):
        self._started += 1
        worker = f"{mode}-{self._started}"
        env = {"PUBLISH_SECONDS": str(self.publish_seconds), "LEASE_SECONDS": str(self.lease_seconds)}
        return worker, self._spawn(PROGRAM, mode, *self._urls, worker, env=env)

    async def go(self, mode, count):
        """All at once, when `count` of them have started."""
        await until(lambda: self.redis.scard(f"ready:{mode}") >= count, 60, f"{count} relays to be ready")
        self.redis.set(f"go:{mode}", 1)

    def sink(self):
        return [Event.decode(fields["body"]) for _, fields in self.redis.xrange("sink")]

    async def quiet(self):
        """No relay publishes any more."""

        async def same():
            before = self.redis.xlen("sink")
            await asyncio.sleep(0.3)
            return self.redis.xlen("sink") == before

        await until(same, 30, "the relays to come to rest")

    def reset(self):
        self._spawn.close()
        self.redis.flushall()


@pytest.fixture
def relays(spawn, store_url, redis_url):
    return Relays(spawn, store_url, redis_url)


def event(subject, n):
    return Event(id=f"{subject}-{n}", source="/proof", type="order.changed.v1", subject=subject, data={"n": n})


async def bump(store, subject, rng, *, fail):
    """One business transaction: raise the aggregate's version, add the event, take a while, commit or not."""
    try:
        async with begin(store) as tx:
            raised = update(aggregates).where(aggregates.c.key == subject)
            raised = raised.values(version=aggregates.c.version + 1).returning(aggregates.c.version)
            version = (await tx.execute(raised)).scalar_one()
            changed = event(subject, version)
            if fail:
                changed = changed.model_copy(update={"id": f"ghost-{subject}-{version}-{rng.random()}"})
            await add(tx, changed)
            await asyncio.sleep(rng.random() * 0.004)
            if fail:
                raise Undo
    except Undo:
        return None
    return changed.id


async def work(store, prefix, commits, rollbacks, seed):
    """Five writers on shared aggregates. Returns the ids that were committed."""
    rng = random.Random(seed)
    plan = [False] * commits + [True] * rollbacks
    rng.shuffle(plan)
    subjects = [f"{prefix}-{n}" for n in range(max(5, commits // 20))]
    async with begin(store) as tx:
        await tx.execute(delete(aggregates))
        await tx.execute(insert(aggregates), [{"key": key, "version": 0} for key in subjects])
    done = set()

    async def writer():
        while plan:
            ident = await bump(store, rng.choice(subjects), rng, fail=plan.pop())
            done.update([ident] if ident else [])

    await asyncio.gather(*(writer() for _ in range(5)))
    return done


def first_copies(events):
    kept = {}
    for copy in events:
        kept.setdefault(copy.id, copy)
    return kept


def out_of_order(events):
    """Events whose aggregate had a later one before them."""
    last = defaultdict(int)
    wrong = 0
    for copy in first_copies(events).values():
        wrong += copy.data["n"] <= last[copy.subject]
        last[copy.subject] = max(last[copy.subject], copy.data["n"])
    return wrong


async def stranded(store, worker):
    """Rows a dead relay had claimed but not settled: proof that the kill hit it at work."""
    held = select(func.count()).where(outbox.c.claimed_by == worker, outbox.c.published_at.is_(None))
    async with read(store) as connection:
        return int((await connection.execute(held)).scalar_one())


async def kill_while_working(relays, store, mode, *, kills, commits, rollbacks, seed):
    """Two relays at a time, `kills` of them SIGKILLed while they publish. Returns ids, kills that hit."""
    relays.publish_seconds, relays.lease_seconds = 0.01, 0.7  # dead ones hold their batch that long
    alive = dict(relays.start(mode) for _ in range(2))
    await relays.go(mode, 2)
    writing = asyncio.create_task(work(store, mode, commits, rollbacks, seed))
    hits = 0
    for number in range(kills):
        seen = relays.redis.xlen("sink")
        share = commits * (number + 1) * 0.5 / kills
        await until(
            lambda share=share, seen=seen: relays.redis.xlen("sink") >= max(share, seen + 3),
            60,
            "relays to publish",
            every=0.003,
        )
        [(_, newest)] = relays.redis.xrevrange("sink", count=1)
        alive.pop(newest["by"]).kill()  # whoever is publishing right now
        hits += await stranded(store, newest["by"]) > 0
        alive.update([relays.start(mode)])
    committed = await writing
    return committed, hits


@pytest.mark.slow
@pytest.mark.fault
async def test_killed_relays_publish_every_commit_and_no_rollback_while_a_naive_one_loses(
    store, relays, scale, seed, figures
):
    kills, commits, rollbacks = scale(6, 20), scale(200, 1000), scale(40, 200)
    size = {"kills": kills, "commits": commits, "rollbacks": rollbacks}
    await create_all(store)
    committed, hits = await kill_while_working(relays, store, "relay", seed=seed, **size)

    async def all_published():
        return (await lag(store)).waiting == 0

    await until(all_published, 30, "the surviving relays to finish")
    published = relays.sink()
    kept = first_copies(published)
    assert len(committed) == commits
    assert set(kept) == committed  # nothing lost; no ghosts, which would have ids of their own
    assert out_of_order(published) == 0
    assert hits >= kills // 3, "the kills did not hit relays at work: the proof proves nothing"

    naive_lost = {}
    if not is_postgres(store):  # the same fault on both stores: once is enough
        relays.reset()
        small = {"kills": 3, "commits": 100, "rollbacks": 0}
        promised, _ = await kill_while_working(relays, store, "mark_first", seed=seed, **small)
        await until(all_published, 30, "the naive relays to mark everything")
        await relays.quiet()
        lost = promised - {copy.id for copy in relays.sink()}
        assert lost, "the naive relay lost nothing: the kills came at the wrong moments"
        naive_lost = {"naive_kills": 3, "naive_commits": 100, "naive_lost": len(lost)}
    figures(
        "outbox",
        name=f"kills-{store.dialect.name}",
        **size,
        kills_in_mid_batch=hits,
        lost=len(committed - set(kept)),
        ghosts=len(set(kept) - committed),
        out_of_order=out_of_order(published),
        copies_with_same_id=len(published) - len(kept),
        **naive_lost,
    )


async def fill(store, count):
    async with begin(store) as tx:
        await add(tx, *(event(f"order-{n % 50}", n // 50 + 1) for n in range(count)))


@pytest.mark.fault
async def test_three_relays_at_once_duplicate_nothing_while_two_naive_ones_duplicate_all(store, relays, scale, figures):
    """With the default lease of 30 s: none stalls for longer, even on a crowded machine."""
    count = scale(200, 2000)
    await fill(store, count)
    started = [relays.start("relay") for _ in range(3)]
    naive = [relays.start("select_then_update") for _ in range(2)]
    await relays.go("relay", 3)
    await until(lambda: relays.redis.xlen("sink") >= count, 60, "three relays to publish")
    for _, process in started:
        process.terminate()
    for _, process in started:
        assert await process.exited() == 0  # SIGTERM: finish, settle, leave
    entries = [fields for _, fields in relays.redis.xrange("sink")]
    published = relays.sink()
    assert len(published) == len(first_copies(published)) == count
    assert out_of_order(published) == 0
    shares = Counter(fields["by"] for fields in entries)
    assert len(shares) >= 2, f"one relay did everything, nothing was proven: {shares}"

    relays.redis.delete("sink")
    async with begin(store) as tx:
        await tx.execute(update(outbox).values(published_at=None, due_at=0.0))
    await relays.go("select_then_update", 2)
    for _, process in naive:
        assert await process.exited(60) == 0
    duplicated = len(relays.sink()) - len(first_copies(relays.sink()))
    assert duplicated > 0
    figures(
        "outbox",
        name=f"relays-at-once-{store.dialect.name}",
        events=count,
        relays=len(started),
        duplicated=len(published) - len(first_copies(published)),
        naive_relays=len(naive),
        naive_duplicated=duplicated,
    )


@pytest.mark.fault
async def test_a_relay_frozen_past_its_lease_duplicates_what_it_held_and_reorders_nothing(store, relays, figures):
    """The limit of the promise above: a lease cannot stop a process that does not know it is late."""
    relays.publish_seconds, relays.lease_seconds = 0.02, 2.0
    events = 100
    await fill(store, events)
    name, frozen = relays.start("relay")
    await relays.go("relay", 1)

    def by(worker):
        return [fields["id"] for _, fields in relays.redis.xrange("sink") if fields["by"] == worker]

    async def in_mid_batch():
        """Stopped between two publishes: of what it holds, the part already published."""
        if not 3 <= len(by(name)) % 20 <= 10:
            return []
        frozen.stop_signal()
        held = select(outbox.c.event_id).where(outbox.c.claimed_by == name, outbox.c.published_at.is_(None))
        async with read(store) as connection:
            ids = set((await connection.execute(held)).scalars().all())
        if published := sorted(ids.intersection(by(name))):
            return published
        frozen.cont()
        return []

    doomed = await until(in_mid_batch, 30, "the relay to be in the middle of a batch", every=0.005)
    successor, _ = relays.start("relay")

    async def all_published():
        return (await lag(store)).waiting == 0

    await until(all_published, 60, "the successor to publish the rest", every=0.1)
    frozen.cont()
    await relays.quiet()
    published = relays.sink()
    copies = len(published) - len(first_copies(published))
    assert len(first_copies(published)) == events
    assert out_of_order(published) == 0
    assert set(doomed) <= set(by(successor)), "what the frozen one had published is published again"
    assert await all_published()
    figures(
        "outbox",
        name=f"frozen-relay-{store.dialect.name}",
        events=events,
        lost=events - len(first_copies(published)),
        out_of_order=out_of_order(published),
        copies_with_same_id=copies,
    )


@pytest.mark.fault
async def test_overlapping_runs_in_one_process_duplicate_nothing_while_a_naive_interval_does(store, figures):
    events = 50
    await fill(store, events)
    naive = SlowSink()

    async def tick():
        async with read(store) as connection:
            oldest = select(outbox.c.position, outbox.c.body).where(outbox.c.published_at.is_(None))
            rows = (await connection.execute(oldest.order_by(outbox.c.position).limit(20))).all()
        for row in rows:
            await naive.publish([Event.decode(row.body)])
        async with begin(store) as tx:
            done = update(outbox).where(outbox.c.position.in_([row.position for row in rows]))
            await tx.execute(done.values(published_at=1.0))

    ticks = []
    while (await lag(store)).waiting:  # as setInterval does: the next run starts whatever the last one does
        ticks.append(asyncio.create_task(tick()))
        await asyncio.sleep(0.02)
    await asyncio.gather(*ticks)
    naive_duplicated = len(naive.events) - events
    assert naive_duplicated > 0

    async with begin(store) as tx:
        await tx.execute(update(outbox).values(published_at=None))
    ours = SlowSink()
    relay = Relay(store, ours, batch=20)
    while (await lag(store)).waiting:
        await asyncio.gather(*(relay.run_once() for _ in range(4)))
    published = {event.id for event in ours.events}
    duplicated = len(ours.events) - len(published)
    assert (len(published), duplicated) == (events, 0)
    sizes = {"events": events, "duplicated": duplicated, "naive_duplicated": naive_duplicated}
    figures("outbox", name=f"overlap-{store.dialect.name}", **sizes)


class SlowSink:
    """Accepts after a moment; refuses what `bad` says, event by event."""

    def __init__(self, bad=lambda _: False):
        self.events: list[Event] = []
        self.calls = 0
        self._bad = bad

    async def publish(self, events):
        self.calls += 1
        await asyncio.sleep(0.005)
        self.events += [each for each in events if not self._bad(each)]
        return [Transient("the broker refuses this one") if self._bad(each) else None for each in events]


@pytest.mark.fault
async def test_a_hundred_poison_rows_do_not_delay_fifty_good_ones(store, figures):
    poison, good = 100, 50
    async with begin(store) as tx:
        await add(tx, *(event(f"bad-{n}", 1) for n in range(poison)))
        await add(tx, *(event(f"good-{n}", 1) for n in range(good)))

    def bad(each):
        return each.subject.startswith("bad")

    naive = SlowSink(bad)
    for _ in range(20):  # oldest first, mark what was accepted, come back to the rest
        async with read(store) as connection:
            oldest = select(outbox.c.position, outbox.c.body).where(outbox.c.published_at.is_(None))
            rows = (await connection.execute(oldest.order_by(outbox.c.position).limit(50))).all()
        await naive.publish([Event.model_validate(json.loads(row.body)) for row in rows])
    assert naive.events == []

    ours = SlowSink(bad)
    policy = RetryPolicy(base=0.5, cap=0.5, attempts=3)
    relay = Relay(store, ours, batch=50, policy=policy)
    rounds = 0
    while len(ours.events) < good:
        rounds += 1
        assert await relay.run_once(), "claimed nothing although good events wait"
    assert rounds <= 7  # even if every poison row used up its three attempts first

    async def given_up():
        await relay.run_once()
        return (await lag(store)).quarantined == poison

    await until(given_up, 20, "the poison to be quarantined")
    left = await lag(store)
    assert left.waiting == 0
    figures(
        "outbox",
        name=f"poison-{store.dialect.name}",
        poison=poison,
        good=good,
        batches_until_all_good=rounds,
        quarantined=left.quarantined,
        naive_batches=naive.calls,
        naive_good_published=len(naive.events),
    )


@pytest.mark.fault
@pytest.mark.needs_postgres
async def test_a_late_commit_is_published_while_an_id_cursor_loses_it(postgres_url, figures):
    from studyhall.patterns.core.open_store import close, open_store

    store = open_store(postgres_url)
    await create_all(store)
    sink, cursor, naive = SlowSink(), 0, []

    async def poll_by_cursor():
        async with read(store) as connection:
            newer = select(outbox.c.position, outbox.c.event_id).where(outbox.c.position > cursor)
            rows = (await connection.execute(newer.order_by(outbox.c.position))).all()
        naive.extend(row.event_id for row in rows)
        return max([cursor, *(row.position for row in rows)])

    relay = Relay(store, sink)
    for n in range(1, 11):
        async with begin(store) as early:
            await add(early, event(f"early-{n}", 1))  # takes the lower position, commits last
            async with begin(store) as late:
                await add(late, event(f"late-{n}", 1))
            await relay.run_once()
            cursor = await poll_by_cursor()
        await relay.run_once()
        cursor = await poll_by_cursor()
    committed = [f"{w}-{n}-1" for n in range(1, 11) for w in ("early", "late")]
    published = [event.id for event in sink.events]
    assert sorted(published) == sorted(committed)
    naive_lost = len(set(committed) - set(naive))
    assert naive_lost == len(committed) / 2
    lost = len(set(committed) - set(published))
    figures("outbox", name="late-commits", commits=len(committed), lost=lost, naive_id_cursor_lost=naive_lost)
    await close(store)
