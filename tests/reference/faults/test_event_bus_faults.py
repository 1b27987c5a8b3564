"""Kill consumers and brokers under every event bus; and the usual Redis Streams consumer beside ours."""

import asyncio
import sqlite3
import time
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from harness.buses import BUSES, QUICK, SERVERS, THREE_KAFKA, events, new_prefix, open_bus
from harness.kafka import KafkaCluster
from harness.nats import NatsServer
from harness.rabbitmq import RabbitServer
from harness.redis import RedisServer
from harness.waiting import until
from studyhall.patterns.core.event import Event
from studyhall.patterns.event_bus import BrokerUnavailable

pytestmark = pytest.mark.fault

PROGRAMS = Path(__file__).parent / "programs"
EVERY = tuple(kind for kind in BUSES if not kind.endswith("-ordered"))


class Fleet:
    """One bus, one store, and consumer processes on them."""

    def __init__(self, kind, url, store, spawn):
        self.kind, self.url, self.store, self._spawn = kind, url, store, spawn
        self.prefix = new_prefix()
        self.bus = open_bus(kind, url, self.prefix)
        self.delivered: Counter[tuple[str, str]] = Counter()

    def start(self, group, way, *deaths):
        """One life after another, each ended by the death it is given."""
        args = (self.kind, self.url, self.prefix, self.store, group, way, ",".join(deaths))
        return self._spawn(PROGRAMS / "bus_consumer.py", *args)

    async def finish(self, group, child, expected):
        """Wait until everything took effect, stop the last life; the ids of the events the others died on."""

        async def enough():
            return len(set(self.effects(group))) >= expected and await self.bus.lag(group) == 0

        await until(enough, 90, lambda: f"{expected} effects of {group}; {child}", every=0.3)
        child.terminate()
        assert await child.exited(30) == 0, str(child)
        lives = [line.split()[1:] for line in child.lines() if line.startswith("life ")]
        assert all(status == ("0" if death == "never" else "-9") for death, status in lives), lives
        self.delivered.update((group, each) for each in _ids(child, "delivered "))
        return _ids(child, "dies on ")

    def effects(self, group):
        with closing(sqlite3.connect(self.store.removeprefix("sqlite:///"), timeout=10)) as store:
            try:
                rows = store.execute("SELECT event FROM bus_effects WHERE consumer = ? ORDER BY id", (group,))
            except sqlite3.OperationalError:  # not created yet
                return []
            return [row[0] for row in rows]

    async def close(self):
        await self.bus.close()
        if (client := getattr(self.bus, "redis", None)) is not None:
            await client.aclose()


@pytest.fixture
async def fleet(request, tmp_path, spawn):
    kind = str(request.param)
    url = request.getfixturevalue(SERVERS[kind.removesuffix("-ordered")])
    made = Fleet(kind, url, f"sqlite:///{tmp_path}/store.db", spawn)
    yield made
    await made.close()


@pytest.mark.parametrize("fleet", [*EVERY, pytest.param(THREE_KAFKA, marks=pytest.mark.slow)], indirect=True)
async def test_consumer_killed_before_and_after_its_effect_takes_effect_once(fleet, scale, figures):
    rounds = scale(1, 5)
    for group in ("mail", "naive"):
        await fleet.bus.subscribe(group, ["order"])
    batch = events(12 * rounds)
    assert set(await fleet.bus.publish(batch)) == {None}
    began = time.monotonic()
    mail = fleet.start("mail", "inbox", *["before", "after"] * rounds, "never")
    bare = fleet.start("naive", "bare", "after", "never")
    victims = await fleet.finish("mail", mail, len(batch))
    seconds = time.monotonic() - began
    (doomed,) = await fleet.finish("naive", bare, len(batch))
    ours, naive = Counter(fleet.effects("mail")), Counter(fleet.effects("naive"))
    assert ours == {event.id: 1 for event in batch}
    assert len(victims) == 2 * rounds
    assert all(fleet.delivered["mail", each] >= 2 for each in victims)  # a kill cost a delivery, not an event
    assert naive[doomed] == 2  # the same death without an inbox
    figures(
        "event-bus",
        name=f"consumer kills, {fleet.kind}",
        events=len(batch),
        kills=len(victims),
        lost=len(batch) - len(ours),
        duplicated=sum(ours.values()) - len(ours),
        duplicated_without_inbox=sum(naive.values()) - len(naive),
        seconds=round(seconds, 1),
    )


