"""Auto-pipelined script calls: every caller gets its own reply or an error, whatever happens around it."""

import asyncio
import random
import time

import pytest
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from harness.waiting import until
from studyhall.patterns.bullmq_worker import autopipeline
from studyhall.patterns.bullmq_worker.autopipeline import AutoPipeline
from studyhall.patterns.core.worker_connections import worker_client

ECHO = "return ARGV[1]"
FAIL = "return redis.error_reply('WRONG ' .. ARGV[1])"


async def test_a_thousand_calls_share_one_connection_and_few_writes(redis_url, redis_server):
    client = worker_client(redis_url, AutoPipeline, name="thousand")
    echo = client.register_script(ECHO)
    assert await echo(args=["first"]) == "first"
    with redis_server.client() as watcher:
        before = watcher.info("stats")
        assert await asyncio.gather(*(echo(args=[n]) for n in range(1000))) == [str(n) for n in range(1000)]
        after = watcher.info("stats")
        assert len([row for row in watcher.client_list() if row["name"] == "thousand"]) <= 2
    assert after["total_commands_processed"] - before["total_commands_processed"] >= 1000
    assert after["total_reads_processed"] - before["total_reads_processed"] < 100
    await client.aclose()


async def test_replies_stay_with_their_callers_when_others_fail_or_are_cancelled(redis_url, seed):
    choose = random.Random(seed)
    client = worker_client(redis_url, AutoPipeline)
    echo, fail = client.register_script(ECHO), client.register_script(FAIL)
    await asyncio.gather(echo(args=[0]), _caught(fail(args=[0])))

    answers = []
    for batch in range(40):
        numbers = range(batch * 50, batch * 50 + 50)
        tasks = [asyncio.create_task((fail if n % 7 == 0 else echo)(args=[n])) for n in numbers]
        for _ in range(2):
            await asyncio.sleep(0)  # packed, then written: from here on the replies are owed
        for task in choose.sample(tasks, 15):
            task.cancel()
        answers += await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = 0
    for number, answer in enumerate(answers):
        if isinstance(answer, asyncio.CancelledError):
            cancelled += 1
        elif number % 7 == 0:
            assert isinstance(answer, ResponseError)
            assert str(answer).endswith(f" {number}")
        else:
            assert answer == str(number)
    assert cancelled > 100
    await client.aclose()


@pytest.mark.fault
async def test_a_dead_server_fails_every_call_at_once_and_the_next_connection_works(own_redis):
    client = worker_client(own_redis.url, AutoPipeline)
    echo = client.register_script(ECHO)
    await echo(args=["warm"])
    own_redis.pause()  # so that the calls are on their way, unanswered, when it dies
    calls = [asyncio.create_task(echo(args=[n])) for n in range(200)]
    await asyncio.sleep(0.2)
    assert not any(call.done() for call in calls)
    own_redis.kill()
    started = time.monotonic()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(answer, ConnectionError) for answer in answers)
    assert time.monotonic() - started < autopipeline.SILENCE_TICKS, "they waited until the silence was noticed"
    assert all(isinstance(a, ConnectionError) for a in [await _caught(echo(args=[n])) for n in range(20)])
    own_redis.restart()
    assert await asyncio.gather(*(echo(args=[n]) for n in range(50))) == [str(n) for n in range(50)]
    await client.aclose()


@pytest.mark.slow
@pytest.mark.fault
async def test_a_frozen_server_fails_the_calls_instead_of_hanging(own_redis, monkeypatch):
    monkeypatch.setattr(autopipeline, "SILENCE_TICKS", 1)
    client = worker_client(own_redis.url, AutoPipeline)
    echo = client.register_script(ECHO)
    await echo(args=["warm"])
    own_redis.pause()
    answers = await asyncio.wait_for(asyncio.gather(*(_caught(echo(args=[n])) for n in range(50))), 10)
    assert all(isinstance(answer, TimeoutError) for answer in answers)
    # 50 callers share one attempt to connect: one after the other they would wait for 50 timeouts
    started = time.monotonic()
    answers = await asyncio.gather(*(_caught(echo(args=[n])) for n in range(50)))
    assert all(isinstance(answer, ConnectionError | TimeoutError) for answer in answers)
    assert time.monotonic() - started < 12
    own_redis.resume()
    assert await echo(args=["back"]) == "back"
    await client.aclose()


async def test_a_blocked_event_loop_is_not_mistaken_for_a_silent_server(redis_url, monkeypatch):
    monkeypatch.setattr(autopipeline, "SILENCE_TICKS", 1)
    client = worker_client(redis_url, AutoPipeline)
    echo = client.register_script(ECHO)
    await echo(args=["warm"])
    calls = [asyncio.create_task(echo(args=[n])) for n in range(10)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # written
    time.sleep(3)
    assert await asyncio.gather(*calls) == [str(n) for n in range(10)]
    await client.aclose()


async def test_closing_fails_what_is_under_way_and_what_comes_late(redis_url, redis_server):
    client = worker_client(redis_url, AutoPipeline, name="closing")
    echo = client.register_script(ECHO)
    await echo(args=["warm"])
    call = asyncio.create_task(echo(args=["never"]))
    await asyncio.sleep(0)
    await client.aclose()
    assert isinstance(await _caught(call), ConnectionError)
    assert isinstance(await _caught(echo(args=["late"])), ConnectionError)
    with redis_server.client() as watcher:
        await until(
            lambda: "closing" not in {row["name"] for row in watcher.client_list()}, 10, "every connection to be gone"
        )


async def _caught(call):
    try:
        return await call
    except Exception as error:
        return error
