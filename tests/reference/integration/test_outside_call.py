"""Calls to somebody else's API: what the ledger says decides, on every kind of ledger and without any queue."""

import asyncio
import sqlite3
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import psycopg
import pytest
from redis.asyncio import Redis

from harness.waiting import until
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.errors import Permanent, RateLimited, Transient
from studyhall.patterns.core.job import RetryPolicy, provider_key
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.outside_call import InFlight, NotMade, OutsideCalls, Refused, Unclear, check_status
from studyhall.patterns.outside_call.dbapi import DbApiLedger, InThreads
from studyhall.patterns.outside_call.ledger import State
from studyhall.patterns.outside_call.redis_ledger import RedisLedger
from studyhall.patterns.outside_call.store import StoreLedger
from studyhall.patterns.outside_call.sync import SyncOutsideCalls
from studyhall.patterns.retry import decide

LONGEST = 0.3
postgres = partial(pytest.param, marks=pytest.mark.needs_postgres)
LEDGERS = ["store-sqlite", postgres("store-postgres"), "sqlite3", postgres("psycopg"), "redis"]


@asynccontextmanager
async def ledger_of(kind, request, folder):
    match kind:
        case "store-sqlite" | "store-postgres":
            url = f"sqlite:///{folder / 'calls.db'}"
            store = open_store(url if kind == "store-sqlite" else request.getfixturevalue("postgres_url"))
            await create_all(store)
            yield StoreLedger(store)
            await close(store)
        case "sqlite3" | "psycopg":
            plain = dbapi_ledger(kind, request, folder)
            yield InThreads(plain)
        case _:
            # Fifty at once connect at once: on a busy machine that takes longer than a producer waits.
            patience = "?socket_connect_timeout=20&socket_timeout=20"
            redis: Redis = producer_client(request.getfixturevalue("redis_url") + patience)
            yield RedisLedger(redis)
            await redis.aclose()


def dbapi_ledger(kind, request, folder):
    if kind == "sqlite3":
        connect = lambda: sqlite3.connect(folder / "calls.db")  # noqa: E731
    else:
        url = request.getfixturevalue("postgres_url")
        connect = lambda: psycopg.connect(url)  # noqa: E731
    ledger = DbApiLedger(connect)
    ledger.create()
    ledger.create()
    return ledger


@pytest.fixture(params=LEDGERS)
async def ledger(request, tmp_path):
    async with ledger_of(request.param, request, tmp_path) as made:
        yield made


@pytest.fixture
async def sqlite_ledger(request, tmp_path):
    async with ledger_of("store-sqlite", request, tmp_path) as made:
        yield made


class Carrier:
    """Prints labels. `will` holds what happens to the next requests: an exception before or after the effect."""

    def __init__(self):
        self.labels: dict[str, int] = {}
        self.seen: list[str] = []
        self.before: list[Exception] = []
        self.after: list[Exception] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def send(self, key):
        self.seen.append(key)
        if self.before:
            raise self.before.pop(0)
        self.labels[key] = self.labels.get(key, 0) + 1
        await self.hold.wait()
        if self.after:
            raise self.after.pop(0)
        return {"label": len(self.seen)}

    async def send_keyed(self, key):
        """Like a provider that remembers keys: a repeat gets the first answer."""
        if key in self.labels:
            self.seen.append(key)
            return {"label": "the first"}
        return await self.send(key)

    async def find(self, key):
        return {"label": "found"} if key in self.labels else None


def calls(ledger, **rules):
    return OutsideCalls(ledger, "carrier", longest=LONGEST, **rules)


async def eventually(attempt, *passing):
    """Like a worker: come back when the error says so."""
    for _ in range(20):
        try:
            return await attempt()
        except InFlight as busy:
            await asyncio.sleep(busy.delay + 0.01)
        except passing:
            await asyncio.sleep(0.1)
    raise AssertionError("in flight forever")


# ---- the ledgers


async def test_a_clock_that_was_put_back_does_not_hold_a_call_until_it_is_there_again(ledger):
    """An hour ahead when it was claimed: the next run waited 3,599 s."""
    carrier, ahead = Carrier(), (await ledger.read("carrier", "a")).claimed()
    hour = ahead.now + 3600
    assert await ledger.write(replace(ahead, first=hour, since=hour))
    with pytest.raises(InFlight) as wait:
        await calls(ledger, key_life=60).once("a", carrier.send_keyed)
    assert wait.value.delay <= 2 * LONGEST
    # A busy machine may stand still between claim and request: then it is not made, and tried again.
    assert await eventually(lambda: calls(ledger, key_life=60).once("a", carrier.send_keyed), NotMade) == {"label": 1}


