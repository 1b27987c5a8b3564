"""The clients against a Redis that is there, gone, frozen, demoted or guarded by a password."""

import asyncio
import base64
import contextlib
import gc
import re
import statistics
import sys
import time
from functools import partial

import pytest
import redis.asyncio
from bullmq import Queue, QueueEvents
from redis.exceptions import ConnectionError, TimeoutError

from harness.processes import start_tied
from harness.redis import server_binary
from harness.tcp_proxy import proxy_to
from harness.waiting import until
from harness.workers import at_work, queue_at, stock_at_work, until_counts
from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.bullmq_worker.autopipeline import AutoPipeline
from studyhall.patterns.core import worker_connections
from studyhall.patterns.core.connections import NoCluster, producer_client
from studyhall.patterns.core.worker_connections import blocking_client, events_client, worker_client


async def nothing(job, token):
    pass


async def failing_add(queue):
    started = time.monotonic()
    with pytest.raises((ConnectionError, TimeoutError)):
        await queue.add("job", {}, {"jobId": "one"})
    return time.monotonic() - started


async def went_on(client):
    """Did it go on although cancelled while its command was sent?"""

    async def work():
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await client.get("x")
        return "went on"

    await client.ping()
    running = asyncio.create_task(work())
    await asyncio.wait({running}, timeout=20)
    assert await client.get("x") is None, "the connection that was left in mid-command is not used again"
    await client.aclose()
    return not running.cancelled()


async def test_a_cancellation_that_comes_while_a_command_leaves_is_not_swallowed(redis_url):
    for make in (producer_client, blocking_client, events_client, partial(worker_client, kind=AutoPipeline)):
        assert not await went_on(make(redis_url)), make
    stock = redis.asyncio.Redis.from_url(redis_url, socket_timeout=5, decode_responses=True)
    assert await went_on(stock) == (sys.version_info < (3, 12))


@pytest.mark.slow
@pytest.mark.fault
async def test_add_fails_fast_when_redis_is_away_where_the_stock_client_hangs(own_redis, figures):
    warm = Queue("q", {"connection": producer_client(own_redis.url)})
    await warm.add("job", {})
    own_redis.pause()
    frozen = await failing_add(warm)
    own_redis.resume()
    own_redis.kill()
    gone = await failing_add(warm)
    cold = Queue("q", {"connection": producer_client(own_redis.url)})
    never_up = await failing_add(cold)

    stock = Queue("q", {"connection": own_redis.url})
    pending = asyncio.create_task(stock.add("job", {}))
    done, _ = await asyncio.wait({pending}, timeout=4)
    pending.cancel()
    await asyncio.wait({pending})
    assert not done, "the stock client did not hang"
    figures("bullmq-worker", name="degraded", frozen=round(frozen, 2), gone=round(gone, 2), cold=round(never_up, 2))
    assert max(frozen, gone, never_up) < 2

    own_redis.restart()
    await warm.add("job", {})  # and recovers by itself
    for queue in (warm, cold, stock):
        await queue.close()


async def test_a_client_that_does_not_decode_loses_name_and_data(redis_url):
    """Why every client here decodes: the stock worker sees jobs without name and data."""
    seen = {}

    async def note(job, token):
        seen[job.queue.name] = (job.name, job.data)

    careless = redis.asyncio.Redis.from_url(redis_url, socket_timeout=30)
    async with (
        queue_at(redis_url, "stock") as stock_queue,
        queue_at(redis_url, "ours") as our_queue,
        stock_at_work("stock", note, connection=careless),
        at_work("ours", note, url=redis_url),
    ):
        for queue in (stock_queue, our_queue):
            await queue.add("greet", {"who": "you"})
        await until(lambda: len(seen) == 2, 10, "both to run")
    assert seen == {"stock": (None, {}), "ours": ("greet", {"who": "you"})}


