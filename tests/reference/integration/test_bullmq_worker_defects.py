"""The eight measured defects of BullMQ's stock Python worker: it shows each of them, ReliableWorker none."""

import asyncio
import statistics
import time

import pytest

from harness.waiting import until
from harness.workers import at_work, counts, queue_at, stock_at_work, until_counts


async def nothing(job, token):
    pass


async def test_idle_worker_hears_a_new_job_at_once(redis_url, scale, figures):
    """1. redis-py 8 times a socket out after 5 s, the stock worker blocks for 5 s: deaf for seconds.

    Quick: the same collision at half a second. Full: everything at its default, one minute idle.
    """
    idle = scale(1.0, 60.0)
    connection = scale({"socket_timeout": 0.5}, {})
    port = int(redis_url.rsplit(":", 1)[1].split("/")[0])
    started = {}

    async def note(job, token):
        started[job.data["who"]] = time.time() - job.data["at"]

    async with (
        stock_at_work("stock", note, connection={"port": port, **connection}, drainDelay=scale(0.5, 5)),
        at_work("ours", note, url=redis_url),
        queue_at(redis_url, "stock") as stock_queue,
        queue_at(redis_url, "ours") as our_queue,
    ):
        await asyncio.sleep(idle)
        for who, queue in (("stock", stock_queue), ("ours", our_queue)):
            await queue.add("job", {"who": who, "at": time.time()})
        await until(lambda: len(started) == 2, 40, "both jobs to start")
    figures(
        "bullmq-worker",
        name="idle",
        idle_seconds=idle,
        ours=round(started["ours"], 3),
        stock=round(started["stock"], 3),
    )
    assert started["stock"] > 0.7
    assert started["ours"] < started["stock"] / 2


async def test_closing_under_load_strands_no_job(redis_url, scale, figures):
    """2. The stock close() forgets jobs that were just fetched: active, never run, stalled much later."""
    stranded = {"stock": 0, "ours": 0}
    trials = scale(3, 10)

    async def short(job, token):
        await asyncio.sleep(0.003)

    async with queue_at(redis_url, "stock") as stock_queue, queue_at(redis_url, "ours") as our_queue:
        jobs = [{"name": "job", "data": {}} for _ in range(300)]
        for _ in range(trials):
            await stock_queue.addBulk(jobs)
            async with stock_at_work("stock", short, connection=redis_url, concurrency=20) as worker:
                await until(stock_queue.getCompletedCount, 10, "stock to be at work")
                await worker.close()
            stranded["stock"] += (await counts(stock_queue)).get("active", 0)
            await stock_queue.obliterate(True)
            await stock_queue.resume()

            await our_queue.addBulk(jobs)
            async with at_work("ours", short, url=redis_url, concurrency=20) as worker:
                await until(our_queue.getCompletedCount, 10, "ours to be at work")
                await worker.drain(5)
            stranded["ours"] += (await counts(our_queue)).get("active", 0)
            await our_queue.obliterate(True)
            await our_queue.resume()
    figures("bullmq-worker", name="close", trials=trials, stranded=stranded["ours"], stranded_stock=stranded["stock"])
    assert stranded["stock"] > 0
    assert stranded["ours"] == 0


@pytest.mark.slow
async def test_draining_keeps_the_locks_of_the_jobs_it_waits_for(redis_url):
    """3. The stock close() stops renewing, so another worker runs the job that the first one is finishing."""
    runs = []

    async def slow(job, token):
        runs.append(job.queue.name)
        await asyncio.sleep(2.5)

    async def is_run_by(worker, queue):
        await queue.add("slow", {})
        await until(lambda: worker.name in runs, 10, f"{worker.name} to start the job")

    lock = {"lockDuration": 800, "stalledInterval": 300, "maxStalledCount": 5, "concurrency": 5}
    async with (
        queue_at(redis_url, "stock") as queue,
        stock_at_work("stock", slow, connection=redis_url, **lock) as first,
    ):
        await is_run_by(first, queue)
        async with stock_at_work("stock", slow, connection=redis_url, **lock):
            await first.close()
    short = {"lock_duration": 0.8, "stalled_interval": 0.3, "url": redis_url}
    async with queue_at(redis_url, "ours") as queue, at_work("ours", slow, **short) as first:
        await is_run_by(first, queue)
        async with at_work("ours", slow, **short):
            assert await first.drain(10) == []
        assert await counts(queue) == {"completed": 1}
    assert runs.count("stock") == 2
    assert runs.count("ours") == 1


