"""A run: the set-up is tried without a fault, then each fault in its own world, several at a time."""

import concurrent.futures
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from . import invariants, probes
from .faults import FAULTS, Fault
from .init import page_of
from .invariants import TIME_UP, Row
from .servers import Sqs
from .spec import Spec, Wrong
from .world import LATEST, Aborted, Batch, Crowd, World

NOT_QUICK = "not with --quick"
KILLS = ("kill-at-effect", "kill-at-commit", "kill-random")
NO_REDIS, UNUSED = "no Redis", "the service does not use Redis"

# Worlds that only wait for a recovery, besides those at work.
WAITING = 4
# Without a fault a submit may take long: no promise covers that.
PATIENT = 30.0
# Seconds of the minute for the try without a fault; what it takes beyond is added, or no fault would run.
TRIED = 8.0


@dataclass(frozen=True)
class Options:
    quick: bool = False
    soak: float = 0.0
    seed: int = 1
    only: Sequence[str] = ()
    keep: bool = False
    lanes: int = 0

    @property
    def budget(self) -> float:
        return self.soak or (52.0 if self.quick else 290.0)


@dataclass
class Card:
    name: str
    seed: int
    server: str
    workers: int
    seconds: float
    rows: list[Row] = field(default_factory=list)
    evidence: str = ""
    stack: str = ""  # whose page says how to fix it
    command: str = "queuesmith prove"  # that was typed

    @property
    def broken(self) -> list[Row]:
        return [row for row in self.rows if row.verdict == "broken"]

    @property
    def rest(self) -> list[str]:
        """Faults that should have run and did not, or not to the end."""
        return [row.fault for row in self.rows if row.verdict == "unclear" or row.measured in (TIME_UP, NOT_QUICK)]

    @property
    def proved(self) -> bool:
        """Did any fault except `none` hit something?"""
        return any(
            row.verdict in ("held", "broken") and row.fault in FAULTS and row.fault != "none" for row in self.rows
        )


Say = Callable[[str, int, int], None]


def prove(spec: Spec, options: Options, say: Say = lambda text, done, all: None) -> Card:
    """Raises Wrong when the set-up, not the service, is at fault."""
    folder = Path(tempfile.mkdtemp(prefix=f"queuesmith-prove-{spec.service.name[:20]}-"))
    run, card = _Run(spec, options, folder, say), None
    try:
        rows = run.soak() if options.soak else run.faults()
        rows += invariants.judge_whole(run.worlds, bool(options.soak))
        seconds = time.monotonic() - run.began
        card = Card(spec.service.name, options.seed, run.server, spec.service.workers, seconds, rows)
        card.stack = page_of(spec)
        return card
    finally:
        run.close()
        if card is not None and (card.broken or options.keep):
            card.evidence = str(folder)
            shutil.copyfile(spec.file, folder / "prove.toml")
        else:
            shutil.rmtree(folder, ignore_errors=True)


