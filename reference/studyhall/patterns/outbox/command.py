"""The outbox by hand: `python -m patterns.outbox.command [retry|discard DESTINATION EVENT…]`, by DATABASE_URL."""

from __future__ import annotations

import asyncio
import os
import sys

from sqlalchemy import select

from ..core.open_store import close, create_all, open_store
from ..core.store import read
from .quarantine import discard, lag, quarantined, requeue
from .table import outbox


async def main(command: str = "list", destination: str = "", *event_ids: str) -> None:
    store = open_store(os.environ["DATABASE_URL"])
    await create_all(store)
    try:
        match command:
            case "list":
                async with read(store) as connection:
                    known = (await connection.scalars(select(outbox.c.destination).distinct())).all()
                for name in sorted(known):
                    behind = await lag(store, destination=name)
                    counts = f"{behind.waiting} waiting, oldest {behind.oldest:.0f} s"
                    print(f"{name}: {counts}, {behind.quarantined} set aside")
                    for row in await quarantined(store, destination=name):
                        print(f"  {row.event_id}  {row.reason[:200]}  ({row.held} wait behind it)")
            case "retry" if event_ids:
                print(f"{await requeue(store, event_ids, destination=destination)} will be sent again")
            case "discard" if event_ids:
                print(f"{await discard(store, event_ids, 'by hand', destination=destination)} discarded")
            case _:
                raise SystemExit(__doc__)
    finally:
        await close(store)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
