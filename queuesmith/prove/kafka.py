"""A Kafka broker from Maven Central as a command line: KRaft, its own controller, no ZooKeeper, no container.

The jars (45 files, 43 MB) are fetched by Maven once, into the user's cache folder. A broker needs 3 s of CPU to
start, and 160 MB of memory.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .spec import Wrong

VERSION = "4.1.1"
HOW = "install Java 17 or newer and Maven (Debian: default-jre-headless maven); no service has to run"
_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>queuesmith</groupId><artifactId>kafka</artifactId><version>1</version><packaging>pom</packaging>
<dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{VERSION}</version></dependency>
<dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
</dependencies></project>
"""
_JVM = "-Xmx256m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dorg.slf4j.simpleLogger.defaultLogLevel=warn"


def command(
    folder: Path, port: int, controllers: Sequence[int], node: int = 1, more: Mapping[str, str] | None = None
) -> list[str]:
    """How to start broker `node` of a cluster with one port in `controllers` for each, its data in `folder`; again on
    the same data. `more`: further settings. `Wrong` says what is missing."""
    java = shutil.which("java")
    if java is None:
        raise Wrong(f"Kafka needs Java: {HOW}")
    jars, data, size = _jars(), folder.resolve() / "data", len(controllers)
    data.mkdir(parents=True, exist_ok=True)
    if not (data / "meta.properties").exists():  # what `kafka-storage format` writes, in another 2 s of CPU
        (data / "meta.properties").write_text(f"version=1\ncluster.id={'A' * 21}Q\nnode.id={node}\n")
    settings = {
        "process.roles": "broker,controller",
        "node.id": str(node),
        "controller.quorum.voters": ",".join(f"{n}@127.0.0.1:{at}" for n, at in enumerate(controllers, 1)),
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controllers[node - 1]}",
        "log.dirs": str(data),
        "default.replication.factor": str(size),
        "min.insync.replicas": str(size // 2 + 1),
        "offsets.topic.replication.factor": str(size),
        "transaction.state.log.replication.factor": str(size),
        "transaction.state.log.min.isr": str(size // 2 + 1),
        # Fifty partitions by default, each made and loaded again at every start.
        "offsets.topic.num.partitions": "2",
        "transaction.state.log.num.partitions": "2",
        # A first member waits 3 s for others, and a dead one is noticed after 6 s at the soonest.
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "1000",
        # How long a killed broker stays leader and keeps its successor on the same port from registering.
        "broker.session.timeout.ms": "4000",
        "broker.heartbeat.interval.ms": "500",
        # Otherwise 128 MB of heap.
        "log.cleaner.dedupe.buffer.size": "2097152",
        **(more or {}),
    }
    file = folder.resolve() / "server.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return [java, *_JVM.split(), "-cp", f"{jars}/*", "kafka.Kafka", str(file)]


def _jars() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "queuesmith"
    jars = cache / f"kafka-{VERSION}"
    if jars.is_dir():
        return jars
    maven = shutil.which("mvn")
    if maven is None:
        raise Wrong(f"Kafka's jars are fetched by Maven: {HOW}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kafka-", dir=cache) as made:
        Path(made, "pom.xml").write_text(_POM)
        argv = [maven, "-B", "-q", "dependency:copy-dependencies", "-DoutputDirectory=jars"]
        try:
            done = subprocess.run(
                argv, cwd=made, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=300
            )
        except subprocess.TimeoutExpired:
            raise Wrong("Maven did not fetch Kafka's jars within 300 s") from None
        if done.returncode:
            raise Wrong(f"Maven did not fetch Kafka's jars:\n{done.stdout.decode(errors='replace')[-1500:]}")
        with contextlib.suppress(OSError):  # another run was faster: its jars are the same
            Path(made, "jars").rename(jars)
    return jars
