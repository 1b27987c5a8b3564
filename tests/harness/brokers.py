"""A broker in a temp dir on free loopback ports: what NATS, RabbitMQ and Kafka have in common."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from .ports import free_port
from .processes import start_tied


class Broker(ABC):
    """`start()`, then `url`. `kill()` is SIGKILL, `restart()` comes back on the same ports and data."""

    patience = 20.0

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="test-broker-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls) -> Self:
        server = cls()
        server.restart()
        return server

    @abstractmethod
    def launch(self) -> None: ...

    def wait(self) -> None:
        assert self._process is not None
        self._await(self._process, self.port, self.patience)

    def kill(self) -> None:
        """SIGKILL, as a crash of the machine would."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(20)
            self._process = None

    def restart(self) -> None:
        """Up again (killed first if it still runs)."""
        self.kill()
        self.launch()
        self.wait()

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _run(self, argv: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
        with (self.directory / "log").open("ab") as out:
            return start_tied(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.directory, **options)

    def _await(self, process: subprocess.Popen[bytes], port: int, seconds: float, greeting: bytes = b"") -> None:
        deadline = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5) as probe:
                if not greeting or probe.recv(len(greeting)) == greeting:
                    return
            time.sleep(0.02)
        log = (self.directory / "log").read_text(errors="replace")[-2000:]
        raise AssertionError(f"the test server did not start:\n{log}")
