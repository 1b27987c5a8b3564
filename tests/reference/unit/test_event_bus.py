"""The parts every event-bus adapter is made of, without a broker."""

import asyncio
import dataclasses
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from studyhall.patterns.core.errors import Cancelled, Permanent, RateLimited
from studyhall.patterns.core.event import Event
from studyhall.patterns.core.job import Outcome, RetryPolicy
from studyhall.patterns.event_bus import Capabilities, Quarantined, topic_of
from studyhall.patterns.event_bus.delivery import Lanes, checked_name, judge, pauses

POLICY = RetryPolicy(base=0.1, cap=1, attempts=3)
EVENT = Event(source="/test", type="order.placed.v1", subject="o1")


async def verdict(error, deliveries=1, event=EVENT):
    async def handler(_):
        if error is not None:
            raise error

    return await judge(handler, event.encode(), deliveries, POLICY, 5)


def test_topic_is_the_aggregate_so_that_its_events_share_a_channel():
    cancelled = EVENT.model_copy(update={"type": "order.cancelled.v3"})
    assert topic_of(EVENT) == topic_of(cancelled) == "order"


@pytest.mark.parametrize("word", ["", "a b", "a.b", "a*", "a>", "ä", "a/b", "a:b"])
def test_names_that_one_of_the_brokers_would_misread_are_refused(word):
    with pytest.raises(ValueError, match="topic or group name"):
        checked_name(word)


async def test_every_end_of_a_handler_becomes_one_decision():
    assert await verdict(None) is None
    assert await verdict(Cancelled("not wanted any more")) is None
    again = await verdict(RuntimeError("away"))
    assert again is not None
    assert again.outcome is Outcome.RETRY
    assert again.delay is not None
    free = await verdict(RateLimited(retry_after=2), deliveries=3)
    assert free is not None
    assert free.delay is not None
    assert free.delay >= 2
    assert not free.consume_attempt
    for final in (await verdict(Permanent("never")), await verdict(RuntimeError("away"), deliveries=3)):
        assert final is not None
        assert final.delay is None


async def test_more_deliveries_than_attempts_means_it_kills_its_consumer_and_is_not_run_again():
    final = await verdict(AssertionError("was run"), deliveries=4)
    assert final is not None
    assert final.delay is None
    assert "delivered 3 times and never answered" in final.reason


async def test_free_waiting_ends_when_the_event_is_older_than_the_policy_allows():
    old = EVENT.model_copy(update={"time": datetime.now(UTC) - timedelta(days=2)})
    final = await verdict(RateLimited(retry_after=2), event=old)
    assert final is not None
    assert final.outcome is Outcome.EXPIRED


async def test_a_task_group_that_failed_does_not_make_the_next_cancellation_look_like_ours():
    async def grouped(_):
        async with asyncio.TaskGroup() as group:
            group.create_task(refuses())

    async def refuses():
        await asyncio.sleep(0.01)  # until the group waits for it
        raise ValueError("no")

    first = await judge(grouped, EVENT.encode(), 1, POLICY, 5)
    assert first is not None
    # The same task, as of a lane: a cancellation of the handler's own making is a failed delivery.
    second = await verdict(asyncio.CancelledError())
    assert second is not None
    assert second.delay is not None


async def test_cancellation_from_outside_passes_through():
    async def forever(_):
        await asyncio.Event().wait()

    task = asyncio.create_task(judge(forever, EVENT.encode(), 1, POLICY, 60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_lanes_keep_one_key_in_order_and_let_others_pass():
    lanes, gate, seen = Lanes(), asyncio.Event(), list[str]()

    async def first():
        await gate.wait()
        seen.append("a1")
        raise RuntimeError("must not stop the lane")

    async def note(name):
        seen.append(name)

    lanes.start("a", first)
    lanes.start("a", lambda: note("a2"))
    lanes.start("b", lambda: note("b1"))
    lanes.start(None, lambda: note("free"))
    await asyncio.sleep(0.01)
    assert sorted(seen) == ["b1", "free"]
    gate.set()
    await lanes.drain()
    assert seen[2:] == ["a1", "a2"]
    assert not lanes.tasks
    assert not lanes._last


async def test_pauses_grow_and_end_with_stop():
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    turns = []
    async for _ in pauses(stop, longest=0.2):
        turns.append(loop.time())
        if len(turns) == 4:
            stop.set()
    gaps = [later - earlier for earlier, later in pairwise(turns)]
    assert len(turns) == 4
    assert gaps[0] >= 0.09
    assert gaps[1] >= 0.19


def test_quarantine_shows_what_was_on_the_wire_even_if_it_is_not_an_event():
    entry = Quarantined("1", "order", "not json", "malformed", 1, datetime.now(UTC))
    assert entry.event is None
    assert dataclasses.replace(entry, body=EVENT.encode().decode()).event == EVENT


def test_capabilities_cannot_be_talked_up_later():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Capabilities("x").transactions = True  # type: ignore[misc]
