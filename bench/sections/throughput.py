"""Jobs per second, by kind of work, payload and number of processes."""

from __future__ import annotations

from ..figures import Column, Value
from ..lab import Lab, Peer, Record

TITLE = "Jobs per second"
ABOUT = (
    "The jobs wait in the queue before the workers start; the rate is taken between the first and the last tenth of the "
    "executions, so that neither the start nor the tail of a run counts."
)
COLUMNS = {
    "noop": Column("no-op", "jobs/s", ratio=True),
}


def rate(records: list[Record]) -> float:
    cut = len(records) // 10
    first, last = records[cut], records[-cut - 1]
    return (len(records) - 2 * cut - 1) / ((last.ended - first.ended) / 1e9)


def measure(lab: Lab) -> dict[str, dict[str, Value]]:
    rows: dict[str, dict[str, Value]] = {}
    for peer in lab.peers:
        try:
            rows[peer.id] = {"noop": once(lab, peer)}
        except (RuntimeError, OSError) as error:
            lab.failed(peer, error)
    return rows


def once(lab: Lab, peer: Peer) -> float:
    jobs = max(200, int(peer.pace * lab.scale(1.5, 5)))
    with lab.bench(peer) as bench:
        bench.enqueue(jobs, bulk=True)
        workers = bench.start()
        return rate(bench.finished(jobs, workers))
