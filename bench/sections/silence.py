"""The first job after a silence: do idle workers go deaf?"""

import contextlib
import statistics
import time

from bench.figures import Value, less
from bench.lab import Bench, Lab, Workers

from .latency import IDLE, WARM_UP, waited

TITLE = "The first job after a silence"
ABOUT = (
    "All workers idle beside each other, on queues of their own, for a minute (quick: 7 s, longer than the time limit "
    "of redis-py 8); then each gets one job. Milliseconds from the enqueue to its start; up to 30 s are waited for it."
)
COLUMNS = {"median": less("median", "ms"), "worst": less("worst", "ms"), "unheard": less("not started in 30 s", "jobs")}
LIMIT = 30.0


def measure(lab: Lab) -> dict[str, dict[str, Value]]:
    seconds, silences = lab.scale((7.0, 1), (60.0, 2))
    delays: dict[str, list[float]] = {}
    with lab.server.client() as client:
        client.flushall()
    with contextlib.ExitStack() as stack:
        up: list[tuple[Bench, Workers]] = []
        for peer in lab.peers:
            bench = stack.enter_context(lab.bench(peer, flush=False, queue=peer.id))
            up.append((bench, bench.start()))
        for bench, workers in list(up):
            try:
                waited(bench, workers, 0, WARM_UP, IDLE)
                delays[bench.peer.id] = []
            except (RuntimeError, OSError) as error:
                lab.failed(bench.peer, error)
                up.remove((bench, workers))
        for silence in range(silences):
            lab.say(f"silence {silence + 1} of {silences}, {seconds:g} s")
            time.sleep(seconds)
            for bench, workers in up:
                delays[bench.peer.id].append(_first_job(bench, workers))
    return {
        name: {
            "median": round(statistics.median(waits), 1),
            "worst": round(max(waits), 1),
            "unheard": sum(delay >= LIMIT * 1000 for delay in waits),
        }
        for name, waits in delays.items()
    }


def _first_job(bench: Bench, workers: Workers) -> float:
    done = bench.tally.count()
    bench.enqueue(1, first=done)
    try:
        bench.finished(done + 1, workers, timeout=LIMIT)
    except RuntimeError:
        return LIMIT * 1000
    record = bench.tally.records()[-1]
    return (record.started - record.sent) / 1e6
