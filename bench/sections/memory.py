"""Memory: of one worker process, and in Redis per job in each of its states."""

import time

import redis

from bench.figures import Value, less
from bench.lab import Bench, Lab, Peer

TITLE = "Memory"
ABOUT = (
    "One worker with its children after some hundred jobs; proportional: pages that processes share are shared out. "
    "Redis: `MEMORY USAGE` of all keys per job of 100 bytes payload. A dash: the peer "
    "keeps no such jobs in Redis. Retention is the peer's default."
)
COLUMNS = {
    "pss": less("worker, proportional", "MB"),
    "rss": less("worker, resident", "MB"),
    "waiting": less("Redis: waiting", "bytes/job"),
    "active": less("active", "bytes/job"),
    "delayed": less("delayed", "bytes/job"),
    "completed": less("completed", "bytes/job"),
    "failed": less("failed", "bytes/job"),
}
PAYLOAD = 100
QUICK = ("waiting", "completed")


def measure(lab: Lab) -> dict[str, dict[str, Value]]:
    return lab.each_peer(once, lambda row: f"{row['pss']} MB, {row['waiting']} bytes per waiting job")


def once(lab: Lab, peer: Peer) -> dict[str, Value]:
    row: dict[str, Value] = {}
    jobs = max(30, min(lab.scale(300, 1_000), peer.pace * 2))
    for state in ("waiting", "active", "delayed", "completed", "failed"):
        if state in QUICK or not lab.quick:
            with lab.bench(peer) as bench, lab.server.client() as client:
                row |= _state(bench, client, state, jobs)
    return {key: value if key in (*peer.states, "pss", "rss") else None for key, value in row.items()}


def _state(bench: Bench, client: redis.Redis, state: str, jobs: int) -> dict[str, Value]:
    """Bytes in Redis per job in that state; for completed jobs, megabytes of the worker too."""
    peer = bench.peer
    if state == "active" and state in peer.states:
        workers = bench.start(kind="hold")
        bench.enqueue(1, payload=PAYLOAD)
        bench.finished(1, workers)
        before = _stored(client)
        jobs = peer.concurrency.get("hold", 50)
        bench.enqueue(jobs, payload=PAYLOAD, kind="hold", first=1)
        bench.finished(1 + peer.concurrency.get("running", jobs), workers)
        return {state: round((_stored(client) - before) / jobs)}
    if state not in peer.states and state != "completed":
        return {state: None}
    kind = "fail" if state == "failed" else "noop"
    delay = 3_600 if state == "delayed" else None
    bench.enqueue(jobs, payload=PAYLOAD, kind=kind, bulk=True, delay=delay)
    megabytes: dict[str, Value] = {}
    if state in ("completed", "failed"):
        workers = bench.start()
        bench.finished(jobs, workers)
        if state == "completed":
            megabytes = {name: round(value, 1) for name, value in workers.memory().items()}
    return megabytes | {state: round(_stored(client) / jobs)}


def _stored(client: redis.Redis) -> int:
    """Bytes of all keys, once they no longer change: the last job's end is written after its record."""
    last = -1
    for _ in range(25):
        total = sum(int(client.memory_usage(key, samples=0) or 0) for key in client.scan_iter(count=1_000))
        if total == last:
            return total
        last = total
        time.sleep(0.2)
    return last
