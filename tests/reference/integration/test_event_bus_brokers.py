"""What only one broker does, or gets wrong by default."""

import asyncio
import logging
import random
from collections import Counter

import aio_pika
import pytest
from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient
from redis.asyncio import Redis

from harness.buses import consuming, events, new_prefix, open_bus
from harness.waiting import until
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.event_bus.rabbitmq import NoSubscriber, RabbitBus
from studyhall.patterns.event_bus.redis_streams import RedisStreamsBus


@pytest.fixture
async def redis(redis_url):
    client = producer_client(redis_url)
    yield client
    await client.aclose()


async def test_redis_trims_only_what_the_slowest_group_has_finished(redis):
    bus = RedisStreamsBus(redis, retain=0)
    seen = []

    async def keep(event):
        seen.append(event.id)

    await bus.publish(events(10))
    assert await bus.trim("order") == 0  # no group yet: nobody has finished anything
    for group in ("fast", "slow"):
        await bus.subscribe(group, ["order"])
    async with consuming(bus, "fast", keep):
        await until(lambda: len(seen) == 10, what="the fast group")
    assert await bus.trim("order") == 0  # the slow group has read nothing
    first = await redis.xreadgroup("slow", "someone", {"events:order:0": ">"}, count=4)
    entries = [entry for entry, _ in first[0][1]]
    await redis.xack("events:order:0", "slow", *entries[:2])
    assert await bus.trim("order") == 2  # the third is pending: read, not finished
    assert await bus.lag("slow") == 8
    keeping = RedisStreamsBus(redis, retain=3600)
    await redis.xack("events:order:0", "slow", *entries)
    assert await keeping.trim("order") == 0  # finished, and still there for a group that comes late
    assert await bus.trim("order") == 2


@pytest.mark.parametrize("ordered", [False, True], ids=["plain", "ordered"])
@pytest.mark.parametrize("left", [0, 100])
async def test_redis_reports_what_somebody_else_trimmed_away_unread(redis, caplog, ordered, left):
    bus = RedisStreamsBus(redis, ordered=ordered, claim_idle=1)
    caplog.set_level(logging.ERROR, "event_bus")
    done = set()
    gate = asyncio.Event()

    async def held(event):
        await gate.wait()
        done.add(event.id)

    def reported():
        return sum(int(str(r.args[0])) for r in caplog.records if r.args and "trimmed before" in r.msg)

    await bus.subscribe("mail", ["order"])
    await bus.publish(events(700))
    async with consuming(bus, "mail", held):
        await until(lambda: _pending(redis), what="events in hand")
        await redis.xtrim("events:order:0", maxlen=left, approximate=False)
        gate.set()
        await until(lambda: _none_left(bus), 30, "a lag that is true", every=0.1)
        await until(lambda: len(done) + reported() == 700, 30, lambda: f"{len(done)} done, {reported()} lost")
        assert reported() > 0 or ordered  # the owner of a stream reads ahead: it has them all in hand
        await bus.publish(events(5))
        await until(lambda: _none_left(bus), 30, "what came after", every=0.1)
        assert await bus.lag("mail") == 0
    assert len(done) + reported() == 705
    assert bus.trimmed == reported(), "for a metric or a health check"


async def test_redis_reports_what_was_trimmed_away_from_a_dead_member(redis):
    bus = RedisStreamsBus(redis, claim_idle=0.2)
    await bus.subscribe("mail", ["order"])
    await bus.publish(events(30))
    await redis.xreadgroup("mail", "dead", {"events:order:0": ">"}, count=20)
    await redis.xtrim("events:order:0", maxlen=15, approximate=False)
    done = set()

    async def keep(event):
        done.add(event.id)

    async with consuming(bus, "mail", keep):
        await until(lambda: len(done) + bus.trimmed == 30, 30, lambda: f"{len(done)} done, {bus.trimmed} lost")
    assert (len(done), bus.trimmed) == (15, 15)


@pytest.mark.parametrize("ordered", [False, True], ids=["plain", "ordered"])
async def test_redis_counts_what_was_removed_while_nobody_read_before_it_reads_on(redis, monkeypatch, ordered):
    bus, done = RedisStreamsBus(redis, ordered=ordered), set()
    await bus.subscribe("mail", ["order"])
    await bus.publish(events(20))
    await redis.xtrim("events:order:0", maxlen=0, approximate=False)
    await bus.publish(events(5))
    look = bus._notice_gap

    async def slowly(*stream):
        await asyncio.sleep(0.5)
        await look(*stream)

    async def keep(event):
        done.add(event.id)

    monkeypatch.setattr(bus, "_notice_gap", slowly)
    async with consuming(bus, "mail", keep):
        await until(lambda: len(done) == 5, 30, "what came after")
    assert bus.trimmed == 20


