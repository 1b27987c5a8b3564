"""Renews the locks of running jobs and looks for stalled ones, in a thread with its own connection.

Promise: a job keeps its lock while its worker is alive, even when a processor blocks the event loop for
longer than the lock lives; a job whose lock is gone is reported at once; the jobs of a dead worker come back
within `lock + check` seconds, also beside workers of BullMQ's own, in Node or Python.
It does not hold
- for a process that is stopped, or whose C code keeps the interpreter lock, longer than the lock lives: other
  workers take its jobs over, and on its return it is told which ones it lost;
- for an event loop that has been silent for `hung_after` seconds: its locks lapse on purpose, because a hung
  process must not keep jobs forever;
- when Redis itself is away for longer than a lock lives: then every lock is gone and every running job lost.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import msgpack
from bullmq.redis_connection import SCRIPT_DEFINITIONS, loadScript

from ..core.worker_connections import lock_client

__all__ = ["HeldLock", "LockKeeper"]

BEAT_SECONDS = 0.25


class HeldLock(Protocol):
    """A lock to keep: what the worker knows about a running job."""

    @property
    def job_id(self) -> str: ...
    @property
    def token(self) -> str: ...


H = TypeVar("H", bound=HeldLock)


class LockKeeper(Generic[H]):
    def __init__(
        self,
        url: str,
        keys: dict[str, str],
        *,
        name: str,
        lock: float,
        check: float,
        max_stalled: int,
        hung_after: float,
        held: Callable[[], Sequence[H]],
        on_lost: Callable[[H], None],
        on_stalled: Callable[[str], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._url, self._keys, self._name = url, keys, name
        self._lock, self._check, self._max_stalled, self._hung_after = lock, check, max_stalled, hung_after
        self._held, self._on_lost, self._on_stalled, self._on_error = held, on_lost, on_stalled, on_error
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="lock keeper", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._beat()
        self._thread.start()

    async def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._pulse.cancel()
            await asyncio.to_thread(self._thread.join, 5)

    def _beat(self) -> None:
        self._last_beat = time.monotonic()
        self._pulse = self._loop.call_later(BEAT_SECONDS, self._beat)

    def _work(self) -> None:
        client = lock_client(self._url, name=self._name)
        extend, sweep = (
            client.register_script(loadScript(SCRIPT_DEFINITIONS[name]))
            for name in ("extendLocks", "moveStalledJobsToWait")
        )
        renew_at = check_at = time.monotonic()
        while not self._stop.wait(max(0.01, min(renew_at, check_at) - time.monotonic())):
            now = time.monotonic()
            try:
                if now >= renew_at:
                    # Four tries within the life of a lock: two may fail or come late before one is lost.
                    renew_at = now + self._lock / 4
                    if now - self._last_beat < self._hung_after:
                        self._renew(extend)
                if now >= check_at:
                    check_at = now + self._check * random.uniform(0.8, 1.0)  # workers must not check in step
                    self._sweep(sweep)
            except Exception as error:  # whatever it is: without this thread every lock runs out
                renew_at = check_at = time.monotonic() + random.uniform(0.2, 0.5)
                self._tell(self._on_error, error)
        client.close()

    def _renew(self, extend: Callable[..., list[str]]) -> None:
        held = list(self._held())
        if not held:
            return
        tokens, ids = [lock.token for lock in held], [lock.job_id for lock in held]
        args = [self._keys[""], msgpack.packb(tokens), msgpack.packb(ids), int(self._lock * 1000)]
        lost = set(extend(keys=[self._keys["stalled"]], args=args))
        for lock in held:
            if lock.job_id in lost:
                self._tell(self._on_lost, lock)

    def _sweep(self, sweep: Callable[..., list[str]]) -> None:
        names = ("stalled", "wait", "active", "stalled-check", "meta", "paused", "marker", "events", "repeat")
        # A check blocks everybody else's for its worker's interval. BullMQ's workers hold their key for 30 s: beside
        # one of them jobs came back after 54 s. So our workers have their own key. More checks do no harm, because
        # the script moves only jobs that have no lock.
        keys = {**self._keys, "stalled-check": self._keys["stalled-check"] + ":reliable"}
        # The last argument is how long other checks are refused. With the full interval a single worker that
        # wakes a millisecond early would be refused by its own last check, and every second one be skipped.
        args = [self._max_stalled, self._keys[""], int(time.time() * 1000), int(self._check * 700)]
        for job_id in sweep(keys=[keys[name] for name in names], args=args):
            self._tell(self._on_stalled, job_id)

    def _tell(self, listener: Callable[..., None], about: object) -> None:
        try:
            self._loop.call_soon_threadsafe(listener, about)
        except RuntimeError:  # the loop is closed: nobody is left to keep locks for
            self._stop.set()
