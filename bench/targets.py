"""What was promised, and whether the run kept it: met or missed, and by how much."""

from dataclasses import dataclass, replace

from bench.figures import UNSTABLE, number
from bench.results import Results, compare, median, values

PIPELINE, BARE = "queuesmith", "queuesmith-bare"
PYTHON_PEERS = ("stock", "celery", "rq", "arq", "saq", "taskiq", "dramatiq", "huey")
# Rates that faster jobs must not cost, compared with an older commit on the same machine (`--before`).
KEPT = (
    ("relay", "SQLite", "rate"),
    ("relay", "PostgreSQL", "rate"),
    ("streams", "Queuesmith", "consume"),
    ("streams", "Queuesmith, ordered", "consume"),
    ("stores", "SQLite", "sagas"),
    ("stores", "PostgreSQL", "sagas"),
)
NOISE = 0.1


@dataclass(frozen=True)
class Target:
    text: str
    wanted: str
    measured: str
    verdict: str  # met, missed by …, unstable, not measured

    @property
    def met(self) -> bool:
        return self.verdict == "met"


def targets(results: Results) -> list[Target]:
    result = [
        _by_cpu(results, _times(results, "full pipeline, no-op jobs", PIPELINE, "stock", 3.5), "stock"),
        _by_cpu(results, _times(results, "full pipeline, no-op jobs", PIPELINE, "node", 0.3), "node"),
        _times(results, "full pipeline, jobs of 1 KB", PIPELINE, "stock", 3.0, "kb1"),
        _times(results, "full pipeline, jobs of 100 KB", PIPELINE, "stock", 1.5, "kb100"),
        _times(results, "full pipeline, jobs of 5 ms I/O", PIPELINE, "stock", 2.5, "io5"),
        _times(results, "bare worker, no-op jobs", BARE, "stock", 4.0),
        _times(results, "bare worker, no-op jobs", BARE, "node", 0.5),
    ]
    result += [
        _times(results, "full pipeline ahead, no-op jobs of one process", PIPELINE, peer, 1.0, sign=">")
        for peer in PYTHON_PEERS
        if peer != "stock" and peer in results["peers"]
    ]
    result += [
        _times(results, "enqueue one by one, full pipeline", PIPELINE, "stock", 1.0, "single", "enqueue"),
        _times(results, "enqueue in bulk, full pipeline", PIPELINE, "stock", 1.0, "bulk", "enqueue"),
    ]
    result += [
        _least(results, f"bulk enqueue to single, {name}", "enqueue", peer, "gain", 4.0)
        for name, peer in (("full pipeline", PIPELINE), ("bare", BARE))
    ]
    result += [_scaling(results, name, peer) for name, peer in (("full pipeline", PIPELINE), ("bare", BARE))]
    result += [
        _times(results, "p50 enqueue to start, idle queue", PIPELINE, "stock", 1.2, "idle_p50", "latency", sign="≤"),
        _most(results, "p99 enqueue to start, idle queue", "latency", PIPELINE, "idle_p99", 5.0, " ms"),
        _most(results, "enqueue to start after a silence, worst", "silence", PIPELINE, "worst", 10.0, " ms"),
        _times(results, "bytes in Redis per waiting job", PIPELINE, "stock", 1.3, "waiting", "memory", sign="≤"),
        _most(results, "memory of a worker, proportional", "memory", PIPELINE, "pss", 55.0, " MB"),
        _times(results, "full pipeline on PostgreSQL, no-op jobs", "PostgreSQL", "SQLite", 0.7, "noop", "stores"),
    ]
    result += [_kept(results, *figure) for figure in KEPT]
    result += [
        _most(results, "jobs lost by the kills", "kills", PIPELINE, "lost", 0, ""),
        _most(results, "jobs duplicated by the kills", "kills", PIPELINE, "duplicated", 0, ""),
    ]
    return result


def _times(
    results: Results,
    text: str,
    one: str,
    other: str,
    wanted: float,
    key: str = "noop",
    section: str = "throughput",
    sign: str = "≥",
) -> Target:
    title = results["peers"].get(other, {}).get("title", other)
    ratio = compare(results, section, key, one, other)
    goal = f"{sign} {wanted:g} × {title}"
    if ratio is None:
        return Target(text, goal, "–", "not measured")
    if not ratio.stable:
        return Target(text, goal, UNSTABLE, UNSTABLE)
    by = ratio.median - wanted
    kept = by <= 0 if sign == "≤" else by > 0 if sign == ">" else by >= 0
    return Target(text, goal, str(ratio), "met" if kept else f"missed by {abs(by):.2f} ×")


def _kept(results: Results, section: str, row: str, key: str) -> Target:
    now, before = median(results, section, row, key), results.get("before", {}).get(f"{section}/{row}/{key}")
    known = now is not None and before
    goal = f"≥ {1 - NOISE:g} ×" + (f" {number(before)}" if known else "")
    text = f"{section}, {row}: {key} per second as before"
    return _at_least(text, goal, now / before if known else None, 1 - NOISE)


def _least(results: Results, text: str, section: str, row: str, key: str, wanted: float) -> Target:
    return _at_least(text, f"≥ {wanted:g} ×", median(results, section, row, key), wanted)


def _at_least(text: str, goal: str, times: float | None, least: float) -> Target:
    if times is None:
        return Target(text, goal, "–", "not measured")
    return Target(text, goal, f"{times:.2f} ×", "met" if times >= least else f"missed by {least - times:.2f} ×")


def _most(results: Results, text: str, section: str, row: str, key: str, wanted: float, unit: str) -> Target:
    rounds = values(results, section, row, key)
    if not rounds:
        return Target(text, f"≤ {wanted:g}{unit}", "–", "not measured")
    worst = max(rounds) if wanted == 0 else median(results, section, row, key) or 0.0
    verdict = "met" if worst <= wanted else f"missed by {worst - wanted:g}{unit}"
    return Target(text, f"≤ {wanted:g}{unit}", f"{worst:g}{unit}", verdict)


def _scaling(results: Results, name: str, peer: str) -> Target:
    """Two processes to one. Where it is missed, what the cores allow at most: Redis runs on them too."""
    target = _least(results, f"two processes to one, {name}", "throughput", peer, "scaling", 1.7)
    rate, worker, redis = (median(results, "throughput", peer, key) for key in ("noop", "worker_us", "redis_us"))
    if target.met or not (rate and worker and redis):
        return target
    cpus = results["machine"]["cpus"]
    most = cpus * 1e6 / (worker + redis) / rate
    why = f"; {cpus} cores allow {most:.2f} × with Redis on them" if most < 1.7 else ""
    return replace(target, verdict=target.verdict + why)


def _by_cpu(results: Results, target: Target, peer: str) -> Target:
    """Where it is not met: what the worker's CPU time per job allows, which a busy host changes less than a rate."""
    ours, theirs = (median(results, "throughput", name, "worker_us") for name in (PIPELINE, peer))
    if target.met or not (ours and theirs):
        return target
    allows = f"{number(ours)} µs of CPU per job against {number(theirs)} allow {theirs / ours:.2f} ×"
    return replace(target, verdict=f"{target.verdict}; {allows}")