@pytest.mark.slow
@pytest.mark.fault
async def test_worker_started_before_redis_waits_for_it(own_redis):
    """A stock worker on a client whose retries run out: its task dies, the process lives on doing nothing."""
    own_redis.kill()
    done = []

    async def note(job, token):
        done.append(job.queue.name)

    stock_client = blocking_client(own_redis.url)
    reported = []
    worker = ReliableWorker("ours", note, url=own_redis.url, on_error=reported.append)
    running = asyncio.create_task(worker.run())
    async with stock_at_work("stock", note, connection=stock_client):
        await until(lambda: reported, 10, "the outage to be reported")
        own_redis.restart()
        back = time.monotonic()
        await asyncio.wait_for(worker.ready(), 10)
        for name in ("stock", "ours"):
            async with queue_at(own_redis.url, name) as queue:
                await queue.add("job", {})
        await until(lambda: "ours" in done, 10, "our job to run")
        took = time.monotonic() - back
    await worker.drain(1)
    await running
    assert took < 10
    assert done == ["ours"]
    assert len(reported) < 5, "an outage must not flood the log"


@pytest.mark.slow
@pytest.mark.fault
async def test_drain_returns_while_redis_is_down(own_redis):
    async def slow(job, token):
        await asyncio.sleep(0.2)

    async with at_work("q", slow, url=own_redis.url, on_error=lambda error: None) as worker:
        async with queue_at(own_redis.url, "q") as queue:
            await queue.add("job", {})
        await until(lambda: worker.active, 10, "the job to run")
        own_redis.kill()
        started = time.monotonic()
        await worker.drain(0.5)
        assert time.monotonic() - started < 15


async def test_wrong_password_raises_instead_of_retrying_forever(make_redis):
    server = make_redis(requirepass="right")
    worker = ReliableWorker("q", nothing, url=server.url.replace("right", "wrong"), on_error=lambda e: None)
    with pytest.raises(RuntimeError, match="credentials"):
        await asyncio.wait_for(worker.run(), 10)
    with pytest.raises(RuntimeError, match="closed"):
        await worker.ready()
    async with at_work("q", nothing, url=server.url) as worker, queue_at(server.url, "q") as queue:
        await queue.add("job", {})
        await until(queue.getCompletedCount, 10, "a job to complete with the right one")


async def test_unix_socket_carries_producer_and_worker(make_redis, tmp_path):
    path = tmp_path / "redis.sock"
    make_redis(unixsocket=str(path))
    url = f"unix://{path}?db=1"
    async with at_work("q", nothing, url=url), queue_at(url, "q") as queue:
        await queue.add("job", {})
        await until(queue.getCompletedCount, 10, "the job to complete")


@pytest.mark.fault
async def test_queue_events_survive_a_restart(own_redis):
    """On a client with few retries QueueEvents ends for good; on ours it goes on."""
    heard = {"few retries": [], "ours": []}
    careless = blocking_client(own_redis.url)
    listeners = {
        "few retries": QueueEvents("q", {"connection": careless}),
        "ours": QueueEvents("q", {"connection": events_client(own_redis.url)}),
    }
    for name, listener in listeners.items():
        listener.on("completed", lambda event, id, name=name: heard[name].append(event["jobId"]))
        listener.on("error", lambda *_: None)
    async with (
        at_work("q", nothing, url=own_redis.url, on_error=lambda error: None),
        queue_at(own_redis.url, "q") as queue,
    ):
        await queue.add("job", {}, {"jobId": "before"})
        await until(lambda: all(heard.values()), 10, "both to hear the first job")
        own_redis.restart()
        await queue.add("job", {}, {"jobId": "after"})
        await until(lambda: "after" in heard["ours"], 20, "ours to hear the second job")
    assert heard["few retries"] == ["before"]
    for listener in listeners.values():
        with contextlib.suppress(Exception):
            await asyncio.wait_for(listener.close(), 5)


