"""Child processes that never outlive the run, and signals to them and all they started."""

import contextlib
import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .spec import Wrong

# Reads "+pid", "-pid", "/folder" and finally "."; when we end, by whatever signal, its input ends and it kills what is
# left. Without the ".", we were killed: then it also kills processes that left their parent, known by their
# environment, and removes the folders.
_KEEPER = """
import glob, os, shutil, signal, subprocess, sys, time
pids, folders, orderly = set(), [], False
for line in sys.stdin:
    if line[0] in "+-":
        (pids.add if line[0] == "+" else pids.discard)(int(line[1:]))
    elif line[0] == "/":
        folders.append(line.strip())
    else:
        orderly = True
rows = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout.splitlines()
table = [tuple(map(int, row.split())) for row in rows]
pids &= {pid for pid, _ in table}
while new := {pid for pid, parent in table if parent in pids} - pids:
    pids |= new
for path in [] if orderly else glob.glob("/proc/[0-9]*/environ"):
    try:
        if sys.argv[1].encode() in open(path, "rb").read():
            pids.add(int(path.split("/")[2]))
    except OSError:
        pass
for pid in pids:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
for folder in [] if orderly else folders:
    for _ in range(25):  # the dying write until they are dead
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            break
        time.sleep(0.2)
    run = os.path.dirname(folder)
    if "queuesmith-prove-" in os.path.basename(run):
        try:
            os.rmdir(run)  # when this was its last
        except OSError:
            pass
"""


LEASE = 600.0  # seconds
_MOST_LOG = 32 * 2**20
_PIPE = 2**20


class Keeper:
    """Ends every child when this process ends, SIGKILL included: then also what has `marker` in its environment."""

    def __init__(self, marker: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _KEEPER, marker],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self, pid: int) -> None:
        self._say(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        self._say(f"-{pid}\n")

    def remove(self, folder: Path) -> None:
        """Only if we are killed; an orderly end decides itself what is kept."""
        self._say(f"{folder.resolve()}\n")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._say(".\n")
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait(10)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it may be closed already
            self._process.stdin.write(line)
            self._process.stdin.flush()


class Child:
    """A process in its own session. Its output goes to `log` through a pipe: `store-full` must not stop its logging,
    and endless output must not fill our disk."""

    def __init__(
        self, keeper: Keeper, argv: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path, **options: object
    ) -> None:
        self.log, self._keeper = log, keeper
        self.started = time.monotonic()
        self._process = subprocess.Popen(  # type: ignore[call-overload]
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            **options,
        )
        self.pid: int = self._process.pid
        keeper.watch(self.pid)
        self._copying = threading.Thread(target=self._copy, name=f"log of {self.pid}", daemon=True)
        self._copying.start()

    def _copy(self) -> None:
        with self._process.stdout as pipe, self.log.open("ab", buffering=0) as out:
            # A child that prints much waits for us whenever the pipe is full, and we wait for our other threads: with
            # a pipe of 64 kB, being watched slowed a service down.
            if hasattr(fcntl, "F_SETPIPE_SZ"):
                with contextlib.suppress(OSError):
                    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)
            kept = out.tell()
            while data := pipe.read1(_PIPE):
                if kept < _MOST_LOG:
                    kept += out.write(data)

    @property
    def code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        code: int | None = self._process.poll()
        if code is not None:
            self._keeper.forget(self.pid)
        return code

    def wait(self, timeout: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
            # for its last lines; a child that it left behind may hold the pipe open
            self._copying.join(0.5)
        return self.code

    def kill(self) -> None:
        """SIGKILL to it and all it started at once, as when a container ends."""
        if self.code is None:
            frozen: set[int] = set()
            # Frozen first, until there are no new ones: none can act after others have died.
            while new := set(family(self.pid)) - frozen:
                send(new, signal.SIGSTOP)
                frozen |= new
            send(frozen, signal.SIGKILL)
            self.wait(10)

    def said(self, text: str, offset: int) -> bool:
        """Does the log hold this, within a megabyte after `offset`?"""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(offset)
            return text.encode() in log.read(2**20)
        return False

    def tail(self, lines: int = 8) -> str:
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - 2**14))
            text = log.read().decode(errors="replace")
            return "\n".join(line[:400] for line in printable(text).splitlines()[-lines:])
        return ""


class _Shown(dict[int, str]):
    """For `str.translate`: each character is judged only once."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        self[code] = shown = char if char.isprintable() or char in "\n\t" else "?"
        return shown


_SHOWN = _Shown()


def printable(text: str) -> str:
    """Characters that a terminal would obey, or XML refuse, as question marks."""
    return text.translate(_SHOWN)


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def family(pid: int) -> list[int]:
    """`pid` and all below it, whatever sessions they moved to."""
    below: dict[int, list[int]] = {}
    for child, parent in _parents():
        below.setdefault(parent, []).append(child)
    pids = [pid]
    for member in pids:
        pids += below.get(member, [])
    return pids


def _parents() -> list[tuple[int, int]]:
    if Path("/proc/self/stat").exists():
        pairs = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    pairs.append((int(path.parent.name), int(fields[1])))
        return pairs
    rows = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
    return [(int(pid), int(parent)) for pid, parent in (row.split() for row in rows.splitlines())]


def alive(pid: int) -> bool:
    return any(pid == known for known, _ in _parents())


def marked(marker: str) -> dict[int, str]:
    """Living processes whose environment holds `marker`, even if they left their parent (Linux only)."""
    processes = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes():
                command = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if command:  # a zombie has none
                    processes[int(path.parent.name)] = command
    return processes


def owner(port: int, pids: Iterable[int]) -> int | None:
    """Which of the processes has the connection from this local port (Linux only)."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path) in inodes:
                        return pid
    return None


def catches(number: int, pid: int) -> bool:
    """Has this process set a handler for the signal (Linux only)?"""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def memory_mb(pids: Iterable[int]) -> float:
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            total += pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return total


def free_port() -> int:
    """Below the ephemeral range: while its server is down, no outgoing connection can take it. Many a server needs
    seconds until it binds: no other run of this user is given the same port for `LEASE` seconds. When each was given
    is in a file that the runs share, four bytes per port."""
    leases = Path(f"/tmp/queuesmith-ports-{os.getuid()}")  # whatever TMPDIR says
    with open(os.open(leases, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "rb+", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for _ in range(200):
            port, now = random.SystemRandom().randrange(20_000, 32_000), time.time()
            given = int.from_bytes(os.pread(file.fileno(), 4, 4 * port), "big")
            if abs(now - given) > LEASE and _bindable(port):
                os.pwrite(file.fileno(), int(now).to_bytes(4, "big"), 4 * port)
                return port
    raise Wrong("no free port between 20000 and 32000 on 127.0.0.1: end what listens there, and run again")


def _bindable(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