class _Run:
    def __init__(self, spec: Spec, options: Options, folder: Path, say: Say) -> None:
        self.spec, self.options, self.folder, self._say = spec, options, folder, say
        self.began = time.monotonic()
        self.worlds: list[World] = []
        self.server = Sqs.name if spec.sqs else NO_REDIS
        lanes = options.lanes or (1 if spec.alone else min(4, max(2, os.cpu_count() or 2)))
        self._threads = lanes + (0 if lanes == 1 else WAITING)
        self.crowd = Crowd(lanes)
        self._open: list[World] = []
        self._struck: list[World] = []
        self._baseline: World | None = None
        self._done = self._of = 0
        self._slow = 0.0
        self._first: list[str] = []

    @property
    def gone(self) -> float:
        """Of the budget."""
        return time.monotonic() - self.began - self._slow

    def close(self) -> None:
        """Ends all waiting and leaves nothing behind."""
        self.crowd.over.set()
        for world in list(self._open):
            world.close()

    def _time_up(self) -> None:
        """Worlds still at work are stopped and count as not run; the others are judged by what was seen so far."""
        self.crowd.over.set()
        for world in list(self._open):
            if world not in self._struck:
                world.close()

    # faults, each in its own world

    def faults(self) -> list[Row]:
        spec, only = self.spec, self.options.only
        chosen = [fault for name, fault in FAULTS.items() if name != "none" and (not only or name in only)]
        rows = {"none": self._try(FAULTS["none"])}
        # A minute is short: what a slow machine took for that is not counted.
        self._slow = max(0.0, self.gone - TRIED) if self.options.quick else 0.0
        able = [fault.name for fault in chosen if not self._left_out(fault)]
        self._of = len(able)
        self._first = [name for name in KILLS if name in able][:1] + ["twice"] * ("twice" in able)
        # Then those that mostly wait: others work meanwhile.
        order = [FAULTS[name] for name in self._first]
        order += sorted((fault for fault in chosen if fault not in order), key=lambda fault: fault.seconds(spec) < 30)
        with concurrent.futures.ThreadPoolExecutor(self._threads, "fault") as pool:
            futures = {pool.submit(self._one, fault, turn): fault for turn, fault in enumerate(order)}
            try:
                waiting = set(futures)
                while waiting:
                    if not only and self.gone > self.options.budget + LATEST and not self.crowd.over.is_set():
                        self._time_up()
                    done, waiting = concurrent.futures.wait(waiting, 0.2, "FIRST_EXCEPTION")
                    rows.update({futures[future].name: future.result() for future in done})
            except BaseException:
                self.close()
                for future in futures:
                    future.cancel()
                raise
        return [rows[name] for name in FAULTS if name in rows]

    def _one(self, fault: Fault, turn: int) -> Row:
        why = self._left_out(fault)
        if not why:
            try:
                with self.crowd.place(turn):
                    # it may have waited long
                    why = self._too_late(fault)
                    if not why:
                        self._say(f"{fault.name}: {fault.does}", self._done + 1, self._of)
                        world = self._open_world(fault.name)
                        try:
                            world.start(resting=fault.backlog and world.early)
                            batch = _strike(world, fault)
                            self._struck.append(world)
                            self.crowd.check()
                        except BaseException:
                            self._shut(world, keep=False)
                            raise
            except Exception:  # any error of a closed world
                if not self.crowd.over.is_set():
                    raise
                why = TIME_UP
        self._done += why in ("", TIME_UP)
        if why:
            return Row(fault.name, fault.does, "not run", why)
        row = None
        try:
            row = self._judged(world, batch, fault)
            if row.verdict == "hit nothing" and self.crowd.over.is_set():  # still striking when the run ended
                return Row(fault.name, fault.does, "not run", TIME_UP)
            return row
        finally:
            self._shut(world, keep=self.options.keep or (row is not None and row.verdict == "broken"))

    def _try(self, fault: Fault) -> Row:
        """Without any fault. The speed that it measures is allowed for in the others."""
        self._say("starting", 0, 1)
        world = self._open_world(fault.name)
        world.normal = PATIENT
        row = None
        try:
            with self.crowd.place():
                world.start(resting=True)
                if world.redis:
                    self.server = world.redis.version()
                batch = _strike(world, fault)
            world.watch(batch, max(15.0 * world.scale, world.spec.promises.recovery))
            world.service.check_stays()
            _check_baseline(world, batch)
            if world.redis and not world.redis.connected():
                self.server = NO_REDIS
            first = min(job.seen[0] for job in batch.expected() if job.seen)
            world.warmup = max(0.0, first - world.service.started)
            world.normal = max(job.slowest for job in batch.jobs.values())
            self._baseline = world
            row = self._judged(world, batch, fault)
            return row
        finally:
            self._shut(world, keep=self.options.keep or (row is not None and row.verdict == "broken"))

    def _judged(self, world: World, batch: Batch, fault: Fault) -> Row:
        with suppress(Aborted):
            if fault.name != "none":
                world.watch(batch, self._patience(batch.over, world))
            self._echo(world)
        _last_look(world)
        invariants.end(world)
        world.look()
        return invariants.judge(world, batch, fault)

    def _patience(self, since: float, world: World, least: float = 0.0) -> float:
        """Seconds until the promised recovery, or the run's time, is over."""
        promised = since + max(self.spec.promises.recovery, least) + world.warmup - world.timeline.now()
        left = self.options.budget - self.gone if not self.options.only else promised
        return max(0.0, min(promised, left))

    def _left_out(self, fault: Fault) -> str:
        """Why this fault is not run."""
        if why := fault.needs(self.spec):
            return why
        if fault.name.startswith("redis-") and self.server == NO_REDIS:
            return UNUSED
        if fault.name in self.spec.promises.skip:
            return "not promised ([promises] skip)"
        return NOT_QUICK if self.options.quick and not fault.quick and not self.options.only else ""

    def _too_late(self, fault: Fault) -> str:
        if self.options.only or fault.name in self._first:
            return ""
        warmup = self._baseline.warmup if self._baseline else 0.0
        # A service that keeps its promises needs no more; for another the card says unclear.
        tail = min(self.spec.promises.recovery, 2.0 if self.options.quick else 10.0)
        late = self.gone + fault.seconds(self.spec) + warmup + tail > self.options.budget
        return TIME_UP if late else ""

    # plain work and faults in random order, in one world

    def soak(self) -> list[Row]:
        """Half of the time plain work, by which memory is judged."""
        options, none = self.options, FAULTS["none"]
        possible = [
            fault
            for name, fault in FAULTS.items()
            if name != "none" and (not options.only or name in options.only) and not self._left_out_of_soak(fault)
        ]
        world, done = self._open_world("soak"), list[tuple[Batch, Fault]]()
        rows: list[Row] = []
        try:
            with self.crowd.place():
                world.start()
                self.server = world.redis.version() if world.redis else self.server
                while not done or self.gone < options.budget - min(self.spec.promises.recovery, 60.0):
                    calm = not done or self.gone < options.budget / 2 or not possible
                    pick = random.Random(f"{options.seed} {len(done)}")
                    fault = none if calm else pick.choice(possible)
                    self._say(f"{fault.name}: {fault.does}", int(self.gone), int(options.budget))
                    world.wait_for_api()  # an earlier fault may have killed it
                    batch = _strike(world, fault)
                    if not world.settle(batch, world.patience) and fault is not none:
                        # The next fault must find a service that works.
                        world.timeline.add("fault", f"started again by us: {fault.name} left work undone")
                        world.service.kill(*world.service.all())
                    done.append((batch, fault))
                    if len(done) == 1:
                        _check_baseline(world, batch)
                        if world.redis and not world.redis.connected():
                            self.server = NO_REDIS
                            possible = [fault for fault in possible if not fault.name.startswith("redis-")]
            self._echo(world)
            _last_look(world)
            invariants.end(world)
            world.look()
            rows = [invariants.judge(world, batch, fault) for batch, fault in _merged(done)]
            return rows
        finally:
            self._shut(world, keep=options.keep or any(row.verdict == "broken" for row in rows))

    def _left_out_of_soak(self, fault: Fault) -> bool:
        return bool(fault.needs(self.spec)) or fault.name in self.spec.promises.skip

    # worlds

    def _open_world(self, name: str) -> World:
        options = self.options
        ends = math.inf if options.only or options.soak else self.began + self._slow + options.budget
        world = World(
            self.spec,
            self.folder / name,
            options.seed,
            name,
            quick=options.quick,
            crowd=self.crowd,
            ends=ends if self._baseline else math.inf,
        )
        self._open.append(world)
        self.worlds.append(world)
        if self._baseline:
            world.resting = self._baseline.resting
            world.warmup, world.normal = self._baseline.warmup, self._baseline.normal
            world.early = self._baseline.early
        return world

    def _shut(self, world: World, *, keep: bool) -> None:
        world.close()
        self._open.remove(world)
        if keep:
            world.timeline.write(world.folder, world.events_of_logs())
        else:
            shutil.rmtree(world.folder, ignore_errors=True)

    def _echo(self, world: World) -> None:
        """Wait for late duplicates, when a lock runs out, and for work still under way."""
        last = max(batch.over for batch in world.batches)
        again = self.spec.service.redelivery
        most = 15.0 if self.options.quick else max(60.0, again)
        end = time.monotonic() + min(self._patience(last, world, again), most)
        keys = {key for batch in world.batches for key in batch.jobs}
        while time.monotonic() < end:
            self.crowd.check()
            world.look()
            waiting = [batch for batch in world.batches if batch.open()]
            for batch in waiting:
                world.look_for_failures(batch.open())
            if not waiting and not _under_way(world, keys):
                return
            time.sleep(0.3)