@pytest.mark.fault
async def test_sentinel_failover_is_followed_by_producer_and_worker(make_redis, tmp_path):
    """The master is killed: the worker finds the promoted replica and goes on."""
    master = make_redis()
    replica = make_redis(replicaof=f"127.0.0.1 {master.port}")
    from harness.ports import free_port

    port = free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 2000\n"
    )
    log = (tmp_path / "sentinel.log").open("wb")
    sentinel = start_tied([server_binary(), str(config), "--sentinel"], stdout=log, stderr=log)
    try:
        url = f"redis+sentinel://127.0.0.1:{port}/main/0"
        with redis.Redis(port=port, decode_responses=True) as asked:

            def sees_replica():
                with contextlib.suppress(redis.RedisError):
                    return bool(asked.sentinel_slaves("main"))
                return False

            await until(sees_replica, 20, "sentinel to see the replica")
        async with at_work("q", nothing, url=url, on_error=lambda error: None):
            queue = Queue("q", {"connection": producer_client(url)})
            await queue.add("job", {}, {"jobId": "before"})
            await until(queue.getCompletedCount, 10, "a job before the failover")
            master.kill()

            async def added():
                with contextlib.suppress(redis.RedisError):
                    await queue.add("job", {}, {"jobId": "after"})
                    return True
                return False

            await until(added, 30, "an add after the failover", every=0.2)

            async def after_is_done():
                return bool(await queue.getJobState("after") == "completed")

            await until(after_is_done, 10, "the job after the failover")
            await queue.close()
        with replica.client() as client:
            assert client.info("replication")["role"] == "master"
    finally:
        sentinel.kill()
        sentinel.wait(10)
        log.close()


async def test_broken_utf8_in_one_job_does_not_break_the_others(redis_url, redis_server):
    async with queue_at(redis_url, "q") as queue:
        await queue.addBulk([{"name": "job", "data": {"n": n}} for n in range(3)])
        with redis_server.client() as client:
            client.hset("bull:q:2", "data", b'{"n": "\xff\xfe"}')
        async with at_work("q", nothing, url=redis_url):
            await until_counts(queue, {"completed": 3}, 10, "all three to complete")


@pytest.mark.slow
@pytest.mark.fault
async def test_failover_behind_one_address_is_followed_by_every_client(make_redis):
    """The old primary lives on as a replica, and connections that are open stay with it: no lock is lost, the
    sweep for stalled jobs goes on, producer and worker work on the new primary."""
    old = make_redis()
    new = make_redis(replicaof=f"127.0.0.1 {old.port}")
    lost = []
    errors = []
    done = []
    finish = asyncio.Event()

    async def process(job, token):
        if job.name == "long":
            await finish.wait()
        done.append(job.id)

    with proxy_to(old.port) as proxy:
        options = {"lock_duration": 3.0, "stalled_interval": 0.5, "on_error": errors.append}
        queue = Queue("q", {"connection": producer_client(proxy.url)})
        async with at_work("q", process, url=proxy.url, **options) as worker:
            worker.on("lost", lambda job: lost.append(job.id))
            for number in range(3):
                await queue.add("long", {}, {"jobId": f"long-{number}"})
            await until(lambda: len(worker.active) == 3, 10, "the long jobs to run")
            # As in a managed service: no acknowledged write is lost, and the old one stays up, read-only.
            with old.client() as client, new.client() as promoted:
                await until(
                    lambda: client.info("replication").get("slave0", {}).get("state") == "online",
                    30,
                    "the replica to be in step",
                )
                client.execute_command("FAILOVER", "TO", "127.0.0.1", new.port, "TIMEOUT", 10_000)
                proxy.target = new.port
                await until(lambda: promoted.info("replication")["role"] == "master", 20, "the promotion")
                await until(lambda: client.info("replication")["role"] == "slave", 20, "the demotion")
                # A job whose worker died: only a sweep on the new primary finds it.
                promoted.hset("bull:q:orphan", mapping={"name": "orphan", "data": "{}", "opts": "{}"})
                promoted.lpush("bull:q:active", "orphan")

            async def added():
                with contextlib.suppress(redis.RedisError):
                    await queue.add("short", {}, {"jobId": "after"})
                    return True
                return False

            started = time.monotonic()
            await until(added, 20, "an add after the failover")
            await until(lambda: {"after", "orphan"} <= set(done), 20, f"work to go on: {errors}")
            took = time.monotonic() - started
            # Longer than a lock: without renewal on the new primary all three would be lost.
            with new.client() as promoted:
                gone = time.monotonic() + 4
                await until(lambda: time.monotonic() > gone or lost, 10, "a lock to run out")
                assert all(promoted.exists(f"bull:q:long-{number}:lock") for number in range(3))
            finish.set()
            await until(lambda: len(done) == 5, 10, "the long jobs to end")
        await queue.close()
    assert lost == []
    assert sorted(done) == ["after", "long-0", "long-1", "long-2", "orphan"]
    assert took < 10


