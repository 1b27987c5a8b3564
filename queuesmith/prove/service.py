"""The processes of the service: started, watched, started again when they end, as an orchestrator does."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from .probes import http, listens
from .processes import Child, Keeper, catches, family, memory_mb, owner, printable, send
from .spec import Program, Spec, Wrong, fill
from .timeline import Timeline

RESTART_AFTER = 0.3
START_WITHIN = 90.0
_MOST_LINES = 200_000


@dataclass(frozen=True)
class Exit:
    at: float
    name: str
    code: int
    ours: bool  # by a signal of ours


@dataclass
class Running:
    """One process: `worker 1`. `wanted`: it is started again when it ends."""

    name: str
    program: Program
    instance: int
    wanted: bool = True
    child: Child | None = None
    hit: bool = False  # we signalled it
    ended: float = 0.0
    quick_ends: int = 0
    offset: int = 0  # where this start begins in its log
    env: Mapping[str, str] = field(default_factory=dict)  # its own, beyond the file's

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.code is None


class ServiceRunner:
    """`environment(instance)`, `values(instance)`: of one process."""

    def __init__(
        self,
        spec: Spec,
        keeper: Keeper,
        timeline: Timeline,
        logs: Path,
        environment: Callable[[int], Mapping[str, str]],
        values: Callable[[int], Mapping[str, object]],
    ) -> None:
        self.spec, self.exits, self.lines = spec, list[Exit](), list[tuple[float, str, str]]()
        self._keeper, self._timeline, self._logs = keeper, timeline, logs
        self._environment, self._values = environment, values
        self.started = 0.0
        self.memory: dict[str, list[tuple[float, float]]] = {}  # process -> (age, MB)
        self._slots: list[Running] = []
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._offsets: dict[Path, int] = {}
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._supervise, self._tail)]

    def start(self, *, resting: bool = False) -> None:
        """`resting`: the workers start with `wake`, or after a backlog was sent."""
        self.started = self._timeline.now()
        self._logs.mkdir(parents=True, exist_ok=True)
        service = self.spec.service
        if service.api:
            self._add(Running("api", service.api, 1))
        for number in range(1, service.workers + 1):
            self._add(Running(f"worker {number}", service.worker, number), resting=resting)
        for thread in self._threads:
            thread.start()
        self._wait_ready()

    def wake(self) -> None:
        if all(slot.child for slot in self.all()):
            return
        self.started = self._timeline.now()
        self.resume_all()
        self._wait_ready()

    def _wait_ready(self) -> None:
        for slot in self.all():
            if slot.child is not None:
                self.wait_ready(slot, START_WITHIN)

    def check_stays(self, limit: float = 20) -> None:
        """Wrong if a process keeps ending at once: then there is nothing to hit."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and any(slot.quick_ends for slot in self.all()):
            for slot in self.all():
                if slot.quick_ends >= 3:
                    self._ends_at_once(slot)
            time.sleep(0.05)

    def _ends_at_once(self, slot: Running) -> NoReturn:
        code = next(end.code for end in reversed(self.exits) if end.name == slot.name)
        hint = "If it goes to the background by itself: keep it in the foreground. " * (code == 0)
        raise Wrong(
            f"{slot.name} ends at once, again and again, with exit code {code}"
            f"{self._line(slot)}: {slot.program.run}. {hint}Its log ends with:\n{self.tail(slot)}"
        )

    def _line(self, slot: Running) -> str:
        return self.spec.line(f"service.{'api' if slot.name.startswith('api') else 'worker'}")

    def workers(self) -> list[Running]:
        with self._lock:
            return [slot for slot in self._slots if slot.name.startswith("worker")]

    def all(self) -> list[Running]:
        with self._lock:
            return list(self._slots)

    def wait_ready(self, slot: Running, limit: float) -> None:
        url = getattr(self.spec.service.submit, "url", "") if slot.name.startswith("api") else ""
        ready, deadline = slot.program.ready or url, time.monotonic() + limit
        while ready and time.monotonic() < deadline:
            if self._over.is_set():  # the run was ended meanwhile
                return
            if not slot.program.ready:
                if listens(fill(ready, self._values(slot.instance))):
                    return
            elif ready.startswith("http"):
                with contextlib.suppress(OSError, ValueError):
                    if http("GET", fill(ready, self._values(slot.instance)), timeout=1)[0] < 300:
                        return
            elif slot.child and slot.child.said(ready, slot.offset):
                return
            if slot.quick_ends >= 3:
                self._ends_at_once(slot)
            time.sleep(0.05)
        if ready:
            raise Wrong(
                f"{slot.name} is not ready after {limit:g} s: nothing like {ready!r}{self._line(slot)}. "
                f"Its log ends with:\n{self.tail(slot)}"
            )

    def wait_up(self, warmup: float = 0.0) -> None:
        """Until every worker has set its signal handlers, as far as can be seen, or is old enough to have."""
        deadline = time.monotonic() + 10 + 3 * warmup
        for slot in self.workers():
            while time.monotonic() < deadline and not self._over.is_set() and not self.up(slot, warmup):
                time.sleep(0.05)

    def up(self, slot: Running, warmup: float) -> bool:
        if not slot.alive or slot.child is None:
            return False
        ready = slot.program.ready
        if ready and not ready.startswith("http") and not slot.child.said(ready, slot.offset):
            return False
        old = time.monotonic() - slot.child.started > 3 + 2 * warmup
        return old or catches(signal.SIGTERM, slot.child.pid)

    def tail(self, slot: Running) -> str:
        return slot.child.tail() if slot.child else ""

    # what the faults do

    def kill(self, *slots: Running, why: str = "") -> None:
        """SIGKILL to each and all it started; they come back."""
        with self._lock:
            for slot in slots:
                if slot.alive and slot.child:
                    slot.hit = True
                    self._timeline.add("fault", f"SIGKILL {slot.name}{why}")
                    slot.child.kill()

    def kill_owner(self, port: int, why: str) -> Running | None:
        """SIGKILL to the process whose connection comes from this port; None: not one of ours."""
        for slot in self.all():
            if slot.child and slot.alive and owner(port, family(slot.child.pid)):
                self.kill(slot, why=why)
                return slot
        return None

    def terminate(self, slot: Running, limit: float, kind: str = "fault") -> tuple[int | None, float]:
        """SIGTERM to the process itself -> (exit code or None, seconds). SIGKILL after `limit`."""
        child, began = slot.child, time.monotonic()
        assert child is not None
        slot.hit, slot.wanted = True, False
        self._timeline.add(kind, f"SIGTERM {slot.name}")
        send([child.pid], signal.SIGTERM)
        code, took = child.wait(limit), time.monotonic() - began
        if code is None:
            self.kill(slot, why=f": still running {limit:g} s after SIGTERM")
        else:
            self._timeline.add("end", f"{slot.name} ended with {code} after {took:.1f} s")
        return code, took

    def freeze(self, slot: Running) -> None:
        if slot.child:
            self._timeline.add("fault", f"SIGSTOP {slot.name}")
            send(family(slot.child.pid), signal.SIGSTOP)

    def thaw(self, slot: Running) -> None:
        if slot.child:
            self._timeline.add("fault", f"SIGCONT {slot.name}")
            send(family(slot.child.pid), signal.SIGCONT)

    def stop_all(self) -> None:
        """SIGKILL to all; they stay down until `resume_all`."""
        with self._lock:
            for slot in self._slots:
                slot.wanted = False
            self.kill(*self._slots)

    def rest_workers(self, limit: float = 5) -> None:
        """The idle workers end, by SIGTERM if they can, and stay down until `resume_all`."""
        workers = [slot for slot in self.workers() if slot.alive and slot.child]
        for slot in workers:
            slot.wanted, slot.hit = False, True
        send((slot.child.pid for slot in workers if slot.child), signal.SIGTERM)
        deadline = time.monotonic() + limit
        for slot in workers:
            if slot.child and slot.child.wait(max(0.0, deadline - time.monotonic())) is None:
                slot.child.kill()

    def resume_all(self) -> None:
        with self._lock:
            for slot in self._slots:
                slot.wanted, slot.ended, slot.quick_ends = True, 0.0, 0
                if slot.child is None:
                    self._launch(slot)

    def add_copies(self, program: Program | None = None) -> list[Running]:
        """One more of every process; with `program`, of every worker, running that."""
        added = []
        for slot in self.workers() if program else self.all():
            instance = slot.instance + 100
            new = Running(f"{slot.name}{' new' if program else ' copy'}", program or slot.program, instance)
            self._add(new)
            added.append(new)
        return added

    def end_all(self, limit: float) -> None:
        """SIGTERM to all of them, and they do not come back."""
        with self._lock:
            slots, self._slots = self._slots, []
        living = [(slot, slot.child) for slot in slots if slot.alive and slot.child]
        for slot, child in living:
            self._timeline.add("stop", f"SIGTERM {slot.name}")
            send([child.pid], signal.SIGTERM)
        deadline = time.monotonic() + limit
        for slot, child in living:
            if child.wait(max(0.0, deadline - time.monotonic())) is None:
                self._timeline.add("stop", f"SIGKILL {slot.name}: still running {limit:g} s after SIGTERM")
                child.kill()

    def remove(self, slot: Running, limit: float) -> tuple[int | None, float]:
        """SIGTERM, and no restart."""
        result = self.terminate(slot, limit, "stop") if slot.alive else (None, 0.0)
        with self._lock:
            slot.wanted = False
            if slot in self._slots:
                self._slots.remove(slot)
        return result

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(5)
        for slot in self.all():
            slot.wanted = False
            if slot.child:
                # a frozen one cannot end
                send(family(slot.child.pid), signal.SIGCONT)
                slot.child.kill()
        self._read_logs()

    # in the background

    def _add(self, slot: Running, *, resting: bool = False) -> None:
        with self._lock:
            self._slots.append(slot)
            if not resting:
                self._launch(slot)

    def _launch(self, slot: Running) -> None:
        values = self._values(slot.instance)
        words = [fill(word, values) for word in slot.program.run.words]
        log = self._logs / f"{slot.name.replace(' ', '-')}.log"
        slot.offset = log.stat().st_size if log.exists() else 0
        env = {**self._environment(slot.instance), **slot.env}
        if slot.program is self.spec.service.api and "PORT" not in self.spec.service.env:
            env["PORT"] = str(values["port"])
        try:
            slot.child = Child(self._keeper, words, log, env, self.spec.folder)
        except OSError as error:
            raise Wrong(f"cannot start {slot.name}: {words[0]}: {error.strerror}{self._line(slot)}") from None
        slot.hit = False
        self._timeline.add("start", f"{slot.name} started, pid {slot.child.pid}")

    def _supervise(self) -> None:
        sampled = 0.0
        while not self._over.wait(0.03):
            now = time.monotonic()
            with self._lock:
                for slot in self._slots:
                    self._restart(slot, now)
            if now - sampled > 0.5:
                sampled = now
                for slot in self.workers():
                    if slot.alive and slot.child:
                        life = self.memory.setdefault(f"{slot.name}, pid {slot.child.pid}", [])
                        life.append((now - slot.child.started, memory_mb(family(slot.child.pid))))

    def _restart(self, slot: Running, now: float) -> None:
        if slot.child is None or slot.alive:
            return
        if not slot.ended:
            slot.ended = now
            code = slot.child.code
            assert code is not None
            self.exits.append(Exit(self._timeline.now(), slot.name, code, slot.hit))
            if not slot.hit:
                self._timeline.add("end", f"{slot.name} ended by itself with {code}")
            lived = now - slot.child.started
            slot.quick_ends = slot.quick_ends + 1 if lived < 10 and not slot.hit else 0
        if slot.wanted and now - slot.ended >= RESTART_AFTER * 2 ** min(slot.quick_ends, 2):
            slot.ended = 0.0
            self._launch(slot)

    def _tail(self) -> None:
        while not self._over.wait(0.05):
            self._read_logs()

    def _read_logs(self) -> None:
        for path in sorted(self._logs.glob("*.log")):
            offset = self._offsets.get(path, 0)
            with contextlib.suppress(OSError), path.open("rb") as log:
                log.seek(offset)
                data = log.read(2**22)
                whole = data[: data.rfind(b"\n") + 1]
                self._offsets[path] = offset + len(whole)
                now = self._timeline.now()
                if len(self.lines) < _MOST_LINES:
                    # Line by line: one long call for all would block every other thread.
                    self.lines += [
                        (now, path.stem, line)
                        for raw in whole.split(b"\n")
                        if (line := printable(raw.decode(errors="replace"))).strip()
                    ]
