"""A real RabbitMQ node, with an epmd of its own, in a temp dir on free loopback ports."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from queuesmith.prove.servers import rabbitmq_environment

from .brokers import Broker
from .missing import need_binary
from .ports import free_port

HOW = "apt-get install rabbitmq-server (brew install rabbitmq); no service has to run"
# Debian's wrapper in /usr/sbin switches user and insists on the system's directories; this does neither.
SCRIPT = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


class RabbitServer(Broker):
    patience = 90.0

    def __init__(self) -> None:
        self._script = str(SCRIPT) if SCRIPT.exists() else need_binary("rabbitmq-server", how=HOW)
        erlang = tuple(map(str, Path("/usr/lib/erlang").glob("erts-*/bin")))
        self._epmd_binary = need_binary("epmd", how=HOW, also_in=erlang)
        super().__init__()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}/"
        self._dist, self._epmd_port = free_port(), free_port()
        self._epmd: subprocess.Popen[bytes] | None = None

    def has_on_disk(self, queue: str) -> bool:
        """RabbitMQ 3.10 writes the name of a new quorum queue to disk a second after declaring it: killed before
        that, it comes back without the queue. In a cluster the other nodes still have it."""
        files = self.directory.glob("data/*/quorum/*/names.dets")
        name = f"%2F_{queue}".encode()
        return any(bytes([len(name)]) + name in path.read_bytes() for path in files)

    def ctl(self, *command: str) -> None:
        """`rabbitmqctl command`, to this node."""
        script = SCRIPT.with_name("rabbitmqctl")
        binary = str(script) if script.exists() else need_binary("rabbitmqctl", how=HOW)
        environment = self._environment()
        argv = [binary, "-n", environment["RABBITMQ_NODENAME"], *command]
        done = subprocess.run(argv, check=False, env=environment, cwd=self.directory, capture_output=True, timeout=60)
        assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")[-1500:]

    def stop(self) -> None:
        if self._process is not None:  # politely: Erlang's helper processes end with it
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
        super().stop()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait(10)

    def launch(self) -> None:
        environment = self._environment()
        if self._epmd is None:
            # Ours and already running, or the node starts a daemon that outlives the tests and listens
            # on every address.
            self._epmd = self._run([self._epmd_binary], env=environment)
            self._await(self._epmd, self._epmd_port, 20)
        self._process = self._run([self._script], env=environment)

    def _environment(self) -> dict[str, str]:
        own = rabbitmq_environment(self.directory, self.port, self._dist, self._epmd_port)
        return {**os.environ, **own}


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