@pytest.mark.fault
@pytest.mark.parametrize("make", [producer_client, partial(worker_client, kind=AutoPipeline), blocking_client])
async def test_a_demoted_server_costs_a_client_one_answer_at_most(make_redis, make):
    old, new = make_redis(), make_redis()
    with proxy_to(old.port) as proxy:
        client = make(proxy.url)
        script = client.register_script("return redis.call('SET', KEYS[1], ARGV[1])")
        await client.set("key", 1)
        await script(keys=["key"], args=[1])
        with old.client() as demoted:
            demoted.replicaof("127.0.0.1", new.port)
        proxy.target = new.port
        calls = [lambda: client.set("key", 2), lambda: script(keys=["key"], args=[2])]
        for call in calls:  # the pooled connection and the pipelined one
            with contextlib.suppress(ConnectionError):
                await call()
            await call()
        async with client.pipeline(transaction=True) as pipe:
            await pipe.set("key", 3).execute()
        with new.client() as promoted:
            assert promoted.get("key") == "3"
        await client.aclose()


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("dead", ["all", "waiter"])
async def test_a_connection_that_died_without_a_word_is_noticed_soon(redis_server, redis_url, dead):
    """A NAT forgot the worker's idle connections while it was busy: no reply, no close."""
    started = []
    finish = asyncio.Event()

    async def process(job, token):
        started.append(job.name)
        await finish.wait()

    with proxy_to(redis_server.port) as proxy:
        async with (
            queue_at(redis_url, "q") as queue,
            at_work("q", process, url=proxy.url, concurrency=1, on_error=lambda error: None),
        ):
            await queue.add("first", {})
            await until(lambda: started, 10, "the first to start")
            waiter = f"bull:{base64.b64encode(b'q').decode()}"
            with redis_server.client() as client:
                ports = [int(row["addr"].rpartition(":")[2]) for row in client.client_list() if row["name"] == waiter]
            assert proxy.swallow() >= 3 if dead == "all" else proxy.swallow(*ports) == 1
            finish.set()
            await until(queue.getCompletedCount, 30, "the first to be completed over a new connection")
            await queue.add("second", {})
            added = time.monotonic()
            await until(lambda: "second" in started, 60, "the second to start")
            deaf = time.monotonic() - added
        assert deaf < 15  # 5 on a quiet machine; 30 with the patience of other blocking reads


SUFFICES = re.search(r"ACL SETUSER worker .*", str(worker_connections.__doc__))


