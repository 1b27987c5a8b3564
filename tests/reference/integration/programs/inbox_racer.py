"""Ten tasks deliver the same key at the same moment. Arguments: store URL, start time, process number."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from sqlalchemy.ext.asyncio import AsyncConnection

from studyhall.patterns.idempotency import Inbox, fingerprint
from studyhall.patterns.store import close, create_all, open_store


async def main(url: str, start_at: float, process: int) -> None:
    engine = open_store(url)
    await create_all(engine)
    inbox = Inbox(engine, "racers")

    async def deliver(task: int) -> object:
        async def effect(_tx: AsyncConnection) -> dict[str, int]:
            await asyncio.sleep(0.05)  # long enough that everybody else arrives meanwhile
            return {"process": process, "task": task}

        return await inbox.once("same-key", fingerprint("same"), effect)

    await asyncio.sleep(max(0.0, start_at - time.time()))
    print("results", json.dumps(await asyncio.gather(*(deliver(task) for task in range(10)))))
    await close(engine)


asyncio.run(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
