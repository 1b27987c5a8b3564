"""A process that imports the libraries once and forks every Python program it is asked for.

Most CPU time of a fault test went into starting Python: a worker imports for a second before it works, and a proof
starts ten of them. A fork is a process like any other, with a session, environment and output of its own; it is killed
with the test run and imports our code itself. Only on Linux, where all of that depends on one death signal.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Not prometheus_client and not opentelemetry: what they are depends on the environment they are imported in.
LIBRARIES = [
    *("aiosqlite", "bullmq", "croniter", "cryptography.fernet", "fastapi", "httpx2", "pydantic", "rich.console"),
    *("redis.asyncio.sentinel", "sqlalchemy.dialects.sqlite", "sqlalchemy.ext.asyncio", "typer", "uvicorn", "uvloop"),
]
_PR_SET_PDEATHSIG = 1


class Forked:
    """As much of `Popen` as the harness uses."""

    def __init__(self, pid: int, listen: Callable[[float], None]) -> None:
        self.pid, self._listen = pid, listen
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self._listen(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self._listen(0.05)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    """The test run's side."""

    def __init__(self) -> None:
        from .processes import start_tied

        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._process = start_tied([sys.executable, __file__], stdin=theirs, env=environment)
        theirs.close()
        self._lock = threading.RLock()
        self._running: dict[int, Forked] = {}

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: int) -> Forked:
        request = json.dumps({"argv": list(argv), "env": dict(env), "cwd": str(cwd)}).encode()
        with self._lock:
            socket.send_fds(self._socket, [request], [log])
            while (pid := self._hear()) is None:
                pass
            self._running[pid] = Forked(pid, self._listen)
            return self._running[pid]

    def _listen(self, seconds: float) -> None:
        with self._lock:
            while select.select([self._socket], [], [], seconds)[0]:
                seconds = 0
                self._hear()

    def _hear(self) -> int | None:
        """One message: the pid of a process that was started, or None for one that ended."""
        text = self._socket.recv(1_000)
        assert text, "the process that starts the others has ended"
        pid, code = json.loads(text)
        if code is None:
            return int(pid)
        self._running.pop(pid).returncode = code
        return None


@functools.cache
def _server() -> _Server:
    return _Server()


def _fork(argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: int) -> Forked:
    """`python *argv`; `log` takes what it prints."""
    return _server().start(argv, env, cwd, log)


def pytest_configure() -> None:
    from .processes import Spawned

    if sys.platform == "linux":
        Spawned.fork = staticmethod(_fork)


# ---- its own side


def serve(asked: socket.socket) -> dict[str, Any]:
    """Answers forever; returns in each new process, with what that process is asked for."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write)
    ours = os.getpid()
    while True:
        ready, _, _ = select.select([asked.fileno(), read], [], [])
        if read in ready:
            os.read(read, 4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    asked.send(json.dumps([ended[0], os.waitstatus_to_exitcode(ended[1])]).encode())
        if asked.fileno() in ready:
            text, [log, *_], _, _ = socket.recv_fds(asked, 1_000_000, 1)
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                # A shell's background job ignores Ctrl-C, and so would every child of a test run started as one.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.setsid()
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != ours:  # it ended before prctl: no signal will come
                    os._exit(1)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.closerange(3, max(asked.fileno(), read, write, log) + 2)
                asked.detach()
                request: dict[str, Any] = json.loads(text)
                return request
            os.close(log)
            asked.send(json.dumps([pid, None]).encode())


def become(argv: list[str], env: dict[str, str], cwd: str, base: list[str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    os.chdir(cwd)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), encoding="utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), encoding="utf-8", errors="backslashreplace", write_through=True)
    module = argv[0] == "-m"
    first = cwd if module else str(Path(argv[0]).parent)
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *base]
    sys.argv = argv[1:] if module else argv
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    del sys.path[0]  # this folder: its redis.py is not the library
    base = sys.path[:]
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    become(**serve(socket.socket(fileno=os.dup(0))), base=base)


if __name__ == "__main__":
    main()