@pytest.mark.parametrize(
    ("rights", "missing"),
    [
        (str(SUFFICES and SUFFICES[0]).partition("~")[2], set()),
        ("bull:* +@all -@dangerous", {"INFO", "CLIENT UNBLOCK"}),
        ("bull:* +@all -info -client", {"INFO", "CLIENT SETNAME", "CLIENT ID", "CLIENT UNBLOCK"}),
    ],
    ids=["the documented line", "nothing dangerous", "no client at all"],
)
async def test_a_user_with_few_rights_works_and_is_told_once_what_is_missing(make_redis, rights, missing):
    server = make_redis()
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "worker", "on", ">secret", f"~{rights.split()[0]}", *rights.split()[1:])
    url = server.url.replace("redis://", "redis://worker:secret@")
    errors = []
    late = []

    async def process(job, token):
        late.append(time.time() - (job.timestamp + job.delay) / 1000)
        return str(await job.getState())

    queue = Queue("q", {"connection": producer_client(url)})
    async with at_work("q", process, url=url, on_error=errors.append) as worker:
        for number in range(10):
            await queue.add("job", {}, {"jobId": f"now-{number}"})
            await until(lambda number=number: len(late) > number, 10, f"the job to run: {errors}")
        for number in range(5):
            await queue.add("job", {}, {"jobId": f"soon-{number}", "delay": 100 + 150 * number})
        await until(lambda: len(late) == 15, 20, f"the delayed jobs to run: {errors}")
        started = time.monotonic()
        await worker.drain(1)
        drained = time.monotonic() - started
    assert (await queue.getJob("now-0")).returnvalue == "active"
    await queue.close()
    assert statistics.median(late) < 0.15, late  # 0.21 and more, with an error for each fetch, before
    assert drained < 6
    assert len(errors) == bool(missing), errors
    assert set(re.findall(r"INFO|CLIENT [A-Z]+", str(errors))) == missing


async def test_a_user_who_may_not_touch_the_queue_is_refused_at_once(make_redis):
    server = make_redis()
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "worker", "on", ">secret", "~other:*", "+@all")
    url = server.url.replace("redis://", "redis://worker:secret@")
    with pytest.raises(RuntimeError, match="refuses this queue"):
        await asyncio.wait_for(ReliableWorker("q", nothing, url=url).run(), 10)


async def test_a_redis_cluster_is_recognised_and_the_error_says_what_works(make_redis):
    server = make_redis(cluster_enabled="yes")
    with server.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await until(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok", 20, "the cluster")
    reported = []
    with pytest.raises(NoCluster, match="cluster mode off"):
        await asyncio.wait_for(ReliableWorker("q", nothing, url=server.url, on_error=reported.append).run(), 10)
    assert reported == []
    queue = Queue("q", {"connection": producer_client(server.url)})
    with pytest.raises(NoCluster, match="cluster mode off"):
        await queue.add("job", {})
    with pytest.raises(NoCluster, match="cluster mode off"):
        await queue.addBulk([{"name": "job", "data": {}}] * 3)
    await queue.close()
    # what the message offers does work
    queue = Queue("q", {"connection": producer_client(server.url), "prefix": "{bull}"})
    async with at_work("q", nothing, url=server.url, prefix="{bull}"):
        await queue.add("job", {})
        await queue.addBulk([{"name": "job", "data": {}}] * 3)
        await until_counts(queue, {"completed": 4}, 20, "the jobs to complete")
    await queue.close()


@pytest.mark.slow
@pytest.mark.fault
async def test_a_restart_of_redis_is_one_line_when_it_goes_and_one_when_it_is_back(own_redis, caplog):
    done = []

    async def process(job, token):
        await asyncio.sleep(0.01)
        done.append(job.id)

    async with at_work("q", process, url=own_redis.url), queue_at(own_redis.url, "q") as queue:
        await queue.addBulk([{"name": "job", "data": {}} for _ in range(300)])
        await until(lambda: len(done) > 50, 20, "work to be under way")
        caplog.clear()
        own_redis.kill()
        gone = time.monotonic()
        await until(lambda: caplog.records, 10, "the outage to be logged")
        own_redis.restart()
        await until(lambda: "is back" in caplog.text, 30, "the return to be logged")
        away = time.monotonic() - gone
        before = len(done)
        await queue.add("job", {})
        await until(lambda: len(done) > before, 30, "work to go on")
    gc.collect()  # asyncio tells of forgotten errors when their tasks are collected
    ours = [record for record in caplog.records if record.name.startswith(("studyhall", "asyncio"))]
    # AOF: its last second is gone.
    lost = [record for record in ours if "is no longer ours" in record.getMessage()]
    lines = [record.getMessage() for record in ours if record not in lost]
    assert [record for record in ours if record.exc_info and record not in lost] == []
    assert len(lines) <= 2 + away // 10, lines
    assert "is back" in lines[-1]
