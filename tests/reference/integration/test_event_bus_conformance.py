"""One suite for every event bus, against a real server each, led by what the adapter declares.

What is declared is proven, and what is not declared is shown to be missing, so that no capability is only a word.
"""

import asyncio
import random
from collections import Counter, defaultdict
from functools import partial

import pytest
from confluent_kafka import OFFSET_END, TopicPartition
from confluent_kafka.admin import AdminClient
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from harness.buses import BUSES, QUICK, SERVERS, THREE_KAFKA, close_bus, consuming, events, new_prefix, open_bus
from harness.missing import missing
from harness.waiting import until
from studyhall.patterns.core.errors import Permanent, ResourceBusy
from studyhall.patterns.core.event import MAX_BYTES, Event, EventTooLarge
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.event_bus.delivery import partition_of
from studyhall.patterns.event_bus.kafka import KafkaBus

EVERY = tuple(kind for kind in BUSES if not kind.endswith("-ordered"))
ORDERED = tuple(kind for kind in BUSES if kind.endswith("-ordered"))


@pytest.fixture(params=[*EVERY, pytest.param(THREE_KAFKA, marks=pytest.mark.slow)])
def kind(request):
    return str(request.param)


@pytest.fixture
async def another(kind, request):
    """Opens the bus again, as another process would."""
    url = request.getfixturevalue(SERVERS[kind.removesuffix("-ordered")])
    prefix = new_prefix()
    opened = []

    def open_():
        opened.append(open_bus(kind, url, prefix))
        return opened[-1]

    yield open_
    for bus in opened:
        await close_bus(bus)


@pytest.fixture
def bus(another):
    return another()


class Seen:
    """A handler that remembers. `act` decides what happens after that."""

    def __init__(self, act=None):
        self.started: list[str] = []
        self.done: list[str] = []
        self._act = act

    async def __call__(self, event):
        self.started.append(event.id)
        if self._act is not None:
            await self._act(event)
        self.done.append(event.id)


async def publish(bus, batch):
    assert await bus.publish(batch) == [None] * len(batch)
    return [event.id for event in batch]


async def nothing_left(bus, group):
    async def empty():
        return await bus.lag(group) == 0

    await until(empty, 20, f"lag of {group} at zero")


async def test_accepted_events_reach_the_handler_unchanged_and_are_acknowledged(bus):
    seen = {}

    async def keep(event):
        seen[event.id] = event

    await bus.subscribe("mail", ["order"])
    await bus.subscribe("mail", ["order"])  # again, as every process does at its start
    batch = events(50)
    await publish(bus, batch)
    assert await bus.lag("mail") == 50
    async with consuming(bus, "mail", keep):
        await until(lambda: len(seen) == 50, 30, "50 events")
        await nothing_left(bus, "mail")
    assert [seen[event.id] for event in batch] == batch


async def test_a_refused_event_does_not_harm_its_batch(bus):
    seen = Seen()
    await bus.subscribe("mail", ["order"])
    first, last = events(2)
    huge = Event(source="/test", type="order.placed.v1", subject="o", data={"text": "x" * MAX_BYTES})
    nameless = Event(source="/test", type="bad topic.v1", subject="o")
    results = await bus.publish([first, huge, nameless, last])
    assert [type(result) for result in results] == [type(None), EventTooLarge, ValueError, type(None)]
    async with consuming(bus, "mail", seen):
        await until(lambda: len(seen.done) == 2, 30, "both good events")
        await nothing_left(bus, "mail")
    assert sorted(seen.started) == sorted([first.id, last.id])


@pytest.mark.parametrize("kind", [*EVERY, *ORDERED], indirect=True)
async def test_waits_are_counted_for_the_group_and_not_in_one_process(bus, another):
    calls = Counter()

    async def busy(event):
        calls[event.id] += 1
        if calls[event.id] <= 6:
            raise ResourceBusy("pool is full", retry_after=0.1)

    policy = RetryPolicy(base=0.05, cap=0.1, attempts=4)  # fewer than the waits
    await bus.subscribe("mail", ["order"])
    ids = await publish(bus, events(10))
    # Two members at first, and then new ones, as after a deployment.
    async with consuming(bus, "mail", busy, policy=policy), consuming(another(), "mail", busy, policy=policy):
        await until(lambda: sum(calls.values()) >= 25, 30, "waits in two members")
    async with consuming(another(), "mail", busy, policy=policy), consuming(another(), "mail", busy, policy=policy):
        await until(lambda: min(calls[each] for each in ids) >= 7, 60, lambda: f"seven calls each: {calls}")
        await nothing_left(bus, "mail")
    assert await bus.quarantined("mail") == []


