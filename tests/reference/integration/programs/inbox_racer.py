"""Ten tasks deliver the same key at the same moment. Arguments: store URL, starting gun (a file), number."""

import asyncio
import json
import sys
from pathlib import Path

from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.idempotency import Inbox, fingerprint


async def main(url, gun, process):
    store = open_store(url)
    await create_all(store)
    inbox = Inbox(store, "racers")

    async def deliver(task):
        async def effect(_tx):
            await asyncio.sleep(0.05)  # long enough that everybody else arrives meanwhile
            return {"process": process, "task": task}

        return await inbox.once("same-key", fingerprint("same"), effect)

    print("ready", flush=True)
    while not gun.exists():  # another process makes it
        await asyncio.sleep(0.002)
    print("results", json.dumps(await asyncio.gather(*(deliver(task) for task in range(10)))))
    await close(store)


asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
