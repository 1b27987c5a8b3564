"""The outbox on the command line. DATABASE_URL says where it is.

python -m patterns.outbox.command                            how far behind each is, and what was set aside
python -m patterns.outbox.command retry DESTINATION EVENT…   sends these again, in their old place
python -m patterns.outbox.command discard DESTINATION EVENT… never sends them: what waits behind them goes on
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from ..core.open_store import close, open_store
from .quarantine import destinations, discard, lag, quarantined, requeue

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", nargs="?", choices=("list", "retry", "discard"), default="list")
    parser.add_argument("destination", nargs="?")
    parser.add_argument("events", nargs="*", metavar="EVENT")
    options = parser.parse_args(argv)
    if options.do != "list" and not options.events:
        parser.error(f"{options.do} which? Name the destination and the ids of its events")
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> int:
    store = open_store(os.environ["DATABASE_URL"])
    try:
        if options.do == "list":
            for name in [options.destination] if options.destination else await destinations(store):
                behind = await lag(store, destination=name)
                counts = f"{behind.waiting} waiting, the oldest for {behind.oldest:.0f} s"
                print(f"{name}: {counts}, {behind.quarantined} set aside")
                for row in await quarantined(store, destination=name):
                    print(f"  {row.event_id}  {row.reason}  ({row.held} wait behind it)")
            return 0
        if options.do == "retry":
            done = await requeue(store, options.events, destination=options.destination)
        else:
            done = await discard(store, options.events, "by hand", destination=options.destination)
        if done < len(options.events):
            print(f"{len(options.events) - done} of these were not set aside", file=sys.stderr)
        return int(done < len(options.events))
    finally:
        await close(store)


if __name__ == "__main__":
    sys.exit(main())
