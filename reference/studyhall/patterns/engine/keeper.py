"""The process that holds an embedded server as its child, so that it lives and dies with its users.

Promises
    The server runs while at least one user process is alive, and is gone within seconds of the last one:
    each user holds a shared flock on `users.lock`, which the kernel drops even on SIGKILL, and the keeper
    leaves as soon as it gets that lock exclusively. No pids are compared, so none can be mistaken. A server that
    dies alone comes back on the same port, password and data, where connected clients find it again. A
    keeper that dies alone takes the server along (Linux: PDEATHSIG), and its users start another.

Does not hold
    macOS has no PDEATHSIG: there a SIGKILLed keeper leaves its server running until the next keeper of the
    same directory ends it first. A child forked (not exec'ed) from a user counts as a user.

Started by `engine.ensure_redis` as a plain script with the standard library alone, never by hand.
"""

import ctypes
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

POLL_SECONDS = 0.2
TERM_SECONDS = 3.0
STARTS_IN_A_ROW = 3

# AOF because the default snapshots lost 2,000 of 2,000 acknowledged jobs on a kill; noeviction because an
# evicting server emptied the payloads of 3,367 jobs of 20,000, which then ran with no data.
SETTINGS = {
    "bind": "127.0.0.1",
    "protected-mode": "yes",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "save": "",
    "maxmemory-policy": "noeviction",
    "daemonize": "no",
    "logfile": "server.log",
}


def keep(directory: Path, binary: str, source: str) -> str:
    """Run the server until its last user is gone. Returns why that was not possible, or an empty string."""
    users = os.open(directory / "users.lock", os.O_RDWR | os.O_CREAT, 0o600)
    state = directory / "state.json"
    port, password = _end_orphan(state, directory)
    password, failures = password or secrets.token_hex(24), 0
    while failures < STARTS_IN_A_ROW:
        port, announced = _bindable(port), False
        server = _start(binary, directory, port, password)
        try:
            while server.poll() is None:
                if _nobody_holds(users):
                    state.unlink(missing_ok=True)
                    return ""
                if not announced and _is_up(server.pid, port, directory, password):
                    known = {"port": port, "pid": server.pid, "source": source, "password": password}
                    _write(state, known)
                    _let_go_of_starter()
                    announced, failures = True, 0
                time.sleep(POLL_SECONDS if announced else 0.01)
        finally:
            _stop(server)
        if not announced:
            failures += 1
            time.sleep(0.05 * 2**failures)
    return f"{binary} ended at once {failures} times"


def _start(binary: str, directory: Path, port: int, password: str) -> subprocess.Popen[bytes]:
    # In a file of our own user: everybody may read a process's arguments.
    config = directory / "server.conf"
    config.touch(mode=0o600)
    config.write_text(f"requirepass {password}\n")
    settings = {"port": str(port), "dir": str(directory), **SETTINGS}
    keeper = os.getpid()

    def die_with_keeper() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1 is PR_SET_PDEATHSIG
            if os.getppid() != keeper:
                os._exit(1)

    return subprocess.Popen(
        [binary, str(config), *(part for name, value in settings.items() for part in (f"--{name}", value))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=directory,
        preexec_fn=die_with_keeper,  # noqa: PLW1509  (the keeper has one thread)
    )


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(TERM_SECONDS)
    except subprocess.TimeoutExpired:  # stopped or stuck: SIGTERM never reached its loop
        server.kill()
        server.wait()


def _nobody_holds(users: int) -> bool:
    """Once taken, the lock is held until the keeper ends, so that a newcomer waits for a clean slate."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def info_if_serving(port: int, directory: Path, password: str = "") -> str:
    """INFO of the server on this loopback port, if `directory` is where it keeps its data; else nothing."""
    reply = _ask(port, _login(password) + b"CONFIG GET dir\r\nINFO server\r\nPING\r\n")
    where = b"\r\n" + os.fsencode(directory) + b"\r\n"
    return reply.decode(errors="replace") if where in reply else ""


def _is_up(pid: int, port: int, directory: Path, password: str) -> bool:
    """Has *our* server loaded its data? Another one may have taken the port a moment ago."""
    reply = info_if_serving(port, directory, password)
    return f"process_id:{pid}\r" in reply and "+PONG" in reply


def _end_orphan(state: Path, directory: Path) -> tuple[int, str]:
    """The last port and password, after making sure that no server without a keeper still writes here."""
    try:
        known = json.loads(state.read_text())
        port, password = int(known["port"]), str(known.get("password", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0, ""
    if not 0 < port < 65536:
        return 0, ""
    if info_if_serving(port, directory, password):
        _ask(port, _login(password) + b"SHUTDOWN\r\n")
    return port, password


def _login(password: str) -> bytes:
    return f"AUTH {password}\r\n".encode() if password else b""


def _bindable(port: int) -> int:
    """`port` if it gets free in a moment, else any other: connected clients only know the old one."""
    deadline = time.monotonic() + 0.5
    while port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
                continue
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ask(port: int, commands: bytes) -> bytes:
    """What a loopback port replies, up to the reply to PING or the end."""
    reply = b""
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(commands)
            while b"+PONG" not in reply and b"-LOADING" not in reply and len(reply) < 65536:
                part = connection.recv(16384)
                if not part:
                    break
                reply += part
    except (OSError, OverflowError):  # OverflowError: an impossible port in a state file
        pass
    return reply


def _write(path: Path, content: dict[str, object]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def _let_go_of_starter() -> None:
    """Whoever started us waits for the end of our output."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    """SIGTERM: through `finally`, so that the server writes out what it has."""
    raise SystemExit(0)


if __name__ == "__main__":
    # We also inherited keeper.lock: an flock belongs to the open file, not to the process, so the lock of
    # our starter passes to us without a gap, and we hold it until we end.
    if os.fork():
        os._exit(0)  # not a child of the starter: its children are its business
    os.umask(0o077)
    signal.signal(signal.SIGTERM, _leave)
    print(keep(Path(sys.argv[1]), sys.argv[2], sys.argv[3]), end="", flush=True)
