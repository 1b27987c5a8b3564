"""Dead letters under kill -9, and the naive ways that lose them."""

import json
from collections import Counter
from pathlib import Path

import pytest
import pytest_asyncio
from bullmq import Job, Queue

from harness.waiting import until
from studyhall.patterns import dead_letter
from studyhall.patterns.core.connections import producer_client

PROGRAMS = Path(__file__).parent / "programs"
WORKER, VICTIMS = PROGRAMS / "dead_letter_worker.py", PROGRAMS / "dead_letter_victims.py"
FAILED = "bull:q:failed"

pytestmark = pytest.mark.fault


@pytest_asyncio.fixture
async def redis(redis_url):
    client = producer_client(redis_url)
    yield client
    await client.aclose()


async def deaths_of(spawn, *args):
    child = spawn(VICTIMS, *args)
    return Counter(json.loads((await child.line("deaths ", 180)).removeprefix("deaths ")))


async def all_letters(store, *, replayed=False):
    return await dead_letter.list_dead_letters(store, replayed=replayed, limit=10_000)


async def failed(redis, number, timeout=60):
    async def all_failed():
        return int(await redis.zcard(FAILED)) == number

    await until(all_failed, timeout, f"{number} jobs fail")


async def jobs_that_died_of_everything(redis, redis_url, spawn, each):
    """`each` jobs per cause, failed by real workers; those that hang are killed with their worker."""
    queue = Queue("q", {"connection": redis})

    async def add(cause, name):
        ids = [f"{cause}-{n}" for n in range(each)]
        opts = {"attempts": 2}
        await queue.addBulk([{"name": name, "data": {}, "opts": {**opts, "jobId": i}} for i in ids])
        return ids

    ids = await add("stalled", "hangs")
    first = spawn(WORKER, redis_url, "q", 1_000)
    for job_id in ids:
        await first.line(f"started hangs {job_id}", 60)
    first.kill()
    spawn(WORKER, redis_url, "q", 30_000)
    await failed(redis, len(ids))
    ids += await add("exhausted", "fails") + await add("unrecoverable", "refuses")
    ids += await add("malformed", "fails")
    await failed(redis, len(ids))
    for n in range(each):  # half of the malformed lost their data, the other half has broken data
        if n % 2:
            await redis.delete(f"bull:q:malformed-{n}")
        else:
            await redis.hset(f"bull:q:malformed-{n}", "data", '{"cut off')
    return set(ids)


async def test_every_cause_is_dead_lettered_once_under_kills_with_one_alert_each(
    *, store, store_url, redis, redis_url, spawn, scale, seed, figures
):
    each, kills, planned, sweepers = scale(6, 30), scale(6, 20), scale(8, 26), 3
    ids = await jobs_that_died_of_everything(redis, redis_url, spawn, each)
    # The naive filter of most `failed` listeners, asked about the very same jobs.
    queue = Queue("q", {"connection": redis})
    seen_by_naive = set()
    for job_id in (i for i in ids if not i.startswith("malformed")):
        job = await Job.fromId(queue, job_id)
        assert job is not None
        if job.attemptsMade >= job.opts["attempts"]:
            seen_by_naive.add(job_id.split("-")[0])

    deaths = await deaths_of(spawn, store_url, redis_url, "sweep", planned, seed, sweepers)

    letters = await all_letters(store)
    alerts = {key: int(times) for key, times in (await redis.hgetall("alerts")).items()}
    causes = Counter(letter.cause for letter in letters)
    figures(
        "dead-letter",
        name=f"kills-{store_url.split(':', maxsplit=1)[0]}",
        jobs=len(ids),
        sweepers=sweepers,
        kills=deaths.total(),
        kills_by_point=dict(deaths),
        dead_letters=len(letters),
        lost=len(ids - {letter.job_id for letter in letters}),
        duplicated=len(letters) - len({letter.job_id for letter in letters}),
        causes=len(causes),
        jobs_alerted=len(alerts),
        alerts_sent=sum(alerts.values()),
        naive_filter_causes_seen=len(seen_by_naive),
    )
    assert deaths.total() >= kills, f"too few deaths to prove anything: {deaths}"
    assert Counter(letter.job_id for letter in letters) == Counter(ids), "each once"
    assert causes == dict.fromkeys(("exhausted", "unrecoverable", "stalled", "malformed"), each)
    assert set(alerts) == {letter.id for letter in letters}, "one alert id per job"
    assert sum(alerts.values()) <= len(ids) + deaths["alert sent"] + deaths["anywhere"], "repeats by death only"
    assert await redis.zcard(FAILED) == 0
    assert seen_by_naive == {"exhausted"}, "the fault did not happen: the naive filter saw all causes"


