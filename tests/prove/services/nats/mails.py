"""Mails by NATS JetStream: acknowledged after the effect, which a redelivery finds done.

mails.py worker | ID…
"""

import asyncio
import os
import signal
import sqlite3
import sys

import nats
from nats.errors import Error
from nats.js.api import ConsumerConfig


async def connected():
    # By default the client tries for two minutes and prints tracebacks.
    async def quiet(_: Exception) -> None:
        pass

    client = await nats.connect(
        os.environ["NATS_URL"],
        connect_timeout=2,
        reconnect_time_wait=0.2,
        max_reconnect_attempts=-1,
        ping_interval=1,
        max_outstanding_pings=2,
        error_cb=quiet,
    )
    stream = client.jetstream(timeout=3)
    await stream.add_stream(name="mails", subjects=["mails"])
    return client, stream


async def work() -> None:
    store = sqlite3.connect(os.environ["STORE"], timeout=10, isolation_level=None)
    store.execute("create table if not exists mails (id text primary key)")
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    client, stream = await connected()
    mails = await stream.pull_subscribe("mails", "mailer", config=ConsumerConfig(ack_wait=1.5))
    print("ready", flush=True)
    while not stopping.is_set():
        try:
            for message in await mails.fetch(1, timeout=1):
                await asyncio.sleep(0.3)
                store.execute("insert or ignore into mails values (?)", (message.data.decode(),))
                await message.ack_sync(timeout=2)
        except (Error, TimeoutError):
            await asyncio.sleep(0.05)
    await client.close()


async def submit(*idents: str) -> None:
    async with asyncio.timeout(6):
        client, stream = await connected()
        for ident in idents:
            await stream.publish("mails", ident.encode(), headers={"Nats-Msg-Id": ident})
        await client.close()


if __name__ == "__main__":
    asyncio.run(work() if sys.argv[1] == "worker" else submit(*sys.argv[1:]))