@pytest.mark.parametrize(
    "fleet",
    ["redis", "nats", "rabbitmq", "kafka", pytest.param("kafka-ordered", marks=pytest.mark.full)],
    indirect=True,
)
async def test_event_that_kills_its_consumer_ends_in_quarantine(fleet):
    deaths = (
        3 if fleet.kind.startswith("kafka") else 2
    )  # attempts allowed: two; of Kafka's first death nothing is known
    await fleet.bus.subscribe("mail", ["order"])
    good, (poison,) = events(4), events(1, poison=True)
    assert set(await fleet.bus.publish([*good[:2], poison, *good[2:]])) == {None}
    child = fleet.start("mail", "inbox", *["poison"] * (deaths + 1))

    async def quarantined():
        return len(await fleet.bus.quarantined("mail")) == 1 and await fleet.bus.lag("mail") == 0

    await until(quarantined, 60, lambda: f"the poison in quarantine; {child}", every=0.3)
    child.terminate()
    assert await child.exited(20) == 0, str(child)
    assert _ids(child, "dies on ") == [poison.id] * deaths
    assert child.lines()[-1] == "life poison 0"
    (entry,) = await fleet.bus.quarantined("mail")
    assert entry.event == poison
    assert "delivered 2 times and never answered" in entry.reason
    assert Counter(fleet.effects("mail")) == {event.id: 1 for event in good}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fleet", ["redis-ordered", "nats-ordered", pytest.param("kafka-ordered", marks=pytest.mark.full)], indirect=True
)
async def test_order_per_key_survives_a_killed_owner(fleet):
    assert fleet.bus.capabilities.ordered_per_key
    await fleet.bus.subscribe("mail", ["order"])
    batch = [event for _ in range(6) for event in events(3)]  # three subjects, six events each, interleaved
    assert set(await fleet.bus.publish(batch)) == {None}
    child = fleet.start("mail", "inbox", "before", "after", "never")
    assert len(await fleet.finish("mail", child, len(batch))) == 2
    effects = fleet.effects("mail")  # in the order they were committed
    for subject in {event.subject for event in batch}:
        line = [event.id for event in batch if event.subject == subject]
        assert [each for each in effects if each in line] == line


def _ids(child, word):
    return [line.removeprefix(word) for line in child.lines() if line.startswith(word)]


@pytest.fixture
def broker(request):
    if request.param == "kafka":  # the shared one: it comes back with its data
        server = request.getfixturevalue("kafka_server")
        server.kind = "kafka"
        yield server
        return
    kinds = {"redis": RedisServer, "nats": NatsServer, "rabbitmq": RabbitServer, THREE_KAFKA: KafkaCluster}
    server = kinds[request.param].start()
    server.kind = request.param
    yield server
    server.stop()


def _reached(seen, wanted):
    return len(seen) >= wanted


def _more(count, than):
    return count() > than


