"""The world of one fault: its own servers, providers and service, the keys that were sent, and what became of each.

Every fault has a world to itself: no fault finds what another left behind, and several can run at a time.
"""

import concurrent.futures
import contextlib
import datetime
import math
import os
import random
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from . import probes
from .probes import Unreadable
from .processes import Child, Keeper, free_port, marked
from .provider import Call, PlayedProvider
from .servers import Kafka, Nats, Postgres, RabbitMQ, Redis, Server, Sqs
from .service import ServiceRunner
from .spec import SERVERS, Command, Spec, Submit, Wrong, fill, fill_all
from .timeline import Event, Timeline

# Seconds for ending everything after the run's time.
LATEST = 4.0
_ERRORS = re.compile(r"error|fail|exception|dead|refus|reject|gave up|invalid", re.IGNORECASE)


@dataclass
class Job:
    """A key that was sent, once or more. `expects`: done, or failed; `over`: when its fault had ended;
    `seen`: when each effect was first seen; `unseen`: when a look last found none."""

    key: str
    expects: str = "done"
    accepted: bool = False
    refused: bool = False
    at: float = 0.0
    over: float = 0.0
    slowest: float = 0.0
    said: str = ""
    count: int = 0
    seen: list[float] = field(default_factory=list)
    unseen: float = 0.0
    reason: str = ""


@dataclass
class Batch:
    """What was sent under one fault. `over`: when the fault ended; recovery is counted from there."""

    fault: str
    jobs: dict[str, Job] = field(default_factory=dict)
    began: float = 0.0
    queued: dict[str, str] = field(default_factory=dict)  # key -> where a job that is done still waits
    over: float = 0.0
    watched: float = 0.0
    hits: list[str] = field(default_factory=list)
    unhit: str = ""  # why nothing was hit
    facts: list[str] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)  # (invariant, measured)

    def broke(self, invariant: str, measured: str) -> None:
        self.broken.append((invariant, measured))

    def end_fault(self, now: float) -> None:
        """Recovery is counted from here for the jobs sent so far; the fault may come again, with others."""
        self.over = now
        for job in self.jobs.values():
            job.over = job.over or now

    def expected(self) -> list[Job]:
        """Those that were taken, which must end visibly."""
        return [job for job in self.jobs.values() if job.accepted]

    def open(self) -> list[Job]:
        return [job for job in self.expected() if not (job.reason or (job.count and job.expects == "done"))]


class Aborted(Exception):
    """The run is over, by Ctrl-C or a wrong set-up: all waiting ends."""


class Crowd:
    """How many worlds may be at work at a time; those that only wait for a recovery do not count."""

    def __init__(self, most: int) -> None:
        self._free, self._waiting = most, list[int]()
        self._changed = threading.Condition()
        self.over = threading.Event()

    @contextlib.contextmanager
    def place(self, turn: int = 0) -> Iterator[None]:
        """The lowest `turn` comes first."""
        self._take(turn)
        try:
            self.check()
            yield
        finally:
            self._leave()

    @contextlib.contextmanager
    def aside(self, *, punctual: bool = False) -> Iterator[None]:
        """Give up the place while waiting: another world may work meanwhile.

        `punctual`: come back at once, even if that makes one too many.
        """
        self._leave()
        try:
            yield
        finally:
            if punctual:
                self._leave(-1)
            else:
                self._take(-1)

    def check(self) -> None:
        if self.over.is_set():
            raise Aborted

    def _take(self, turn: int) -> None:
        with self._changed:
            self._waiting.append(turn)
            while not self.over.is_set() and not (self._free > 0 and turn == min(self._waiting)):
                self._changed.wait(0.2)
            self._waiting.remove(turn)
            self._free -= 1
            self._changed.notify_all()

    def _leave(self, places: int = 1) -> None:
        with self._changed:
            self._free += places
            self._changed.notify_all()


