"""Real child processes that write to a log file and never outlive the test run.

A child dies with the test process even when that is SIGKILLed, on Linux through PDEATHSIG. The kernel
ties that signal to the *thread* that forked, so all children are forked by one thread that lives as long
as the process. macOS has no PDEATHSIG: there a SIGKILL of pytest itself can leave children behind.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pytest

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1
_forker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forker")
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def start_tied(argv: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
    """`Popen(argv, **options)` in a session of its own, killed by the kernel when this process ends."""
    parent = os.getpid()

    def prepare() -> None:
        # A shell's background job ignores Ctrl-C, and so would every child of a test run started as one.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it ended between fork and prctl: no signal will come
                os._exit(1)

    def fork() -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, start_new_session=True, preexec_fn=prepare, **options)  # type: ignore[call-overload, no-any-return]  # noqa: PLW1509

    return _forker.submit(fork).result()


def alive(pid: int) -> bool:
    """Is there a process `pid` that still runs? A zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    return True


class Process(Protocol):
    """As much of `Popen` as is used here."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Spawned:
    """A running child. stdout and stderr go to `log`, line by line."""

    # How to start Python sooner, if the test run has a way: see `preloaded`.
    fork: Callable[[Sequence[str], Mapping[str, str], Path, int], Process] | None = None

    def __init__(
        self, argv: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path = ROOT, *, fork: bool = False
    ) -> None:
        self.argv, self.log = list(argv), log
        self.process: Process
        with log.open("wb") as out:
            if fork and Spawned.fork is not None:
                self.process = Spawned.fork(self.argv[1:], env, cwd, out.fileno())
            else:
                self.process = start_tied(
                    self.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=dict(env), cwd=cwd
                )
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative signal number when it was killed."""
        return self.process.poll()

    def kill(self) -> None:
        """SIGKILL to this process alone (not to its children) and wait for its end."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> None:
        """SIGTERM, without waiting."""
        self.process.terminate()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop_signal(self) -> None:
        """SIGSTOP: the process freezes, its connections stay open."""
        self.process.send_signal(signal.SIGSTOP)

    def cont(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def wait(self, timeout: float = 10) -> int:
        """Exit code. Blocks the event loop: in async tests use `await exited()`."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:g} s: {self}") from None

    async def exited(self, timeout: float = 10) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.returncode) is None:
            if time.monotonic() >= deadline:
                raise AssertionError(f"still running after {timeout:g} s: {self}")
            await asyncio.sleep(0.02)
        return code

    def lines(self) -> list[str]:
        """Every whole line written so far."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return text[: text.rfind("\n") + 1].splitlines()

    async def line(self, text: str, timeout: float = 20) -> str:
        """The first line that contains `text`, awaited. Fails at once when the process ends without it."""
        deadline = time.monotonic() + timeout
        while (line := self._find(text, deadline)) is None:
            await asyncio.sleep(0.02)
        return line

    def line_sync(self, text: str, timeout: float = 20) -> str:
        deadline = time.monotonic() + timeout
        while (line := self._find(text, deadline)) is None:
            time.sleep(0.02)
        return line

    def _find(self, text: str, deadline: float) -> str | None:
        ended = self.returncode is not None  # asked before reading: what it wrote last is in the log by now
        for line in self.lines():
            if text in line:
                return line
        if ended:
            raise AssertionError(f"ended with {self.returncode} before it printed {text!r}: {self}")
        if time.monotonic() >= deadline:
            raise AssertionError(f"did not print {text!r} in time: {self}")
        return None

    def close(self) -> None:
        """Kill it and whatever it started in its session, and reap it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(10)

    def __str__(self) -> str:
        tail = "\n".join(self.lines()[-40:])
        return f"{' '.join(self.argv[:6])} (pid {self.pid}); its output ends with:\n{tail}"


def spawn_python(
    module_or_path: str | Path,
    *args: object,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    cwd: Path = ROOT,
) -> Spawned:
    """`python -m module` or `python path.py`, with `reference` and `tests` importable. Close it yourself."""
    target = str(module_or_path)
    run = [target] if target.endswith(".py") else ["-m", target]
    return _spawn([sys.executable, *run, *map(str, args)], env, log, cwd, fork=True)


class Spawner:
    """What the fixture `spawn` gives: call it for Python, `.command()` for anything else.

    In /proc a forked Python shows its parent's command line and environment: to look there, use `.command()`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._all: list[Spawned] = []

    def __call__(
        self, module_or_path: str | Path, *args: object, env: Mapping[str, str] | None = None, cwd: Path = ROOT
    ) -> Spawned:
        return self._keep(spawn_python(module_or_path, *args, env=env, log=self._log(), cwd=cwd))

    def command(self, *argv: object, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Spawned:
        return self._keep(_spawn([str(part) for part in argv], env, self._log(), cwd))

    def close(self) -> None:
        for child in self._all:
            child.close()

    def _log(self) -> Path:
        return self._directory / f"process-{len(self._all)}.log"

    def _keep(self, child: Spawned) -> Spawned:
        self._all.append(child)
        return child


def _spawn(
    argv: list[str], env: Mapping[str, str] | None, log: Path | None, cwd: Path, *, fork: bool = False
) -> Spawned:
    if log is None:
        handle, name = tempfile.mkstemp(prefix="spawned-", suffix=".log")
        os.close(handle)
        log = Path(name)
    paths = [str(ROOT / "reference"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    full = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **(env or {})}
    return Spawned(argv, log, full, cwd, fork=fork)


@pytest.fixture
def spawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spawner]:
    """`spawn("package.module" or "program.py", *args, env=…)`: real processes, gone when the test ends."""
    spawner = Spawner(tmp_path_factory.mktemp("spawned"))
    yield spawner
    spawner.close()