async def test_a_ledger_takes_only_the_next_version(ledger):
    fresh = await ledger.read("carrier", "a")
    assert (fresh.version, fresh.state) == (0, State.INTENDED)
    assert abs(fresh.now - time.time()) < 5
    claim = fresh.claimed()
    assert [await ledger.write(claim), await ledger.write(claim)] == [True, False], "one claim wins"
    stands = await ledger.read("carrier", "a")
    assert (stands.state, stands.version, stands.tries) == (State.IN_FLIGHT, 1, 1)
    assert stands.since == pytest.approx(fresh.now)
    assert stands.now >= fresh.now
    done = stands.answered({"text": "é", "null": None})
    assert await ledger.write(done)
    assert not await ledger.write(claim.refused(Permanent("late"))), "a stale run cannot overwrite"
    assert (await ledger.read("carrier", "a")).outcome() == {"text": "é", "null": None}
    assert (await ledger.read("other", "a")).version == 0, "each provider has its own"


async def test_a_ledger_lists_what_is_unclear_and_purges_what_has_ended(ledger):
    for number in range(5):
        claim = (await ledger.read("carrier", f"k{number}")).claimed()
        assert await ledger.write(claim)
        assert await ledger.write(claim.set_aside() if number < 2 else claim.answered(number))
        assert await ledger.write((await ledger.read("other", f"k{number}")).answered(1))
    assert [call.key for call in await ledger.unclear("carrier", 10)] == ["k0", "k1"]
    assert [call.key for call in await ledger.unclear("carrier", 1)] == ["k0"]
    assert await ledger.purge("carrier", 60) == 0
    assert await ledger.purge("carrier", -5) == 3, "by the clock of the ledger"
    assert [(await ledger.read("carrier", f"k{n}")).version for n in range(5)] == [2, 2, 0, 0, 0]
    assert len(await ledger.unclear("carrier", 10)) == 2
    assert (await ledger.read("other", "k0")).version > 0


async def test_fifty_at_once_make_one_call(ledger):
    carrier, ours = Carrier(), OutsideCalls(ledger, "carrier", longest=1)
    theirs = OutsideCalls(ledger, "carrier", longest=1)  # another process: nothing is shared but the ledger

    async def call(which):
        # NotMade: on a busy machine this process may get no turn for so long that it leaves the call alone.
        return await eventually(lambda: which.once("label/1", carrier.send), NotMade)

    answers = await asyncio.gather(*(call(ours if n % 2 else theirs) for n in range(50)))
    assert answers == [{"label": 1}] * 50
    assert carrier.seen == [provider_key("label/1", "carrier")]


# ---- what may be done next


async def test_a_lost_answer_is_looked_up_after_the_request_cannot_run_any_more(sqlite_ledger):
    carrier, began = Carrier(), time.monotonic()
    ours = calls(sqlite_ledger, look_up=carrier.find)
    carrier.after = [ConnectionResetError("cut")]
    with pytest.raises(InFlight) as lost:
        await ours.once("label/1", carrier.send)
    assert decide(lost.value, RetryPolicy(), 0).consume_attempt is False
    with pytest.raises(InFlight, match="left"):
        await ours.once("label/1", carrier.send)
    assert await eventually(lambda: ours.once("label/1", carrier.send)) == {"label": "found"}
    assert time.monotonic() - began >= 2 * LONGEST, "a look-up right after the break would prove nothing"
    assert list(carrier.labels.values()) == [1]


async def test_without_a_look_up_the_same_key_is_sent_while_it_lives(sqlite_ledger):
    carrier = Carrier()
    ours = calls(sqlite_ledger, key_life=60)
    carrier.after = [TimeoutError("no answer")]
    assert await eventually(lambda: ours.once("label/1", carrier.send_keyed)) == {"label": "the first"}
    assert len(set(carrier.seen)) == 1
    assert list(carrier.labels.values()) == [1]


async def test_a_key_that_may_be_forgotten_is_never_sent_again(sqlite_ledger):
    carrier = Carrier()
    ours = calls(sqlite_ledger, key_life=2.5 * LONGEST)  # over before a second request would have arrived
    carrier.after = [TimeoutError("no answer")]
    with pytest.raises(Unclear):
        await eventually(lambda: ours.once("label/1", carrier.send))
    assert len(carrier.seen) == 1
    assert [call.key for call in await ours.unclear()] == ["label/1"]


