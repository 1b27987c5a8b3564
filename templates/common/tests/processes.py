"""Real processes of this service, for tests that stop and kill them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from {@ package @}.settings import PREFIX


class Processes:
    """Starts Python programs with the settings of this test, or with others: `start(..., port=8001)`."""

    def __init__(self, env: dict[str, str], logs: Path) -> None:
        self._env, self._logs = env, logs
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, **settings: object) -> subprocess.Popen[bytes]:
        env = self._env | {f"{PREFIX}{name.upper()}": str(value) for name, value in settings.items()}
        log = self._logs / f"{len(self._running)}-{Path(command[-1]).stem}.log"
        with log.open("wb") as out:
            process = subprocess.Popen([sys.executable, *command], env=env, cwd=self._logs, stdout=out, stderr=out)
        self._running.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL: no handler runs, nothing is cleaned up."""
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def output(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self._logs.glob("*.log")))

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.wait(10)


def until(look: Callable[[], object], what: str, timeout: float = 30) -> None:
    """Poll until `look` returns something true."""
    deadline = time.monotonic() + timeout
    while not look():
        assert time.monotonic() < deadline, f"no {what} after {timeout:g} s"
        time.sleep(0.05)
