"""Where the peers meet: one Redis, their environments, their worker processes and the tally of what they did.

How a section uses its `Lab`:

    for peer in lab.peers:
        with lab.bench(peer) as bench:                     # empty Redis, empty tally
            bench.enqueue(2000, bulk=True)                 # -> seconds
            workers = bench.start(processes=2)             # real processes; killed when the block ends
            bench.finished(2000, workers)                  # until this many executions ended -> their records
            workers.kill()                                 # SIGKILL to the whole tree, as when a container dies
            bench.tally.missing(2000), bench.tally.duplicated()
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "reference")]

from bench.figures import Value  # noqa: E402
from harness.processes import start_tied  # noqa: E402
from harness.redis import RedisServer  # noqa: E402

HERE = Path(__file__).resolve().parent
PEERS = HERE / "peers"
ENVS = ROOT / "build" / "bench" / "envs"
GO_MOD = ROOT / "reference" / "stacks" / "asynq" / "go.mod"
RECORD = struct.Struct("<4q")  # as in peers/shared/contest.py
OURS = ("queuesmith", "queuesmith-bare")  # they run in the repository's own environment
# Also the order of the rows.
ORDER = ("stock", *OURS, "celery", "rq", "arq", "saq", "taskiq", "dramatiq", "huey", "node", "asynq")


class NotInstalled(Exception):
    """A peer's packages could not be installed; the run goes on without it."""


class Record(NamedTuple):
    """One execution that reached its end; times in nanoseconds since the epoch."""

    number: int
    sent: int
    started: int
    ended: int


