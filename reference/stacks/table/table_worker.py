"""No queue: a table of your database is the queue. A worker loop without asyncio, on any DB-API connection.

    create(connection)                            # the table, if it is missing
    put(connection, "accounts", email)            # in the transaction of your own insert: committed together
    run(connect, "accounts", work, threads=4)     # until SIGTERM; save = work(email), then save(connection)

Promise: what was put is worked on until its `state` is done or failed, with a `reason`. One worker has a row, for
`lease` seconds: a crash or a freeze only delays it. What `save` writes commits with the row's end, or not at all if
somebody else has the row by then. The error's class decides: `Permanent` fails it, `RateLimited`, `ResourceBusy` and
`Snooze` (`InFlight`) come back after their delay and consume no try, all else after `random() * min(60, 2**tries)` s,
at most `tries` times; a crash is a try. SIGTERM: no further row is taken, running ones are finished. To retry a
failed row: `UPDATE table_jobs SET state = 'open', tries = 0 WHERE kind = … AND key = …`.

When it does not hold: `work` that takes longer than `lease` runs twice at once: what it does outside the database
belongs in `SyncOutsideCalls`. A delay is at most `FARTHEST` seconds: anything later was written by a wrong clock.
SQLite 3.35 or PostgreSQL; hundreds of rows a second, not thousands.
"""

import logging
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from studyhall.patterns.core.errors import Permanent, RateLimited, ResourceBusy, Snooze, describe
from studyhall.patterns.sync_inbox import execute, is_sqlite, transaction

__all__ = ["create", "put", "run"]

FARTHEST = 900.0
Connect, Save = Callable[[], Any], Callable[[Any], Any]
Work = Callable[[str], Save | None]
log = logging.getLogger("table_worker")

_CREATE = """CREATE TABLE IF NOT EXISTS table_jobs (kind VARCHAR(100) NOT NULL, key TEXT NOT NULL,
state VARCHAR(10) NOT NULL, due DOUBLE PRECISION NOT NULL, tries INTEGER NOT NULL, reason TEXT NOT NULL,
PRIMARY KEY (kind, key))"""
_INDEX = "CREATE INDEX IF NOT EXISTS table_jobs_due ON table_jobs (kind, state, due)"
_PUT = "INSERT INTO table_jobs VALUES (?, ?, 'open', ?, 0, '') ON CONFLICT DO NOTHING"
# `due` is also the end of the lease, and so identifies its holder.
_CLAIM = """UPDATE table_jobs SET due = ?, tries = tries + 1 WHERE kind = ? AND key = (SELECT key FROM table_jobs
WHERE kind = ? AND state = 'open' AND (due <= ? OR due > ?) ORDER BY due LIMIT 1 SKIP) RETURNING key, tries"""
_END = """UPDATE table_jobs SET state = ?, due = ?, tries = tries - ?, reason = ?
WHERE kind = ? AND key = ? AND state = 'open' AND due = ?"""


class _Overtaken(Exception):
    """The lease ran out, and another worker has the row."""


def create(connection: Any) -> None:
    with transaction(connection):
        execute(connection, _CREATE)
        execute(connection, _INDEX)


def put(connection: Any, kind: str, key: str) -> bool:
    """False: it was there. Whoever opened the transaction commits it."""
    return bool(execute(connection, _PUT, kind, key, time.time()).rowcount == 1)


def run(connect: Connect, kind: str, work: Work, *, lease: float = 60, tries: int = 12, threads: int = 1) -> None:
    """In the main thread. `connect()` makes a new connection: each thread has its own."""
    signals: list[int] = []  # not an Event: a handler cannot safely set one that its own thread waits for
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: signals.append(number))
    stop = threading.Event()
    workers = [threading.Thread(target=_loop, args=(connect, kind, work, lease, tries, stop)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    while not signals:
        time.sleep(0.1)
    stop.set()
    for worker in workers:
        worker.join()


def _loop(connect: Connect, kind: str, work: Work, lease: float, tries: int, stop: threading.Event) -> None:
    connection = None
    while not stop.is_set():
        took = False
        try:
            connection = connection or connect()
            took = _next(connection, kind, work, lease, tries)
        except Exception as error:  # the row comes back when its lease is over
            log.warning("%s: the database is away: %s", kind, describe(error))
            connection = None
        if not took:
            stop.wait(random.uniform(0.2, 0.5))
    if connection:
        connection.close()


def _next(connection: Any, kind: str, work: Work, lease: float, most: int) -> bool:
    """Claim a row that is due and do it; False if there is none."""
    now = time.time()
    until = now + lease + random.random()
    with transaction(connection):
        statement = _CLAIM.replace("SKIP", "" if is_sqlite(connection) else "FOR UPDATE SKIP LOCKED")
        row = execute(connection, statement, until, kind, kind, now, now + max(FARTHEST, lease) + 1).fetchone()
    if row is None:
        return False
    key, tries = row

    def end(state: str, delay: float = 0.0, back: int = 0, reason: str = "", save: Save | None = None) -> None:
        with transaction(connection):
            if save:
                save(connection)
            later = time.time() + min(delay, FARTHEST)
            if execute(connection, _END, state, later, back, reason, kind, key, until).rowcount != 1:
                raise _Overtaken

    try:
        if tries > most:
            raise Permanent(f"its worker died, {most} tries are over")
        end("done", save=work(key))
    except _Overtaken:
        log.warning("%s %s: another worker has it", kind, key)
    except Permanent as error:
        end("failed", reason=describe(error))
    except Snooze as error:
        end("open", error.delay, 1)
    except (RateLimited, ResourceBusy) as error:
        end("open", error.retry_after, 1)
    except Exception as error:
        log.warning("%s %s, try %d: %s", kind, key, tries, describe(error))
        delay = random.random() * min(60.0, 2.0**tries)
        end("open" if tries < most else "failed", delay, reason=describe(error))
    return True