async def _pending(redis):
    return bool((await redis.xpending("events:order:0", "mail"))["pending"])


async def _none_left(bus):
    return await bus.lag("mail") == 0


async def test_redis_consumer_goes_on_after_all_data_is_lost(redis):
    bus = RedisStreamsBus(redis)
    seen = Counter()

    async def keep(event):
        seen[event.id] += 1

    async with consuming(bus, "mail", keep):
        before, after = events(3), events(3)
        await bus.publish(before)
        await until(lambda: len(seen) == 3, what="events before")
        await redis.flushall()  # NOGROUP from now on
        await bus.publish(after)
        await until(lambda: len(seen) == 6, 20, "events after the loss")
    assert set(seen) == {event.id for event in before + after}


async def test_redis_consumers_end_whenever_they_are_told_to(redis, seed):
    """One stop in ten or so hung forever: a cancel that met the end of a Redis call was swallowed."""
    bus, moments = RedisStreamsBus(redis), random.Random(seed)

    async def started_and_stopped(group):
        await bus.subscribe(group, ["order"])
        async with consuming(bus, group, _ignore):  # fails when it takes longer than a minute
            await asyncio.sleep(moments.random() * 0.2)

    await bus.publish(events(3))
    await asyncio.gather(*(started_and_stopped(f"g{n}") for n in range(40)))


async def _ignore(_): ...


async def test_redis_body_that_is_not_text_does_not_harm_its_batch(redis):
    bus = RedisStreamsBus(redis)
    seen = []

    async def keep(event):
        seen.append(event.id)

    good = events(6)
    await bus.publish(good[:3])
    await redis.xadd("events:order:0", {"event": b"\xff\xfe not UTF-8", "key": "x"})
    await redis.xadd("events:order:0", {"nothing": "we know"})
    await bus.publish(good[3:])

    async def both():
        return len(await bus.quarantined("mail")) == 2

    async with consuming(bus, "mail", keep):
        await until(both, what="two in quarantine")
        await until(lambda: len(seen) == 6, what="the good ones")
    assert sorted(seen) == sorted(event.id for event in good)
    assert all("CloudEvents" in entry.reason for entry in await bus.quarantined("mail"))


async def test_redis_idle_reader_stays_below_the_socket_timeout(redis_url, caplog):
    caplog.set_level(logging.WARNING, "event_bus")
    client = Redis.from_url(redis_url, socket_timeout=0.4)
    bus = RedisStreamsBus(client)
    seen = []

    async def keep(event):
        seen.append(asyncio.get_running_loop().time())

    async with consuming(bus, "mail", keep):
        await asyncio.sleep(1.5)  # idle for several socket timeouts
        published = asyncio.get_running_loop().time()
        await bus.publish(events(1))
        await until(lambda: seen, what="the event")
    assert seen[0] - published < 1
    assert not [record for record in caplog.records if "cannot read" in record.getMessage()]
    await client.aclose()


async def test_redis_entries_whose_reply_was_lost_come_first_under_the_same_name(redis):
    bus = RedisStreamsBus(redis, member="pod-0", claim_idle=3600)
    await bus.subscribe("mail", ["order"])
    batch = events(4)
    await bus.publish(batch[:2])
    await redis.xreadgroup("mail", "pod-0", {"events:order:0": ">"})  # the process died with this reply
    await bus.publish(batch[2:])
    seen = []

    async def keep(event):
        seen.append(event.id)

    async with consuming(bus, "mail", keep, concurrency=1):
        await until(lambda: len(seen) == 4, what="all four")
    assert seen == [event.id for event in batch]
    assert await redis.xinfo_consumers("events:order:0", "mail") == []  # left nothing, so left no name


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "server"), [("redis", "redis_url"), ("nats", "nats_url")])
async def test_slow_handler_of_a_living_member_is_not_duplicated(kind, server, request):
    """Takeover comes after 1.5 s of silence; the handler needs three times as long, and another member waits."""
    url = request.getfixturevalue(server)
    buses = [open_bus(kind, url, "slow") for _ in range(2)]
    calls = []
    done = []

    async def slow(event):
        calls.append(event.id)
        await asyncio.sleep(4.5)
        done.append(event.id)

    await buses[0].subscribe("mail", ["order"])
    await buses[0].publish(events(1))
    async with consuming(buses[0], "mail", slow), consuming(buses[1], "mail", slow):
        await until(lambda: done, 15, "the slow event")
    assert (len(calls), len(done)) == (1, 1)
    for bus in buses:
        await bus.close()
        if isinstance(bus, RedisStreamsBus):
            await bus.redis.aclose()