async def test_a_cancellation_that_escapes_a_processor_does_not_end_the_worker(redis_url):
    """4. In the stock worker it ends run() without a word; later jobs wait forever."""

    async def trips(job, token):
        if job.name == "cancelled inside":
            inner = asyncio.create_task(asyncio.sleep(10))
            inner.cancel()
            await inner

    async with (
        queue_at(redis_url, "stock") as stock_queue,
        queue_at(redis_url, "ours") as our_queue,
        stock_at_work("stock", trips, connection=redis_url) as stock,
        at_work("ours", trips, url=redis_url),
    ):
        for queue in (stock_queue, our_queue):
            await queue.add("cancelled inside", {})
        await until(lambda: not stock.running, 10, "the stock worker to die")
        await until(our_queue.getFailedCount, 10, "our job to fail")
        for queue in (stock_queue, our_queue):
            await queue.add("innocent", {})
        await until(our_queue.getCompletedCount, 10, "the innocent job to run")
        assert await counts(our_queue) == {"completed": 1, "failed": 1}
        assert await counts(stock_queue) == {"active": 1, "waiting": 1}


@pytest.mark.slow
async def test_rate_limited_jobs_start_when_their_window_opens(redis_url, figures):
    """5. The stock worker sleeps for its drainDelay instead of the rest of the window."""
    limit = {"limiter": {"max": 2, "duration": 500}, "concurrency": 5}
    took = await _race(redis_url, nothing, jobs=6, stock={**limit, "drainDelay": 2}, ours=limit)
    ideal = 2 * 0.5  # the third pair starts with the third window
    figures("bullmq-worker", name="limiter", ideal=ideal, ours=round(took["ours"], 2), stock=round(took["stock"], 2))
    assert took["stock"] > 2
    assert 0.9 * ideal < took["ours"] < took["stock"] / 2


@pytest.mark.slow
async def test_global_concurrency_is_kept_busy(redis_url, figures):
    """6. At the limit the stock worker is told "nothing" and sleeps, although a job ends a moment later."""

    # Long enough that the third is asked for while two run, even on a busy machine: only then is the limit met.
    seconds, drain = 0.3, 2

    async def short(job, token):
        await asyncio.sleep(seconds)

    async with queue_at(redis_url, "stock") as stock_queue, queue_at(redis_url, "ours") as our_queue:
        await stock_queue.setGlobalConcurrency(2)
        await our_queue.setGlobalConcurrency(2)
    took = await _race(redis_url, short, jobs=6, stock={"concurrency": 5, "drainDelay": drain}, ours={"concurrency": 5})
    figures(
        "bullmq-worker",
        name="global-concurrency",
        ideal=6 / 2 * seconds,
        ours=round(took["ours"], 2),
        stock=round(took["stock"], 2),
    )
    assert took["stock"] > 6 / 2 * seconds + drain
    assert took["ours"] < took["stock"] / 2


async def _race(url, processor, *, jobs, stock, ours):
    """Seconds until both kinds of worker have completed `jobs` jobs that waited for them."""
    took = {}
    async with queue_at(url, "stock") as stock_queue, queue_at(url, "ours") as our_queue:
        for queue in (stock_queue, our_queue):
            await queue.addBulk([{"name": "job", "data": {}} for _ in range(jobs)])

        async def timed(who, queue, at):
            async def all_done():
                return bool(await queue.getCompletedCount() == jobs)

            await until(all_done, 60, f"{who} to complete {jobs} jobs")
            took[who] = time.monotonic() - at

        async with at_work("ours", processor, url=url, **ours):
            await timed("ours", our_queue, time.monotonic())
        async with stock_at_work("stock", processor, connection=url, **stock):
            await timed("stock", stock_queue, time.monotonic())
    return took


