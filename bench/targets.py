"""What was promised, and whether the run kept it: met or missed, and by how much."""

from dataclasses import dataclass, replace

from bench.figures import UNSTABLE
from bench.results import Results, compare, median, values

PIPELINE, BARE = "queuesmith", "queuesmith-bare"
PYTHON_PEERS = ("stock", "celery", "rq", "arq", "saq", "taskiq", "dramatiq", "huey")


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
        _times(results, "full pipeline, no-op jobs", PIPELINE, "stock", 2.0),
        _times(results, "bare worker, no-op jobs", BARE, "stock", 4.0),
        _times(results, "bare worker, no-op jobs", BARE, "node", 0.5),
    ]
    result += [
        _times(results, "full pipeline ahead, no-op jobs of one process", PIPELINE, peer, 1.0)
        for peer in PYTHON_PEERS
        if peer != "stock" and peer in results["peers"]
    ]
    result += [
        _least(results, f"bulk enqueue to single, {name}", "enqueue", peer, "gain", 4.0)
        for name, peer in (("full pipeline", PIPELINE), ("bare", BARE))
    ]
    result += [_scaling(results, name, peer) for name, peer in (("full pipeline", PIPELINE), ("bare", BARE))]
    result += [
        _most(results, "p99 enqueue to start, idle queue", "latency", PIPELINE, "idle_p99", 10.0, " ms"),
        _most(results, "enqueue to start after a silence, worst", "silence", PIPELINE, "worst", 10.0, " ms"),
        _most(results, "jobs lost by the kills", "kills", PIPELINE, "lost", 0, ""),
        _most(results, "jobs duplicated by the kills", "kills", PIPELINE, "duplicated", 0, ""),
    ]
    return result


def _times(results: Results, text: str, row: str, other: str, wanted: float) -> Target:
    title = results["peers"].get(other, {}).get("title", other)
    ratio = compare(results, "throughput", "noop", row, other)
    sign = ">" if wanted == 1.0 else "≥"
    goal = f"{sign} {wanted:g} × {title}"
    if ratio is None:
        return Target(text, goal, "–", "not measured")
    if not ratio.stable:
        return Target(text, goal, UNSTABLE, UNSTABLE)
    kept = ratio.median > wanted if wanted == 1.0 else ratio.median >= wanted
    return Target(text, goal, str(ratio), "met" if kept else f"missed by {wanted - ratio.median:.2f} ×")


def _least(results: Results, text: str, section: str, row: str, key: str, wanted: float) -> Target:
    middle = median(results, section, row, key)
    if middle is None:
        return Target(text, f"≥ {wanted:g} ×", "–", "not measured")
    verdict = "met" if middle >= wanted else f"missed by {wanted - middle:.2f} ×"
    return Target(text, f"≥ {wanted:g} ×", f"{middle:.2f} ×", verdict)


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