@pytest.mark.parametrize(
    "broker", ["redis", "nats", "rabbitmq", "kafka", pytest.param(THREE_KAFKA, marks=pytest.mark.slow)], indirect=True
)
async def test_broker_killed_mid_stream_loses_no_accepted_event(broker, scale, figures):
    kills = scale(1, 5)
    bus = open_bus(broker.kind, broker.url, "orders")
    await bus.subscribe("mail", ["order"])
    seen = Counter()
    accepted = set()
    refused = 0
    over = asyncio.Event()

    async def note(event):
        seen[event.id] += 1

    async def produce():
        """Like an outbox: what was not accepted is published again under the same id."""
        nonlocal refused
        while not over.is_set():
            waiting = events(10)
            await until(partial(_reached, seen, len(accepted) - 100), 120, "the consumer to keep up")
            while waiting:
                results = await bus.publish(waiting)
                accepted.update(e.id for e, failed in zip(waiting, results, strict=True) if failed is None)
                waiting = [e for e, failed in zip(waiting, results, strict=True) if failed is not None]
                refused += len(waiting)
                await asyncio.sleep(0.2 if waiting else 0.01)

    if broker.kind == "rabbitmq":
        await until(lambda: broker.has_on_disk("orders.mail"), 60, "the queue on disk", every=0.2)
    stop = asyncio.Event()
    consumer = asyncio.create_task(bus.consume("mail", ["order"], note, stop=stop, policy=QUICK))
    producer = asyncio.create_task(produce())

    def felt():  # a single broker is missed; of three, two go on
        return len(accepted) if broker.kind == THREE_KAFKA else refused

    for _ in range(kills):
        await until(partial(_reached, seen, len(seen) + 100), 60, "events before the kill")
        await asyncio.to_thread(broker.kill)
        await until(partial(_more, felt, felt()), 60, "a publish that meets the kill")
        await asyncio.to_thread(broker.restart)
    over.set()
    await asyncio.wait_for(producer, 120)
    await until(lambda: accepted <= set(seen), 60, "every accepted event")
    stop.set()
    await asyncio.wait_for(consumer, 40)
    await bus.close()
    assert set(seen) == accepted
    figures(
        "event-bus",
        name=f"broker kills, {broker.kind}",
        events=len(accepted),
        kills=kills,
        lost=len(accepted - set(seen)),
        delivered_twice=sum(seen.values()) - len(seen),
    )


async def _longest_silence(of):
    """The longest pause of the event loop in seconds, until `of` is set."""
    longest, last = 0.0, time.monotonic()
    while not of.is_set():
        await asyncio.sleep(0.01)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return longest


@pytest.mark.parametrize(
    "broker", ["redis", "nats", "kafka", pytest.param("rabbitmq", marks=pytest.mark.full)], indirect=True
)
async def test_broker_that_is_away_at_the_start_is_waited_for_and_stops_nobody(broker):
    await asyncio.to_thread(broker.kill)
    bus = open_bus(broker.kind, broker.url, "outage")
    seen, stop, measured = list[Event](), asyncio.Event(), asyncio.Event()
    silence = asyncio.create_task(_longest_silence(measured))

    async def note(event):
        seen.append(event)

    (order,) = events(1)
    (refused,) = await asyncio.wait_for(bus.publish([order]), 30)
    assert isinstance(refused, BrokerUnavailable)
    consumer = asyncio.create_task(bus.consume("mail", ["order"], note, stop=stop, policy=QUICK))
    await asyncio.sleep(0.5)
    assert not consumer.done(), "a consumer outlives an outage, also one it starts in"
    measured.set()
    # nats-py with a reconnect wait of 0 answered nobody and starved every other task, forever
    assert await silence < 5
    await asyncio.to_thread(broker.restart)

    async def accepted():
        return await bus.publish([order]) == [None]

    await until(accepted, 60, "the broker to take the event", every=0.1)
    await until(lambda: order in seen, 60, "the consumer to get it")
    stop.set()
    await asyncio.wait_for(consumer, 40)
    await bus.close()


