"""Connections of every event bus that are cut, or that swallow every byte; and a broker that is short of memory."""

import asyncio
import json
from collections import Counter
from urllib.parse import urlsplit

import pytest
from nats.js.api import DiscardPolicy

from harness.buses import QUICK, SERVERS, close_bus, consuming, events, new_prefix, open_bus, through
from harness.waiting import until
from studyhall.patterns.core.event import Event
from studyhall.patterns.event_bus import BrokerUnavailable

pytestmark = pytest.mark.fault

KINDS = (
    *("redis", "redis-ordered", "nats", "rabbitmq", "kafka-ordered"),
    pytest.param("nats-ordered", marks=pytest.mark.slow),  # connects as "nats" does
    pytest.param("kafka", marks=pytest.mark.full),
)


class SlowHandler:
    """A handler that takes its time, and remembers how many ran at once."""

    def __init__(self, seconds):
        self.seconds, self.most, self.beside = seconds, 0, 0
        self.running: Counter[str] = Counter()
        self.done: Counter[str] = Counter()

    async def __call__(self, event):
        self.running[event.id] += 1
        self.most = max(self.most, self.running.total())
        self.beside = max(self.beside, self.running[event.id])
        try:
            await asyncio.sleep(self.seconds)
            self.done[event.id] += 1
        finally:
            self.running[event.id] -= 1

    def never_beside_itself(self, concurrency):
        assert self.most <= concurrency
        assert self.beside == 1, f"{self.beside} of one event side by side"


@pytest.fixture
async def line(request, tcp_proxy):
    """A bus behind a proxy, the same bus without it, and the proxy."""
    kind, prefix = str(request.param), new_prefix()
    if kind.startswith("kafka"):
        server = request.getfixturevalue("kafka_server")
        proxy, behind, url = tcp_proxy(server.proxied_port, server.proxy_port), server.behind, server.url
    else:
        url = request.getfixturevalue(SERVERS[kind.removesuffix("-ordered")])
        proxy = tcp_proxy(urlsplit(url).port or 0)
        behind = through(proxy, url)
    buses = [open_bus(kind, each, prefix) for each in (behind, url)]
    await buses[1].subscribe("mail", ["order"])
    yield buses[0], buses[1], proxy
    for bus in buses:
        await close_bus(bus)


@pytest.mark.slow
@pytest.mark.parametrize("line", KINDS, indirect=True)
async def test_cut_connections_are_no_crashes_and_start_no_handler_beside_itself(line):
    bus, direct, proxy = line
    handler = SlowHandler(5)
    batch = events(16)
    assert set(await direct.publish(batch)) == {None}
    async with consuming(bus, "mail", handler, concurrency=8):
        for _ in range(5):  # more often than there are attempts, and all within one run of a handler
            await until(lambda: handler.running.total() >= 4, 60, "handlers at work")
            await asyncio.sleep(0.8)
            proxy.cut()
        await until(lambda: len(handler.done) == 16, 90, lambda: f"all events: {len(handler.done)}")
        await until(lambda: _finished(direct), 60, "nothing left", every=0.2)
    assert await direct.quarantined("mail") == []
    handler.never_beside_itself(8)
    # A connection cut between effect and acknowledgement shows the event again: at least once, not five times.
    assert max(handler.done.values()) <= 2


async def _finished(bus):
    return await bus.lag("mail") == 0


async def _published(bus, batch):
    """As an outbox does: what the brokers did not confirm is published again."""

    async def taken():
        answers = await bus.publish(batch)
        batch[:] = [event for event, answer in zip(batch, answers, strict=True) if answer is not None]
        return not batch

    await until(taken, 60, "brokers that confirm")


@pytest.mark.parametrize("line", KINDS, indirect=True)
async def test_connection_that_swallows_every_byte_is_replaced_within_20_seconds(line):
    bus, direct, proxy = line
    done = set()

    async def note(event):
        done.add(event.id)

    async def taken(batch):
        results = await asyncio.wait_for(bus.publish(batch), 20)  # an answer in any case
        return results == [None] * len(batch)

    before, after, late = events(5), events(5), events(5)
    async with consuming(bus, "mail", note):
        await until(lambda: taken(before), 20, "a first publish")
        await until(lambda: {event.id for event in before} <= done, 30, "events before")
        proxy.swallow()
        began = asyncio.get_running_loop().time()
        publishing = asyncio.create_task(until(lambda: taken(late), 60, "a publish through a new connection"))
        assert set(await direct.publish(after)) == {None}
        await until(lambda: {event.id for event in after} <= done, 60, "the consumer's way back")
        await publishing
        await until(lambda: {event.id for event in late} <= done, 60, "what was published meanwhile")
        assert asyncio.get_running_loop().time() - began < 20
    assert await direct.quarantined("mail") == []