async def test_an_unclear_call_waits_for_a_human_who_ends_it_either_way(sqlite_ledger):
    carrier, ours = Carrier(), calls(sqlite_ledger)
    for key in ("made", "not made"):
        carrier.after = [ConnectionResetError("cut")]
        for _ in range(3):
            with pytest.raises(Unclear, match=r"resolve\(key"):
                await eventually(lambda key=key: ours.once(key, carrier.send))
    assert len(carrier.seen) == 2
    await ours.resolve("made", done={"label": "from the website"})
    await ours.resolve("not made", again=True)
    assert await ours.once("made", carrier.send) == {"label": "from the website"}
    assert await ours.once("not made", carrier.send) == {"label": 3}
    assert await ours.unclear() == []
    with pytest.raises(Permanent, match="only unclear and refused"):
        await ours.resolve("made", again=True)


async def test_tries_are_the_calls_own_budget(sqlite_ledger):
    carrier = Carrier()
    ours = calls(sqlite_ledger, key_life=60, tries=3)
    carrier.before = [Transient("HTTP 502")] * 10
    with pytest.raises(Unclear, match="sent 3 times"):
        await eventually(lambda: ours.once("label/1", carrier.send))
    assert len(carrier.seen) == 3


async def test_what_the_provider_certainly_did_not_do_is_repeated_at_once(sqlite_ledger):
    carrier, ours = Carrier(), calls(sqlite_ledger)
    nothing = [NotMade("refused connection"), RateLimited(retry_after=7), NotMade("again"), NotMade("again")]
    carrier.before = list(nothing)
    for expected in nothing:
        with pytest.raises(type(expected)):
            await ours.once("label/1", carrier.send)
    assert await ours.once("label/1", carrier.send) == {"label": 5}
    assert list(carrier.labels.values()) == [1]


async def test_nothing_made_after_a_lost_answer_does_not_hide_the_lost_one(sqlite_ledger):
    carrier, ours = Carrier(), calls(sqlite_ledger, key_life=60)
    carrier.after = [ConnectionResetError("cut")]
    with pytest.raises(InFlight):
        await ours.once("label/1", carrier.send)
    carrier.before = [NotMade("refused connection")]
    with pytest.raises(NotMade):
        await eventually(lambda: ours.once("label/1", carrier.send))
    stands = await sqlite_ledger.read("carrier", "label/1")
    assert (stands.state, stands.tries) == (State.IN_FLIGHT, 1), "the first request may still have been made"
    assert await ours.once("label/1", carrier.send_keyed) == {"label": "the first"}, "its wait is over"


async def test_a_refusal_is_recorded_and_told_to_every_later_run(sqlite_ledger):
    carrier, ours = Carrier(), calls(sqlite_ledger)
    carrier.before = [Permanent("HTTP 422: no such street")]
    for _ in range(2):
        with pytest.raises(Refused, match="no such street"):
            await ours.once("label/1", carrier.send)
    assert len(carrier.seen) == 1
    await ours.resolve("label/1", again=True)
    assert await ours.once("label/1", carrier.send) == {"label": 2}


async def test_an_answer_that_cannot_be_kept_is_not_asked_for_again(sqlite_ledger):
    ours, made = calls(sqlite_ledger), []

    async def send(key):
        made.append(key)
        return object()

    for _ in range(2):
        with pytest.raises(Unclear, match="it was made"):
            await ours.once("label/1", send)
    assert len(made) == 1


# ---- interruptions


async def test_a_cancelled_run_does_not_throw_a_paid_answer_away(sqlite_ledger):
    carrier = Carrier()
    carrier.hold.clear()
    ours = OutsideCalls(sqlite_ledger, "carrier", longest=20)
    run = asyncio.create_task(ours.once("label/1", carrier.send))
    await until(lambda: carrier.labels, what="the request is on its way")
    run.cancel("the lock is lost")
    with pytest.raises(asyncio.CancelledError):
        await run
    again = asyncio.create_task(ours.once("label/1", carrier.send))  # the job, released and taken again here
    await asyncio.sleep(0)
    carrier.hold.set()
    await ours.close()
    assert await again == {"label": 1}
    assert (await sqlite_ledger.read("carrier", "label/1")).state is State.DONE
    assert await calls(sqlite_ledger).once("label/1", carrier.send) == {"label": 1}