@pytest.mark.parametrize("kind", [*EVERY, *ORDERED], indirect=True)
async def test_attempts_are_counted_over_restarts(bus, another):
    calls = []

    async def broken(event):
        calls.append(event.id)
        raise RuntimeError("database is away")

    async def parked():
        return bool(await bus.quarantined("mail"))

    async def called_or_parked(before):
        return len(calls) > before or await parked()

    await bus.subscribe("mail", ["order"])
    await publish(bus, events(1))
    # Stopped in its backoff, most of the time.
    policy = RetryPolicy(base=1, cap=1, attempts=3)
    for life in range(4):
        async with consuming(another(), "mail", broken, policy=policy):
            await until(partial(called_or_parked, life), 30, f"call {life + 1} or quarantine", every=0.1)
        if await parked():
            break
    assert await parked()
    assert len(calls) == 3


class _Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")


@pytest.mark.parametrize("kind", [*EVERY, *ORDERED], indirect=True)
async def test_error_text_that_no_broker_takes_ends_in_quarantine_and_holds_up_nobody(bus):
    wild = [
        RuntimeError("nul \x00 inside"),
        RuntimeError("lone \udcff surrogate"),
        RuntimeError("two\r\nlines\r\nX-Header: forged\r\n\r\n"),
        _Unspeakable(),
        RuntimeError("long " * 100_000),
    ]

    async def poisonous(event):
        if (number := event.data.get("wild")) is not None:
            raise wild[number]

    seen = Seen(poisonous)
    bad = [events(1, subject=f"bad-{n}", wild=n)[0] for n in range(len(wild))]
    await bus.subscribe("mail", ["order"])
    ids = await publish(bus, [*bad, *events(20)])

    async def parked():
        return len(await bus.quarantined("mail")) == len(wild)

    async with consuming(bus, "mail", seen, concurrency=4):
        await until(lambda: len(seen.done) == 20, 30, "the good events")
        await until(parked, 30, "all of them in quarantine", every=0.2)
        await nothing_left(bus, "mail")
    assert Counter(seen.started) == {
        each: QUICK.attempts if number < len(wild) else 1 for number, each in enumerate(ids)
    }
    reasons = " ".join(entry.reason for entry in await bus.quarantined("mail"))
    assert all(word in reasons for word in ("inside", "surrogate", "lines", "_Unspeakable", "long"))


async def test_redelivery_is_bounded_and_ends_in_quarantine_with_the_reason(bus):
    async def broken(event):
        if event.data["number"] == 1:
            raise Permanent("no such customer")
        raise RuntimeError("line 7, password=hunter2\nline 8")

    seen = Seen(broken)
    await bus.subscribe("mail", ["order"])
    retried, hopeless = events(2)
    unreadable = Event.model_construct(source="", type="order.placed.v1", subject="o", id="unreadable")
    await publish(bus, [retried, hopeless, unreadable])

    async def three():
        return len(await bus.quarantined("mail")) == 3

    async with consuming(bus, "mail", seen):
        await until(three, 30, "three in quarantine", every=0.2)
        await nothing_left(bus, "mail")
    assert Counter(seen.started) == {retried.id: QUICK.attempts, hopeless.id: 1}
    held = {entry.event.id if entry.event else "unreadable": entry for entry in await bus.quarantined("mail")}
    assert held[retried.id].event == retried
    assert held[retried.id].deliveries == QUICK.attempts
    assert "attempt 3 of 3 failed: RuntimeError: line 7" in held[retried.id].reason
    assert "hunter2" not in held[retried.id].reason
    assert held[hopeless.id].reason == "Permanent: no such customer"
    assert "source" in held["unreadable"].reason
    assert "unreadable" in held["unreadable"].body
    assert {entry.topic for entry in held.values()} == {"order"}