@pytest.mark.parametrize("kind", [pytest.param("kafka", marks=pytest.mark.full), "kafka-ordered"])
async def test_kafka_brokers_that_stand_still_are_not_a_crash_and_start_no_handler_beside_itself(kind, any_kafka):
    brokers = any_kafka
    bus = open_bus(kind, brokers.url)
    handler = SlowHandler(3)
    await bus.subscribe("mail", ["order"])
    try:
        async with consuming(bus, "mail", handler, concurrency=8):
            for seconds in (1, 1, 5):  # the last for longer than a member may be silent
                await _published(bus, events(8))  # in each round: on a busy machine earlier ones may be done
                await until(lambda: handler.running.total() >= 1, 60, "handlers at work")
                brokers.freeze()
                answer = asyncio.create_task(bus.publish(events(1)))
                await asyncio.sleep(seconds)
                brokers.thaw()
                (result,) = await asyncio.wait_for(answer, 20)
                assert result is None or isinstance(result, BrokerUnavailable)
            (after,) = events(1)
            await _published(bus, [after])
            await until(lambda: handler.done[after.id], 90, lambda: f"what came after: {handler.done.total()}")
            await until(lambda: _finished(bus), 60, "nothing left", every=0.2)
        assert await bus.quarantined("mail") == []
    finally:
        brokers.thaw()
        await bus.close()
    handler.never_beside_itself(8)
    assert max(handler.done.values()) <= 3  # a member that was silent for too long is given its partitions again


ALARMS = {
    "memory": (["set_vm_memory_high_watermark", "0.000001"], ["set_vm_memory_high_watermark", "0.6"]),
    "disk": (["set_disk_free_limit", "1000000GB"], ["set_disk_free_limit", "20MB"]),
}


@pytest.mark.parametrize("alarm", ALARMS)
async def test_rabbitmq_alarm_stops_publishing_and_not_consuming(rabbitmq_server, alarm):
    raised, cleared = ALARMS[alarm]
    bus = open_bus("rabbitmq", rabbitmq_server.url)
    bus.confirm_within = 3
    tries = Counter()
    done = Counter()

    async def every_fifth_fails_once(event):
        tries[event.id] += 1
        if event.data["number"] % 5 == 0 and tries[event.id] == 1:
            raise RuntimeError("once")
        done[event.id] += 1

    await bus.subscribe("mail", ["order"])
    batch = events(200)
    assert set(await bus.publish(batch)) == {None}
    good = {event.id for event in batch if event.data["number"] % 5}
    try:
        await asyncio.to_thread(rabbitmq_server.ctl, *raised)
        # The failing ones are five times as many as may run at once: they must not fill every place.
        async with consuming(bus, "mail", every_fifth_fails_once, concurrency=8):
            await until(lambda: good <= set(done), 60, lambda: f"the {len(good)} good ones: {len(done)}")
            assert set(done) == good
            late = events(3, late=True)
            for _ in range(3):  # as an outbox does
                refused = await asyncio.wait_for(bus.publish(late), 20)
                assert {type(each) for each in refused} == {BrokerUnavailable}
            assert await asyncio.wait_for(bus.lag("mail"), 20) == 0
            await asyncio.to_thread(rabbitmq_server.ctl, *cleared)
            await until(lambda: len(done) >= 200, 60, lambda: f"all events: {len(done)}")
            assert await bus.publish(late) == [None] * 3
            await until(lambda: {event.id for event in late} <= set(done), 60, "the late ones")
    finally:
        await asyncio.to_thread(rabbitmq_server.ctl, *cleared)
    assert await bus.quarantined("mail") == []
    assert Counter(tries[event.id] for event in batch) == {1: 160, 2: 40}
    # The first publish met the alarm unprepared and landed late; the other two were not even sent.
    assert max(done[event.id] for event in late) <= 2
    await bus.close()