async def test_an_answer_is_recorded_through_an_outage_of_the_ledger(own_redis):
    redis, carrier = producer_client(own_redis.url), Carrier()
    carrier.hold.clear()
    ours = OutsideCalls(RedisLedger(redis), "carrier", longest=20)
    run = asyncio.create_task(ours.once("label/1", carrier.send))
    await until(lambda: carrier.labels, what="the request is on its way")
    own_redis.pause()
    carrier.hold.set()
    done, _ = await asyncio.wait({run}, timeout=2.5)
    assert not done, "it keeps trying"
    own_redis.resume()
    assert await asyncio.wait_for(run, 20) == {"label": 1}
    assert (await RedisLedger(redis).read("carrier", "label/1")).state is State.DONE
    await redis.aclose()


async def test_a_run_that_was_overtaken_cannot_overwrite(sqlite_ledger):
    carrier = Carrier()
    carrier.hold.clear()
    slow = OutsideCalls(sqlite_ledger, "carrier", longest=20)
    run = asyncio.create_task(slow.once("label/1", carrier.send))
    await until(lambda: carrier.labels, what="the request is on its way")
    stands = await sqlite_ledger.read("carrier", "label/1")
    assert await sqlite_ledger.write(stands.claimed().answered({"label": "of the other run"})) is False
    taken = stands.claimed()
    assert await sqlite_ledger.write(taken)
    assert await sqlite_ledger.write(taken.answered({"label": "of the other run"}))
    carrier.hold.set()
    assert await run == {"label": "of the other run"}, "what stands in the ledger counts"


async def test_a_process_that_stood_still_after_its_claim_sends_nothing(sqlite_ledger):
    class Frozen:
        """A ledger whose answer to the claim arrives after the others may act."""

        def __getattr__(self, name):
            return getattr(sqlite_ledger, name)

        async def write(self, call):
            written = await sqlite_ledger.write(call)
            await asyncio.sleep(LONGEST * 1.5 if call.state is State.IN_FLIGHT else 0)
            return written

    carrier = Carrier()
    with pytest.raises(NotMade, match="stood still"):
        await calls(Frozen()).once("label/1", carrier.send)
    assert carrier.seen == []
    assert await calls(sqlite_ledger).once("label/1", carrier.send) == {"label": 1}


# ---- HTTP


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (200, None),
        (201, None),
        (302, None),
        (400, Permanent),
        (404, Permanent),
        (422, Permanent),
        (401, NotMade),
        (403, NotMade),
        (429, RateLimited),
        (408, Transient),
        (409, Transient),
        (500, Transient),
        (503, Transient),
    ],
)
def test_a_status_says_what_became_of_the_effect(status, error):
    if error is None:
        check_status(status)
        return
    with pytest.raises(error) as raised:
        check_status(status, retry_after=3.0)
    assert type(raised.value) is error


# ---- without an event loop


@pytest.mark.parametrize("kind", ["sqlite3", postgres("psycopg")])
def test_the_synchronous_twin_follows_the_same_rules(kind, request, tmp_path):
    ledger = dbapi_ledger(kind, request, tmp_path)
    made = {}

    def print_label(key):
        made[key] = made.get(key, 0) + 1
        if len(made) < 3:
            raise TimeoutError("no answer")
        return {"label": 1}

    def waiting(calls, key):
        for _ in range(10):
            try:
                return calls.once(key, print_label)
            except InFlight as busy:
                time.sleep(busy.delay + 0.01)
            except NotMade:  # on a busy machine it may get no turn for so long that it leaves the call alone
                time.sleep(0.1)
        raise AssertionError("in flight forever")

    finds = SyncOutsideCalls(ledger, "finds", longest=LONGEST, look_up=lambda key: {"found": made[key]})
    assert waiting(finds, "a") == {"found": 1}
    knows_nothing = SyncOutsideCalls(ledger, "knows nothing", longest=LONGEST)
    with pytest.raises(Unclear):
        waiting(knows_nothing, "b")
    assert [call.key for call in knows_nothing.unclear()] == ["b"]
    knows_nothing.resolve("b", done="by hand")
    assert knows_nothing.once("b", print_label) == "by hand"
    assert [waiting(finds, "c"), waiting(finds, "c")] == [{"label": 1}] * 2

    def refuse(key):
        raise Permanent("HTTP 422")

    for _ in range(2):
        with pytest.raises(Refused):
            finds.once("d", refuse)

    def unreachable(key):
        raise NotMade("no route")

    with pytest.raises(NotMade):
        finds.once("e", unreachable)
    assert finds.once("e", print_label) == {"label": 1}
    assert list(made.values()) == [1, 1, 1, 1]
    assert finds.purge(-5) == 4
