"""A real Kafka broker or three on free loopback ports, with the jars that `queuesmith prove` fetches.

A broker answers after 3 s of CPU, killed and started again after 4 s. Without Java or Maven the suites that need no
kill run on librdkafka's mock brokers, which speak the real protocol over TCP to the real client: groups, rebalances,
commits, keyed partitions, idempotent producers. They keep everything in memory and know no CreateTopics.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from queuesmith.prove.kafka import HOW, command
from queuesmith.prove.spec import Wrong

from .brokers import Broker
from .missing import missing
from .ports import free_port
from .processes import Spawned, spawn_python


class KafkaServer(Broker):
    """Kafka's clients go to the address a broker names, past any proxy: `behind` is a second address, which leads to a
    proxy that listens on `proxy_port` and is to forward to `proxied_port`."""

    patience = 120.0

    def __init__(self, controllers: Sequence[int] = (), node: int = 1) -> None:
        super().__init__()
        controllers = controllers or (free_port(),)
        self.proxied_port, self.proxy_port = free_port(), free_port()
        self.url, self.behind = f"127.0.0.1:{self.port}", f"127.0.0.1:{self.proxy_port}"
        names = {"PLAINTEXT": self.port, "BEHIND": self.proxied_port, "CONTROLLER": controllers[node - 1]}
        more = {
            "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in names.items()),
            "advertised.listeners": f"PLAINTEXT://{self.url},BEHIND://{self.behind}",
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in names),
        }
        try:
            self._command = command(self.directory, self.port, controllers, node, more)
        except Wrong as error:
            shutil.rmtree(self.directory)
            missing(f"Kafka ({error})", HOW)

    @property
    def alive(self) -> bool:
        return self._process is not None

    def launch(self) -> None:
        self._process = self._run(self._command)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nobody answers. `thaw()` ends it."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            os.kill(self._process.pid, number)


class KafkaCluster:
    """Three brokers, each topic on all of them, written by two before it is confirmed. Used like one."""

    def __init__(self) -> None:
        controllers = [free_port() for _ in range(3)]
        self._servers = [KafkaServer(controllers, node) for node in (1, 2, 3)]
        self._killed = self._servers[0]
        self.url = ",".join(server.url for server in self._servers)

    @classmethod
    def start(cls) -> KafkaCluster:
        cluster = cls()
        for server in cluster._servers:
            server.launch()
        for server in cluster._servers:
            server.wait()
        return cluster

    def kill(self) -> None:
        """SIGKILL to the leader of a partition of the first topic."""
        from confluent_kafka.admin import AdminClient

        topics = AdminClient({"bootstrap.servers": self.url}).list_topics(timeout=30).topics
        first = min(name for name in topics if not name.startswith("__"))
        self._killed = self._servers[topics[first].partitions[0].leader - 1]
        self._killed.kill()

    def restart(self) -> None:
        self._killed.restart()

    def stop(self) -> None:
        for server in self._servers:
            server.stop()


class MockKafka:
    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="test-kafka-")
        self._process: Spawned = spawn_python(
            Path(__file__).with_name("kafka_brokers.py"), log=Path(self._directory.name) / "log"
        )
        # Marks it for `buses`, also in other processes.
        self.url = f"mock:{self._process.line_sync('brokers-at', timeout=30).split()[1]}"

    def freeze(self) -> None:
        self._process.stop_signal()

    def thaw(self) -> None:
        self._process.cont()

    def stop(self) -> None:
        self._process.close()
        self._directory.cleanup()


@pytest.fixture(scope="session")
def any_kafka() -> Iterator[KafkaServer | MockKafka]:
    """One broker for the whole run (one per xdist worker)."""
    if find_spec("confluent_kafka") is None:
        missing("confluent-kafka", "pip install 'queuesmith[brokers]'")
    server: KafkaServer | MockKafka
    try:
        server = KafkaServer.start()
    except pytest.skip.Exception:
        server = MockKafka()
    yield server
    server.stop()


@pytest.fixture
def kafka_server(any_kafka: KafkaServer | MockKafka) -> Iterator[KafkaServer]:
    """The real one. Kill, freeze, restart it as you like: its data stays."""
    if isinstance(any_kafka, MockKafka):
        missing("Kafka", HOW)
    yield any_kafka
    any_kafka.thaw()
    if not any_kafka.alive:
        any_kafka.restart()


@pytest.fixture
def kafka_url(any_kafka: KafkaServer | MockKafka) -> str:
    """Bootstrap servers of the shared broker. Topics of earlier tests are still there: use names of your own."""
    return any_kafka.url


@pytest.fixture(scope="session")
def three_kafka_url() -> Iterator[str]:
    cluster = KafkaCluster.start()
    yield cluster.url
    cluster.stop()
