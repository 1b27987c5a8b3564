"""The schedules' history on the command line. DATABASE_URL says where it is.

python -m patterns.schedule.command      each schedule: its last slot, how many ran, and the latest missed ones
"""

import argparse
import asyncio
import os
from datetime import UTC, datetime

from ..core.open_store import close, create_all, open_store
from .history import missed, past

__all__ = ["main"]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    asyncio.run(_show())


async def _show() -> None:
    store = open_store(os.environ["DATABASE_URL"])
    try:
        await create_all(store)
        for name, row in sorted((await past(store)).items()):
            counts = f"{row.ticks} ran, {row.missed} missed, {row.skipped} skipped"
            print(f"{name}: last {_moment(row.last_slot)}, {counts}")
            for slot in await missed(store, name):
                print(f"  missed {_moment(slot)}")
    finally:
        await close(store)


def _moment(millis: int) -> str:
    return f"{datetime.fromtimestamp(millis / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


if __name__ == "__main__":
    main()
