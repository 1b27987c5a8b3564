"""The calls that wait for a human, on the command line. DATABASE_URL says where the ledger is.

    python -m patterns.outside_call.command carrier                              which are unclear, the oldest first
    python -m patterns.outside_call.command carrier KEY --done '{"id": 7}'       it was made, with this answer
    python -m patterns.outside_call.command carrier KEY --again                  it was not: the next run makes it

Then replay the job's dead letter: `python -m patterns.dead_letter.command`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence

from ..core.failures import JobError
from ..core.open_store import close, open_store
from .calls import OutsideCalls
from .store import StoreLedger

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("provider")
    parser.add_argument("key", nargs="?")
    told = parser.add_mutually_exclusive_group()
    told.add_argument("--done", type=json.loads, metavar="JSON", help="it was made, with this answer")
    told.add_argument("--again", action="store_true", help="it was not made")
    options = parser.parse_args(argv)
    if options.key and options.done is None and not options.again:
        parser.error("look at the provider first, then say --done JSON or --again")
    try:
        return asyncio.run(_run(options))
    except JobError as error:
        print(error, file=sys.stderr)
        return 1


async def _run(options: argparse.Namespace) -> int:
    store = open_store(os.environ["DATABASE_URL"])
    try:
        calls = OutsideCalls(StoreLedger(store), options.provider, longest=1)
        if options.key:
            await calls.resolve(options.key, done=options.done, again=options.again)
            return 0
        for call in await calls.unclear():
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(call.since))
            print(f"{call.key}  last sent {at} as {call.provider_key}  {call.reason}")
        return 0
    finally:
        await close(store)


if __name__ == "__main__":
    sys.exit(main())
