"""Lives that end by SIGKILL: forks children from one warm process, so that a kill costs milliseconds.

Each child runs `live(life)` until it returns, or until its planned death: at a named point it reaches, or
anywhere within some milliseconds after its first point. Then the next one is forked, until all deaths have
happened; the last ones live on.
"""

import asyncio
import ctypes
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

ANYWHERE = "anywhere"


@dataclass
class Life:
    """One child. `slot` says which of the parallel children it is."""

    slot: int
    dies_at: str | None = None
    after: int = 0
    delay: float = 0.0
    _reached: Counter[str] = field(default_factory=Counter)

    def reached(self, point):
        """Call it at every named point; it does not return from the one it dies at."""
        if self.dies_at == ANYWHERE and not self._reached:
            threading.Timer(self.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        self._reached[point] += 1
        if point == self.dies_at and self._reached[point] > self.after:
            os.kill(os.getpid(), signal.SIGKILL)


def run(live, *, points, kills, seed, slots, most_after=3, longest=0.02):
    """How many died at which point. Raises when a child fails in any other way than by its planned death."""
    rng = random.Random(seed)
    plan = [[*points, ANYWHERE][n % (len(points) + 1)] for n in range(kills)]  # each point in turn
    rng.shuffle(plan)
    deaths = Counter()
    running = {}  # pid: slot, planned death

    def start(slot):
        dies_at = plan.pop() if plan else None
        life = Life(slot, dies_at, rng.randrange(most_after + 1), rng.uniform(0, longest))
        pid = os.fork()
        if pid == 0:
            _child(live, life)
        running[pid] = (slot, dies_at)

    for slot in range(slots):
        start(slot)
    while running:
        for pid, (slot, dies_at) in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del running[pid]
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and dies_at:
                deaths[dies_at] += 1
                start(slot)
            elif os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
                if plan:  # it finished before its death came: another has to die
                    start(slot)
            else:
                raise SystemExit(f"a child failed with status {status}")
        time.sleep(0.002)
    return deaths


def _child(live, life):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with the nursery
    try:
        asyncio.run(live(life))
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    os._exit(0)