@pytest.mark.parametrize("kind", [*EVERY, *ORDERED], indirect=True)
async def test_poison_delays_no_more_than_declared(bus):
    async def poisonous(event):
        if event.data.get("poison"):
            raise ResourceBusy("for a long time", retry_after=60)

    seen = Seen(poisonous)
    poison = events(20, subject="poison", poison=True)
    same_key = events(3, subject="poison")
    others = events(40)
    await bus.subscribe("mail", ["order"])
    poison_ids = await publish(bus, poison)
    good = {event.id: event for event in [*same_key, *others]}
    await publish(bus, list(good.values()))
    delays = bus.capabilities.poison_delays
    if delays == "itself":
        free = set(good)
    elif delays == "its key":
        free = {event.id for event in others}
    else:
        count = bus.partitions
        taken = partition_of("poison", count)
        free = {event.id for event in others if partition_of(event.subject, count) != taken}
    assert len(free) >= 15
    patient = RetryPolicy(base=1, cap=120, attempts=3)
    async with consuming(bus, "mail", seen, concurrency=4, policy=patient):
        await until(lambda: free <= set(seen.done), 30, "the good events")
        # Each was tried (or the first of its key, where order is kept) and waits: 60 s are not over.
        tried = [each for each in seen.started if each in set(poison_ids)]
        assert tried == poison_ids[:1] or sorted(tried) == sorted(poison_ids)
        assert set(seen.done) == free


async def test_members_of_a_group_share_the_events(bus, another):
    async def slow(event):
        await asyncio.sleep(0.005)

    one, two = Seen(slow), Seen(slow)
    await bus.subscribe("mail", ["order"])
    ids = []
    async with consuming(bus, "mail", one, concurrency=2), consuming(another(), "mail", two, concurrency=2):

        async def both():
            ids.extend(await publish(bus, events(20)))
            return len(one.done) > 10 and len(two.done) > 10

        await until(both, 40, lambda: f"both members at work: {len(one.done)} and {len(two.done)}", every=0.1)
        await until(lambda: len(one.done) + len(two.done) >= len(ids), 30, "all done")
        await nothing_left(bus, "mail")
    assert sorted(one.done + two.done) == sorted(ids)


async def test_a_late_group_gets_the_past_only_where_declared(bus):
    """So does a renamed one; what it had not handled stays under the old name. Every group gets what is new."""
    early, late = Seen(), Seen()
    await bus.subscribe("early", ["order"])
    past = await publish(bus, events(30))
    async with consuming(bus, "early", early):
        await until(lambda: len(early.done) == 30, 30, "the early group")
        await nothing_left(bus, "early")
    await bus.subscribe("late", ["order"])
    new = await publish(bus, events(5))
    expected = past + new if bus.capabilities.replay_from_start else new
    async with consuming(bus, "late", late):
        await until(lambda: len(late.done) >= len(expected), 30, "the late group")
        await nothing_left(bus, "late")
    assert sorted(late.done) == sorted(expected)
    async with consuming(bus, "early", early):
        await until(lambda: len(early.done) >= 35, 30, "the early group's backlog")
        await nothing_left(bus, "early")
    assert sorted(early.done) == sorted(past + new)


def _odd_ids():
    tricky = st.sampled_from(["a", "a ", " a", "A", "a\t", "a\n", "a\r\nX: y", "é", "e\u0301", "\U0001f600" * 200])
    tricky |= st.sampled_from(["replay/mail/1", "mail/1", "~", "%20", "a" * 200, "*", ">", "a.b", "\x00", "\ufffd"])
    anything = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)
    return st.lists(tricky | anything, min_size=1, max_size=40, unique=True)


# Kafka's ids are the same in order or not, and each example makes topics: once is enough.
@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*EVERY, *ORDERED} - {"kafka"}), indirect=True)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(ids=_odd_ids())
@example(ids=["a", "a ", " a", "\ta", "a\n", "\U0001f600" * 200, "é" * 130, "replay/mail/1", "mail/1"])
async def test_every_id_an_event_may_have_is_delivered_and_only_its_own_repeats_are_dropped(kind, request, ids):
    seen = Seen()
    # A bus of its own for every example: the brokers remember ids.
    url = request.getfixturevalue(SERVERS[kind.removesuffix("-ordered")])
    bus = open_bus(kind, url)
    batch = [event.model_copy(update={"id": each}) for each, event in zip(ids, events(len(ids)), strict=True)]
    copies = 1 if bus.capabilities.dedup_window > 0 else 2
    await bus.subscribe("mail", ["order"])
    await publish(bus, batch)
    await publish(bus, batch)
    async with consuming(bus, "mail", seen):
        await until(lambda: len(seen.done) >= copies * len(ids), 30, lambda: f"{len(seen.done)} of {ids!r}")
        await nothing_left(bus, "mail")
    await close_bus(bus)
    assert Counter(seen.done) == dict.fromkeys(ids, copies)


