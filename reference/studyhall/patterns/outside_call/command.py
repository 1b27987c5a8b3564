"""The calls that wait for a human, on the command line. DATABASE_URL says where the ledger is.

    python -m patterns.outside_call.command carrier                              the unclear ones, oldest first
    python -m patterns.outside_call.command carrier KEY --done '{"id": 7}'       it was made, with this answer
    python -m patterns.outside_call.command carrier KEY --again                  it was not: the next run makes it

Then replay the job's dead letter: `python -m patterns.dead_letter.command`.
"""

import argparse
import json
import os
import re
import sqlite3
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from ..core.failures import JobError
from .dbapi import DbApiLedger
from .sync import SyncOutsideCalls

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
    if not os.environ.get("DATABASE_URL"):
        parser.error("set DATABASE_URL to that of the service")
    try:
        return _run(options)
    except (JobError, sqlite3.Error) as error:
        print(error, file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    url = os.environ["DATABASE_URL"]
    # A plain connection: it reads the tables of every ledger in a database, and needs no package for SQLite.
    calls = SyncOutsideCalls(DbApiLedger(lambda: _connect(url)), options.provider, longest=1)
    if options.key:
        calls.resolve(options.key, done=options.done, again=options.again)
        return 0
    for call in calls.unclear():
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(call.since))
        print(f"{call.key}  last sent {at} as {call.provider_key}  {call.reason}")
    return 0


def _connect(url: str) -> Any:
    if file := re.match(r"sqlite(?:\+\w+)?:///([^?]+)", url):
        return sqlite3.connect(f"file:{quote(file[1])}?mode=rw", uri=True, timeout=30)
    import psycopg

    # As `open_store` takes it: with SQLAlchemy's driver name and the pooler option.
    return psycopg.connect(re.sub(r"^(\w+)\+\w+|[?&]pooler=\w+$", r"\1", url))


if __name__ == "__main__":
    sys.exit(main())
