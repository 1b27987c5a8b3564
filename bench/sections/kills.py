"""The same jobs and the same kills for every peer: what is lost, and what happens twice.

Each job works for 20 ms, inserts a row and works for another 20 ms. The worker is killed when the number of jobs done
passes a mark, and a random moment later, as the end of a container or the kernel's out-of-memory killer does it. All
the while one more job without effect arrives every second, as in a queue that is in use.
"""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import redis

from bench.figures import Column, Value, less
from bench.lab import Bench, Lab, Peer, Workers

from .crash import TAKEOVER, WORDS, Effects, Held, alone, held, traffic

TITLE = "Lost and duplicated by kills"
ABOUT = (
    "1,000 jobs (quick: 200), four at a time, each with one INSERT in its middle; the worker with all its processes is "
    "killed with SIGKILL 20 times (quick: 5) at the same seeded moments for every peer, and restarted at once. Jobs of "
    f"a dead worker are given away after {TAKEOVER:g} s where the peer lets one choose, and no peer counts "
    "the kills as too many tries; both are shown. The full pipeline inserts its row through `Done(save=…)`, all others "
    "as handlers usually do. Lost: no row, and not stuck. Duplicated: more than one row. Given up: the peer says "
    "failed or dead. Stuck: the peer still says running at the end of the time limit."
)
COLUMNS = {
    "kills": Column("kills", better=""),
    "lost": less("lost", "jobs"),
    "duplicated": less("duplicated", "jobs"),
    "given_up": less("given up", "jobs"),
    "stuck": less("stuck", "jobs"),
    "seconds": less("at rest after the last kill", "s"),
    "settings": Column("settings", better=""),
    "why": Column("what a crash does", better=""),
}
ROUNDS = 1
SEED = 9
AT_A_TIME = 4  # jobs
ONE_PER_PROCESS = ("celery", "rq")
AT_REST = 3.0  # seconds without anything waiting or running: some peers do not say what is running
AT_ONCE = 3  # peers; the work is waiting, not computing
SLOWEST = ("saq", "rq")  # they come to rest minutes later: they start first


def measure(lab: Lab) -> dict[str, dict[str, Value]]:
    jobs, kills, limit = lab.scale((200, 5, 130), (1_000, 20, 480))
    rows: dict[str, dict[str, Value]] = {}

    def try_peer(peer: Peer) -> None:
        try:
            rows[peer.id] = survive(lab, peer, jobs=jobs, kills=kills, limit=limit, seed=SEED + lab.round)
        except (RuntimeError, OSError, redis.RedisError) as error:
            lab.failed(peer, error)

    with ThreadPoolExecutor(AT_ONCE) as turns:
        list(turns.map(try_peer, sorted(lab.peers, key=lambda peer: peer.id not in SLOWEST)))
    return {peer.id: rows[peer.id] for peer in lab.peers if peer.id in rows}


def survive(lab: Lab, peer: Peer, *, jobs: int, kills: int, limit: float, seed: int) -> dict[str, Value]:
    """One row of the table."""
    with alone(lab, peer) as (bench, effects, client):
        bench.enqueue(jobs, kind="row", bulk=True, takeover=TAKEOVER, tries=kills + 5)
        with traffic(bench, jobs, takeover=TAKEOVER, tries=kills + 5):
            done = _kill(bench, effects, moments(jobs, kills, seed), limit, tries=kills + 5)
            began = time.monotonic()
            rest = _at_rest(effects, jobs, partial(held, peer, client, bench.queue), limit)
        left, times = held(peer, client, bench.queue), effects.times()
        lab.say(f"{peer.title}: {done} kills, {len(times)} of {jobs} done, {time.monotonic() - began:.0f} s after them")
    return {
        "kills": done,
        "lost": max(0, jobs - len(times) - left.running),  # what is stuck may come back one day
        "duplicated": sum(1 for count in times.values() if count > 1),
        "given_up": left.dead,
        "stuck": left.running,
        "seconds": f"> {limit:g}" if rest is None else round(rest, 1),
    }


def words(peer: str) -> dict[str, Value]:
    return {"settings": WORDS[peer].takeover, "why": WORDS[peer].why}


def moments(jobs: int, kills: int, seed: int) -> list[tuple[int, float]]:
    """(jobs done, seconds more) at which to kill: while there is work to do, anywhere within a job's 40 ms."""
    rng = random.Random(seed)
    marks = sorted(rng.sample(range(jobs // 20, jobs * 9 // 10), kills))
    return [(mark, rng.uniform(0, 0.04)) for mark in marks]


def _kill(bench: Bench, effects: Effects, when: list[tuple[int, float]], limit: float, *, tries: int) -> int:
    """How many kills there were: fewer than planned if the peer makes no progress for `limit` seconds."""

    def start() -> Workers:
        processes = AT_A_TIME if bench.peer.id in ONE_PER_PROCESS else 1
        return bench.start(processes, concurrency=AT_A_TIME // processes, kind="row", takeover=TAKEOVER, tries=tries)

    workers = start()
    for number, (mark, more) in enumerate(when):
        moved, seen = time.monotonic(), 0
        while (done := len(effects.times())) < mark:
            if done > seen:
                moved, seen = time.monotonic(), done
            if time.monotonic() - moved > limit:
                if not number and not done:
                    raise RuntimeError(f"no job ran at all; its workers said: {workers.said()[-500:]}")
                return number
            time.sleep(0.005)
        time.sleep(more)
        workers.kill()
        workers = start()
    return len(when)


def _at_rest(effects: Effects, jobs: int, look: partial[Held], limit: float) -> float | None:
    """Seconds until nothing was waiting or running any more; None: not in time."""
    began = time.monotonic()
    since: float | None = None
    while (now := time.monotonic()) - began < limit:
        if not look().idle:
            since = None
        elif since is None:
            since = now
        if since is not None and (len(effects.times()) == jobs or now - since > AT_REST):
            return since - began
        time.sleep(0.1)
    return None
