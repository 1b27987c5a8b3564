"""Deadline: the work is stopped, its finished part is kept, and whatever refuses to stop is named."""

import asyncio
import logging
import math

import pytest

from harness.waiting import until
from studyhall.patterns.core.errors import Transient
from studyhall.patterns.core.job import Deadline, Outcome, RetryPolicy
from studyhall.patterns.deadline import DeadlineExceeded, remaining, run_within, uncharged
from studyhall.patterns.retry import decide


async def test_hung_work_charges_once_where_a_race_leaves_zombies_that_charge_too(figures):
    """Three attempts, the first two too slow. The naive twin only stops waiting: they still charge later."""
    policy = RetryPolicy(base=0.001, cap=0.001, attempts=3)

    async def run(stop):
        charges = []
        outcomes = []
        gate, attempts_made = asyncio.Event(), 0

        async def attempt(slow):
            if slow:
                await gate.wait()
            charges.append("charged")

        while True:
            slow = attempts_made < 2
            try:
                if stop:
                    await run_within(0.05, attempt, slow)
                else:
                    zombie = asyncio.create_task(attempt(slow))
                    done, _ = await asyncio.wait({zombie}, timeout=0.05)
                    if not done:
                        raise TimeoutError
                break
            except (Transient, TimeoutError) as error:
                outcomes.append(decide(error, policy, attempts_made).outcome)
                attempts_made += 1
        gate.set()  # the slow provider answers at last
        for _ in range(10):
            await asyncio.sleep(0)
        assert outcomes == [Outcome.RETRY, Outcome.RETRY]
        return len(charges)

    naive, ours = await run(stop=False), await run(stop=True)
    assert naive == 3, "the naive twin charged again from its zombies"
    assert ours == 1
    figures("deadline", name="timed-out attempts", attempts=policy.attempts, charges_race=naive, charges_deadline=ours)


async def test_cleanup_of_stopped_work_has_ended_before_the_error_is_raised():
    steps = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            steps.append("released")

    with pytest.raises(DeadlineExceeded) as caught:
        await run_within(0.02, work)
    assert steps == ["released"]
    assert not caught.value.abandoned
    assert isinstance(caught.value, Transient)


async def test_the_finished_part_travels_on_the_error():
    pages = []

    async def extract():
        for page in range(3):
            pages.append(page)
            await asyncio.sleep(0)
        await asyncio.Event().wait()
        return pages

    with pytest.raises(DeadlineExceeded, match=r"extract did not finish within 0.05 s") as caught:
        await run_within(0.05, extract, partial=lambda: list(pages))
    assert caught.value.partial == [0, 1, 2]
    assert caught.value.limit == 0.05

    async def hands_over():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "half a graph"
        return "a graph"

    with pytest.raises(DeadlineExceeded) as caught:
        await run_within(0.02, hands_over)
    assert caught.value.partial == "half a graph"


async def test_an_error_in_the_cleanup_is_kept_as_the_cause():
    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("disk full")

    with pytest.raises(DeadlineExceeded) as caught:
        await run_within(0.02, work)
    assert isinstance(caught.value.__cause__, OSError)


async def test_work_that_swallows_its_cancellation_is_abandoned_and_named(caplog):
    release, ended = asyncio.Event(), asyncio.Event()

    async def stubborn():
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        ended.set()

    with caplog.at_level(logging.ERROR):
        with pytest.raises(DeadlineExceeded, match=r"stubborn.*abandoned.*must not swallow") as caught:
            await run_within(0.02, stubborn, grace=0.05)
        assert caught.value.abandoned
        assert "stubborn swallowed its cancellation" in caplog.text
        release.set()
        await until(ended.is_set, what="the abandoned work ends")
        await until(lambda: "ended late: completed" in caplog.text, what="its late end is reported")


async def test_a_single_swallowed_cancellation_is_not_enough_to_survive():
    async def once():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded) as caught:
        await run_within(0.02, once, grace=0.05)
    assert not caught.value.abandoned


async def test_cancelling_the_caller_stops_the_work():
    started, stopped = asyncio.Event(), asyncio.Event()

    async def work():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    outer = asyncio.create_task(run_within(60, work))
    await started.wait()
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert stopped.is_set()


async def test_work_knows_how_long_it_has_and_an_inner_limit_cannot_exceed_the_outer():
    assert remaining() == math.inf

    async def outer():
        assert 0 < remaining() <= 30

        async def inner():
            return remaining()

        return await run_within(1_000, inner)

    assert 0 < await run_within(30, outer) <= 30


async def test_many_limits_share_a_timer_and_each_ends_in_time():
    loop = asyncio.get_running_loop()

    async def late(seconds):
        began = loop.time()
        with pytest.raises(DeadlineExceeded):
            await run_within(seconds, asyncio.sleep, 30)
        return loop.time() - began

    # The later ones first, and a work that ends before its limit among them.
    limits = [30.0, 0.3, 0.1, 0.2, 0.1]
    quick = asyncio.create_task(run_within(limits[0], asyncio.sleep, 0.15, "done"))
    took = await asyncio.gather(*(late(limit) for limit in limits[1:]))
    assert await quick == "done"
    assert all(limit - 0.005 <= each < limit + 0.15 for limit, each in zip(limits[1:], took, strict=True)), took
    assert 0.1 - 0.005 <= await late(0.1) < 0.25, "after the others it is set again"


async def test_uncharged_time_is_added_to_every_limit_around_and_the_rest_still_counts():
    async def work(seconds):
        with uncharged():
            await asyncio.gather(asyncio.sleep(0.6), nested())
        left = remaining()
        await asyncio.sleep(seconds)
        return left

    async def nested():
        with uncharged():
            await asyncio.sleep(0.3)

    async def inner(seconds):
        return await run_within(0.5, work, seconds)

    assert 0 < await run_within(0.5, inner, 0) <= 0.5
    with pytest.raises(DeadlineExceeded):
        await run_within(0.5, inner, 30)


@pytest.mark.parametrize("wrong", [{"seconds": 0}, {"growth": 0.5}, {"longest": 1}])
def test_a_deadline_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="need seconds > 0"):
        Deadline(**{"seconds": 10.0, **wrong})
