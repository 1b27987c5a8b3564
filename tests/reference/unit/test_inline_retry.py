"""Retries outside a queue: bounded, jittered, on a budget."""

import asyncio
import time

import pytest

from studyhall.patterns.core.errors import Permanent, RateLimited, Transient
from studyhall.patterns.inline_retry import Budget, call


class Dependency:
    def __init__(self, *failures, always=None):
        self.calls: list[float] = []
        self._failures, self._always = list(failures), always

    async def __call__(self):
        self.calls.append(time.monotonic())
        if self._failures:
            raise self._failures.pop(0)
        if self._always is not None:
            raise self._always
        return "answer"


async def test_what_passes_by_itself_is_tried_again_and_what_does_not_is_not():
    shaky = Dependency(Transient("1"), Transient("2"))
    assert await call(shaky, base=0.01) == "answer"
    assert len(shaky.calls) == 3
    for error in (Permanent("no"), ValueError("a bug")):
        broken = Dependency(always=error)
        with pytest.raises(type(error)):
            await call(broken, base=0.01)
        assert len(broken.calls) == 1


async def test_a_dead_dependency_gets_its_normal_load_and_little_more(figures):
    async def naive(dead):
        for attempt in range(3):
            try:
                await dead()
                return
            except Transient:
                await asyncio.sleep(0.001 * 2**attempt)

    hammered, spared = Dependency(always=Transient("down")), Dependency(always=Transient("down"))
    budget = Budget(share=0.1, reserve=10)
    requests = 200
    for _ in range(requests):
        await naive(hammered)
        with pytest.raises(Transient):
            await call(spared, base=0.0005, budget=budget)
    assert len(hammered.calls) == 600
    assert 200 < len(spared.calls) <= 200 + 200 * 0.1 + 10
    naive_calls, calls = len(hammered.calls), len(spared.calls)
    figures("inline-retry", name="dead dependency", requests=requests, naive_calls=naive_calls, calls=calls)


async def test_the_pause_is_spread_over_its_whole_length_also_at_the_cap():
    async def pauses():
        every = []
        for _ in range(8):
            dependency = Dependency(*(Transient("x") for _ in range(3)))
            await call(dependency, attempts=4, base=0.2, cap=0.2)
            gaps = [after - before for before, after in zip(dependency.calls, dependency.calls[1:], strict=False)]
            every += gaps
        return every

    gaps = [gap for many in await asyncio.gather(*(pauses() for _ in range(20))) for gap in many]
    short = sum(gap < 0.1 for gap in gaps) / len(gaps)
    assert 0.1 < short < 0.9, "full jitter: about half of the pauses are in the lower half"


async def test_retry_after_is_waited_for_if_it_fits_and_not_if_it_does_not():
    asked = Dependency(RateLimited(retry_after=0.2))
    assert await call(asked, timeout=5) == "answer"
    assert asked.calls[1] - asked.calls[0] >= 0.2
    patient, limit = Dependency(RateLimited(retry_after=600)), 60
    began = time.monotonic()
    with pytest.raises(RateLimited):
        await call(patient, timeout=limit)
    assert time.monotonic() - began < limit / 2, "it waited although that was in vain"
    assert len(patient.calls) == 1


async def test_a_hung_call_ends_with_the_time_limit():
    calls = 0

    async def hangs():
        nonlocal calls
        calls += 1
        await asyncio.Event().wait()

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await call(hangs, timeout=0.3)
    assert time.monotonic() - began < 10
    assert calls == 1
