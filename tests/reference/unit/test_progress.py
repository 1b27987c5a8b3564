"""Progress: throttled between milestones, complete at milestones, never the reason a job fails."""

import asyncio
from typing import Any

from studyhall.patterns.progress import MAX_DETAIL, MAX_MESSAGE, Progress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Sink:
    def __init__(self):
        self.sent: list[dict[str, Any]] = []
        self.down = False

    async def __call__(self, update):
        if self.down:
            raise ConnectionError("redis is away")
        self.sent.append(update)


async def test_between_milestones_only_the_latest_goes_out_once_per_interval():
    sink, clock = Sink(), Clock()
    progress = Progress(sink, interval=1.0, clock=clock)
    for row in range(1000):
        await progress("reading", row / 10, f"row {row}")
        clock.now += 0.01
    await progress.flush()
    assert len(sink.sent) <= 12, "ten seconds of work, one update per second"
    assert sink.sent[-1]["message"] == "row 999", "the end is not held back"


async def test_milestones_are_never_dropped():
    sink = Sink()
    progress = Progress(sink, interval=3600, clock=Clock())
    for stage in range(50):
        for row in range(20):
            await progress(f"stage {stage}", row)
    await progress("stage 49", 100, "done")
    assert [sent["stage"] for sent in sink.sent if sent["percent"] == 0] == [f"stage {n}" for n in range(50)]
    assert sink.sent[-1] == {"stage": "stage 49", "percent": 100.0, "message": "done", "detail": {}}


async def test_the_end_is_announced_once_however_often_it_is_reported():
    sink = Sink()
    progress = Progress(sink, interval=3600, clock=Clock())
    for _ in range(1000):
        await progress("saving", 100)
    assert len(sink.sent) == 1


async def test_an_outage_never_fails_the_work_and_milestones_arrive_afterwards_in_order():
    sink = Sink()
    progress = Progress(sink, interval=0, clock=Clock())
    await progress("one", 10)
    sink.down = True
    await progress("two", 20)
    await progress("two", 25, "thinned")
    await progress("three", 30)
    sink.down = False
    await progress("four", 40)
    assert [row["stage"] for row in sink.sent] == ["one", "two", "three", "four"]


async def test_a_report_that_hangs_costs_its_patience_and_no_more():
    async def hang(_update):
        await asyncio.Event().wait()

    async with asyncio.timeout(5):
        await Progress(hang, patience=0.05)("one", 1)


async def test_being_cancelled_while_reporting_still_cancels_the_work():
    reporting = asyncio.Event()

    async def hang(_update):
        reporting.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(Progress(hang, patience=60)("one", 1))  # type: ignore[arg-type]
    await reporting.wait()
    task.cancel()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)


async def test_odd_numbers_and_large_details_are_bounded():
    sink = Sink()
    progress = Progress(sink, clock=Clock())
    await progress("a", float("nan"), "m" * 10_000, big="x" * MAX_DETAIL)
    await progress("b", -5, thing=object())
    await progress("c", 1e9)
    assert [row["percent"] for row in sink.sent] == [0.0, 0.0, 100.0]
    assert len(sink.sent[0]["message"]) == MAX_MESSAGE
    assert "bytes" in sink.sent[0]["detail"]["left_out"]
    assert "not JSON" in sink.sent[1]["detail"]["left_out"]
