"""Many callers, one commit: whoever asks while a batch is being written goes into the next one.

Promise: `await group.submit(item)` returns after the batch that carried the item was committed, never
before. A failure reaches every caller of its batch; a poison item fails alone. There is no timer: an idle
group adds no delay, a busy one makes larger batches by itself.

When it does not hold: a caller that is cancelled while it waits does not know whether its item was written.
Items must therefore be safe to submit again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["GroupCommit"]

LATE = 0.02  # seconds

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class _Waiting(NamedTuple, Generic[Item, Answer]):
    item: Item
    answer: asyncio.Future[Answer]
    alone: bool = False  # it was in a batch that died


class GroupCommit(Generic[Item, Answer]):
    """`flush(items)` gives one answer per item, in order; an exception among them is raised to its caller.

    `poison` names the errors a single bad item can cause. A batch that dies of one is written again item by
    item, so `flush` must leave nothing behind when it raises (that is: be one transaction). While all batches that
    are being written take longer than `LATE`, another one is begun beside them, up to `at_once` in all.
    """

    def __init__(
        self,
        flush: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | BaseException]]],
        *,
        max_batch: int = 500,
        at_once: int = 1,
        poison: tuple[type[Exception], ...] = (),
    ) -> None:
        self._flush = flush
        self._max_batch, self._at_once = max_batch, at_once
        self._poison = poison
        self._waiting: list[_Waiting[Item, Answer]] = []
        # Who writes, and since when its batch is being written. Held: a task without a reference may be collected.
        self._flushers: dict[asyncio.Task[None], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def submit(self, item: Item) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(item, answer))
        if not self._flushers:
            self._start()
        return await answer

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._flushers[loop.create_task(self._run())] = loop.time()
        if self._at_once > 1 and self._timer is None:
            self._timer = loop.call_later(LATE, self._help)

    def _help(self) -> None:
        self._timer, loop = None, asyncio.get_running_loop()
        late = all(loop.time() - begun >= LATE for begun in self._flushers.values())
        if self._waiting and late and len(self._flushers) < self._at_once:
            self._start()
        if self._flushers and self._timer is None:
            self._timer = loop.call_later(LATE, self._help)

    async def _run(self) -> None:
        batch: list[_Waiting[Item, Answer]] = []
        flusher = asyncio.current_task()
        assert flusher is not None
        try:
            while self._waiting:
                together = [entry.alone for entry in self._waiting[: self._max_batch]]
                count = 1 if together[0] else [*together, True].index(True)
                batch, self._waiting = self._waiting[:count], self._waiting[count:]
                self._flushers[flusher] = asyncio.get_running_loop().time()
                await self._write(batch)
                batch = []
        finally:
            del self._flushers[flusher]
            for entry in batch if self._flushers else [*batch, *self._waiting]:
                entry.answer.cancel()  # only when the loop shuts down under us

    async def _write(self, batch: list[_Waiting[Item, Answer]]) -> None:
        try:
            answers = await self._flush([entry.item for entry in batch])
        except self._poison as error:
            if len(batch) == 1:
                _settle(batch[0].answer, error)
            else:
                self._waiting[:0] = [entry._replace(alone=True) for entry in batch]
        except Exception as error:
            for entry in batch:
                _settle(entry.answer, error)
        else:
            for entry, answer in zip(batch, answers, strict=True):
                _settle(entry.answer, answer)


def _settle(future: asyncio.Future[Answer], answer: Answer | BaseException) -> None:
    if future.done():  # its caller was cancelled
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)