class Tally:
    """The file to which every execution appends its record."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def count(self) -> int:
        return self.path.stat().st_size // RECORD.size if self.path.exists() else 0

    def records(self) -> list[Record]:
        """In the order of their ends."""
        data = self.path.read_bytes() if self.path.exists() else b""
        whole = data[: len(data) // RECORD.size * RECORD.size]
        return sorted((Record(*fields) for fields in RECORD.iter_unpack(whole)), key=lambda record: record.ended)

    def missing(self, jobs: int, first: int = 0) -> list[int]:
        """Jobs that never reached their end."""
        done = {record.number for record in self.records()}
        return [number for number in range(first, first + jobs) if number not in done]

    def duplicated(self) -> dict[int, int]:
        """Job number -> executions, of those that reached their end more than once."""
        counted = Counter(record.number for record in self.records())
        return {number: times for number, times in counted.items() if times > 1}


@dataclass(frozen=True)
class Peer:
    """A program under peers/: how to call it, and what the report says about it."""

    id: str
    title: str
    package: str
    pace: int  # about its empty jobs per second
    bulk: bool
    own_processes: bool
    settings: str
    states: list[str]
    concurrency: dict[str, int]  # kind of work -> jobs at a time, if not as asked for

    @classmethod
    def load(cls, ident: str) -> Peer:
        about: dict[str, Any] = tomllib.loads((PEERS / ident / "peer.toml").read_text())
        about["own_processes"] = about.pop("processes") == "own"
        return cls(ident, settings=about.pop("reliable"), **{"concurrency": {}, **about})

    @property
    def is_node(self) -> bool:
        return (PEERS / self.id / "peer.mjs").exists()

    @property
    def is_go(self) -> bool:
        return (PEERS / self.id / "peer.go").exists()

    def python(self) -> str:
        return sys.executable if self.id in OURS else str(ENVS / self.id / "bin" / "python")

    def command(self, *args: object) -> list[str]:
        if self.is_node:
            program = ["node", str(ENVS / self.id / "peer.mjs")]
        elif self.is_go:
            program = [str(ENVS / self.id / "peer")]
        else:
            program = [self.python(), str(PEERS / self.id / "peer.py")]
        return [*program, *map(str, args)]

    def environment(self) -> dict[str, str]:
        paths = [str(PEERS / "shared")] + ([str(ROOT / "reference")] if self.id in OURS else [])
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def version(self) -> str:
        if self.is_node:
            package = json.loads((ENVS / self.id / "node_modules" / self.package / "package.json").read_text())
            return str(package["version"])
        if self.is_go:
            return next(line.split()[1] for line in GO_MOD.read_text().splitlines() if self.package in line)
        code = f"from importlib.metadata import version; print(version({self.package!r}))"
        return subprocess.run([self.python(), "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def install(self) -> None:
        """Its environment in build/bench/envs, made once and again when its pins change."""
        if self.id in OURS:
            return
        own = "package.json" if self.is_node else "peer.go" if self.is_go else "requirements.txt"
        wanted = PEERS / self.id / own
        home, ready = ENVS / self.id, ENVS / f"{self.id}.ready"
        if not (ready.exists() and ready.read_text() == wanted.read_text() and home.exists()):
            print(f"installing {self.title} (once)", file=sys.stderr, flush=True)
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir(parents=True)
            if self.is_node:
                shutil.copyfile(wanted, home / "package.json")
                flags = ["--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
                _run(["npm", "install", *flags], cwd=home)
            elif self.is_go:
                for path in (wanted, GO_MOD, GO_MOD.with_name("go.sum")):
                    shutil.copyfile(path, home / path.name)
                _run(["go", "build", "-o", "peer", "peer.go"], cwd=home)
            else:
                install_python(home, "-r", str(wanted))
            ready.write_text(wanted.read_text())
        if self.is_node:  # its imports are looked up from the program's folder
            shutil.copyfile(PEERS / self.id / "peer.mjs", home / "peer.mjs")


def install_python(home: Path, *packages: str) -> None:
    """An environment of this Python with these packages."""
    uv = str(Path(sys.executable).with_name("uv"))
    _run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(home)])
    _run([uv, "pip", "install", "-q", "--python", str(home / "bin" / "python"), *packages])


def _run(argv: list[str], cwd: Path = ROOT) -> None:
    try:
        done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(str(error)) from None
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise NotInstalled(f"{' '.join(argv[:3])}: {output[-1] if output else done.returncode}")


def processes_of(pid: int) -> list[int]:
    """`pid` and all below it, whatever sessions they moved to (rq's children do)."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    result = [pid]
    for parent in result:
        result += children.get(parent, [])
    return result


class Workers:
    """The worker processes of one peer."""

    def __init__(self, commands: Sequence[list[str]], environment: dict[str, str], folder: Path) -> None:
        self.log = folder / "workers.log"
        with self.log.open("ab") as out:
            self._leaders = [
                start_tied(
                    argv, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
                )
                for argv in commands
            ]

    def pids(self) -> list[int]:
        return [pid for leader in self._leaders if leader.poll() is None for pid in processes_of(leader.pid)]

    def alive(self) -> bool:
        return all(leader.poll() is None for leader in self._leaders)

    def kill(self) -> None:
        """SIGKILL to all of them at once, as when a container or machine ends."""
        living = [leader for leader in self._leaders if leader.poll() is None]
        frozen: set[int] = set()
        # Frozen first, until there are no new ones: none can act after others have died.
        while new := {pid for leader in living for pid in processes_of(leader.pid)} - frozen:
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            frozen |= new
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for leader in living:
            leader.wait(10)

    def memory(self) -> dict[str, float]:
        """Megabytes: `rss` counts shared pages in every process, `pss` shares them out."""
        totals = {"rss": 0.0, "pss": 0.0}
        for pid in self.pids():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    name, _, rest = line.partition(":")
                    if name.lower() in totals:
                        totals[name.lower()] += int(rest.split()[0]) / 1024
        return totals

    def cpu_seconds(self) -> float:
        """CPU time spent so far by them and by their children that ended."""
        total = 0.0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        return total

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


class Bench:
    """One peer on an empty Redis."""

    def __init__(self, peer: Peer, url: str, folder: Path, queue: str = "bench") -> None:
        self.peer, self.url, self.folder, self.queue = peer, url, folder, queue
        self.tally = Tally(folder / "tally")
        self.store = ""  # URL of the full pipeline's database, if not SQLite
        self._all: list[Workers] = []

    def enqueue(self, jobs: int, **options: object) -> float:
        """Add jobs with the peer's own producer; seconds. Options as in `contest.py`: `kind="io5", bulk=True, …`."""
        done = subprocess.run(
            self.enqueue_command(jobs, **options),
            env=self.environment(),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        if done.returncode or not done.stdout.strip():
            raise RuntimeError(f"{self.peer.id} could not add jobs:\n{done.stdout}{done.stderr[-2000:]}")
        return float(json.loads(done.stdout.strip().splitlines()[-1])["seconds"])

    def enqueue_command(self, jobs: int, **options: object) -> list[str]:
        argv = self.peer.command("enqueue", "--url", self.url, "--queue", self.queue, "--jobs", jobs)
        return argv + _flags({**options, "bulk": bool(options.get("bulk")) and self.peer.bulk})

    def environment(self) -> dict[str, str]:
        stores = {"BENCH_STORE": str(self.folder / "store.db"), "BENCH_STORE_URL": self.store}
        return {**self.peer.environment(), **stores}

    def start(
        self,
        processes: int = 1,
        *,
        concurrency: int = 50,
        kind: str = "noop",
        takeover: float | None = None,
        tries: int | None = None,
        tally: Tally | None = None,
        under: Sequence[str] = (),
    ) -> Workers:
        """`kind`: the work that is coming, for peers whose best concurrency depends on it; `under`: a program, with
        its arguments, that starts the worker."""
        options = {
            "url": self.url,
            "queue": self.queue,
            "tally": (tally or self.tally).path,
            "concurrency": self.peer.concurrency.get(kind, concurrency),
            "takeover": takeover,
            "tries": tries,
            "processes": processes if self.peer.own_processes else 1,
        }
        argv = self.peer.command("worker", *_flags(options))
        copies = 1 if self.peer.own_processes else processes
        workers = Workers([[*under, *argv]] * copies, self.environment(), self.folder)
        self._all.append(workers)
        return workers

    def finished(self, jobs: int, workers: Workers, timeout: float = 120) -> list[Record]:
        """The records after this many executions ended; if they do not come, raises with what the workers printed."""
        deadline = time.monotonic() + timeout
        while self.tally.count() < jobs:
            if time.monotonic() > deadline or not workers.alive():
                ended = "" if workers.alive() else ", and its worker ended"
                state = f"{self.tally.count()} of {jobs} executions in {timeout:g} s{ended}"
                raise RuntimeError(f"{self.peer.id}: {state}; its workers said:\n{workers.said()}")
            time.sleep(0.005)
        return self.tally.records()

    def close(self) -> None:
        for workers in self._all:
            workers.kill()


class Lab:
    """One run: its peers, its Redis, and how big it is."""

    def __init__(
        self, peers: Sequence[Peer], *, quick: bool, server: RedisServer, folder: Path, brief: Sequence[str] = ()
    ) -> None:
        self.brief = brief  # ids of peers measured only by their rate of no-op jobs
        self.peers, self.quick, self.server, self.folder = list(peers), quick, server, folder
        self.round = 1
        self.prefix = ""  # of the progress lines
        self.failures: dict[str, str] = {}  # of the section that runs

    @property
    def url(self) -> str:
        return self.server.url

    def scale(self, quick: Any, full: Any) -> Any:
        return quick if self.quick else full

    def say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self.prefix}{text}", file=sys.stderr, flush=True)

    def each_peer(
        self, once: Callable[[Lab, Peer], dict[str, Value]], summary: Callable[[dict[str, Value]], str]
    ) -> dict[str, dict[str, Value]]:
        """The rows of a section in which the peers take turns; one that fails is noted and left out."""
        rows: dict[str, dict[str, Value]] = {}
        for peer in self.peers:
            if peer.id in self.brief:
                continue
            try:
                rows[peer.id] = once(self, peer)
            except (RuntimeError, OSError) as error:
                self.failed(peer, error)
            else:
                self.say(f"{peer.title}: {summary(rows[peer.id])}")
        return rows

    def failed(self, peer: Peer, error: Exception) -> None:
        """Note that this peer failed; the report says so."""
        self.failures[peer.id] = str(error).splitlines()[0]
        self.say(f"{peer.title} failed: {error}")

    @contextlib.contextmanager
    def bench(self, peer: Peer, *, flush: bool = True, queue: str = "bench") -> Iterator[Bench]:
        if flush:
            with self.server.client() as client:
                client.flushall()
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=f"{peer.id}-") as folder:
            bench = Bench(peer, self.url, Path(folder), queue)
            try:
                yield bench
            finally:
                bench.close()


def _flags(options: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        if value is True:
            flags.append(f"--{name}")
        elif value is not None and value is not False:
            flags += [f"--{name}", str(value)]
    return flags


def available(names: Sequence[str]) -> tuple[list[Peer], list[str]]:
    """The peers asked for that can run here, and why the others cannot."""
    ready, missing = [], []
    for name in names:
        peer = Peer.load(name)
        try:
            peer.install()
            ready.append(peer)
        except NotInstalled as error:
            missing.append(f"{peer.title}: {error}")
    return ready, missing
