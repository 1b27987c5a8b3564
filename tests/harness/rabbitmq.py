"""A real RabbitMQ node, with an epmd of its own, in a temp dir on free loopback ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from queuesmith.prove.servers import rabbitmq_environment

from .missing import need_binary
from .ports import free_port
from .processes import start_tied

HOW = "apt-get install rabbitmq-server (brew install rabbitmq); no service has to run"
# Debian's wrapper in /usr/sbin switches user and insists on the system's directories; this does neither.
SCRIPT = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


class RabbitServer:
    """`start()`, then `url`. `kill()` is SIGKILL, `restart()` comes back on the same port and data."""

    def __init__(self) -> None:
        self._script = str(SCRIPT) if SCRIPT.exists() else need_binary("rabbitmq-server", how=HOW)
        self._epmd_binary = need_binary("epmd", how=HOW, also_in=_erlang())
        self.directory = Path(tempfile.mkdtemp(prefix="test-rabbitmq-"))
        self.port, self._dist, self._epmd_port = free_port(), free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._epmd: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls) -> RabbitServer:
        server = cls()
        server._launch()
        return server

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def kill(self) -> None:
        """SIGKILL, as a crash of the machine would."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(20)
            self._process = None

    def restart(self) -> None:
        """Up again on the same port and data (killed first if it still runs)."""
        self.kill()
        self._launch()

    def has_on_disk(self, queue: str) -> bool:
        """RabbitMQ 3.10 writes the name of a new quorum queue to disk a second after declaring it: killed before
        that, it comes back without the queue. In a cluster the other nodes still have it."""
        found = self.directory.glob("data/*/quorum/*/names.dets")
        name = f"%2F_{queue}".encode()
        return any(bytes([len(name)]) + name in path.read_bytes() for path in found)

    def ctl(self, *command: str) -> None:
        """`rabbitmqctl command`, to this node."""
        script = SCRIPT.with_name("rabbitmqctl")
        binary = str(script) if script.exists() else need_binary("rabbitmqctl", how=HOW)
        environment = self._environment()
        argv = [binary, "-n", environment["RABBITMQ_NODENAME"], *command]
        done = subprocess.run(argv, check=False, env=environment, cwd=self.directory, capture_output=True, timeout=60)
        assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")[-1500:]

    def stop(self) -> None:
        if self._process is not None:  # politely: Erlang's own helper processes leave with it
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
        self.kill()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait(10)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _launch(self) -> None:
        log = self.directory / "log"
        environment = self._environment()
        with log.open("ab") as out:
            quiet = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            if self._epmd is None:
                # Ours and already running, or the node starts a daemon that outlives the tests and listens
                # on every address.
                self._epmd = start_tied([self._epmd_binary], env=environment, **quiet)
                await_port(self._epmd, self._epmd_port, log, 20)
            self._process = start_tied([self._script], env=environment, cwd=self.directory, **quiet)
        await_port(self._process, self.port, log, 90)

    def _environment(self) -> dict[str, str]:
        own = rabbitmq_environment(self.directory, self.port, self._dist, self._epmd_port)
        return {**os.environ, **own}


def _erlang() -> tuple[str, ...]:
    return tuple(str(path.parent) for path in Path("/usr/lib/erlang").glob("erts-*/bin/epmd"))


def await_port(process: subprocess.Popen[bytes], port: int, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), 0.5):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"the test server did not start:\n{log.read_text(errors='replace')[-2000:]}")


@pytest.fixture(scope="session")
def rabbitmq_server() -> Iterator[RabbitServer]:
    """One node for the whole run (one per xdist worker). Restart it if you like: its data stays."""
    server = RabbitServer.start()
    yield server
    server.stop()


@pytest.fixture
def rabbitmq_url(rabbitmq_server: RabbitServer) -> str:
    """URL of the shared node. Queues of earlier tests are still there: use names of your own."""
    return rabbitmq_server.url
