"""Celery tasks that are neither lost nor repeated: a row in your database for each, and Celery to run them.

    enqueue(db, "shop.buy_label", f"label/{parcel}", parcel=parcel)     # inside your transaction, in place of .delay()

    @app.task(base=Job)
    def buy_label(parcel):
        label = carrier.once(f"label/{parcel}", buy)                    # outside effects: `outside_call.sync`
        return lambda db: db.execute("INSERT INTO labels …")            # own effects: committed once, with the row

Promise: what `enqueue` wrote runs when its transaction commits, and never when it does not. What the task returns
takes effect once (`sync_inbox`), in one transaction with the end of its row. A retry is the same row with a later
date, so it outlives every worker and Redis itself; no countdown waits unacknowledged in a worker's memory. The class
of the error decides: `RateLimited` and `Snooze` wait and consume no attempt, `Permanent` and the last attempt make a
dead letter, and so do `CRASHES` starts without an end. `replay` sends a dead letter again. A message that Redis lost
is sent again.

When it does not hold: effects outside the database without `outside_call`, and tasks sent with `.delay()`, past the
table.
"""

import json
import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from typing import Any

from celery import Celery, Task, bootsteps

from studyhall.patterns import sync_inbox
from studyhall.patterns.core.errors import Permanent, RateLimited, ResourceBusy, Snooze, describe
from studyhall.patterns.sync_inbox import execute, is_sqlite, transaction

__all__ = ["Job", "Relay", "create", "dead_letters", "enqueue", "reliable", "replay", "transaction"]

log = logging.getLogger("celery_jobs")
ATTEMPTS, BASE, CAP, CRASHES = 8, 1.0, 60.0, 4
CLAIM = 5.0
DAY = 86_400.0


