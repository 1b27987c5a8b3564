# [kill9]
# test_kill9.py: pytest, no Redis needed (the engine module starts one)
import asyncio
import os
import random
import signal
import subprocess
import sys
import time

from sqlalchemy import select, text

from jobs import AddCredit, jobs
from patterns.core.open_store import close, create_all, open_store
from patterns.core.store import begin, read
from patterns.engine import ensure_redis
from patterns.idempotency import inbox
from patterns.producer import JobRequest, Producer
from patterns.typed_jobs import validated

JOBS, KILLS = 200, int(os.environ.get("KILLS", "3"))


def test_kill_9_loses_and_doubles_nothing(tmp_path):
    redis = ensure_redis(tmp_path)
    env = {**os.environ, "REDIS_URL": redis.url, "DATABASE_URL": f"sqlite:///{tmp_path}/app.db"}

    def start():
        return subprocess.Popen([sys.executable, "worker.py"], env=env)

    async def scenario():
        store = open_store(env["DATABASE_URL"])
        await create_all(store)
        async with begin(store) as tx:
            await tx.execute(text("CREATE TABLE accounts (id TEXT PRIMARY KEY, cents INTEGER)"))
            await tx.execute(text("INSERT INTO accounts VALUES ('alice', 0)"))

        async def done():
            async with read(store) as tx:
                return len((await tx.execute(select(inbox.c.key))).all())

        producer = Producer(redis.url, validated(jobs))
        await producer.enqueue_many(
            [
                JobRequest("add-credit", AddCredit(account="alice", cents=1), key=f"pay-{i}")
                for i in range(JOBS)
            ]
        )
        worker, caught = start(), 0
        for kill in range(1, KILLS + 1):
            while await done() < JOBS * kill // (KILLS + 1):  # mid-work, not before and not after
                await asyncio.sleep(0.01)
            await asyncio.sleep(random.random() / 50)
            caught += await done() < JOBS
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait()
            worker = start()
        assert caught == KILLS, "the kills came too late to prove anything: add jobs"
        end = time.monotonic() + 60
        while await done() < JOBS and time.monotonic() < end:
            await asyncio.sleep(0.1)
        worker.terminate()
        assert worker.wait(30) == 0  # drains and exits cleanly
        async with read(store) as tx:
            assert (
                await tx.execute(text("SELECT cents FROM accounts"))
            ).scalar_one() == JOBS  # lost: less, duplicated: more
        await producer.close()
        await close(store)

    try:
        asyncio.run(scenario())
    finally:
        redis.stop()


# [/kill9]
