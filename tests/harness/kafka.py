"""A Kafka cluster as far as one runs without Java: librdkafka's mock brokers, in a process of their own.

They speak the real protocol over TCP to the real client: groups, rebalances, commits, keyed partitions,
idempotent producers. They keep everything in memory, so a restart forgets it, and their transactions are not
honest (aborted messages are delivered), so nothing here may claim either.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .missing import missing
from .processes import Spawned, spawn_python

__all__ = ["MockKafka"]


class MockKafka:
    def __init__(self) -> None:
        try:
            import confluent_kafka  # noqa: F401
        except ImportError:
            missing("confluent-kafka", "pip install 'queuesmith[brokers]'")
        self._directory = tempfile.TemporaryDirectory(prefix="test-kafka-")
        self._process: Spawned = spawn_python(
            Path(__file__).with_name("kafka_brokers.py"), log=Path(self._directory.name) / "log"
        )
        self.bootstrap = self._process.line_sync("brokers-at", timeout=30).split()[1]

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nobody answers. `thaw()` ends it; what they hold is still there."""
        self._process.stop_signal()

    def thaw(self) -> None:
        self._process.cont()

    def stop(self) -> None:
        self._process.close()
        self._directory.cleanup()


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[MockKafka]:
    server = MockKafka()
    yield server
    server.stop()


@pytest.fixture
def kafka_bootstrap(kafka_server: MockKafka) -> str:
    """`host:port` of the shared brokers. Topics of earlier tests are still there: use names of your own."""
    return kafka_server.bootstrap
