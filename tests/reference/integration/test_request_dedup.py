"""The same request twice is one request, whatever happened to the first one."""

import asyncio

import pytest
import redis.asyncio

from harness.waiting import until
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.request_dedup import Answer, InvalidRequestKey, KeyReused, RequestDedup, business_key


@pytest.fixture
async def store(tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'requests.db'}")
    await create_all(store)
    yield store
    await close(store)


class Orders:
    """Takes orders by id: the same id is the same order. Fails when it is told to, before or after the effect."""

    def __init__(self):
        self.placed: set[str] = set()
        self.fail_next = ""

    async def place(self, ident):
        failing, self.fail_next = self.fail_next, ""
        if failing == "before":
            raise ConnectionError("the database went away")
        self.placed.add(ident)
        if failing == "after":
            raise ConnectionError("the answer was lost")
        return {"order": ident}


async def naive(client, orders, key, ident):
    """What is usually published: a window of SET NX. True: taken."""
    if not await client.set(f"seen:{key}", "1", nx=True, px=300):
        return False
    await orders.place(ident)
    return True


async def test_a_failed_request_may_be_retried_and_a_late_repeat_is_not_a_second_one(store, redis_url, figures):
    body = {"pack": "biology", "seats": 1}
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        window = Orders()
        window.fail_next = "before"
        with pytest.raises(ConnectionError):
            await naive(client, window, "k1", "first")
        refused = not await naive(client, window, "k1", "retry")
        assert refused
        lost = 1 - len(window.placed)
        assert lost == 1, "the retry of a failed request is refused: the order is lost"
        assert await naive(client, window, "k2", "first")
        while await client.exists("seen:k2"):
            await asyncio.sleep(0.02)
        assert await naive(client, window, "k2", "retry, after the window")
        duplicated = len(window.placed) - 1

    ours = Orders()
    requests, asked = RequestDedup(store, "orders"), 0

    async def order(key):
        nonlocal asked
        asked += 1
        return await requests.run("ann", key, body, ours.place)

    for failing in ("before", "after"):
        before = len(ours.placed)
        ours.fail_next = failing
        with pytest.raises(ConnectionError):
            await order(failing)
        answer = await order(failing)
        assert not answer.replayed
        for _ in range(3):
            assert await order(failing) == Answer(answer.value, replayed=True)
        assert len(ours.placed) - before == 1, f"failed {failing} its effect: one order"
    assert duplicated == 1
    figures(
        "request-dedup",
        name="retries",
        naive_lost=lost,
        naive_duplicated=duplicated,
        requests=asked,
        orders=len(ours.placed),
    )


async def test_fifty_at_once_are_one(store, figures):
    orders = Orders()
    # As in five processes: nothing shared but the database.
    others = [RequestDedup(store, "orders") for _ in range(5)]
    answers = await asyncio.gather(
        *(others[number % 5].run("ann", "same", {"n": 1}, orders.place) for number in range(50))
    )
    assert len(orders.placed) == 1
    assert len({answer.value["order"] for answer in answers}) == 1
    figures("request-dedup", name="at once", requests=len(answers), orders=len(orders.placed))


async def test_the_same_key_with_another_body_is_an_error_also_while_the_first_runs(store):
    requests, orders, gate = RequestDedup(store, "orders"), Orders(), asyncio.Event()

    async def slow(ident):
        await gate.wait()
        return await orders.place(ident)

    first = asyncio.create_task(requests.run("ann", "k", {"n": 1}, slow))
    await until(lambda: _claimed(requests), what="the first request has its id")
    with pytest.raises(KeyReused):
        await requests.run("ann", "k", {"n": 2}, orders.place)
    gate.set()
    await first
    with pytest.raises(KeyReused):
        await requests.run("ann", "k", {"n": 2}, orders.place)
    assert len(orders.placed) == 1


async def _claimed(requests):
    try:
        await requests._inbox.seen(f"{business_key('ann', 'k')}/id", "another body")
    except KeyReused:
        return True
    return False


async def test_callers_and_kinds_do_not_share_keys_and_no_key_is_always_new(store):
    orders = Orders()
    for kind in ("orders", "uploads"):
        for caller in ("ann", "bob"):
            await RequestDedup(store, kind).run(caller, "k", {}, orders.place)
    for _ in range(2):
        await RequestDedup(store, "orders").run("ann", None, {}, orders.place)
    assert len(orders.placed) == 6
    for bad in ("", " ", "a b", "ä", "x" * 201, "line\nbreak"):
        with pytest.raises(InvalidRequestKey):
            await RequestDedup(store, "orders").run("ann", bad, {}, orders.place)


async def test_purged_keys_are_new_again(store):
    requests, orders = RequestDedup(store, "orders"), Orders()
    await requests.run("ann", "k", {}, orders.place)
    assert await requests.purge(86_400) == 0
    assert await requests.purge(-1) == 2
    assert not (await requests.run("ann", "k", {}, orders.place)).replayed
