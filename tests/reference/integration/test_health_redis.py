"""Health: no backlog hides, no listing holds Redis up, one incident is one alert."""

import asyncio
import time

import pytest
from bullmq import Queue
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import text

from harness.waiting import until
from harness.workers import at_work, queue_at
from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin, ping
from studyhall.patterns.core.worker_connections import events_client
from studyhall.patterns.dead_letter import counts
from studyhall.patterns.health import count_stalls, measure, problems
from studyhall.patterns.health.alerts import Rule, evaluate, raised
from studyhall.patterns.health.exposition import GAUGES, exposition, queue_samples
from studyhall.patterns.health.listing import pages


@pytest.fixture
async def store(tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'health.db'}")
    await create_all(store)
    yield store
    await close(store)


@pytest.fixture
async def redis(redis_url):
    client = producer_client(redis_url)
    yield client
    await client.aclose()


async def of(redis, store, queue="q"):
    return (await measure(redis, [queue], dead_letters=counts(store))).queues[0]


async def test_jobs_that_lose_their_worker_are_counted_longer_than_a_process_lives(redis_url, redis, store):
    async def work(_job, _token):
        pass

    for number in (1, 2):
        async with queue_at(redis_url, "q") as queue:
            await queue.add("n", {}, {"jobId": f"job-{number}"})
            await redis.rpoplpush("bull:q:wait", "bull:q:active")  # taken, and its lock is gone: its worker died
            worker = ReliableWorker("q", work, url=redis_url, stalled_interval=0.2)
            count_stalls(worker, redis)
            running = asyncio.create_task(worker.run())
            await until(lambda: redis.zscore("bull:q:completed", f"job-{number}"), 20, "another one to finish it")  # noqa: B023
            await worker.drain(1)
            await running
        assert (await of(redis, store)).stalls == number
    assert 'queue_stalls{queue="q"} 2.0' in exposition(queue_samples(await measure(redis, ["q"])))


async def test_a_backlog_in_any_waiting_state_is_seen_where_a_depth_alarm_sees_none(redis_url, redis, store, figures):
    async with queue_at(redis_url, "q") as queue:
        jobs, more = 0, [{"name": "n", "data": {}, "opts": {"priority": 1000}}] * 500
        while jobs < 5_000:
            jobs += len(await queue.addBulk(more))
        naive_depth = await queue.getWaitingCount()  # what the usual alarm looks at
        seen = await of(redis, store)
        backlog = seen.backlog
        assert (naive_depth, backlog, seen.prioritized) == (0, 5_000, 5_000)

        await queue.add("n", {}, {"delay": 1})  # due, and no worker to promote it
        await queue.add("n", {}, {"delay": 60_000})
        await asyncio.sleep(0.01)
        seen = await of(redis, store)
        assert (seen.delayed, seen.overdue, seen.backlog) == (2, 1, 5_001)

        await queue.add("plain", {})
        assert (await of(redis, store)).waiting == 1
        await queue.pause()
        seen = await of(redis, store)
        assert (seen.waiting, seen.paused, seen.backlog) == (1, True, 5_002)
    figures("health", name="backlog", jobs=jobs, naive_depth_alarm_saw=naive_depth, seen=backlog)


async def test_a_queue_with_jobs_and_no_worker_is_unattended(redis_url, redis):
    async def look():
        return (await measure(redis, ["q"])).queues[0]

    async with queue_at(redis_url, "q") as queue:
        assert (await look()).unattended is False, "nothing to do"
        await queue.add("n", {}, {"delay": 60_000})
        assert (await look()).unattended is False, "nothing to do yet"
        await queue.add("n", {})
        seen = await measure(redis, ["q"])
        assert (seen.queues[0].workers, seen.signals()["q.unattended"]) == (0, 1.0)
        await queue.pause()
        assert (await look()).unattended is False, "somebody paused it"
        await queue.resume()

        started, go_on = asyncio.Event(), asyncio.Event()

        async def process(job, token):
            started.set()
            await go_on.wait()

        async with at_work("q", process, url=redis_url), at_work("q", process, url=redis_url):
            async with asyncio.timeout(20):
                await started.wait()
                while (await look()).workers != 2:  # the second one's connection may be on its way
                    await asyncio.sleep(0.01)
            seen = await measure(redis, ["q"])
            assert (seen.queues[0].active, seen.signals()["q.unattended"]) == (1, 0.0)
            go_on.set()


async def test_a_user_who_may_not_list_connections_gets_no_worker_count(redis_url, redis):
    await redis.acl_setuser(
        "watcher", enabled=True, passwords=["+of-the-tests"], keys="*", commands=["+@all", "-client|list"]
    )
    watcher = producer_client(redis_url.replace("redis://", "redis://watcher:of-the-tests@"))
    try:
        async with queue_at(redis_url, "q") as queue:
            await queue.add("n", {})
        seen = (await measure(watcher, ["q"])).queues[0]
        assert (seen.workers, seen.unattended, seen.backlog) == (None, False, 1)
    finally:
        await watcher.aclose()
        await redis.acl_deluser("watcher")


