"""Functions that tests run in the children of a SubprocessPool: good, hungry, hung and deadly ones."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from studyhall.patterns.core.errors import Cancelled, Permanent, RateLimited, ResourceBusy, Snooze, Transient


def add(left, right):
    return left + right


def pid():
    return os.getpid()


async def echo_later(value):
    return value


def compute(seconds):
    """Holds the CPU and, in the naive twin, the event loop."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(1_000))
    return "computed"


def spin_forever(mark=""):
    if mark:
        Path(mark).write_text(str(os.getpid()))
    while True:
        pass


def start_a_grandchild_and_hang(mark):
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(mark).write_text(str(grandchild.pid))
    grandchild.wait()


def neighbour(gate, number):
    """Still works when the process killer strikes, and ends after it."""
    while not Path(gate).exists():
        time.sleep(0.01)
    return number


def die(how):
    match how:
        case "sigkill":  # what the kernel's OOM killer does
            os.kill(os.getpid(), signal.SIGKILL)
        case "os._exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(4)
        case "segfault":
            ctypes.string_at(0)


def allocate(megabytes):
    return len(bytearray(megabytes << 20))


def print_and_read():
    print("this must not reach the pipe that carries the answers")
    return sys.stdin.read()


class Awkward(Exception):
    """Cannot be pickled, as errors that hold a connection or a lock cannot."""

    def __init__(self):
        super().__init__("awkward indeed")
        self.lock = threading.Lock()


def fail(how):
    raise {
        "transient": Transient("503"),
        "permanent": Permanent("no such page"),
        "rate-limited": RateLimited("slow down", retry_after=7.5),
        "busy": ResourceBusy("no seat", retry_after=2.5),
        "snooze": Snooze(60),
        "cancelled": Cancelled("stop"),
        "os": FileNotFoundError(2, "No such file", "/no/such/file"),
        "value": ValueError("broken page 7"),
        "awkward": Awkward(),
    }[how]


def unsendable():
    return threading.Lock()


def large(megabytes):
    return bytes(megabytes << 20)
