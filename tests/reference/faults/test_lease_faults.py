"""A holder that is frozen past its lease: its stale write is refused; a plain lock lets it through."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import pytest
from sqlalchemy import select

from harness.waiting import until
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.lease import Lease, LeaseLost, LeaseTaken, StaleFence, check_fence

pytestmark = pytest.mark.fault

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(PROGRAMS))

import lease_holder  # noqa: E402


@pytest.fixture
async def redis(redis_url):
    client = producer_client(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def store(tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'lease.db'}")
    await create_all(store)
    yield store
    await close(store)


async def frozen_holder_story(kind, redis_url, redis, spawn, store_url):
    """A takes it and is frozen past its time, B takes over and writes, A wakes up and writes."""

    def holder(who):
        more = ["--await-loss"] if kind == "fenced" and who == "a" else []
        return spawn(PROGRAMS / "lease_holder.py", kind, who, f"--redis={redis_url}", f"--store={store_url}", *more)

    a = holder("a")
    await a.line('"held"')
    a.stop_signal()
    b = holder("b")
    await b.line('"held"')  # the lease of a frozen holder runs out
    await redis.set("go:b", 1)
    await b.line('"written"')
    await redis.set("go:a", 1)
    a.cont()
    await a.line('"left"')
    return [a, b]


async def test_stale_write_of_a_holder_frozen_past_its_lease_is_refused(redis_url, redis, spawn, tmp_path, figures):
    async def story(kind):
        url = f"sqlite:///{tmp_path / kind}.db"
        store = open_store(url)
        await create_all(store)
        await redis.flushall()
        answer = await frozen_holder_story(kind, redis_url, redis, spawn, url)
        async with read(store) as connection:
            writes = lease_holder.writes
            writers = (await connection.scalars(select(writes.c.who).order_by(writes.c.id))).all()
        await close(store)
        return list(writers), answer

    writes, (a, b) = await story("fenced")
    assert writes == ["b"], "the stale write got through"
    first, second = [json.loads(await holder.line('"held"'))["fence"] for holder in (a, b)]
    assert second > first
    assert "later holder" in await a.line('"refused"')
    assert json.loads(await a.line('"left"'))["lost"] is True, "it also learned that the lease is lost"

    naive_writes, _ = await story("naive")
    assert naive_writes == ["b", "a"], "the naive lock kept the stale write out: this run proves nothing"
    figures("lease", name="frozen-holder", stale_writes=writes.count("a"), naive_stale_writes=naive_writes.count("a"))


async def test_leaving_late_does_not_give_away_the_lease_of_the_next_holder(redis):
    # Naive: DEL without a token, after the lock ran out and another took it.
    await redis.set("lock", "a", nx=True, px=50)
    await until(lambda: redis.set("lock", "b", nx=True, px=5_000), what="the lock of a runs out")
    await redis.delete("lock")  # a is done
    assert await redis.set("lock", "c", nx=True, px=5_000), "b and c hold the lock together"

    a = Lease(redis, "x", ttl=10)
    await a.__aenter__()
    await redis.delete("lease:x")  # as if it ran out
    async with Lease(redis, "x", ttl=10, label="b") as held:
        await a.__aexit__(None, None, None)
        assert await Lease(redis, "x").holder() == "b"
        with pytest.raises(LeaseTaken):
            await Lease(redis, "x").__aenter__()
        assert not held.lost.is_set()


async def test_a_held_lease_is_renewed_and_the_next_waits_for_its_end(redis):
    order = []

    async def hold(name, seconds):
        async with Lease(redis, "y", ttl=1.0, wait=20) as held:
            order.append(f"{name} in")
            await asyncio.sleep(seconds)
            order.append(f"{name} out")
        return held

    first = asyncio.create_task(hold("a", 3.0))  # three times its ttl
    await until(lambda: order, what="a is in")
    second = await hold("b", 0)
    assert order == ["a in", "a out", "b in", "b out"]
    assert not (await first).lost.is_set()
    assert second.fence > (await first).fence


async def test_a_killed_holder_is_followed_within_its_ttl(redis_url, redis, spawn, tmp_path):
    a = spawn(PROGRAMS / "lease_holder.py", "fenced", "a", f"--redis={redis_url}", f"--store=sqlite:///{tmp_path}/k.db")
    await a.line('"held"')
    a.kill()
    async with Lease(redis, "report", wait=5):
        assert await redis.exists("lease:report")


async def test_redis_away_for_longer_than_the_ttl_is_a_lost_lease_and_stops_the_work(own_redis):
    redis = producer_client(own_redis.url)

    async def body():
        async with Lease(redis, "z", ttl=0.5, cancel_on_loss=True):
            own_redis.pause()
            await asyncio.sleep(30)

    try:
        with pytest.raises(LeaseLost):
            await body()
    finally:
        own_redis.resume()
        await redis.aclose()


async def test_a_cancellation_from_outside_stays_a_cancellation(redis):
    async def body():
        async with Lease(redis, "q", ttl=5, cancel_on_loss=True):
            await asyncio.sleep(30)

    task = asyncio.create_task(body())
    await until(lambda: redis.exists("lease:q"), what="held")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await redis.exists("lease:q"), "it was released"


async def test_fences_only_grow_also_when_redis_lost_everything(redis):
    fences = []
    for _ in range(3):
        async with Lease(redis, "f") as held:
            fences.append(held.fence)
        await redis.flushall()
    assert fences == sorted(set(fences))


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_fence_is_checked_in_the_transaction_of_the_write(kind, store, request):
    engine = store if kind == "sqlite" else open_store(request.getfixturevalue("postgres_url"))
    await create_all(engine)
    for fence in (5, 5, 7):  # the same holder may write often
        async with begin(engine) as tx:
            await check_fence(tx, "w", fence)
    with pytest.raises(StaleFence, match="fence 6"):
        async with begin(engine) as tx:
            await check_fence(tx, "w", 6)
    async with begin(engine) as tx:
        await check_fence(tx, "other", 1)
    with contextlib.suppress(RuntimeError):
        async with begin(engine) as tx:
            await check_fence(tx, "w", 9)
            raise RuntimeError("the write fails")
    async with begin(engine) as tx:
        await check_fence(tx, "w", 8)  # a fence whose write was rolled back does not count
    if engine is not store:
        await close(engine)


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), 10**9])
def test_an_absurd_ttl_is_refused(ttl):
    with pytest.raises(ValueError, match="ttl must be between"):
        Lease(None, "x", ttl=ttl)
