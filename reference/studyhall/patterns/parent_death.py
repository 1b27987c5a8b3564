"""A child process that ends when its parent does, even when the parent was SIGKILLed.

Promise on Linux: the kernel sends the signal at the moment the parent's forking thread is gone.

It does not hold elsewhere: macOS and others have no such request, so a thread looks every second whether the
parent changed.
"""

import ctypes
import os
import signal
import sys
import threading
import time

__all__ = ["die_with_parent"]

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Call early in the child with the pid of the process that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent, number), daemon=True, name="parent-watch").start()
    if os.getppid() != parent:  # it died before we could ask
        os.kill(os.getpid(), number)


def _watch(parent: int, number: signal.Signals) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), number)
