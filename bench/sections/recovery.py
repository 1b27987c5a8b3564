"""Seconds until a job runs again after its worker was killed in the middle of it and another started at once."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import redis

from bench.figures import Column, Value, less
from bench.lab import Lab, Peer

from .crash import TAKEOVER, WORDS, alone, held, traffic

TITLE = "Recovery after SIGKILL"
ABOUT = (
    "One job, killed with its worker while it runs; a new worker is started at once, and one more job arrives every "
    "second. Seconds from the kill to the second start of the job: with the peer's default time limits, and with those "
    f"lowered so that a dead worker's job is given away after {TAKEOVER:g} s where the peer lets one choose. Full runs "
    "wait for 90 s, quick ones for 40 s."
)
COLUMNS = {
    "default": less("default limits", "s"),
    "lowered": less("lowered limits", "s"),
    "by_default": Column("by its documentation and source", better=""),
    "settings": Column("what was lowered", better=""),
}
ROUNDS = 1
AT_ONCE = 4  # peers; they do nothing but wait
FORGETS = ("huey",)  # what it runs is not in Redis


def measure(lab: Lab) -> dict[str, dict[str, Value]]:
    limit = lab.scale(40, 90)
    rows: dict[str, dict[str, Value]] = {peer.id: {} for peer in lab.peers}

    def run_turn(turn: tuple[Peer, str]) -> None:
        peer, mode = turn
        try:
            rows[peer.id][mode] = recover(lab, peer, limit=limit, lowered=mode == "lowered")
            lab.say(f"{peer.title}: {mode} limits: {rows[peer.id][mode]}")
        except (RuntimeError, OSError, redis.RedisError) as error:
            lab.failed(peer, error)

    # The long waits first, so that the threads end together.
    with ThreadPoolExecutor(AT_ONCE) as turns:
        list(turns.map(run_turn, [(peer, mode) for mode in ("default", "lowered") for peer in lab.peers]))
    return {name: row for name, row in rows.items() if "default" in row and "lowered" in row}


def words(peer: str) -> dict[str, Value]:
    return {"by_default": WORDS[peer].default, "settings": WORDS[peer].takeover}


def recover(lab: Lab, peer: Peer, *, limit: float, lowered: bool) -> float | str:
    """Seconds, or why there are none: it took longer than `limit`, or the peer gave the job up or forgot it."""
    options = {"takeover": TAKEOVER, "tries": 5} if lowered else {}
    with alone(lab, peer) as (bench, effects, client):
        workers = bench.start(concurrency=1, kind="begin", **options)  # type: ignore[arg-type]
        bench.enqueue(1, first=1, **options)
        bench.finished(1, workers, 60)  # the worker is up and idle
        bench.enqueue(1, kind="begin", **options)
        if not _within(30, lambda: effects.times()[0] == 1):
            raise RuntimeError(f"the job did not start; its workers said: {workers.said()[-500:]}")
        time.sleep(0.3)
        workers.kill()
        killed = time.monotonic()
        if peer.id not in FORGETS and not held(peer, client, bench.queue).running:
            raise RuntimeError("the job had ended before the kill: the machine is too busy to measure this")
        bench.start(concurrency=1, kind="begin", **options)  # type: ignore[arg-type]
        with traffic(bench, 2, **options):
            if _within(limit, lambda: effects.times()[0] > 1):
                return round(time.monotonic() - killed, 1)
        left = held(peer, client, bench.queue)
        return f"given up within {limit:g}" if left.dead else "never" if left.idle else f"> {limit:g}"


def _within(seconds: float, happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