@pytest.mark.parametrize("kind", ORDERED, indirect=True)
async def test_order_per_key_holds_with_two_members_and_failures(bus, another, seed, scale):
    assert bus.capabilities.ordered_per_key
    dice = random.Random(seed)
    keys, each = 6, scale(15, 60)
    finished = defaultdict(list)
    inside = Counter()
    unlucky = {(f"k{key}", number) for key in range(keys) for number in range(each) if dice.random() < 0.1}
    overlaps = 0

    async def step(event):
        nonlocal overlaps
        overlaps += inside[event.subject] > 0
        inside[event.subject] += 1
        try:
            await asyncio.sleep(dice.random() * 0.01)
            if (event.subject, event.data["number"]) in unlucky:
                unlucky.discard((event.subject, event.data["number"]))
                raise RuntimeError("once")
            finished[event.subject].append(event.data["number"])
        finally:
            inside[event.subject] -= 1

    await bus.subscribe("mail", ["order"])
    lines = [events(each, subject=f"k{key}") for key in range(keys)]
    assert unlucky
    async with consuming(bus, "mail", step), consuming(another(), "mail", step):
        for turn in zip(*lines, strict=True):
            await publish(bus, list(turn))
        await until(lambda: sum(map(len, finished.values())) >= keys * each, 60, "all events")
        await nothing_left(bus, "mail")
    if isinstance(bus, KafkaBus):  # a rebalance redelivers what was done behind a partition's oldest unsettled event
        finished = {subject: list(dict.fromkeys(numbers)) for subject, numbers in finished.items()}
    assert dict(finished) == {f"k{key}": list(range(each)) for key in range(keys)}
    assert (overlaps, unlucky) == (0, set())


async def test_without_declared_order_a_retried_event_is_overtaken(bus):
    finished = []
    failed = []

    async def step(event):
        if event.data["number"] == 0 and not failed:
            failed.append(0)
            raise ResourceBusy(retry_after=0.5)
        finished.append(event.data["number"])

    assert not bus.capabilities.ordered_per_key
    await bus.subscribe("mail", ["order"])
    await publish(bus, events(3, subject="one"))
    async with consuming(bus, "mail", step, concurrency=1):
        await until(lambda: len(finished) == 3, 30, "three events")
    assert finished[0] != 0


async def test_replay_goes_to_one_group_and_leaves_the_others_alone(bus):
    broken = True

    async def fails(event):
        if broken:
            raise Permanent("not deployed yet")

    mail, billing = Seen(fails), Seen(fails)
    for group in ("mail", "billing"):
        await bus.subscribe(group, ["order"])
    ids = await publish(bus, events(3))
    async with consuming(bus, "mail", mail), consuming(bus, "billing", billing):

        async def both():
            return all([len(await bus.quarantined(group)) == 3 for group in ("mail", "billing")])

        await until(both, 30, "three in each quarantine", every=0.2)
        broken = False
        chosen = [entry for entry in await bus.quarantined("mail") if entry.event and entry.event.id != ids[0]]
        assert await bus.replay_quarantined("mail", [entry.id for entry in chosen]) == 2
        assert await bus.replay_quarantined("mail", [entry.id for entry in chosen]) == 0  # only once
        wrong = ["", "nonsense", "0", "77", "0-1", "order/x", "order/0-1", "no topic/1-1", str(2**64)]
        assert await bus.replay_quarantined("mail", wrong) == 0
        await until(lambda: len(mail.done) == 2, 30, "the replayed ones")
        await nothing_left(bus, "mail")
    assert sorted(mail.done) == sorted(ids[1:])
    assert billing.done == []
    assert len(billing.started) == 3
    left = {group: await bus.quarantined(group) for group in ("mail", "billing")}
    assert [entry.event.id for entry in left["mail"] if entry.event] == ids[:1]
    assert len(left["billing"]) == 3


async def test_replay_by_two_at_once_while_events_flow_loses_nothing(bus, another):
    broken = True

    async def fails(event):
        if broken and event.data.get("bad"):
            raise Permanent("not deployed yet")

    async def parked():
        return len(await bus.quarantined("mail")) == 20

    seen = Seen(fails)
    await bus.subscribe("mail", ["order"])
    bad = await publish(bus, events(20, bad=True))
    async with consuming(bus, "mail", seen):
        await until(parked, 30, "20 in quarantine", every=0.2)
        broken = False
        entries = [entry.id for entry in await bus.quarantined("mail")]
        live, *replayed = await asyncio.gather(
            publish(bus, events(20)),
            bus.replay_quarantined("mail", entries),
            another().replay_quarantined("mail", entries),
        )
        await until(lambda: set(seen.done) >= {*bad, *live}, 30, "replayed and live events")
        await nothing_left(bus, "mail")
    assert await bus.quarantined("mail") == []
    if bus.capabilities.broker != "kafka":  # whose dead topics cannot be taken from: see its limits
        assert (sum(replayed), max(Counter(seen.done).values())) == (20, 1)


