"""`harness.kafka` without Java: a process with a mock broker of librdkafka. Prints `brokers-at host:port` and stays."""

import signal

import confluent_kafka

if __name__ == "__main__":
    host = confluent_kafka.Producer({"test.mock.num.brokers": 1})
    (broker,) = host.list_topics(timeout=20).brokers.values()
    print(f"brokers-at 127.0.0.1:{broker.port}", flush=True)
    signal.pause()