async def test_the_oldest_job_counts_whatever_its_priority_and_however_long_it_was_delayed(redis_url, redis, store):
    async with queue_at(redis_url, "q") as queue:
        now = int(time.time() * 1000)
        await queue.add("young", {}, {"priority": 1})
        await queue.add("old", {}, {"priority": 10_000, "timestamp": now - 90_000})
        assert 90 <= (await of(redis, store)).oldest < 100
        await queue.obliterate(True)

        # Enqueued days ago to run now: it has not waited for days.
        job = await queue.add("planned", {}, {"delay": 86_400_000, "timestamp": now - 86_400_000, "priority": 5})
        await job.promote()
        assert (await of(redis, store)).oldest < 10
        await queue.obliterate(True)

        await queue.add("late", {}, {"delay": 1_000, "timestamp": now - 31_000})
        assert 30 <= (await of(redis, store)).oldest < 40


async def test_failure_rate_counts_swept_letters_and_survives_retention(redis_url, redis, store):
    async with queue_at(redis_url, "q") as queue:
        now = time.time() * 1000
        done = {f"c{number}": now - 10_000 + number * 10 for number in range(1_000)}
        await redis.zadd(queue.toKey("completed"), done)  # 1,000 in 10 s, and retention keeps no more
        await redis.zadd(queue.toKey("failed"), {f"f{number}": now for number in range(300)})
        rate = (await of(redis, store)).failure_rate
    # 100 a second over 300 s are 30,000: 300 failures are 1 in 100, not 300 of 1,300.
    assert 0.005 < rate < 0.02


@pytest.mark.slow
async def test_listing_a_hundred_thousand_delayed_jobs_never_holds_redis_up(own_redis, scale, figures):
    jobs = 100_000
    redis = events_client(own_redis.url)  # patient: the usual listing outlasts a producer's timeout
    queue = Queue("q", {"connection": redis})
    job = await queue.add("later", {"payload": "x" * 200}, {"delay": 3_600_000})
    assert job is not None
    # One real job, then copies of it in BullMQ's own form: adding each would take longer than the test.
    clone = """
    local fields, score = redis.call('HGETALL', KEYS[1]), redis.call('ZSCORE', KEYS[2], ARGV[1])
    for i = tonumber(ARGV[2]), tonumber(ARGV[3]) do
      redis.call('HSET', KEYS[3] .. i, unpack(fields))
      redis.call('ZADD', KEYS[2], score + i * 4096, i)
    end"""
    keys = (queue.toKey(job.id), queue.toKey("delayed"), queue.toKey(""))
    for start in range(2, jobs + 1, 5_000):
        await redis.eval(clone, 3, *keys, job.id, start, min(start + 4_999, jobs))
    await redis.config_set("slowlog-log-slower-than", 20_000)

    async def worked():
        """Milliseconds of CPU time of the server so far. SLOWLOG's clock also runs while a busy machine suspends the
        server in mid-command, and blames that command."""
        used = await redis.info("cpu")
        return 1_000 * float(used["used_cpu_user"] + used["used_cpu_sys"])

    async def slow():
        entries = await redis.slowlog_get(1_000)
        await redis.slowlog_reset()
        return len(entries)

    await slow()
    each_page, listed, size, before = [], 0, 500, await worked()
    async for page in pages(redis, "q", "delayed", size=size):
        now = await worked()
        each_page.append(now - before)  # all commands of the page together, and the question itself
        listed, before = listed + len(page), now
    slow_commands = await slow()
    before = await worked()
    naive_listed = len(await queue.getDelayed())  # all ids in one command, then all jobs
    naive_worked, naive_slow = await worked() - before, await slow()
    await redis.aclose()
    figures(
        "health",
        name="listing",
        jobs=jobs,
        page=size,
        most_work_for_a_page_ms=round(max(each_page), 1),
        commands_over_20_ms=slow_commands,
        naive_work_ms=round(naive_worked, 1),
        naive_commands_over_20_ms=naive_slow,
    )
    assert listed == naive_listed == jobs
    too_long = [round(spent, 1) for spent in each_page if spent >= 20]
    assert too_long == [], "a page, perhaps one command of it, blocked the server"
    assert naive_slow >= 1, "the usual listing did not block: nothing is proven"
    assert naive_worked > 20


async def test_pages_list_every_state_in_serving_order(redis_url, redis):
    async with queue_at(redis_url, "q") as queue:
        for number in range(7):
            await queue.add(f"n{number}", {})
            await queue.add(f"d{number}", {}, {"delay": 60_000 + number})
        waiting = [job.name async for page in pages(redis, "q", "wait", size=3) for job in page]
        delayed = [job async for page in pages(redis, "q", "delayed", size=3) for job in page]
    assert waiting == [f"n{number}" for number in range(7)]
    assert [job.name for job in delayed] == [f"d{number}" for number in range(7)]
    assert all(job.due is not None and abs(job.due - job.added - 60) < 1 for job in delayed)
    with pytest.raises(ValueError, match="not one of"):
        await anext(pages(redis, "q", "meta"))


