"""The process behind `harness.kafka`: one mock broker of librdkafka. Prints `brokers-at host:port` and stays.

Through librdkafka's C interface where the wheel carries the library as a file, because only there the delay of a
group's first rebalance can be set (3 s otherwise, in every test); else through the client's own setting.
"""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path

import confluent_kafka

REBALANCE_DELAY_MS = 150


def from_library(library: Path) -> str:
    rdkafka = ctypes.CDLL(str(library))
    new, cluster_new = rdkafka.rd_kafka_new, rdkafka.rd_kafka_mock_cluster_new
    addresses, delay = (
        rdkafka.rd_kafka_mock_cluster_bootstraps,
        rdkafka.rd_kafka_mock_group_initial_rebalance_delay_ms,
    )
    new.restype = cluster_new.restype = ctypes.c_void_p
    new.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    cluster_new.argtypes = [ctypes.c_void_p, ctypes.c_int]
    addresses.restype, addresses.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    delay.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    cluster = cluster_new(new(0, None, ctypes.create_string_buffer(512), 512), 1)
    delay(cluster, REBALANCE_DELAY_MS)
    return str(addresses(cluster).decode())


def from_setting() -> tuple[str, confluent_kafka.Producer]:
    host = confluent_kafka.Producer({"test.mock.num.brokers": 1})
    ports = [broker.port for broker in host.list_topics(timeout=20).brokers.values()]
    return ",".join(f"127.0.0.1:{port}" for port in ports), host


if __name__ == "__main__":
    beside = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    if found := sorted(beside.glob("librdkafka*.so*")):
        print("brokers-at", from_library(found[0]), flush=True)
    else:
        where, keep_alive = from_setting()
        print("brokers-at", where, flush=True)
    signal.pause()
