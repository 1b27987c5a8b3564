"""A real PostgreSQL in a temp dir on a free loopback port: one server per run, one new database per test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from queuesmith.prove.processes import family, send
from queuesmith.prove.servers import as_unprivileged, postgres_binaries
from queuesmith.prove.spec import Wrong
from studyhall.patterns.core.open_store import close, create_all, open_store

from .missing import missing
from .ports import free_port
from .processes import start_tied


class PostgresServer:
    """`start()`, then `url`. `kill()` is SIGKILL, `restart()` comes back on the same port and data."""

    def __init__(self) -> None:
        try:
            self._bin = postgres_binaries()
        except Wrong as error:
            missing("PostgreSQL", str(error))
        # Not pytest's tmp_path: that is closed to the unprivileged user a root test run must switch to.
        self.directory = Path(tempfile.mkdtemp(prefix="test-postgres-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._as_user: dict[str, Any] = {}
        if os.geteuid() == 0:  # initdb refuses root
            self._as_user = as_unprivileged(self.directory)

    @classmethod
    def start(cls) -> PostgresServer:
        server = cls()
        made = subprocess.run(
            f"{server._bin}/initdb -D {server.directory}/data -U test -A trust -E UTF8 --locale=C -N".split(),
            capture_output=True,
            text=True,
            cwd="/",
            check=False,
            **server._as_user,
        )
        assert made.returncode == 0, f"initdb failed: {made.stderr or made.stdout}"
        server._launch()
        return server

    @property
    def url(self) -> str:
        return self.database_url("postgres")

    @property
    def pid(self) -> int:
        assert self._process is not None, "PostgreSQL is not running"
        return self._process.pid

    def database_url(self, name: str) -> str:
        return f"postgresql://test@127.0.0.1:{self.port}/{name}"

    def execute(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement.encode())

    def kill(self) -> None:
        """SIGKILL to every process of the server at once, as a crash of the machine would."""
        # Not to the postmaster alone: its children go on serving for a moment.
        os.kill(self.pid, signal.SIGSTOP)  # so that it starts no more of them
        children = family(self.pid)[1:]
        self._end(signal.SIGKILL)
        send(children, signal.SIGKILL)

    def restart(self) -> None:
        """Up again on the same port and data (every session is cut first if it still runs)."""
        self._end(signal.SIGINT)
        self._launch()

    def stop(self) -> None:
        self._end(signal.SIGQUIT)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(30)
            self._process = None

    def _launch(self) -> None:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.directory,
            # Our faults are dead processes, not lost power: the page cache survives them without fsync.
            "fsync": "off",
            "max_connections": 200,
            "shared_buffers": "32MB",
        }
        argv = [str(self._bin / "postgres"), "-D", str(self.directory / "data")]
        argv += [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        log = self.directory / "log"
        deadline = time.monotonic() + 30
        while True:
            with log.open("ab") as out:
                self._process = start_tied(
                    argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/", **self._as_user
                )
            while self._process.poll() is None and time.monotonic() < deadline:
                if self._answers():
                    return
                time.sleep(0.02)
            # After a SIGKILL of the postmaster its last children may hold the shared memory for a moment.
            if time.monotonic() >= deadline:
                self._end(signal.SIGKILL)
                raise AssertionError(f"PostgreSQL did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)

    def _answers(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.url, connect_timeout=2).close()
            return True
        return False


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One server for the whole run (one per xdist worker). Never kill it: take `own_postgres`."""
    server = PostgresServer.start()
    yield server
    server.stop()


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server of this test alone: kill it, restart it."""
    server = PostgresServer.start()
    yield server
    server.stop()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """URL of a database made for this test."""
    name = f"t{uuid.uuid4().hex[:12]}"
    postgres_server.execute(f"CREATE DATABASE {name}")
    # More patience than the store's own: a shared server is slow to fork.
    yield f"{postgres_server.database_url(name)}?connect_timeout=30"
    postgres_server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.needs_postgres)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Runs the test twice: on an SQLite file and on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest_asyncio.fixture
async def store(store_url: str) -> AsyncIterator[AsyncEngine]:
    """`store_url`, opened, with the tables of every pattern imported so far."""
    engine = open_store(store_url)
    await create_all(engine)
    yield engine
    await close(engine)