@pytest.mark.needs_rabbitmq
async def test_rabbitmq_refuses_an_event_nobody_would_get(rabbitmq_url):
    bus = RabbitBus(rabbitmq_url, prefix="nobody")
    (event,) = events(1)
    (result,) = await bus.publish([event])
    assert isinstance(result, NoSubscriber)
    await bus.subscribe("mail", ["order"])
    assert await bus.publish([event]) == [None]
    await bus.close()


@pytest.mark.needs_rabbitmq
async def test_rabbitmq_itself_dead_letters_what_is_returned_too_often(rabbitmq_url):
    bus = RabbitBus(rabbitmq_url, prefix="limited", delivery_limit=2)
    await bus.subscribe("mail", ["order"])
    (event,) = events(1)
    assert await bus.publish([event]) == [None]
    connection = await aio_pika.connect(rabbitmq_url)
    returned = 0
    async with connection:
        for _ in range(4):  # consumers that die with the message in their hands
            channel = await connection.channel()
            queue = await channel.get_queue("limited.mail")
            if await queue.get(fail=False) is not None:
                returned += 1
            await channel.close()
            await asyncio.sleep(0.2)
    assert returned == 3

    async def parked():
        return bool(await bus.quarantined("mail"))

    await until(parked, what="the event in quarantine", every=0.2)
    (entry,) = await bus.quarantined("mail")
    assert entry.event == event
    assert "dead-lettered by RabbitMQ" in entry.reason
    assert await bus.replay_quarantined("mail", [entry.id]) == 1
    assert await bus.lag("mail") == 1
    await bus.close()


@pytest.mark.parametrize("kind", ["kafka", "kafka-ordered"])
async def test_kafka_member_that_joins_or_leaves_takes_no_event_in_mid_handler(kind, kafka_server):
    prefix = new_prefix()
    first, second = (open_bus(kind, kafka_server.url, prefix) for _ in range(2))
    # Redelivery because a crowded machine was silent for too long is not the subject.
    first.session_timeout = second.session_timeout = 20
    admin = AdminClient({"bootstrap.servers": kafka_server.url})
    gate, leave = asyncio.Event(), asyncio.Event()
    runs = Counter()
    inside = Counter()
    side_by_side = []
    started = {"first": 0, "second": 0}

    def handler(name):
        async def slow(event):
            runs[event.id] += 1
            inside[event.id] += 1
            side_by_side.extend([event.id] * (inside[event.id] > 1))
            started[name] += 1
            await gate.wait()
            inside[event.id] -= 1

        return slow

    async def state():
        (asked,) = admin.describe_consumer_groups([f"{prefix}.mail"]).values()
        group = await asyncio.to_thread(asked.result, 20)
        return group.state

    async def rebalancing():
        return await state() != ConsumerGroupState.STABLE

    async def publish(count):
        batch = events(count)
        sent.update(event.id for event in batch)
        assert set(await first.publish(batch)) == {None}

    sent = set()
    await first.subscribe("mail", ["order"])
    await publish(30)
    async with consuming(first, "mail", handler("first"), concurrency=64):
        await until(lambda: started["first"] == 30, 30, "all in hand of the only member")
        joined = asyncio.create_task(second.consume("mail", ["order"], handler("second"), stop=leave, concurrency=64))
        await until(rebalancing, 30, "a second member")
        await asyncio.sleep(0.5)  # if its events were taken, it would be now
        assert started["second"] == 0
        gate.set()
        while not started["second"]:  # it has partitions once it gets new ones
            await publish(12)
            await asyncio.sleep(0.1)
        gate.clear()
        before = started["second"]
        await publish(30)
        await until(lambda: started["second"] > before, 30, "something in hand")
        leave.set()
        await asyncio.sleep(0.5)
        assert not joined.done()
        gate.set()
        await asyncio.wait_for(joined, 30)
        await until(lambda: set(runs) == sent, 30, "all events")
    assert side_by_side == []
    # What is done behind a partition's oldest unsettled event comes again after a rebalance.
    assert sum(runs.values()) - len(sent) <= len(sent) // 4
    for bus in (first, second):
        await bus.close()
