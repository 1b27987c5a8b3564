"""Dead letters on the command line. DATABASE_URL says where they are, REDIS_URL where their jobs go back to.

python -m patterns.dead_letter.command                 those that wait, the newest first
python -m patterns.dead_letter.command replay ID…      puts these jobs back into their queue
python -m patterns.dead_letter.command replay --all    all of them, ten a second
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence

from ..core.failures import JobError
from ..core.open_store import close, open_store
from .archive import list_dead_letters
from .replayer import replay_many

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", nargs="?", choices=("list", "replay"), default="list")
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args(argv)
    if options.do == "replay" and bool(options.ids) == options.all:
        parser.error("replay which? Name their ids, or --all")
    for name in ("DATABASE_URL", "REDIS_URL") if options.do == "replay" else ("DATABASE_URL",):
        if not os.environ.get(name):
            parser.error(f"set {name} to that of the service")
    try:
        return asyncio.run(_run(options))
    except JobError as error:
        print(error, file=sys.stderr)
        return 1


async def _run(options: argparse.Namespace) -> int:
    store = open_store(os.environ["DATABASE_URL"])
    try:
        if options.do == "list":
            for letter in await list_dead_letters(store):
                at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter.failed_at))
                print(f"{letter.id}  {at}  {letter.queue}/{letter.job_id}  {letter.reason}")
            return 0
        from ..core.connections import producer_client  # a list needs no Redis

        redis = producer_client(os.environ["REDIS_URL"])
        try:
            refused = (await replay_many(store, redis, options.ids or None)).refused
        finally:
            await redis.aclose()
        for ident, why in refused.items():
            print(f"{ident} stays: {why}", file=sys.stderr)
        return 1 if refused else 0
    finally:
        await close(store)


if __name__ == "__main__":
    sys.exit(main())