async def test_delays_are_kept_to_the_millisecond_not_rounded_to_seconds(redis_url, figures):
    """7. The stock worker never learns that the server takes fractions, and waits in whole seconds."""
    late = {"stock": [], "ours": []}

    async def note(job, token):
        late[job.queue.name].append(time.time() * 1000 - job.data["due"])

    async with (
        stock_at_work("stock", note, connection=redis_url),
        at_work("ours", note, url=redis_url),
        queue_at(redis_url, "stock") as stock_queue,
        queue_at(redis_url, "ours") as our_queue,
    ):
        for delay in (150, 350, 250):
            done = len(late["stock"])
            for queue in (stock_queue, our_queue):
                await queue.add("job", {"due": time.time() * 1000 + delay}, {"delay": delay})
            await until(lambda done=done: min(map(len, late.values())) > done, 10, "both to run")
    stock, ours = statistics.median(late["stock"]), statistics.median(late["ours"])
    figures("bullmq-worker", name="delays", late_ms=round(ours), late_ms_stock=round(stock))
    assert stock - ours > 300, "both wait for the machine; the stock worker for the next whole second too"


async def test_a_listener_that_raises_does_not_cost_the_job(redis_url):
    """8a. A raising `active` listener leaves the stock worker's job active and unrun."""
    ran = []
    reported = []

    async def run(job, token):
        ran.append(job.queue.name)

    def bad(*_):
        raise ValueError("listener")

    async with (
        queue_at(redis_url, "stock") as stock_queue,
        queue_at(redis_url, "ours") as our_queue,
        stock_at_work("stock", run, connection=redis_url) as stock,
        at_work("ours", run, url=redis_url, on_error=reported.append) as ours,
    ):
        stock.on("active", bad)
        ours.on("active", bad)
        await stock_queue.add("job", {})
        await our_queue.add("job", {})
        await until(our_queue.getCompletedCount, 10, "our job to complete")
        await until_counts(stock_queue, {"active": 1}, 10, "stock's job to be stranded")
    assert ran == ["ours"]
    assert [str(error) for error in reported] == ["listener"]


async def test_an_error_listener_that_raises_does_not_end_the_worker(redis_url, redis_server):
    """8b. In the stock worker the error of an `error` listener ends run()."""

    async def loses_its_lock(job, token):
        if job.name == "unlucky":
            with redis_server.client() as client:
                client.delete(f"bull:{job.queue.name}:{job.id}:lock")

    def bad(*_):
        raise ValueError("listener")

    async with (
        queue_at(redis_url, "stock") as stock_queue,
        queue_at(redis_url, "ours") as our_queue,
        stock_at_work("stock", loses_its_lock, connection=redis_url) as stock,
        at_work("ours", loses_its_lock, url=redis_url, on_error=bad) as ours,
    ):
        stock.on("error", bad)
        ours.on("error", bad)
        for queue in (stock_queue, our_queue):
            await queue.add("unlucky", {})
        await until(lambda: not stock.running, 10, "the stock worker to end")
        await our_queue.add("lucky", {})
        await until(our_queue.getCompletedCount, 10, "the next job to complete")


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # stock's, the very defect
async def test_async_listeners_are_awaited(redis_url):
    """8c. The stock worker calls them and throws the coroutine away."""
    heard = []
    reported = []

    async def heard_by(job, result):
        await asyncio.sleep(0)
        heard.append(job.queue.name)
        raise ValueError("after an await")

    async with (
        queue_at(redis_url, "stock") as stock_queue,
        queue_at(redis_url, "ours") as our_queue,
        stock_at_work("stock", nothing, connection=redis_url) as stock,
        at_work("ours", nothing, url=redis_url, on_error=reported.append) as ours,
    ):
        stock.on("completed", heard_by)
        ours.on("completed", heard_by)
        await stock_queue.add("job", {})
        await until(stock_queue.getCompletedCount, 10, "stock to complete")
        await our_queue.add("job", {})
        await until(lambda: "ours" in heard, 10, "our listener to be heard")
        await until(lambda: reported, 10, "its error to be reported")
    assert heard == ["ours"]
    assert str(reported[0]) == "after an await"