def _strike(world: World, fault: Fault) -> Batch:
    batch = Batch(fault.name, began=world.timeline.now())
    world.batches.append(batch)
    fault.run(world, batch)
    batch.end_fault(batch.over or world.timeline.now())
    return batch


def _merged(done: Sequence[tuple[Batch, Fault]]) -> list[tuple[Batch, Fault]]:
    """One batch of a soak for each line of the card: the faults, and all calm ones merged."""
    calm = [batch for batch, fault in done if fault.name == "none"]
    first = calm[0]
    for batch in calm[1:]:
        first.jobs |= batch.jobs
        first.over = max(first.over, batch.over)
        first.watched = max(first.watched, batch.watched)
    return [(batch, fault) for batch, fault in done if batch is first or fault.name != "none"]


def _check_baseline(world: World, batch: Batch) -> None:
    """Wrong if nothing happens without any fault: then the set-up is at fault, not the service."""
    if not batch.expected():
        answer = next((job.said.strip() for job in batch.jobs.values() if job.said), "it said nothing")
        raise Wrong(f"`submit` was refused, without any fault: {answer[-600:]}{world.spec.line('service.submit')}")
    if any(job.count for job in batch.expected()):
        _learn_places(world, set(batch.jobs))
        return
    tails = "\n".join(f"{slot.name}: {world.service.tail(slot)}" for slot in world.service.all()[:3])
    read = f" It cannot be read: {world.unreadable}." if world.unreadable else ""
    unknown = {call.line for provider in world.providers.values() for call in provider.calls if call.route is None}
    asked = f" Calls that no route answers: {', '.join(sorted(unknown))}." if unknown else ""
    raise Wrong(
        f"without any fault, {len(batch.expected())} jobs were taken and [effect] shows none of them after "
        f"{batch.watched - batch.began:.0f} s.{read}{asked} Is the query right, does it give the {{key}}? "
        f"{world.spec.line('effect')}\nThe logs end with:\n{tails}"
    )


def _learn_places(world: World, keys: set[str]) -> None:
    """Where in Redis jobs stay that were done without any fault: seen twice, a second apart."""
    before: set[str] | None = None
    for _ in range(10):
        lists = probes.in_redis(world, keys).values()
        places = {probes.shape(world, place) for listed in lists for place in listed}
        if places == before:
            break
        before = places
        time.sleep(1 if places else 0.3)
    world.resting = before or set()


def _last_look(world: World) -> None:
    """Note what is done by now, and what is done but still queued, so that it will run again."""
    keys = {key for batch in world.batches for key in batch.jobs}
    queued = probes.queued(world, keys)
    world.look()
    for batch in world.batches:
        batch.watched = world.timeline.now()
        batch.queued = {key: place for key, place in queued.items() if key in batch.jobs}


def _under_way(world: World, keys: set[str]) -> bool:
    """May a job of ours still run?"""
    if any(provider.in_flight for provider in world.providers.values()):
        return True
    return bool(probes.queued(world, keys))
