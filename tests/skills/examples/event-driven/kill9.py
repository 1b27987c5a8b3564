# [kill9]
# test_kill9.py: pytest, no Redis needed (the engine module starts one)
import asyncio
import os
import signal
import subprocess
import sys
import time

from sqlalchemy import text

from patterns.core.open_store import close, create_all, open_store
from patterns.core.store import begin, read
from patterns.engine import ensure_redis
from shop import place_order

ORDERS, KILLS = 400, int(os.environ.get("KILLS", "3"))


def test_relay_and_consumer_killed_publish_and_apply_every_order_once(tmp_path):
    redis = ensure_redis(tmp_path)
    env = {**os.environ, "REDIS_URL": redis.url, "DATABASE_URL": f"sqlite:///{tmp_path}/app.db"}

    def start():
        return subprocess.Popen([sys.executable, "relay.py"], env=env)

    async def scenario():
        store = open_store(env["DATABASE_URL"])
        await create_all(store)
        async with begin(store) as tx:
            await tx.execute(text("CREATE TABLE orders (id TEXT PRIMARY KEY, cents INTEGER)"))
            await tx.execute(text("CREATE TABLE revenue (cents INTEGER)"))
            await tx.execute(text("INSERT INTO revenue VALUES (0)"))

        async def revenue():
            async with read(store) as tx:
                return (await tx.execute(text("SELECT cents FROM revenue"))).scalar_one()

        for number in range(ORDERS):
            await place_order(store, f"o{number}", 1)
            await place_order(store, f"o{number}", 1)  # the caller retries: still one order, one event
        process = start()
        for kill in range(1, KILLS + 1):
            while (seen := await revenue()) < ORDERS * kill // (KILLS + 2):  # it is at work now
                await asyncio.sleep(0.005)
            assert seen < ORDERS, "killed too late to prove anything: place more orders"
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process = start()
        end = time.monotonic() + 90
        while await revenue() < ORDERS and time.monotonic() < end:
            await asyncio.sleep(0.2)
        await asyncio.sleep(1)  # a duplicate would still come
        assert await revenue() == ORDERS
        process.terminate()
        assert process.wait(30) == 0
        await close(store)

    try:
        asyncio.run(scenario())
    finally:
        redis.stop()


# [/kill9]
