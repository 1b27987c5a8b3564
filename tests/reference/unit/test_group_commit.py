"""GroupCommit: one flush for callers that wait together, and each caller gets its own answer."""

import asyncio

import pytest

from studyhall.patterns.core.group_commit import GroupCommit


class Ledger:
    """A flush that remembers its batches, can be held back, and refuses a batch with a negative number."""

    def __init__(self):
        self.batches: list[list[int]] = []
        self.committed: list[int] = []
        self.began, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.broken = False

    async def flush(self, items):
        self.batches.append(list(items))
        self.began.set()
        await self.gate.wait()
        if self.broken:
            raise ConnectionError("database gone")
        if any(item < 0 for item in items):
            raise ValueError("negative")
        self.committed += items
        return [LookupError(f"no {item}") if item == 404 else item * 2 for item in items]


async def test_callers_that_wait_together_share_one_flush():
    ledger = Ledger()
    group = GroupCommit(ledger.flush)
    assert await asyncio.gather(*(group.submit(n) for n in range(50))) == [n * 2 for n in range(50)]
    assert len(ledger.batches) == 1


async def test_callers_that_come_during_a_flush_go_into_the_next_one():
    ledger = Ledger()
    group = GroupCommit(ledger.flush)
    ledger.gate.clear()
    first = asyncio.create_task(group.submit(1))
    await ledger.began.wait()
    late = [asyncio.create_task(group.submit(n)) for n in (2, 3)]
    await asyncio.sleep(0)
    assert ledger.batches == [[1]]
    ledger.gate.set()
    assert [await first, *await asyncio.gather(*late)] == [2, 4, 6]
    assert ledger.batches == [[1], [2, 3]]


async def test_nobody_returns_before_the_commit():
    ledger = Ledger()
    group = GroupCommit(ledger.flush)
    ledger.gate.clear()
    waiting = [asyncio.create_task(group.submit(n)) for n in range(3)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    ledger.gate.set()
    await asyncio.gather(*waiting)
    assert ledger.committed == [0, 1, 2]


async def test_a_failed_batch_is_reported_to_each_caller_and_the_group_goes_on():
    ledger = Ledger()
    group = GroupCommit(ledger.flush, poison=(ValueError,))
    ledger.broken = True
    failed = await asyncio.gather(*(group.submit(n) for n in range(5)), return_exceptions=True)
    assert [type(answer) for answer in failed] == [ConnectionError] * 5
    assert len(ledger.batches) == 1, "an outage is not tried again item by item"
    ledger.broken = False
    assert await group.submit(7) == 14


async def test_one_poison_item_fails_alone():
    ledger = Ledger()
    group = GroupCommit(ledger.flush, poison=(ValueError,))
    answers = await asyncio.gather(*(group.submit(n) for n in (1, -1, 404, 2)), return_exceptions=True)
    assert answers[0] == 2
    assert answers[3] == 4
    assert isinstance(answers[1], ValueError)
    assert isinstance(answers[2], LookupError)
    assert ledger.committed == [1, 404, 2]


async def test_batches_are_bounded():
    ledger = Ledger()
    group = GroupCommit(ledger.flush, max_batch=10)
    await asyncio.gather(*(group.submit(n) for n in range(35)))
    assert [len(batch) for batch in ledger.batches] == [10, 10, 10, 5]


async def test_a_cancelled_caller_does_not_disturb_its_batch():
    ledger = Ledger()
    group = GroupCommit(ledger.flush)
    ledger.gate.clear()
    tasks = [asyncio.create_task(group.submit(n)) for n in range(3)]
    await ledger.began.wait()
    tasks[1].cancel()
    ledger.gate.set()
    assert await tasks[0] == 0
    assert await tasks[2] == 4
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]


def test_a_loop_that_ends_leaves_no_caller_hanging():
    ended = []

    async def use():
        ledger = Ledger()
        ledger.gate.clear()
        group = GroupCommit(ledger.flush)

        async def caller():
            try:
                await group.submit(1)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        held = asyncio.create_task(caller())
        await ledger.began.wait()
        assert not held.done()

    asyncio.run(use())
    assert ended == ["cancelled"]