async def test_killed_replayers_put_every_job_back_exactly_once(
    *, store, store_url, redis, redis_url, spawn, scale, seed, figures
):
    jobs, kills, planned = scale(24, 100), scale(6, 20), scale(8, 26)
    ids = [f"job-{n}" for n in range(jobs)]
    queue = Queue("q", {"connection": redis})
    await queue.addBulk([{"name": "refuses", "data": {"n": i}, "opts": {"jobId": i}} for i in ids])
    worker = spawn(WORKER, redis_url, "q", 30_000)
    await failed(redis, jobs)
    worker.kill()
    await dead_letter.sweep(["q"], redis, store)

    deaths = await deaths_of(spawn, store_url, redis_url, "replay", planned, seed, 3)

    waiting = await redis.lrange("bull:q:wait", 0, -1)
    figures(
        "dead-letter",
        name=f"replay-kills-{store_url.split(':', maxsplit=1)[0]}",
        jobs=jobs,
        kills=deaths.total(),
        kills_by_point=dict(deaths),
        lost=len(set(ids) - set(waiting)),
        duplicated=len(waiting) - len(set(waiting)),
    )
    assert deaths.total() >= kills, f"too few deaths to prove anything: {deaths}"
    assert sorted(waiting) == sorted(ids)
    assert await all_letters(store) == []
    assert len(await all_letters(store, replayed=True)) == jobs
    assert await redis.hget("bull:q:job-0", "data") == '{"n":"job-0"}'


async def test_a_failed_listener_killed_before_its_copy_loses_the_job_and_the_sweep_does_not(
    store, redis, redis_url, spawn, figures
):
    ids = [f"job-{n}" for n in range(5)]
    queue = Queue("q", {"connection": redis})
    for job_id in ids:
        await queue.add("refuses", {"kill": job_id == "job-2"}, {"jobId": job_id})
    first = spawn(WORKER, redis_url, "q", 30_000, "dlq")
    assert await first.exited(60) == -9, "the fault did not happen: the listener's process was not killed"
    spawn(WORKER, redis_url, "q", 30_000, "dlq")
    await failed(redis, 5)
    await queue.add("refuses", {}, {"jobId": "the-last"})  # copied after all others that are copied at all

    async def copied():
        return await redis.lpos("dlq", "the-last") is not None

    await until(copied, 30, "the listener copies the last job")
    in_dlq = set(await redis.lrange("dlq", 0, -1))
    await dead_letter.sweep(["q"], redis, store)
    swept = {letter.job_id for letter in await all_letters(store)}
    lost, naive_lost = set(ids) - swept, set(ids) - in_dlq
    figures("dead-letter", name="listener", jobs=len(ids), naive_listener_lost=len(naive_lost), lost=len(lost))
    assert "job-2" not in in_dlq, "the fault did not happen: the listener lost nothing"
    assert swept == {*ids, "the-last"}


async def test_keeping_failed_jobs_by_count_evicts_them_before_the_sweep(store, redis, redis_url, spawn, figures):
    """Two queues: the count trims the whole failed set, jobs kept by age included."""
    keep = {"by-count": {"count": 5}, "by-age": {"age": 14 * 24 * 3600}}
    for name, value in keep.items():
        queue = Queue(name, {"connection": redis})
        opts = {"removeOnFail": value}
        await queue.addBulk([{"name": "refuses", "data": {}, "opts": opts} for _ in range(40)])
        spawn(WORKER, redis_url, name, 30_000)

        async def all_ran(queue=queue):
            return sum((await queue.getJobCounts("wait", "active")).values()) == 0

        await until(all_ran, 60, "all jobs ran")
    await dead_letter.sweep(keep, redis, store)
    kept = Counter(letter.queue for letter in await all_letters(store))
    numbers = {"jobs": 40, "archived_with_age": kept["by-age"], "archived_with_count": kept["by-count"]}
    figures("dead-letter", name="retention", **numbers)
    assert kept["by-count"] < 40, "the fault did not happen: nothing was evicted"
    assert kept["by-age"] == 40
