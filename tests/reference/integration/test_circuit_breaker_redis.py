"""The rules of the shared breaker, one by one, on a real server."""

import asyncio

import pytest
from redis.asyncio import Redis

from harness.waiting import until
from studyhall.patterns import circuit_breaker
from studyhall.patterns.circuit_breaker import BreakerOpen, CircuitBreaker
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.errors import Permanent, RateLimited, ResourceBusy, Snooze, Transient
from studyhall.patterns.core.job import Outcome, RetryPolicy
from studyhall.patterns.retry import decide


@pytest.fixture
async def redis(redis_url):
    client = producer_client(redis_url)
    yield client
    await client.aclose()


async def fail(breaker, error, times=1):
    for _ in range(times):
        with pytest.raises(type(error)):
            async with breaker:
                raise error


async def state(breaker):
    return (await breaker.state()).state


async def test_opens_after_enough_failures_and_closes_after_a_good_probe(redis):
    breaker = CircuitBreaker(redis, "p", failures=3, cooldown=0.3)
    await fail(breaker, Transient(), 2)
    assert await state(breaker) == "closed"
    await fail(breaker, TimeoutError())
    assert await state(breaker) == "open"
    with pytest.raises(BreakerOpen) as refused:
        await breaker.call(asyncio.sleep, 0)
    assert 0 < refused.value.retry_after <= 0.3
    await until(lambda: _half_open(breaker), 5, "the cooldown to pass")
    await breaker.call(asyncio.sleep, 0)
    assert await state(breaker) == "closed"
    await fail(breaker, Transient(), 2)
    assert await state(breaker) == "closed", "it starts over with a clean slate"


async def _half_open(breaker):
    return await state(breaker) == "half-open"


async def test_failed_probe_opens_again_and_only_one_of_many_callers_probes(redis):
    breakers = [CircuitBreaker(redis, "p", failures=1, cooldown=0.2) for _ in range(3)]
    await fail(breakers[0], Transient())
    for verdict in (Transient(), None):
        await until(lambda: _half_open(breakers[0]), 5, "half-open")
        probing = 0
        gate = asyncio.Event()

        async def probe(error, gate=gate):
            nonlocal probing
            probing += 1
            await gate.wait()
            if error:
                raise error

        calls = [asyncio.create_task(breakers[n % 3].call(probe, verdict)) for n in range(30)]
        await until(lambda calls=calls: sum(call.done() for call in calls) == 29, 10, "29 refusals")
        gate.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert probing == 1
        assert sum(isinstance(answer, BreakerOpen) for answer in answers) == 29
        assert await state(breakers[1]) == ("open" if verdict else "closed")


async def test_refused_job_waits_and_consumes_no_attempt(redis):
    breaker = CircuitBreaker(redis, "p", failures=1)
    await fail(breaker, Transient())
    with pytest.raises(BreakerOpen) as refused:
        async with breaker:
            pass
    decision = decide(refused.value, RetryPolicy(attempts=1), 0)
    assert (decision.outcome, decision.consume_attempt) == (Outcome.SNOOZED, False)


async def test_callers_faults_and_answers_do_not_open_it(redis):
    breaker = CircuitBreaker(redis, "p", failures=2)
    for error in (Permanent(), RateLimited(retry_after=1), ResourceBusy(), Snooze(1), asyncio.CancelledError()):
        await fail(breaker, error, 5)
    assert await state(breaker) == "closed"


async def test_a_probe_that_proves_nothing_leaves_the_place_to_the_next(redis):
    breaker = CircuitBreaker(redis, "p", failures=1, cooldown=0.1)
    await fail(breaker, Transient())
    await until(lambda: _half_open(breaker), 5, "half-open")
    await fail(breaker, Permanent())
    assert await state(breaker) == "half-open"
    await fail(breaker, RateLimited(retry_after=1))  # it answered: it lives
    assert await state(breaker) == "closed"


async def test_slow_calls_count_also_when_a_deadline_cancels_them(redis):
    breaker = CircuitBreaker(redis, "p", failures=2, slow=0.05)
    await breaker.call(asyncio.sleep, 0.1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await breaker.call(asyncio.sleep, 5)
    assert await state(breaker) == "open"


async def test_few_failures_among_many_good_calls_do_not_open_it(redis):
    breaker = CircuitBreaker(redis, "p", failures=3)
    for _ in range(10):
        await breaker.call(asyncio.sleep, 0)
    await fail(breaker, Transient(), 5)
    assert await state(breaker) == "closed"
    await fail(breaker, Transient(), 5)
    assert await state(breaker) == "open", "half of the calls fail"


async def test_failures_older_than_the_window_are_forgotten(redis):
    breaker = CircuitBreaker(redis, "p", failures=2, window=0.3)
    await fail(breaker, Transient())
    await asyncio.sleep(0.5)
    await fail(breaker, Transient())
    assert await state(breaker) == "closed"
    await fail(breaker, Transient())
    assert await state(breaker) == "open"


async def test_results_of_calls_from_before_it_opened_count_for_nothing(redis):
    breaker = CircuitBreaker(redis, "p", failures=1, cooldown=0.1)
    gates = [asyncio.Event() for _ in range(2)]

    async def late(gate, error):
        await gate.wait()
        if error:
            raise error

    good, bad = (
        asyncio.create_task(breaker.call(late, gate, error))
        for gate, error in zip(gates, (None, Transient()), strict=True)
    )
    await asyncio.sleep(0.1)
    await fail(breaker, Transient())
    gates[0].set()
    await good
    assert await state(breaker) != "closed", "a call from before must not close it"
    await until(lambda: _half_open(breaker), 5, "half-open")
    await breaker.call(asyncio.sleep, 0)
    gates[1].set()
    assert isinstance((await asyncio.gather(bad, return_exceptions=True))[0], Transient)
    assert await state(breaker) == "closed", "a call from before must not open it"


async def test_one_breaker_serves_nested_and_concurrent_calls(redis_url, monkeypatch):
    # Patient, and refusing: on a busy machine an answer can take more than a second. The default calls that an outage,
    # lets the call through and rightly does not count it.
    monkeypatch.setattr(circuit_breaker, "ANSWER_SECONDS", 60.0)
    redis = Redis.from_url(redis_url, decode_responses=True, socket_timeout=60, socket_connect_timeout=60)
    breaker = CircuitBreaker(redis, "p", failures=3, on_outage="refuse")

    async def nested():
        async with breaker, breaker:
            await asyncio.sleep(0.01)

    await asyncio.gather(*(nested() for _ in range(20)))
    assert breaker._inside == {}
    raw = await redis.hgetall("breaker:p")
    await redis.aclose()
    assert sum(int(count) for name, count in raw.items() if name.startswith("s:")) == 40


@pytest.mark.parametrize("wrong", [{"failures": 0}, {"cooldown": 0}, {"share": 2}, {"lease": -1}])
async def test_limits_that_make_no_sense_are_refused(redis, wrong):
    with pytest.raises(ValueError, match="need failures"):
        CircuitBreaker(redis, "p", **wrong)