@pytest.mark.parametrize("kind", ["redis", "redis-ordered"])
async def test_full_redis_stops_publishing_and_not_consuming(own_redis, kind):
    bus = open_bus(kind, own_redis.url, "full")
    client = bus.redis
    tries = Counter()
    done = set()

    async def some_fail(event):
        tries[event.id] += 1
        if event.data["number"] % 10 == 0 or (event.data["number"] % 5 == 0 and tries[event.id] == 1):
            raise RuntimeError("every tenth always, every fifth once")
        done.add(event.id)

    async def parked():
        return len(await bus.quarantined("mail")) == 10

    batch = events(100)
    await bus.subscribe("mail", ["order"])
    async with consuming(bus, "mail", some_fail):  # one that runs when it happens
        assert set(await bus.publish(batch[:50])) == {None}
        await until(lambda: len(done) == 45, 30, lambda: f"the first half: {len(done)}")
        assert set(await bus.publish(batch[50:])) == {None}
        await client.config_set("maxmemory", "1mb")
        await until(lambda: len(done) == 90, 60, lambda: f"the second half: {len(done)}")
        await until(parked, 30, "those that always fail, in quarantine", every=0.2)
        refused = await bus.publish(events(3, late=True))
        assert {type(each) for each in refused} == {BrokerUnavailable}
    await client.config_set("maxmemory", "0")
    late = events(3, late=True)
    assert set(await bus.publish(late)) == {None}
    await client.config_set("maxmemory", "1mb")
    async with consuming(bus, "mail", some_fail):  # and one that starts meanwhile
        await until(lambda: {event.id for event in late[1:]} <= done, 60, "what came before it was full")
    await client.config_set("maxmemory", "0")
    await bus.close()
    await client.aclose()


async def test_full_nats_stops_publishing_and_not_consuming(nats_url):
    prefix = new_prefix()
    bus = open_bus("nats", nats_url, prefix)
    tries = Counter()
    done = set()

    async def every_fifth_fails(event):
        tries[event.id] += 1
        if event.data["number"] % 5 == 0:
            raise RuntimeError("always")
        done.add(event.id)

    async def limit(size):
        stream = await bus._jetstream()
        for name in (prefix, bus._parking, bus._waiting):
            config = (await stream.stream_info(name)).config
            await stream.update_stream(config.evolve(max_bytes=size, discard=DiscardPolicy.NEW))

    async def parked():
        return len(await bus.quarantined("mail")) == 40

    batch = events(200)
    await bus.subscribe("mail", ["order"])
    assert set(await bus.publish(batch)) == {None}
    await limit(1)
    # The failing ones are five times as many as may run at once: they must not fill every place.
    async with consuming(bus, "mail", every_fifth_fails, concurrency=8):
        await until(lambda: len(done) == 160, 90, lambda: f"the good ones: {len(done)}")
        late = events(3, late=True)
        assert {type(each) for each in await bus.publish(late)} == {BrokerUnavailable}
        assert await bus.quarantined("mail") == []
        await limit(-1)
        await until(parked, 60, "those that always fail, in quarantine", every=0.2)
        assert set(await bus.publish(late)) == {None}
        await until(lambda: {event.id for event in late[1:]} <= done, 60, "the late ones")
    assert Counter(tries[event.id] for event in batch) == {1: 160, QUICK.attempts: 40}
    await bus.close()


@pytest.mark.parametrize("overflow", ["reject-publish", "drop-head"])
async def test_rabbitmq_length_limit_refuses_or_quarantines_and_loses_nothing(rabbitmq_server, overflow):
    """An operator's policy, which overrides a quorum queue's own setting (reject-publish)."""
    prefix = new_prefix()
    bus = open_bus("rabbitmq", rabbitmq_server.url, prefix)
    tries = Counter()
    done = set()

    async def every_fifth_fails_once(event):
        tries[event.id] += 1
        if event.data["number"] % 5 == 0 and tries[event.id] == 1:
            raise RuntimeError("once")
        done.add(event.id)

    await bus.subscribe("mail", ["order"])
    policy = json.dumps({"max-length": 20, "overflow": overflow})
    await asyncio.to_thread(rabbitmq_server.ctl, "set_policy", prefix, f"^{prefix}.mail$", policy)
    batch, refused = events(60), list[Event]()
    try:
        for event in batch:
            (result,) = await bus.publish([event])
            assert result is None or isinstance(result, BrokerUnavailable), repr(result)
            refused += [] if result is None else [event]
        parked = await bus.quarantined("mail")
        assert all("length limit" in entry.reason for entry in parked)
        pushed_out = [entry.event.id for entry in parked if entry.event]
        assert (bool(refused), bool(pushed_out)) == (overflow == "reject-publish", overflow == "drop-head")
        async with consuming(bus, "mail", every_fifth_fails_once):
            for event in refused:  # as an outbox does
                await until(lambda each=event: _taken(bus, each), 30, "room for one more")
            await until(lambda: len({*done, *pushed_out}) == 60, 60, lambda: f"{len(done)} done, {len(pushed_out)} out")
    finally:
        await asyncio.to_thread(rabbitmq_server.ctl, "clear_policy", prefix)
        await bus.close()


async def _taken(bus, event):
    return await bus.publish([event]) == [None]
