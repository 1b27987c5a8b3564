"""Milliseconds from the enqueue to the start of the job, on an idle and on a busy queue."""

from bench.figures import Value, less, percentile
from bench.lab import Bench, Lab, Peer, Workers

TITLE = "Enqueue to start"
ABOUT = (
    "One worker process. Idle: 20 jobs arrive per second, each finds the queue empty. Busy: 200 jobs arrive per "
    "second. The clock starts before the producer's call, so its time counts too."
)
COLUMNS = {
    "idle_p50": less("idle p50", "ms"),
    "idle_p95": less("p95", "ms"),
    "idle_p99": less("p99", "ms"),
    "busy_p50": less("busy p50", "ms"),
    "busy_p95": less("p95", "ms"),
    "busy_p99": less("p99", "ms"),
}
WARM_UP = 10  # jobs before anything counts: the first ones load code
IDLE, BUSY = 20, 200  # jobs per second


def measure(lab: Lab) -> dict[str, dict[str, Value]]:
    return lab.each_peer(once, lambda row: f"idle p99 {row['idle_p99']} ms, busy {row['busy_p99']} ms")


def once(lab: Lab, peer: Peer) -> dict[str, Value]:
    row: dict[str, Value] = {}
    with lab.bench(peer) as bench:
        workers = bench.start()
        waited(bench, workers, 0, WARM_UP, IDLE)
        idle = waited(bench, workers, WARM_UP, lab.scale(40, 200), IDLE)
        busy = waited(bench, workers, WARM_UP + len(idle), lab.scale(200, 1_000), BUSY)
    for name, delays in (("idle", idle), ("busy", busy)):
        row |= {f"{name}_p{percent}": round(percentile(delays, percent), 2) for percent in (50, 95, 99)}
    return row


def waited(bench: Bench, workers: Workers, first: int, jobs: int, rate: float) -> list[float]:
    """Milliseconds of each of these jobs, until its first start."""
    bench.enqueue(jobs, first=first, rate=rate)
    bench.finished(first + jobs, workers)
    starts: dict[int, float] = {}
    for record in bench.tally.records():
        starts.setdefault(record.number, (record.started - record.sent) / 1e6)
    return [starts[number] for number in range(first, first + jobs) if number in starts]
