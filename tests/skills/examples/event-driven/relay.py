# [relay]
# relay.py: publishes the outbox and feeds the consumers; run as many as you like
import asyncio
import os
import signal

from patterns.core.connections import producer_client
from patterns.core.open_store import create_all, open_store
from patterns.event_bus.redis_streams import RedisStreamsBus
from patterns.outbox.relay import Relay
from revenue import revenue_consumer


async def main() -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    store = open_store(os.environ["DATABASE_URL"])
    await create_all(store)
    redis = producer_client(os.environ["REDIS_URL"])
    bus = RedisStreamsBus(redis, ordered=True, claim_idle=10)  # a dead process's events wait that long
    relay = Relay(store, bus, lease=10)
    await bus.subscribe("revenue", ["order"])  # topic = first word of the type
    async with asyncio.TaskGroup() as parts:  # a part that dies ends the process, which is restarted
        parts.create_task(relay.run())
        parts.create_task(bus.consume("revenue", ["order"], revenue_consumer(store), stop=stop))
        await stop.wait()
        relay.stop()


if __name__ == "__main__":
    asyncio.run(main())
# [/relay]
