"""Shared by the sections on crashes: the effects that jobs left, what a queue still holds, and words on each peer."""

import contextlib
import sqlite3
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from bench.lab import Bench, Lab, Peer
from harness.processes import start_tied
from harness.redis import RedisServer

TAKEOVER = 5.0  # seconds after which a dead worker's job is given away, if the peer has such a setting


@dataclass(frozen=True)
class Words:
    """`takeover`: settings that give a dead worker's job away soon. `default`: what happens without them. `why`: what
    a crash does to its jobs."""

    takeover: str
    default: str
    why: str


AGAIN = "an effect before the crash is done again"
BULLMQ = Words(
    "lockDuration and stalledInterval 2.5 s each, maxStalledCount above the number of kills",
    "about 60 s (30 s + 30 s); fails at the second crash (maxStalledCount 1)",
    f"the job runs again when its lock has expired; {AGAIN}",
)
OURS = "lock_duration 4.2 s, stalled_interval 0.8 s"
OURS_BY_DEFAULT = "about 9 s (7.5 s + 1.5 s)"
WORDS = {
    "stock": BULLMQ,
    "node": BULLMQ,
    "queuesmith": Words(
        OURS,
        OURS_BY_DEFAULT,
        "the job runs again, finds the marker that was committed with its effect, and returns the stored result",
    ),
    "queuesmith-bare": Words(OURS, OURS_BY_DEFAULT, BULLMQ.why),
    "celery": Words(
        "task_acks_late, task_reject_on_worker_lost, prefetch 1, visibility_timeout 5 s, unacked_restore_interval and "
        "unacked_restore_throttle 1",
        "visibility_timeout 1 h; without acks_late the job is lost",
        "an unacknowledged message becomes visible again when its time is over; one that Redis handed out (BRPOP) and "
        f"that the worker has not yet written down as unacknowledged is lost; {AGAIN}",
    ),
    "rq": Words(
        "Retry above the number of kills, job_monitoring_interval, maintenance_interval and dequeue timeout 5 s",
        "90 s, then found when a worker does its maintenance (every 10 min, or at its start); without Retry it fails",
        f"an abandoned job is found 60 s (fixed in RQ) after its last heartbeat; {AGAIN}",
    ),
    "arq": Words(
        "job_timeout 1 s, so that its in-progress key lives 11 s, max_tries above the number of kills",
        "310 s (job_timeout 300 s + 10 s); fails at the sixth start (max_tries 5)",
        f"the job stays queued and starts again when its in-progress key has expired; {AGAIN}",
    ),
    "saq": Words(
        "job timeout 5 s, sweep every 5 s, retries above the number of kills",
        "job timeout 10 s, then found by the sweep, every 60 s; with retries 1, its default, it is then aborted",
        "the sweep takes a stuck job off its list, waits 5 s and puts it back, one after the other: a kill in between "
        f"loses it; {AGAIN}",
    ),
    "taskiq": Words(
        "idle_timeout 5 s, unacknowledged_lock_timeout 5 s",
        "idle_timeout 10 min",
        f"another worker claims what was not acknowledged, but only when a new message arrives; {AGAIN}",
    ),
    "dramatiq": Words(
        "heartbeat_timeout 5 s, maintenance_chance 100 %",
        "60 s without heartbeat, then found by one command in 1,000",
        f"messages of a worker without heartbeat are put back; {AGAIN}",
    ),
    "asynq": Words(
        "a pause of 1 s between retries, and more of them than kills; its lease and its search cannot be set",
        "a lease of 30 s, looked for every minute, then the pause of a retry, 15 s and more",
        f"a job whose lease has expired is a failed try; {AGAIN}",
    ),
    "huey": Words(
        "nothing to set: a task is removed from Redis when it is taken",
        "never",
        "what a killed consumer was running is gone",
    ),
}


class Effects:
    """The rows that jobs inserted. Node before 22.5 and Go have no SQLite of their own and append lines to a file."""

    def __init__(self, folder: Path) -> None:
        self._database = sqlite3.connect(folder / "store.db", isolation_level=None, timeout=30)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("CREATE TABLE effects (id INTEGER PRIMARY KEY, job INTEGER NOT NULL)")
        self._lines = folder / "store.db.rows"

    def times(self) -> Counter[int]:
        """Job -> how often its effect happened."""
        rows = self._database.execute("SELECT job, count(*) FROM effects GROUP BY job")
        result = Counter(dict(rows.fetchall()))
        if self._lines.exists():
            text = self._lines.read_text()
            result.update(int(line) for line in text[: text.rfind("\n") + 1].splitlines())
        return result

    def close(self) -> None:
        self._database.close()


