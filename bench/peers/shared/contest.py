"""What every Python peer has in common: the command line, the jobs, the three kinds of work and the tally.

Runs inside the environment of each peer, so it needs nothing but the standard library. A peer defines how to start
its worker and how to add a job; what a job does and how it is counted is the same for all:

    peer.py worker  --url URL --tally FILE [--processes 1] [--concurrency 50] [--queue bench] [--takeover SECONDS]
                    [--tries N]
    peer.py enqueue --url URL --jobs N [--kind noop|io5|cpu20|hold|fail|row|begin] [--payload BYTES] [--bulk]
                    [--rate PER_SECOND] [--first 0] [--delay SECONDS] [--takeover SECONDS] [--tries N] [--queue bench]
                    prints {"seconds": …}

Every execution that reaches its end appends one record to the tally, with a single `write` to a file opened with
O_APPEND: job number, time of the enqueue, start and end, in nanoseconds since the epoch, 8 bytes each. A job that is
missing there was lost, one that is there twice was duplicated. Jobs of the kind `hold` do so at their start
and stay. Jobs of the kinds `row` and `begin` also insert a row into the SQLite database BENCH_STORE, as handlers
usually do it: one INSERT, committed at once.
"""

import argparse
import asyncio
import itertools
import json
import os
import sqlite3
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

RECORD = struct.Struct("<4q")  # number, enqueued, started, ended
CHUNK = 500  # jobs per bulk call
HOLD_SECONDS = 3600.0
BEGIN_SECONDS = 30.0  # long enough to be killed in between
KINDS = ("noop", "io5", "cpu20", "hold", "fail", "row", "begin")

Job = dict[str, Any]  # {"n": number, "sent": ns, "kind": …, "body": "xxx…"}
_tally: int | None = None
_local = threading.local()  # a connection per thread


class Failed(Exception):
    """What a job of the kind `fail` raises."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    worker = verbs.add_parser("worker")
    worker.add_argument("--tally", required=True)
    worker.add_argument("--processes", type=int, default=1)
    worker.add_argument("--concurrency", type=int, default=50)
    enqueue = verbs.add_parser("enqueue")
    enqueue.add_argument("--jobs", type=int, required=True)
    enqueue.add_argument("--kind", choices=KINDS, default="noop")
    enqueue.add_argument("--payload", type=int, default=0, help="bytes of ballast in every job")
    enqueue.add_argument("--bulk", action="store_true", help="in calls of many, where the peer has such a call")
    enqueue.add_argument("--rate", type=float, help="jobs per second instead of as fast as it goes")
    enqueue.add_argument("--first", type=int, default=0, help="number of the first job")
    enqueue.add_argument("--delay", type=float, help="seconds until the jobs are due")
    for verb in (worker, enqueue):
        verb.add_argument("--takeover", type=float, help="give a dead worker's job away after these seconds")
        verb.add_argument("--tries", type=int, help="starts allowed for a job, where crashes are counted")
        verb.add_argument("--url", required=True)
        verb.add_argument("--queue", default="bench")
    given = parser.parse_args()
    for name in ("url", "queue", "tally", "takeover", "tries"):  # for processes that the peer starts itself
        if getattr(given, name, None) is not None:
            os.environ[f"BENCH_{name.upper()}"] = str(getattr(given, name))
    return given


def setting(name: str, otherwise: str = "") -> str:
    return os.environ.get(f"BENCH_{name.upper()}", otherwise)


def takeover(otherwise: float) -> float:
    """Seconds until a dead worker's job is given away; `otherwise`: what the peer does when nothing is set."""
    return float(setting("takeover") or otherwise)


def tries(otherwise: int) -> int:
    """How often a job may start, for peers that count crashes."""
    return int(setting("tries") or otherwise)


# ---- the work


def work(job: Job) -> None:
    """One job, for peers that call plain functions."""
    for seconds in _pauses(job):
        time.sleep(seconds)


async def work_async(job: Job) -> None:
    """The same for peers that await."""
    for seconds in _pauses(job):
        await asyncio.sleep(seconds)


def _pauses(job: Job) -> Iterator[float]:
    """Does the work of a job, and says where to sleep for how long."""
    started = time.time_ns()
    kind = job["kind"]
    if kind == "io5":
        yield 0.005
    elif kind == "hold":
        record(job, started)
        yield HOLD_SECONDS
    elif kind == "cpu20":
        _compute(0.020)
    elif kind == "row":
        yield 0.020
        insert(job)
        yield 0.020
    elif kind == "begin":
        insert(job)
        yield BEGIN_SECONDS
    record(job, started)
    if kind == "fail":
        raise Failed("on purpose")


def _compute(seconds: float) -> None:
    """CPU time of this thread, not wall-clock time: the same work, however busy the machine is."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def insert(job: Job) -> None:
    """The effect of a job that has one. The table has no unique constraint: duplicates are seen."""
    if not hasattr(_local, "database"):
        _local.database = sqlite3.connect(setting("store"), timeout=30, isolation_level=None)
    _local.database.execute("INSERT INTO effects (job) VALUES (?)", (job["n"],))


def record(job: Job, started: int) -> None:
    global _tally  # noqa: PLW0603
    if _tally is None:
        _tally = os.open(setting("tally"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(_tally, RECORD.pack(job["n"], job["sent"], started, time.time_ns()))


# ---- adding jobs


def jobs(given: argparse.Namespace, began: float = 0.0) -> Iterator[Job]:
    """Each is made, and so stamped, only when it is needed; with a rate, not before it is due."""
    body = "x" * given.payload
    for turn in range(given.jobs):
        if given.rate:
            time.sleep(max(0.0, began + turn / given.rate - time.perf_counter()))
        yield {"n": given.first + turn, "sent": time.time_ns(), "kind": given.kind, "body": body}


def chunks(given: argparse.Namespace) -> Iterator[list[Job]]:
    made = jobs(given)
    while chunk := list(itertools.islice(made, CHUNK)):
        yield chunk


def fill(
    given: argparse.Namespace, add: Callable[[Job], Any], add_many: Callable[[list[Job]], Any] | None = None
) -> None:
    """Add the jobs and print how long it took. Connect before."""
    began = time.perf_counter()
    if given.bulk and add_many:
        for chunk in chunks(given):
            add_many(chunk)
    else:
        for job in jobs(given, began):
            add(job)
    _report(began)


async def fill_async(
    given: argparse.Namespace,
    add: Callable[[Job], Awaitable[Any]],
    add_many: Callable[[list[Job]], Awaitable[Any]] | None = None,
) -> None:
    began = time.perf_counter()
    if given.bulk and add_many:
        for chunk in chunks(given):
            await add_many(chunk)
    else:
        for job in jobs(given, began):  # nothing else runs in this loop, so it may sleep in between
            await add(job)
    _report(began)


def _report(began: float) -> None:
    print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
