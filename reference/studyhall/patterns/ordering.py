"""Ordering: events of one key one after another, different keys side by side.

Promise: of the items submitted for one key, the next one starts only when the one before has succeeded,
even when a broker delivers failed ones again, in whatever order they come back; up to `concurrency` keys
run at once.

How it survives redelivery: when an item fails, everything behind it in its lane is refused (`OutOfTurn`,
which consumes no attempt) and remembered in order. Until the failed one has come back and succeeded, the lane
takes only the item it is owed next. Tell it when an item will not come back (`give_up`, after quarantine).

When it does NOT hold
- Across processes: send each key to one of them, by `partition_of(key, n)` (a queue,
  stream or Kafka partition each, one consumer per partition).
- An item that does not come back within `patience` seconds counts as handled elsewhere, and the lane goes on.
- The publisher must keep the order too: see outbox.
"""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from .core.errors import ResourceBusy

__all__ = ["KeyedLanes", "OutOfTurn", "partition_of"]

Work = Callable[[], Awaitable[Any]]


class OutOfTurn(ResourceBusy):
    """An earlier item of this key failed and has to come back first: deliver this one again a bit later."""


@dataclass(slots=True)
class _Item:
    ident: str
    work: Work
    done: asyncio.Future[Any]


@dataclass(slots=True)
class _Lane:
    line: deque[_Item] = field(default_factory=deque)
    owed: dict[str, float] = field(default_factory=dict)  # refused or failed, in order → since when
    task: asyncio.Task[None] | None = None


class KeyedLanes:
    """Submit in delivery order; acknowledge what the returned future says."""

    def __init__(self, concurrency: int, *, backlog: int = 1000, patience: float = 300.0) -> None:
        if concurrency < 1 or backlog < 1:
            raise ValueError("concurrency and backlog must be at least 1")
        self._slots = asyncio.Semaphore(concurrency)
        self._room = asyncio.Semaphore(backlog)
        self._patience = patience
        self._lanes: dict[str, _Lane] = {}

    async def submit(self, key: str, ident: str, work: Work) -> asyncio.Future[Any]:
        """Waits only while the backlog is full. The future has the result, the error, or `OutOfTurn`."""
        await self._room.acquire()
        lane = self._lanes.setdefault(key, _Lane())
        item = _Item(ident, work, asyncio.get_running_loop().create_future())
        item.done.add_done_callback(lambda _: self._room.release())
        self._write_off(lane)
        if lane.owed and next(iter(lane.owed)) != ident:
            self._refuse(lane, item)
            return item.done
        lane.line.append(item)
        if lane.task is None:
            lane.task = asyncio.create_task(self._drive(key, lane))
        return item.done

    def give_up(self, key: str, ident: str) -> None:
        """The item was quarantined and will not come back: what waits behind it may go on."""
        if (lane := self._lanes.get(key)) is not None:
            lane.owed.pop(ident, None)
            self._drop_if_idle(key, lane)

    async def drain(self) -> None:
        """Wait for everything accepted so far."""
        while tasks := [lane.task for lane in self._lanes.values() if lane.task is not None]:
            await asyncio.wait(tasks)

    async def _drive(self, key: str, lane: _Lane) -> None:
        try:
            while lane.line:
                async with self._slots:  # one item per turn, so that a long lane does not starve the others
                    await self._run(lane, lane.line.popleft())
        finally:
            lane.task = None
            self._drop_if_idle(key, lane)

    async def _run(self, lane: _Lane, item: _Item) -> None:
        try:
            result = await item.work()
        except Exception as error:
            # First of those owed, before the ones it holds back.
            behind = {ident: since for ident, since in lane.owed.items() if ident != item.ident}
            lane.owed = {item.ident: time.monotonic(), **behind}
            _answer(item, error)
            while lane.line:
                self._refuse(lane, lane.line.popleft())
        except BaseException:
            item.done.cancel()
            raise
        else:
            lane.owed.pop(item.ident, None)
            if not item.done.done():
                item.done.set_result(result)

    def _refuse(self, lane: _Lane, item: _Item) -> None:
        first = next(iter(lane.owed))
        lane.owed[item.ident] = time.monotonic()  # keeps its place; it is alive, it keeps coming back
        _answer(item, OutOfTurn(f"{item.ident} has to wait for {first}", retry_after=0.2))

    def _write_off(self, lane: _Lane) -> None:
        now = time.monotonic()
        while lane.owed and now - next(iter(lane.owed.values())) > self._patience:
            del lane.owed[next(iter(lane.owed))]
            if lane.owed:  # the next one gets its own time to come back
                lane.owed[next(iter(lane.owed))] = now

    def _drop_if_idle(self, key: str, lane: _Lane) -> None:
        if lane.task is None and not lane.line and not lane.owed:
            self._lanes.pop(key, None)


def partition_of(key: str, partitions: int) -> int:
    """The same answer in every process and release, unlike `hash()`, which is salted per process."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % partitions


def _answer(item: _Item, error: Exception) -> None:
    if not item.done.done():
        item.done.set_exception(error)
