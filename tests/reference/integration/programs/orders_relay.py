"""A relay process: outbox, sagas and all consumers.    orders_relay.py STORE_URL REDIS_URL PAYMENT_URL"""

import asyncio
import signal
import sys

from studyhall import event_worker
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.event_bus.redis_streams import RedisStreamsBus


async def main(store_url, redis_url, payment_url):
    store = open_store(store_url)
    await create_all(store)
    bus = RedisStreamsBus(producer_client(redis_url), claim_idle=1.0, dedup_window=0)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print("ready", flush=True)
    await event_worker.run(store, bus, payment_url, stop=stop)
    await bus.close()
    await close(store)
    print("stopped", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