async def test_three_instances_and_a_wobbling_value_send_one_alert_per_incident(redis_url, store, tmp_path, figures):
    values = [10, 70, 55, 65, 58, 61, 45, 20, 5]  # one incident, around a limit of 60
    rules = [Rule("*.oldest", raise_at=60, clear_at=30, because="jobs wait too long")]
    stores_of_instances = [open_store(f"sqlite:///{tmp_path / 'health.db'}") for _ in range(3)]
    sent = []

    async def send(alert):
        sent.append(alert)

    naive = 0
    for value in values:
        naive += 3 * (value >= 60)  # the usual: an interval in each instance, a plain limit
        await asyncio.gather(*(evaluate(engine, {"q.oldest": value}, rules, send) for engine in stores_of_instances))
    for engine in stores_of_instances:
        await close(engine)
    assert [(alert.signal, alert.raised, alert.value) for alert in sent] == [
        ("q.oldest", True, 70),
        ("q.oldest", False, 20),
    ]
    assert sent[0].because == "jobs wait too long"
    assert naive == 9
    assert await raised(store) == []
    figures(
        "health",
        name="alerts",
        instances=len(stores_of_instances),
        evaluations=len(values),
        alerts_raised=sum(alert.raised for alert in sent),
        naive_alerts=naive,
    )


async def test_an_alert_that_could_not_be_sent_is_sent_later(store, monkeypatch):
    rules, sent = [Rule("x", raise_at=1, clear_at=0.5)], []

    async def broken(alert):
        raise OSError("the pager is down")

    async def works(alert):
        sent.append(alert)

    assert await evaluate(store, {"x": 2}, rules, broken) == []
    assert await evaluate(store, {"x": 2}, rules, works) == [], "somebody may still be sending it"
    monkeypatch.setattr("studyhall.patterns.health.alerts.LEASE", -1.0)
    await evaluate(store, {"x": 2}, rules, broken)
    monkeypatch.setattr("studyhall.patterns.health.alerts.time.time", lambda: 4e9)
    await evaluate(store, {"x": 2}, rules, works)
    assert [alert.signal for alert in sent] == ["x"]


def test_a_rule_without_hysteresis_is_refused():
    with pytest.raises(ValueError, match="must be below"):
        Rule("x", raise_at=5, clear_at=5)


async def test_readiness_names_the_part_that_does_not_answer(own_redis, store):
    redis = producer_client(own_redis.url)
    assert await problems(redis=redis.ping, database=lambda: ping(store)) == {}
    own_redis.kill()
    assert list(await problems(redis=redis.ping, database=lambda: ping(store))) == ["redis"]
    await redis.aclose()


async def test_a_database_without_a_column_of_this_code_is_not_ready(store):
    """Every job failed, and the probe said 200."""
    async with begin(store) as tx:
        await tx.execute(text("ALTER TABLE dead_letters RENAME COLUMN reason TO elsewhere"))
    try:
        assert list(await problems(database=lambda: ping(store))) == ["database"]
    finally:
        async with begin(store) as tx:
            await tx.execute(text("ALTER TABLE dead_letters RENAME COLUMN elsewhere TO reason"))
    assert await problems(database=lambda: ping(store)) == {}


async def test_memory_is_a_share_of_what_the_server_may_use_and_unknown_without_the_right_to_ask(redis_url, redis):
    used = int((await redis.info("memory"))["used_memory"])
    of_the_machine = (await measure(redis, [])).signals()["redis.memory"]
    assert 0 < of_the_machine < 0.5
    await redis.config_set("maxmemory", used * 4)
    await redis.execute_command("ACL", "SETUSER", "plain", "on", "nopass", "~*", "&*", "+@all", "-@dangerous")
    stranger = producer_client(redis_url.replace("redis://", "redis://plain:any@"))
    try:
        assert 0.2 < (await measure(redis, [])).signals()["redis.memory"] < 0.5
        assert "redis.memory" not in (await measure(stranger, [])).signals()
    finally:
        await redis.config_set("maxmemory", 0)
        await redis.execute_command("ACL", "DELUSER", "plain")
        await stranger.aclose()


async def test_what_is_measured_reads_as_prometheus_text(redis_url, redis, store):
    async with queue_at(redis_url, "q") as queue:
        await queue.add("n", {})
    measured = await measure(redis, ["q"], dead_letters=counts(store))
    read = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(exposition(queue_samples(measured)))
        for sample in family.samples
    }
    assert read["queue_depth", "q", "waiting"] == read["queue_unattended", "q"] == 1
    assert read["queue_workers", "q"] == read["dead_letters",] == 0
    assert {name for name, *_ in read} <= GAUGES.keys()
    odd = exposition([("queue_depth", {"queue": 'a"b\\c\nd'}, 1)])
    (family,) = text_string_to_metric_families(odd)
    assert family.samples[0].labels == {"queue": 'a"b\\c\nd'}
    with pytest.raises(ValueError, match="not in GAUGES"):
        exposition([("made_up", {}, 1)])
