"""What looks like a fault and is none."""
import asyncio
from enum import IntEnum

import httpx
from bullmq import Queue, UnrecoverableError


class Priority(IntEnum):
    HIGH = 1
    NORMAL = 5
    LOW = 10


class Level(IntEnum):
    LOW = 1
    HIGH = 3


async def handle(job, http: httpx.AsyncClient):
    answer = await http.post("https://pay.example/charges", headers={"Idempotency-Key": f"charge/{job.data['order']}"})
    if answer.status_code == 422:
        raise UnrecoverableError("refused")
    answer.raise_for_status()


async def save_cursor(db, name, at):
    await db.execute("INSERT OR REPLACE INTO import_cursors (name, at) VALUES (?, ?)", (name, at))


async def record(db, order):
    await db.execute("INSERT INTO orders (id) VALUES (?) ON CONFLICT DO NOTHING", (order,))


async def relay(db, queue: Queue, options):
    async with db.begin():
        rows = await claim(db)
    for row in rows:
        await queue.add(row.name, {"key": row.key}, options)


async def cleanup(job):
    try:
        await remove(job.data["file"])
    except FileNotFoundError:
        pass


async def shutdown(worker, tasks):
    await worker.close()
    await asyncio.gather(*tasks, return_exceptions=True)