@pytest.mark.slow
async def test_usual_stream_consumer_loses_what_ours_keeps(redis_server, redis_url, spawn, figures):
    """Late start, second start, kill -9, poison, MAXLEN: each step once with the usual consumer, once with ours."""
    lost = {}
    program = PROGRAMS / "naive_stream_consumer.py"
    with redis_server.client() as client:

        def add(stream, count, poison=None):
            with client.pipeline() as batch:  # at once, so that one read gets them all
                for n in range(count):
                    batch.xadd(stream, {"n": n} | ({"poison": 1} if n == poison else {}))
                batch.execute()

        add("late", 4)
        late = spawn(program, redis_url, "late", "g", "work")
        await late.line("ready")
        client.xadd("late", {"n": "marker"})
        await late.line("done marker")
        lost["published before the group"] = 4 - sum("done" in line for line in late.lines()[:-1])
        again = spawn(program, redis_url, "late", "g", "work")
        assert await again.exited() != 0
        assert any("BUSYGROUP" in line for line in again.lines())
        # It acknowledged nothing either: everything it did is still pending, and would be done again.
        assert client.xpending("late", "g")["pending"] == 1

        frozen = spawn(program, redis_url, "killed", "g", "freeze")
        await frozen.line("ready")
        add("killed", 5)
        await frozen.line("batch")
        await until(lambda: client.xpending("killed", "g")["pending"] == 5, what="five in hand")
        frozen.kill()
        client.xadd("killed", {"n": "marker"})
        # Its successor, with the crash on BUSYGROUP repaired: reads new entries and never the five.
        taken = client.xreadgroup("g", "consumer-1", {"killed": ">"}, count=100)
        lost["stuck after kill -9"] = 5 - (len(taken[0][1]) - 1)
        assert client.xpending("killed", "g")["pending"] == 6

        poisoned = spawn(program, redis_url, "poisoned", "g", "poison")
        await poisoned.line("ready")
        add("poisoned", 5, poison=1)
        assert await poisoned.exited() != 0
        lost["batch mates of a poison event"] = 4 - sum("done" in line for line in poisoned.lines())

        client.xgroup_create("capped", "g", id="0", mkstream=True)
        for n in range(50):
            client.xadd("capped", {"n": n}, maxlen=20, approximate=False)
        unread = client.xreadgroup("g", "c", {"capped": ">"}, count=100)[0][1]
        lost["unread beyond MAXLEN"] = 50 - len(unread)
    assert lost == {
        "published before the group": 4,
        "stuck after kill -9": 5,
        "batch mates of a poison event": 3,
        "unread beyond MAXLEN": 30,
    }

    ours = await _the_same_with_ours(redis_url, spawn)
    assert ours == dict.fromkeys(lost, 0)
    figures("event-bus", name="usual stream consumer", usual=lost, ours=ours)


async def _the_same_with_ours(url, spawn):
    bus = open_bus("redis", url, "ours")
    batch = events(50)
    batch[1] = batch[1].model_copy(update={"data": {"number": 1, "poison": True}})
    assert set(await bus.publish(batch)) == {None}  # before the group exists
    await bus.trim("order")
    fleet = Fleet("redis", url, f"sqlite:///{spawn._directory}/ours.db", spawn)
    fleet.prefix = "ours"
    child = fleet.start("g", "inbox", "before")  # kill -9 with an entry in its hands
    assert await child.exited(30) == 0, str(child)
    (killed_on,) = _ids(child, "dies on ")
    done = set()
    stop = asyncio.Event()

    async def handle(event):
        if event.data.get("poison"):
            raise RuntimeError("poison")
        done.add(event.id)

    # The dead one brought two events to their end; everything else is still to come.
    gone = set(fleet.effects("g"))
    consumer = asyncio.create_task(bus.consume("g", ["order"], handle, stop=stop, policy=QUICK))
    good = {event.id for event in batch if not event.data.get("poison")}
    await until(lambda: good <= done | gone, 30, "all good events")
    await bus.trim("order")
    stop.set()
    await consumer
    await fleet.close()
    missing = good - done - gone
    first = {event.id for event in batch[:4]}
    await bus.redis.aclose()
    return {
        "published before the group": len(missing & first),
        "stuck after kill -9": int(killed_on not in done),
        "batch mates of a poison event": len(missing),
        "unread beyond MAXLEN": len(missing),
    }
