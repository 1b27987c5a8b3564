"""A real PostgreSQL in a temp dir on a free loopback port; one server per test run, one fresh database per test."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from studyhall.patterns.store import close, create_all, open_store

HOW_TO_GET = (
    "no PostgreSQL server binaries: install your system's `postgresql` package, or put initdb on PATH"
)


def binaries() -> Path | None:
    """The directory with `initdb` and `postgres`; Debian keeps them off PATH, newest version wins."""
    on_path = shutil.which("initdb")
    candidates = [Path(on_path).resolve().parent] if on_path else []
    debian = glob.glob("/usr/lib/postgresql/*/bin")
    candidates += [
        Path(found) for found in sorted(debian, key=lambda p: float(p.split("/")[-2]), reverse=True)
    ]
    return next(
        (found for found in candidates if (found / "initdb").exists() and (found / "postgres").exists()), None
    )


class PostgresServer:
    """`start()`, then `url`. `kill()` is SIGKILL, `restart()` comes back on the same port and data."""

    def __init__(self, bin_dir: Path) -> None:
        self._bin = bin_dir
        # Not pytest's tmp_path: that is closed to the unprivileged user a root test run must switch to.
        self.dir = Path(tempfile.mkdtemp(prefix="queuesmith-pg-"))
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._user = _unprivileged_user() if os.geteuid() == 0 else None
        if self._user:
            os.chown(self.dir, self._user.pw_uid, self._user.pw_gid)
        self._run(
            "initdb",
            "-D",
            str(self.dir / "data"),
            "-U",
            "test",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-sync",
            "--locale=C",
        )

    @property
    def url(self) -> str:
        return self.database_url("postgres")

    @property
    def pid(self) -> int:
        assert self._process is not None, "PostgreSQL is not running"
        return self._process.pid

    def database_url(self, name: str) -> str:
        return f"postgresql://test@127.0.0.1:{self.port}/{name}"

    def start(self) -> PostgresServer:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.dir,
            # Our faults are dead processes, not lost power: the page cache survives them, so no fsync is needed.
            "fsync": "off",
            "max_connections": 200,
            "shared_buffers": "32MB",
        }
        options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        with (self.dir / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self.dir / "data", *options],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/", preexec_fn=_die_with_parent, **self._as_user(),
            )  # fmt: skip
        deadline = time.monotonic() + 30
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"PostgreSQL did not start:\n{(self.dir / 'log').read_text()[-2000:]}")
            time.sleep(0.02)
        return self

    def kill(self) -> None:
        """SIGKILL the postmaster; its children notice and leave, the shared memory is dropped on the next start."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        if self._process is not None:
            self._end(signal.SIGINT)
        self.start()

    def stop(self) -> None:
        if self._process is not None:
            self._end(signal.SIGQUIT)
        shutil.rmtree(self.dir, ignore_errors=True)

    def execute(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement.encode())

    def _end(self, how: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(30)
        self._process = None

    def _answers(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.url, connect_timeout=2).close()
            return True
        return False

    def _run(self, program: str, *args: str) -> None:
        done = subprocess.run(
            [self._bin / program, *args],
            capture_output=True,
            text=True,
            cwd="/",
            check=False,
            **self._as_user(),
        )
        assert done.returncode == 0, f"{program} failed: {done.stderr or done.stdout}"

    def _as_user(self) -> dict[str, int | list[int]]:
        if self._user is None:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    server = _new_server()
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server of this test's own: it may be killed."""
    server = _new_server()
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    name = f"t{uuid.uuid4().hex[:12]}"
    postgres_server.execute(f"CREATE DATABASE {name}")
    yield postgres_server.database_url(name)
    postgres_server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.needs_postgres)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Runs the test twice: on an SQLite file and on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest_asyncio.fixture
async def store(store_url: str) -> AsyncIterator[AsyncEngine]:
    """`store_url`, opened, with the tables of every imported pattern."""
    engine = open_store(store_url)
    await create_all(engine)
    yield engine
    await close(engine)


def _new_server() -> PostgresServer:
    found = binaries()
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail(HOW_TO_GET)
        pytest.skip(HOW_TO_GET)
    return PostgresServer(found)


def _unprivileged_user() -> pwd.struct_passwd:
    """initdb refuses root."""
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise AssertionError("running as root without a `postgres` or `nobody` user to start PostgreSQL as")


def _die_with_parent() -> None:
    """A killed test run must not leave a server behind (PR_SET_PDEATHSIG; Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGQUIT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