@dataclass(frozen=True)
class Held:
    """What a queue holds: jobs to be run, jobs it believes to be running, and jobs it gave up."""

    waiting: int
    running: int
    dead: int = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running


def held(peer: Peer, client: redis.Redis, queue: str) -> Held:
    """Read from the peer's own keys."""
    count: Any = client
    if peer.id in ("stock", "queuesmith", "queuesmith-bare", "node"):
        key = f"bull:{queue}"
        waiting = count.llen(f"{key}:wait") + count.zcard(f"{key}:prioritized") + count.zcard(f"{key}:delayed")
        return Held(waiting, count.llen(f"{key}:active"), count.zcard(f"{key}:failed"))
    own = f"asynq:{{{queue}}}"
    return {
        "celery": lambda: Held(count.llen(queue), count.hlen("unacked")),
        "rq": lambda: Held(
            count.llen(f"rq:queue:{queue}") + count.zcard(f"rq:scheduled:{queue}"),
            count.zcard(f"rq:wip:{queue}") + count.llen(f"rq:queue:{queue}:intermediate"),
            count.zcard(f"rq:failed:{queue}"),
        ),
        "arq": lambda: _arq(count, queue),
        "saq": lambda: Held(
            count.llen(f"saq:{queue}:queued") + count.zcount(f"saq:{queue}:incomplete", "(1", "+inf"),
            count.llen(f"saq:{queue}:active"),
            _containing(count, f"saq:job:{queue}:*", '"status": "aborted"', '"status": "failed"'),
        ),
        "taskiq": lambda: _taskiq(count, queue),
        "dramatiq": lambda: Held(
            count.llen(f"dramatiq:{queue}") + count.llen(f"dramatiq:{queue}.DQ"),
            sum(count.scard(key) for key in count.scan_iter(f"dramatiq:__acks__.*.{queue}", count=1000)),
            count.zcard(f"dramatiq:{queue}.XQ"),
        ),
        "asynq": lambda: Held(
            count.llen(f"{own}:pending") + count.zcard(f"{own}:scheduled") + count.zcard(f"{own}:retry"),
            count.llen(f"{own}:active"),
            count.zcard(f"{own}:archived"),
        ),
        "huey": lambda: Held(count.llen(f"huey.redis.{queue}") + count.zcard(f"huey.schedule.{queue}"), 0),
    }[peer.id]()


def _arq(client: Any, queue: str) -> Held:
    running = sum(1 for _ in client.scan_iter("arq:in-progress:*", count=1000))
    queued = client.zcard(queue)  # a job stays in there while it runs
    return Held(max(0, queued - running), running, _containing(client, "arq:result:*", "retries exceeded"))


def _taskiq(client: Any, queue: str) -> Held:
    with contextlib.suppress(redis.ResponseError):  # no stream yet
        for group in client.xinfo_groups(queue):
            return Held(group["lag"] or 0, group["pending"])
    return Held(0, 0)


def _containing(client: Any, pattern: str, *words: str) -> int:
    """How many values hold one of the words. The client must not decode: some peers pickle."""
    result = 0
    for key in client.scan_iter(pattern, count=1000):
        value = client.get(key) or b""
        result += any(word.encode() in value for word in words)
    return result


@contextlib.contextmanager
def traffic(bench: Bench, first: int, **options: object) -> Iterator[None]:
    """One more job a second, numbered from `first`, as in a queue in use: some peers look for abandoned jobs only
    while doing something else."""
    argv = bench.enqueue_command(10_000, first=first, rate=1, **options)
    with (bench.folder / "traffic.log").open("wb") as log:
        process = start_tied(
            argv, env=bench.environment(), cwd=bench.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.kill()
        process.wait(10)


@contextlib.contextmanager
def alone(lab: Lab, peer: Peer) -> Iterator[tuple[Bench, Effects, redis.Redis]]:
    """The peer on its own Redis: recovery is mostly waiting, so several peers run at once."""
    server = RedisServer.start()
    try:
        with (
            tempfile.TemporaryDirectory(dir=lab.folder, prefix=f"{peer.id}-") as name,
            redis.Redis.from_url(server.url, socket_timeout=30) as client,
        ):
            bench, effects = Bench(peer, server.url, Path(name)), Effects(Path(name))
            try:
                yield bench, effects, client
            finally:
                bench.close()
                effects.close()
    finally:
        server.stop()