async def _remove_all(bus):
    """As an operator does by hand, or a limit does."""
    if bus.capabilities.broker == "redis-streams":
        for number in range(bus.partitions):
            await bus.redis.xtrim(f"{bus.prefix}:order:{number}", maxlen=0, approximate=False)
    elif bus.capabilities.broker == "nats-jetstream":
        await (await bus._jetstream()).purge_stream(bus.prefix)
    elif bus.capabilities.broker == "kafka":
        everything = [TopicPartition(f"{bus.prefix}.order", number, OFFSET_END) for number in range(bus.partitions)]
        admin = AdminClient(bus._config)  # its answers end with it
        for removed in admin.delete_records(everything).values():
            await asyncio.to_thread(removed.result, 20)
    else:
        async with bus._questions.fresh() as channel:
            await (await channel.get_queue(f"{bus.prefix}.mail")).purge()


@pytest.mark.parametrize("kind", [*EVERY, *ORDERED], indirect=True)
async def test_events_that_somebody_else_removed_are_reported_and_leave_a_true_lag(bus, another):
    gate = asyncio.Event()

    async def held(event):
        await gate.wait()

    seen = Seen(held)
    if not getattr(bus, "create_topics", True):
        missing("DeleteRecords", "use a real Kafka broker")
    await bus.subscribe("mail", ["order"])
    await publish(bus, events(60))
    async with consuming(bus, "mail", seen, concurrency=4):
        await until(lambda: len(seen.started) == 4, 30, "four in hand")
        await _remove_all(another())
        gate.set()
        await nothing_left(bus, "mail")
        new = await publish(bus, events(8))
        await until(lambda: set(new) <= set(seen.done), 30, "what came after")
        await nothing_left(bus, "mail")
    assert await bus.quarantined("mail") == []
    assert len(seen.done) == len(set(seen.done))
    # And while nobody reads. Where the broker keeps a trace, their number is known.
    silent = any("gone without a word" in limit for limit in bus.capabilities.limits)
    lost = await publish(bus, events(20))
    await _remove_all(another())
    latest, reader = await publish(bus, events(20)), another()
    async with consuming(reader, "mail", seen, concurrency=4):
        await until(lambda: set(latest) <= set(seen.done), 30, "the latest")
        await nothing_left(reader, "mail")
        assert not set(lost) & set(seen.started)
        if not silent:
            await until(lambda: reader.trimmed == len(lost), 30, lambda: f"{reader.trimmed} of {len(lost)} reported")


async def test_graceful_stop_finishes_what_is_in_flight_and_leaves_the_rest(bus, another):
    gate = asyncio.Event()

    async def wait(event):
        await gate.wait()

    first, second = Seen(wait), Seen()
    await bus.subscribe("mail", ["order"])
    ids = await publish(bus, events(12))
    async with consuming(bus, "mail", first, concurrency=2) as stop:
        await until(lambda: len(first.started) == 2, 30, "two in flight")
        stop.set()
        await asyncio.sleep(0.5)  # if it gave up on them, it would be now
        assert first.done == []
        gate.set()
    assert sorted(first.done) == sorted(first.started)
    async with consuming(another(), "mail", second):
        await until(lambda: len(first.done) + len(second.done) >= 12, 30, "the rest")
        await nothing_left(bus, "mail")
    assert sorted(first.done + second.done) == sorted(ids)


async def test_a_handler_that_hangs_or_cancels_itself_is_retried_and_does_not_end_the_consumer(bus):
    tries = Counter()

    async def strange(event):
        number = event.data["number"]
        tries[number] += 1
        if number == 0 and tries[0] == 1:
            await asyncio.sleep(60)
        if number == 1 and tries[1] == 1:
            raise asyncio.CancelledError

    await bus.subscribe("mail", ["order"])
    await publish(bus, events(3))
    async with consuming(bus, "mail", strange, time_limit=0.3):
        await until(lambda: tries == {0: 2, 1: 2, 2: 1}, 30, "second tries")
        await nothing_left(bus, "mail")


def test_no_adapter_is_left_out_and_each_says_what_it_cannot_do():
    for name, make in BUSES.items():
        capabilities = make("redis://127.0.0.1:1" if name.startswith("redis") else "127.0.0.1:1", "t").capabilities
        assert capabilities.limits, name
        assert not capabilities.transactions, "declared nowhere, proven nowhere"
        assert (name in ORDERED) == capabilities.ordered_per_key
