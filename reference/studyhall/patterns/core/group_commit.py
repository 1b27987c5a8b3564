"""Many callers, one commit: whoever asks while a batch is being written goes into the next one.

Promise: `await group.submit(item)` returns after the batch that carried the item was committed, never
before. A failure reaches every caller of its batch; a poison item fails alone. There is no timer: an idle
group adds no delay, a busy one makes larger batches by itself.

When it does not hold: a caller that is cancelled while it waits does not know whether its item was written.
Items must therefore be safe to submit again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["GroupCommit"]

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class GroupCommit(Generic[Item, Answer]):
    """`flush(items)` gives one answer per item, in order; an exception among them is raised to its caller.

    `poison` names the errors a single bad item can cause. A batch that dies of one is written again item by
    item, so `flush` must leave nothing behind when it raises (that is: be one transaction).
    """

    def __init__(
        self,
        flush: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | Exception]]],
        *,
        max_batch: int = 500,
        poison: tuple[type[Exception], ...] = (),
    ) -> None:
        self._flush = flush
        self._max_batch = max_batch
        self._poison = poison
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._flusher: asyncio.Task[None] | None = None  # held: a task without a reference may be collected

    async def submit(self, item: Item) -> Answer:
        return await self.put(item)

    def put(self, item: Item) -> asyncio.Future[Answer]:
        """`submit` without a coroutine of its own."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((item, answer))
        if self._flusher is None:
            self._flusher = loop.create_task(self._run(), name="group commit")
        return answer

    async def _run(self) -> None:
        batch: list[tuple[Item, asyncio.Future[Answer]]] = []
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
                await self._write(batch)
        finally:
            self._flusher = None
            for _, answer in [*batch, *self._waiting]:  # only when the loop shuts down under us
                answer.cancel()

    async def _write(self, batch: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._flush([item for item, _ in batch])
        except self._poison as error:
            if len(batch) == 1:
                _settle(batch[0][1], error)
                return
            for entry in batch:
                await self._write([entry])
        except Exception as error:
            for _, future in batch:
                _settle(future, error)
        else:
            for (_, future), answer in zip(batch, answers, strict=True):
                _settle(future, answer)


def _settle(future: asyncio.Future[Answer], answer: Answer | Exception) -> None:
    if future.done():  # its caller was cancelled
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
