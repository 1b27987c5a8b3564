"""Jobs per second, by kind of work, payload and number of processes."""

from dataclasses import dataclass

import redis

from bench.figures import Column, Value, less
from bench.lab import Lab, Peer, Record

TITLE = "Jobs per second"
ABOUT = (
    "Concurrency 50 per process where the peer has such a thing (see its settings). The jobs wait in the queue before "
    "the workers start; the rate is taken between the first and the last tenth of the executions, so that neither the "
    "start nor the tail of a run counts. The 20 ms are of CPU time, in Python code that keeps the interpreter lock. "
    "CPU per job is of the no-op with one process: the worker's, its children's and Redis's."
)
COLUMNS = {
    "noop": Column("no-op, 1 process", "jobs/s", ratio=True),
    "noop2": Column("2 processes", "jobs/s"),
    "scaling": Column("2 : 1", "×"),
    "io5": Column("5 ms I/O", "jobs/s"),
    "cpu20": Column("20 ms CPU", "jobs/s"),
    "cpu20x2": Column("20 ms CPU, 2 processes", "jobs/s"),
    "kb1": Column("1 KB payload", "jobs/s"),
    "kb100": Column("100 KB payload", "jobs/s"),
    "worker_us": less("worker CPU per job", "µs"),
    "redis_us": less("Redis CPU per job", "µs"),
}


@dataclass(frozen=True)
class Workload:
    kind: str = "noop"
    payload: int = 0
    processes: int = 1
    most: float = 1e9  # jobs per second that any peer could do
    share: float = 1.0  # of its pace with empty jobs, about
    quick: bool = True  # part of quick runs

    def jobs(self, peer: Peer, seconds: float) -> int:
        most = self.most
        if self.kind == "io5":
            most = peer.concurrency.get("io5", 50) / 0.005
        return max(60, int(min(peer.pace * self.share, most) * seconds))


WORKLOADS = {
    "noop": Workload(),
    "noop2": Workload(processes=2, share=1.3),
    "io5": Workload("io5", share=0.8),
    "cpu20": Workload("cpu20", most=45),
    "cpu20x2": Workload("cpu20", most=80, processes=2, quick=False),
    "kb1": Workload(payload=1_000, share=0.9, quick=False),
    "kb100": Workload(payload=100_000, share=0.2, most=500, quick=False),
}


def measure(lab: Lab) -> dict[str, dict[str, Value]]:
    rows: dict[str, dict[str, Value]] = {peer.id: {} for peer in lab.peers}
    chosen = {name: workload for name, workload in WORKLOADS.items() if workload.quick or not lab.quick}
    for name, workload in chosen.items():
        for peer in lab.peers:
            if name != "noop" and (peer.id in lab.brief or "noop" not in rows[peer.id]):
                continue  # it failed even at no-op jobs
            try:
                rows[peer.id] |= once(lab, peer, name, workload)
                lab.say(f"{name} {peer.title}: {rows[peer.id][name]:,} jobs/s")
            except (RuntimeError, OSError) as error:
                lab.failed(peer, error)
    for row in rows.values():
        if row.get("noop2"):
            row["scaling"] = round(row["noop2"] / row["noop"], 2)  # type: ignore[operator]
    return {name: row for name, row in rows.items() if row}


def once(lab: Lab, peer: Peer, name: str, workload: Workload, store: str = "") -> dict[str, Value]:
    """`store`: the URL of the database of the full pipeline, if not SQLite."""
    jobs = workload.jobs(peer, lab.scale(1.0, 2.0))
    with lab.bench(peer) as bench, lab.server.client() as client:
        bench.store = store
        bench.enqueue(jobs, kind=workload.kind, payload=workload.payload, bulk=True)
        workers = bench.start(workload.processes, kind=workload.kind)
        bench.finished(jobs // 10, workers)
        begun = bench.tally.count(), workers.cpu_seconds(), redis_seconds(client)
        records = bench.finished(jobs, workers)
        ended = bench.tally.count(), workers.cpu_seconds(), redis_seconds(client)
        result: dict[str, Value] = {name: round(rate(records))}
        if name == "noop" and ended[0] > begun[0]:
            worked, worker, redis = (after - before for before, after in zip(begun, ended, strict=True))
            result |= {"worker_us": round(worker / worked * 1e6), "redis_us": round(redis / worked * 1e6)}
    return result


def rate(records: list[Record]) -> float:
    cut = len(records) // 10
    first, last = records[cut], records[-cut - 1]
    return (len(records) - 2 * cut - 1) / max(1e-9, (last.ended - first.ended) / 1e9)


def redis_seconds(client: redis.Redis) -> float:
    """CPU time that the server spent so far."""
    used = client.info("cpu")
    return float(used["used_cpu_sys"]) + float(used["used_cpu_user"])