def reliable(longest: float) -> dict[str, Any]:
    """Settings for tasks of at most `longest` seconds: `app.conf.update(reliable(60))`."""
    return {
        # The default acknowledges before the work: a crash loses it.
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        # Redis hands a task out again after this time, done or not: it must exceed the longest task.
        # The default is an hour, checked every 100 s: a killed worker's task waits that long.
        "broker_transport_options": {
            "visibility_timeout": longest * 1.5,
            "unacked_restore_interval": max(1, longest // 10),
            "unacked_restore_throttle": 1,
            "socket_timeout": 10,
            "socket_connect_timeout": 5,
        },
        # The soft limit can be handled, the hard one kills the process: without them a hung call blocks it forever.
        "task_soft_time_limit": longest,
        "task_time_limit": longest * 1.2,
        # The default reserves four tasks for each process: they wait behind a long one while others are idle.
        "worker_prefetch_multiplier": 1,
        "worker_max_tasks_per_child": 1000,
        "worker_max_memory_per_child": 400_000,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        # The relay tries again by itself; a view that publishes must not hang while Redis is away.
        "task_publish_retry": False,
        "task_ignore_result": True,
        "accept_content": ["json"],
    }


_CREATE = (
    "CREATE TABLE IF NOT EXISTS jobs (key TEXT PRIMARY KEY, task TEXT NOT NULL, payload TEXT NOT NULL, "
    "state TEXT NOT NULL, due DOUBLE PRECISION NOT NULL, sends INTEGER NOT NULL, starts INTEGER NOT NULL, "
    "attempts INTEGER NOT NULL, first DOUBLE PRECISION NOT NULL, reason TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS jobs_due ON jobs (due) WHERE state = 'waiting'",
)
_ADD = (
    "INSERT INTO jobs (key, task, payload, state, due, sends, starts, attempts, first, reason) "
    "VALUES (?, ?, ?, 'waiting', ?, 0, 0, 0, ?, '') ON CONFLICT DO NOTHING"
)
_CLAIM = (
    "UPDATE jobs SET sends = sends + 1, due = ? WHERE key IN (SELECT key FROM jobs WHERE state = 'waiting' AND "
    "due <= ? ORDER BY due LIMIT 50 FOR UPDATE SKIP LOCKED) RETURNING key, task, payload, sends"
)
_SENT = "UPDATE jobs SET due = ? WHERE key = ? AND due = ? AND state = 'waiting'"
# `sends = 0`: the job was postponed after this message, which is out of date.
_START = (
    "UPDATE jobs SET starts = starts + 1 WHERE key = ? AND state = 'waiting' AND sends > 0 "
    "RETURNING starts, attempts, first"
)
_END = "UPDATE jobs SET state = ?, reason = ? WHERE key = ? AND state = 'waiting'"
_LATER = "UPDATE jobs SET sends = 0, starts = 0, due = ?, attempts = ?, reason = ? WHERE key = ? AND state = 'waiting'"
_DEAD = "SELECT key, task, reason FROM jobs WHERE state = 'dead' ORDER BY first LIMIT ?"
_REPLAY = (
    "UPDATE jobs SET state = 'waiting', due = ?, sends = 0, starts = 0, attempts = 0, first = ? "
    "WHERE key = ? AND state = 'dead'"
)


def create(db: Any) -> None:
    sync_inbox.create(db)
    for statement in _CREATE:
        execute(db, statement)


def enqueue(db: Any, task: str, key: str, **payload: Any) -> None:
    """In the caller's transaction. The same key again is the same job."""
    execute(db, _ADD, key, task, json.dumps(payload), time.time(), time.time())


def dead_letters(db: Any, limit: int = 100) -> list[tuple[str, str, str]]:
    """(key, task, reason), the oldest first."""
    return [tuple(row) for row in execute(db, _DEAD, limit).fetchall()]


def replay(db: Any, key: str) -> None:
    """With all its attempts. Resolve a refused outside call first: `calls.resolve(key, again=True)`."""
    if execute(db, _REPLAY, time.time(), time.time(), key).rowcount != 1:
        raise Permanent(f"{key!r} is not a dead letter: see dead_letters()")


class Job(Task):  # type: ignore[misc]
    """`connect()` is set once: `Job.connect = staticmethod(lambda: psycopg.connect(url, autocommit=True))`.

    Django: `Job.connect = staticmethod(lambda: connection)`, `Job.atomic = staticmethod(lambda _: atomic())`.
    """

    abstract = True
    connect: Callable[[], Any]
    atomic: Callable[[Any], AbstractContextManager[Any]] | None = None

    def __call__(self, **payload: Any) -> None:
        key = self.request.id
        with closing(self.connect()) as db:
            row = execute(db, _START, key).fetchone()
            if row is None:
                return
            starts, attempts, first = row
            if starts > CRASHES:
                self._bury(db, key, f"its worker died {CRASHES} times")
                return
            try:
                effect = self.run(**payload)

                def take_effect(db: Any) -> None:
                    if effect is not None:
                        effect(db)

                with (self.atomic or transaction)(db):
                    sync_inbox.once(db, self.name, key, payload, take_effect)
                    execute(db, _END, "done", "", key)
            # The soft time limit is one of these.
            except Exception as error:
                self._failed(db, key, attempts, first, error)

    def _failed(self, db: Any, key: str, attempts: int, first: float, error: Exception) -> None:
        reason = f"{type(error).__name__}: {describe(error, 300)}"
        if isinstance(error, RateLimited | ResourceBusy | Snooze) and time.time() - first < DAY:
            wait = error.delay if isinstance(error, Snooze) else error.retry_after
        elif isinstance(error, Permanent) or attempts + 1 >= ATTEMPTS:
            self._bury(db, key, reason)
            return
        else:
            wait, attempts = random.random() * min(CAP, BASE * 2**attempts), attempts + 1
        execute(db, _LATER, time.time() + max(wait, 0.1), attempts, reason, key)

    def _bury(self, db: Any, key: str, reason: str) -> None:
        execute(db, _END, "dead", reason, key)
        log.error("dead letter %s: %s", key, reason)


class Relay(bootsteps.StartStopStep):  # type: ignore[misc]
    """Sends what is due, from a thread of every worker: `app.steps["worker"].add(Relay)`. They share the work.

    `resend`: seconds until a job that has not ended is sent again; then twice as long.
    """

    requires = frozenset({"celery.worker.components:Pool"})
    resend = 60.0
    every = 0.2

    def __init__(self, worker: Any, **options: Any) -> None:
        self._app: Celery = worker.app
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="relay", daemon=True)

    def start(self, worker: Any) -> None:
        self._thread.start()

    def stop(self, worker: Any) -> None:
        self._over.set()
        self._thread.join(5)

    def _loop(self) -> None:
        while not self._over.is_set():
            try:
                with closing(Job.connect()) as db:
                    while not self._over.is_set():
                        if not relay(db, self._app, self.resend):
                            self._over.wait(self.every)
            except Exception as error:
                log.warning("relay: %s", describe(error, 200))
                self._over.wait(1)


def relay(db: Any, app: Celery, resend: float) -> int:
    """Send what is due; returns how many. After a crash in here it is due again within seconds."""
    now = time.time()
    # Django's connection says so itself.
    sqlite = is_sqlite(db) or getattr(db, "vendor", "") == "sqlite"
    claim = _CLAIM.replace("FOR UPDATE SKIP LOCKED", "") if sqlite else _CLAIM
    rows = execute(db, claim, now + CLAIM, now).fetchall()
    for key, task, payload, sends in rows:
        app.send_task(task, kwargs=json.loads(payload), task_id=key)
        # Later each time: an hour's backlog must not be sent again every minute.
        execute(db, _SENT, now + resend * 2 ** min(sends - 1, 10), key, now + CLAIM)
    return len(rows)