class World:
    """`ends`: when the run's time is up; nothing is waited for after that.

    Without any fault, `warmup` is how long the service took from its start to its first effect, and `normal` how
    long its submit took. On a crowded machine both can be seconds, which no promise covers."""

    def __init__(
        self,
        spec: Spec,
        folder: Path,
        seed: int,
        name: str = "",
        *,
        quick: bool = False,
        crowd: Crowd | None = None,
        ends: float = math.inf,
    ) -> None:
        self.spec, self.folder, self.seed, self.quick = spec, folder, seed, quick
        self._ends = ends
        self.crowd = crowd or Crowd(1)
        self.scale = float(os.environ.get("QUEUESMITH_PROVE_SCALE", "1"))
        self.patience = min(spec.promises.recovery, 10.0) if quick else spec.promises.recovery
        self.rng = random.Random(f"{seed} {name}")
        self.timeline = Timeline()
        self.batches: list[Batch] = []
        self.unreadable = ""
        self.resting: set[str] = set()  # kinds of places in Redis where done jobs stay
        self.warmup = self.normal = 0.0
        self.early = False  # can a job be sent before any worker has run?
        self.left: dict[int, str] = {}
        self.marker = f"QUEUESMITH_PROVE_RUN={uuid.uuid4().hex}"
        self.canary = f"canary{random.Random(f'{seed} canary').getrandbits(48):012x}"
        self.data = folder / "data"
        self.data.mkdir(parents=True, exist_ok=True)
        self._ports: dict[int, int] = {}
        self._known: dict[str, Job] = {}
        self._own_ids: dict[str, str] = {}  # what the service calls it -> key
        self._own_pattern = re.compile(r"(?!)")
        self._closed = False
        self._key_pattern, self._make_key = _keys(spec.service.keys, f"{seed} {name}")
        self.keeper = Keeper(self.marker)
        self.keeper.remove(folder)
        try:
            self.redis = Redis(self.keeper, folder / "redis", spec.redis_config) if spec.redis else None
            self.postgres = Postgres(self.keeper) if spec.postgres else None
            self.rabbitmq = RabbitMQ(self.keeper, folder / "rabbitmq") if spec.rabbitmq else None
            self.nats = Nats(self.keeper, folder / "nats") if spec.nats else None
            self.kafka = Kafka(self.keeper, folder / "kafka") if spec.kafka else None
            self.sqs = Sqs(self.keeper, folder / "sqs") if spec.sqs else None
        except Wrong:  # it is not installed
            self.keeper.close()
            raise
        self.providers = {
            provider.name: PlayedProvider(provider, self.timeline, seed, self.key_of, self.scale)
            for provider in spec.providers
        }
        self.service = ServiceRunner(spec, self.keeper, self.timeline, folder / "logs", self.environment, self.values)
        self._submitters = concurrent.futures.ThreadPoolExecutor(24, "submit")

    @property
    def servers(self) -> dict[str, Server]:
        servers: dict[str, Server | None] = {name: getattr(self, name) for name in SERVERS}
        return {name: server for name, server in servers.items() if server is not None}

    @property
    def broker(self) -> Server | None:
        return self.rabbitmq or self.nats or self.kafka or self.sqs

    def start(self, *, resting: bool = False) -> None:
        """`resting`: without the workers."""
        for server in self.servers.values():
            server.start()
        for provider in self.providers.values():
            provider.start()
        if self.spec.service.setup:
            code, output = self.run(self.spec.service.setup, 120)
            if code:
                raise Wrong(f"`setup` failed with {code}{self.spec.line('service.setup')}: {output.strip()[-600:]}")
        began = time.monotonic()
        self.service.start(resting=resting)
        # The machine may be slower by now: a killed process takes as long to come back.
        self.warmup = max(self.warmup, time.monotonic() - began)

    def close(self) -> None:
        self._closed = True  # or waiting senders would outlive the run
        with contextlib.suppress(Exception):
            self.service.close()
        self._submitters.shutdown(wait=False, cancel_futures=True)
        for provider in self.providers.values():
            with contextlib.suppress(Exception):
                provider.close()
        for server in self.servers.values():
            with contextlib.suppress(Exception):
                server.remove()
        for pid in marked(self.marker):
            with contextlib.suppress(OSError):
                os.kill(pid, 9)
        self.keeper.close()

    # placeholders

    def values(self, instance: int = 1) -> dict[str, object]:
        if instance not in self._ports:
            self._ports[instance] = free_port()
        return {
            "dir": self.data,
            "port": self._ports[instance],
            "instance": instance,
            "canary": self.canary,
            **{name: server.url for name, server in self.servers.items()},
            **{f"{name}.host": "127.0.0.1" for name in self.servers},
            **{f"{name}.port": server.port for name, server in self.servers.items()},
            **{f"provider.{name}": provider.url for name, provider in self.providers.items()},
        }

    def environment(self, instance: int = 1) -> dict[str, str]:
        values = self.values(instance)
        folder = self.spec.folder
        # The project's own programs are found first, those of this command's Python last.
        own = [path for path in (folder / ".venv" / "bin", folder / "node_modules" / ".bin") if path.is_dir()]
        paths = [*own, os.environ.get("PATH", ""), Path(sys.executable).parent]
        marker, _, run = self.marker.partition("=")
        return {
            **os.environ,
            "PATH": os.pathsep.join(map(str, paths)),
            "PYTHONUNBUFFERED": "1",
            **({"REDIS_URL": self.redis.url} if self.redis else {}),
            **{name: fill(value, values) for name, value in self.spec.service.env.items()},
            marker: run,
        }

    # keys

    def keys_in(self, text: str) -> set[str]:
        """The keys in this text, as they are or as the service calls them."""
        own = {self._own_ids[ident] for ident in self._own_pattern.findall(text) if ident in self._own_ids}
        return own | {key for key in self._key_pattern.findall(text) if key in self._known}

    def key_of(self, text: str) -> str:
        """The first of our keys in this text; empty if there is none."""
        if self._own_ids and (keys := self.keys_in(text)):
            return min(keys)
        return next((key for key in self._key_pattern.findall(text) if key in self._known), "")

    def name_of(self, key: str) -> str:
        """What the service calls it."""
        return next((own for own, known in self._own_ids.items() if known == key), key)

    def called(self, key: str, own: str) -> None:
        """The service has its own id for this key."""
        self._own_ids[own] = key
        self._own_pattern = next((shape for shape in _SHAPES if shape.fullmatch(own)), re.compile(r"[\w.:-]+"))

    def new_jobs(self, batch: Batch, count: int, expects: str = "done") -> list[Job]:
        jobs = [Job(self._make_key(len(self._known) + 1 + n), expects) for n in range(count)]
        self._known.update({job.key: job for job in jobs})
        batch.jobs.update({job.key: job for job in jobs})
        return jobs

    # submitting

    def submit(self, jobs: Iterable[Job], how: Submit | None = None, *, one_by_one: int = 0) -> None:
        """Send each one and wait for the answers."""
        self.submit_later(jobs, how, one_by_one=one_by_one)()

    def submit_later(
        self, jobs: Iterable[Job], how: Submit | None = None, *, one_by_one: int = 0
    ) -> Callable[[], None]:
        """Send each one in the background; the returned function waits for the answers.

        A command that takes {keys} gets all of them at once, unless `one_by_one` says how many to send at a time.
        """
        how, jobs = how or self.spec.service.submit, list(jobs)
        together = isinstance(how, Command) and "{keys}" in how.words and not one_by_one
        gate = threading.Semaphore(one_by_one or 4)

        def send(portion: list[Job]) -> None:
            with gate:
                if not self._closed:
                    self._send(portion, how)

        portions = [jobs] if together and jobs else [[job] for job in jobs]
        futures = [self._submitters.submit(send, portion) for portion in portions]

        def wait() -> None:
            while not all(future.done() for future in futures):
                self.crowd.check()
                self.look()
                concurrent.futures.wait(futures, 0.2)
            for future in futures:
                future.result()

        return wait

    def _send(self, jobs: list[Job], how: Submit) -> None:
        limit, began, sent = self.spec.promises.enqueue, time.monotonic(), self.timeline.now()
        values = {**self.values(), "key": jobs[0].key}
        if isinstance(how, Command):
            keys = [job.key for job in jobs]
            words = [part for word in how.words for part in (keys if word == "{keys}" else [word])]
            code, output = self._run(Command(tuple(words)), values, limit + 5 + 2 * self.normal)
            taken, answer = code == 0, b""
        else:
            try:
                status, answer = probes.http(
                    how.method,
                    fill(how.url, values),
                    fill_all(how.headers, values),
                    fill_all(how.json, values),
                    limit + 5,
                )
                taken, output = status < 300, f"{status} {answer[:200].decode(errors='replace')}"
            except (OSError, ValueError) as error:
                taken, output = False, str(error)
            if taken and how.id and (own := probes.inside(answer, how.id)):
                self.called(jobs[0].key, own)
        took = time.monotonic() - began
        for job in jobs:
            job.slowest = max(job.slowest, took)
            job.at = job.at or self.timeline.now()
            job.accepted |= taken
            job.refused |= not taken
            job.said = job.said if taken else output
            self.timeline.add("submit", "sent" if taken else f"refused when sent ({_last(output)})", job.key, sent)

    def run(self, command: Command, limit: float) -> tuple[int, str]:
        """A command of the file -> its exit code and output."""
        return self._run(command, {}, limit)

    def _run(self, command: Command, values: Mapping[str, object], limit: float) -> tuple[int, str]:
        words = [fill(word, {**self.values(), **values}) for word in command.words]
        log = self.folder / f"submit-{uuid.uuid4().hex[:8]}.out"
        try:
            child = Child(self.keeper, words, log, self.environment(), self.spec.folder)
        except OSError as error:
            settings = vars(self.spec.service).items()
            key = next(
                name for name, value in settings if isinstance(value, Command) and value.words[0] == command.words[0]
            )
            raise Wrong(f"cannot run {words[0]}: {error.strerror}{self.spec.line(f'service.{key}')}") from None
        try:
            code = child.wait(0 if self._closed else limit)
            if code is None:
                child.kill()
                return 124, f"no answer within {limit:g} s"
            return code, log.read_text(errors="replace")
        finally:
            log.unlink(missing_ok=True)

    # seeing

    def look(self) -> None:
        """Read the effects, and note what is new."""
        began = self.timeline.now()
        try:
            counts = probes.read(self.spec.effect, self, self._known)
            self.unreadable = ""
        except Unreadable as error:
            self.unreadable = str(error)
            return
        now = self.timeline.now()
        for key, job in self._known.items():
            count = int(counts.get(key, 0) or 0)
            if count > job.count:
                if self.spec.effect.kind != "provider":
                    new = count - job.count
                    again = f"effect seen{' again' if job.count else ''}{f' {new} times' if new > 1 else ''}"
                    self.timeline.add("effect", again, key)
                job.seen += [now] * (count - job.count)
            job.count = count
            if not count:
                job.unseen = began

    def look_for_failures(self, jobs: Iterable[Job]) -> None:
        wanted = {job.key: job for job in jobs if not job.reason}
        for key, reason in self.failures(set(wanted)).items():
            wanted[key].reason = reason
            self.timeline.add("effect", f"failed visibly ({reason[:80]})", key)

    def failures(self, keys: set[str]) -> dict[str, str]:
        """Key -> its visible reason: where the file says, in BullMQ's failed set, else in the logs.

        Not in the logs if one of the former is known: a job that prints its error and counts as completed has not
        failed visibly.
        """
        reasons: dict[str, str] = {}
        if not keys:
            return reasons
        with contextlib.suppress(Exception):  # Redis may be down
            states = probes.bullmq_states(self, keys)
            reasons |= {key: reason for key, (state, reason) in states.items() if state == "failed" and reason}
        if self.spec.failures:
            with contextlib.suppress(Unreadable):
                read = probes.read(self.spec.failures, self, keys)
                reasons |= {key: f"in [failures]: {value}" for key, value in read.items() if value and key in keys}
        if self.spec.failures or self.spec.service.queue:
            return reasons
        meant = {key for key in keys - reasons.keys() if self._known[key].expects == "failed"}
        return reasons | self.in_logs(meant)

    def in_logs(self, keys: set[str]) -> dict[str, str]:
        """Key -> the last log line that names it as failed."""
        reasons: dict[str, str] = {}
        # Called again and again, mostly without keys, and there can be 200,000 lines.
        for _, source, line in self.service.lines if keys else ():
            if _ERRORS.search(line):
                reasons |= dict.fromkeys(self.keys_in(line) & keys, f"{source}: {line.strip()[:160]}")
        return reasons

    def log_lines(self) -> list[str]:
        return [line for _, _, line in self.service.lines]

    def events_of_logs(self) -> list[Event]:
        return [Event(at, "log", f"{source}: {line}", self.key_of(line)) for at, source, line in self.service.lines]

    # waiting

    def pause(self, seconds: float) -> None:
        """Exactly this long; others work meanwhile."""
        with self.crowd.aside(punctual=True):
            self.wait(seconds * self.scale)

    def wait_aside(self, seconds: float) -> None:
        """At least this long; others work meanwhile."""
        with self.crowd.aside():
            self.wait(seconds)

    def wait(self, seconds: float) -> None:
        """Keeps looking, so that late effects of earlier faults get their right time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.crowd.check()
            time.sleep(min(left, 0.2))
            self.look()

    def until(self, condition: Callable[[], Any], limit: float, every: float = 0.01) -> bool:
        """Whether it came true within the limit, which is longer where starting takes longer."""
        deadline = time.monotonic() + limit + 3 * self.warmup
        while not condition():
            self.crowd.check()
            if time.monotonic() > deadline:
                return False
            time.sleep(every)
        return True

    def wait_for_api(self) -> None:
        """Until it answers, if there is one; at most the promised recovery."""
        api = self.spec.service.api
        if api is None or not api.ready.startswith("http"):
            return

        def answers() -> bool:
            with contextlib.suppress(OSError, ValueError):
                return probes.http("GET", fill(api.ready, self.values()), timeout=2)[0] < 300
            return False

        self.until(answers, self.spec.promises.recovery, 0.1)

    def api_listens(self) -> str:
        """Its address, if something accepts connections there."""
        api = self.spec.service.api
        if api is not None and api.ready.startswith("http"):
            address = fill(api.ready, self.values())
            return urlsplit(address).netloc if probes.listens(address) else ""
        return ""

    def on_effect(self, strike: Callable[[Call], bool] | None) -> None:
        for provider in self.providers.values():
            provider.on_effect = strike

    def linger(self, seconds: float) -> None:
        for provider in self.providers.values():
            provider.linger = seconds

    def backlog(self, jobs: list[Job], done: int = 0, limit: float = 15) -> bool:
        """Send all while the workers are down, start them, and wait until they work and `done` are done.

        Jobs sent one by one are often done before the next: a fault at a random moment would hit nothing.
        """
        self.service.rest_workers()
        self.linger(0.5)
        self.submit(jobs)
        self.service.resume_all()
        began = time.monotonic()
        working = self.until(lambda: self._at_work(jobs, done), limit, 0.002)
        if working:
            self.warmup = max(self.warmup, time.monotonic() - began)
        return working

    def _at_work(self, jobs: list[Job], done: int) -> bool:
        self.look()
        finished = sum(bool(job.count) for job in jobs)
        if done or finished:
            return finished >= done
        if any(provider.in_flight for provider in self.providers.values()):
            return True
        if not self.providers and not self.spec.service.queue and self.spec.service.worker.ready:
            # Nothing shows its work before the end: it is ready, and there is work.
            return all(self.service.up(slot, self.warmup) for slot in self.service.workers())
        with contextlib.suppress(Exception):  # Redis may be down
            states = probes.bullmq_states(self, {job.key for job in jobs})
            return any(state == "active" for state, _ in states.values())
        return False

    def settle(self, batch: Batch, limit: float) -> bool:
        """Until everything that was taken is done or has visibly failed; others may work meanwhile."""
        with self.crowd.aside():
            return self.watch(batch, limit)

    def watch(self, batch: Batch, limit: float) -> bool:
        deadline, looked = time.monotonic() + limit, 0.0
        while True:
            self.crowd.check()
            began = time.monotonic()
            self.look()
            if batch.open() and began - looked > 0.5:
                looked = began
                self.look_for_failures(batch.open())
            batch.watched = self.timeline.now()
            if not batch.open():
                return True
            # without a fault they cannot even start
            hopeless = batch.fault == "none" and all(slot.quick_ends >= 3 for slot in self.service.workers())
            if began > min(deadline, self._ends) or hopeless:
                return False
            # Gently, but often enough: on a crowded machine one look took 7 s, and the effect was seen 14 s late.
            time.sleep(min(1.0, max(0.05, 2 * (time.monotonic() - began))))

    @property
    def left_to_end(self) -> float:
        """Seconds for its processes after SIGTERM: as promised, or what is left of the run's time."""
        left = self._ends + LATEST - time.monotonic()
        return min(self.spec.promises.shutdown, max(2.0, left))

    @property
    def sends_many(self) -> bool:
        """Can a hundred jobs be sent quickly?"""
        submit = self.spec.service.submit
        return not isinstance(submit, Command) or "{keys}" in submit.words

    def rounds(self, most: int) -> Iterator[int]:
        """How many jobs to send for each hit, while there is time for this fault."""
        began, size = time.monotonic(), max(2, self.spec.service.jobs // (1 if self.quick else 2))
        for number in range(1 if self.quick else most):
            if number and time.monotonic() - began > 20 * self.scale:
                return
            yield size


# What ids look like, the exact ones first: longer names contain them, too.
_SHAPES = (
    re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    re.compile(r"(?<![0-9a-f])[0-9a-f]{24,64}(?![0-9a-f])"),
    re.compile(r"(?<!\d)\d+(?!\d)"),
)


def _keys(kind: str, seed: str) -> tuple[re.Pattern[str], Callable[[int], str]]:
    rng = random.Random(f"{seed} keys")
    if kind == "number":
        base = rng.randrange(100_000, 900_000) * 1000
        return re.compile(r"(?<!\d)\d{9}(?!\d)"), lambda number: str(base + number)
    if kind == "uuid":
        run = rng.getrandbits(64)
        return (
            re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
            lambda number: str(uuid.UUID(int=random.Random(f"{run} {number}").getrandbits(128), version=4)),
        )
    if kind == "date" or "%" in kind:
        form = "%Y-%m-%d" if kind == "date" else kind
        # Days that no log line is about.
        first = datetime.date(2200 + rng.randrange(600), 1, 1)
        shape = re.sub(r"%[a-zA-Z]", lambda part: r"\d{4}" if part[0] == "%Y" else r"\d{2}", re.escape(form))
        return (
            re.compile(rf"(?<!\d){shape}(?!\d)"),
            lambda number: (first + datetime.timedelta(number)).strftime(form),
        )
    tag = f"k{rng.getrandbits(16):04x}"
    return re.compile(rf"{tag}-\d{{4}}"), lambda number: f"{tag}-{number:04d}"


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:120] if lines else "no reason given"
