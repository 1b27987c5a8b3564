"""Live events: complete after any break, one reader for all, bounded memory."""

import asyncio
import contextlib

import pytest

from harness.waiting import until
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.progress_stream import GAP, IDLE, JobEvent, ProgressStream, sse

QUEUES = ("alpha", "beta")


@contextlib.asynccontextmanager
async def streaming(url, **options):
    stream = ProgressStream(url, QUEUES, **options)
    running = asyncio.create_task(stream.run())
    try:
        await stream.ready()
        yield stream
    finally:
        running.cancel()
        await asyncio.wait({running})


@pytest.fixture
async def queue(redis_url):
    """`await queue(name, number)`: an event as BullMQ's scripts write it."""
    client = producer_client(redis_url)

    async def write(name, number, event="progress"):
        fields = {"event": event, "jobId": f"job-{number}", "data": f'{{"percent":{number}}}'}
        await client.xadd(f"bull:{name}:events", fields)

    write.client = client
    yield write
    await client.aclose()


class Reader:
    """A client: reads until it is told to stop, keeps what it saw."""

    def __init__(self, stream, last_id=None, pause=0.0):
        self.seen: list[JobEvent] = []
        self._pause = pause
        self._task = asyncio.create_task(self._read(stream, last_id))

    async def _read(self, stream, last_id):
        async for event in stream.events(last_id, idle=60):
            self.seen.append(event)
            if self._pause:
                await asyncio.sleep(self._pause)

    def numbers(self, queue):
        return [int(event.progress["percent"]) for event in self.seen if event.queue == queue and event.progress]

    async def stop(self):
        self._task.cancel()
        await asyncio.wait({self._task})
        return self.seen[-1].cursor if self.seen else ""


async def test_a_client_that_comes_back_misses_nothing_on_any_instance(redis_url, queue, figures):
    numbers, breaks, last = list(range(200)), 8, ""
    seen = {"alpha": [], "beta": []}
    naive = []
    for part in range(breaks):
        # Another instance every time: nothing is kept between them but the id the client sends.
        async with streaming(redis_url) as stream:
            reader, forgetful = Reader(stream, last or None), Reader(stream)
            if not last:
                await asyncio.sleep(0.05)
            batch = numbers[part * 25 : part * 25 + 15]
            for number in batch:
                await queue("alpha", number)
                await queue("beta", number)
            await until(lambda batch=batch, r=reader: batch[-1] in r.numbers("beta"), what="the client has seen it")
            last = await reader.stop()
            await forgetful.stop()
            for name in QUEUES:
                seen[name] += reader.numbers(name)
            naive += forgetful.numbers("alpha")
        for number in numbers[part * 25 + 15 : part * 25 + 25]:  # nobody is connected
            await queue("alpha", number)
            await queue("beta", number)
    async with streaming(redis_url) as stream:
        reader = Reader(stream, last)
        await until(lambda: numbers[-1] in reader.numbers("beta"), what="the rest")
        await reader.stop()
        for name in QUEUES:
            seen[name] += reader.numbers(name)
    assert seen == {"alpha": numbers, "beta": numbers}, "each once, in order"
    assert len(naive) <= 15 * breaks < len(numbers), "without Last-Event-ID the breaks are lost"
    figures(
        "progress-stream",
        name="breaks",
        events=len(QUEUES) * len(numbers),
        breaks=breaks,
        missed=sum(len(set(numbers) - set(got)) for got in seen.values()),
        duplicated=sum(len(got) - len(set(got)) for got in seen.values()),
        naive_missed=len(numbers) - len(naive),
    )


async def test_one_reader_serves_all_clients(redis_url, queue):
    async def reading():
        return [row for row in await queue.client.client_list() if "xread" in row["cmd"]]

    async with streaming(redis_url) as stream:
        clients = [Reader(stream) for _ in range(100)]
        await queue("alpha", 1)
        await until(lambda: all(client.numbers("alpha") == [1] for client in clients), what="all have seen it")
        assert len(await until(reading, what="the reader is back at its stream")) == 1
        assert stream.catch_ups == 0
        for client in clients:
            await client.stop()


async def test_a_slow_client_loses_nothing_and_costs_no_memory(redis_url, queue):
    async with streaming(redis_url, memory=10) as stream:
        slow = Reader(stream, pause=0.002)
        await asyncio.sleep(0.05)
        for number in range(300):
            await queue("alpha", number)
        await until(lambda: len(slow.numbers("alpha")) >= 300, timeout=20, what="the slow one is through")
        assert slow.numbers("alpha") == list(range(300))
        assert stream.catch_ups > 0, "it was behind the ring"
        assert len(stream._ring) == 10
        await slow.stop()


async def test_what_was_trimmed_is_told_as_a_gap(redis_url, queue):
    async with streaming(redis_url) as stream:
        reader = Reader(stream)
        await asyncio.sleep(0.05)
        await queue("alpha", 0)
        await until(lambda: reader.seen, what="the first")
        last = await reader.stop()
        for number in range(1, 21):
            await queue("alpha", number)
        await queue.client.xtrim("bull:alpha:events", maxlen=5, approximate=False)
        back = Reader(stream, last)
        await until(lambda: 20 in back.numbers("alpha"), what="the rest")
        assert back.seen[0].name == GAP
        assert back.numbers("alpha") == [16, 17, 18, 19, 20]
        await back.stop()


async def test_a_redis_that_lost_its_data_is_reported_as_a_gap_and_goes_on(redis_url, queue):
    async with streaming(redis_url) as stream:
        reader = Reader(stream)
        await asyncio.sleep(0.05)
        await queue("alpha", 1)
        await until(lambda: reader.numbers("alpha") == [1], what="the first")
        await queue.client.flushall()
        await until(lambda: reader.seen[-1].name == GAP, timeout=10, what="the gap")
        await queue("alpha", 2)
        await until(lambda: reader.numbers("alpha") == [1, 2], what="what came after")
        await reader.stop()


@pytest.mark.fault
async def test_a_restart_of_redis_is_waited_out(own_redis):
    async with streaming(own_redis.url) as stream:
        reader = Reader(stream)
        await asyncio.sleep(0.05)
        for number in range(2):
            client = producer_client(own_redis.url)
            await client.xadd(
                "bull:alpha:events", {"event": "progress", "jobId": "j", "data": f'{{"percent":{number}}}'}
            )
            await client.aclose()
            await until(lambda number=number: number in reader.numbers("alpha"), what="seen")
            # The AOF is synced every second: this event is to survive.
            await asyncio.sleep(1.1 * (number == 0))
            if number == 0:
                await asyncio.to_thread(own_redis.restart)
        assert reader.numbers("alpha") == [0, 1], "each once, though the connection broke"
        await reader.stop()


async def test_a_quiet_stream_sends_heartbeats_and_nonsense_ids_are_not_an_error(redis_url):
    async with streaming(redis_url) as stream:
        for nonsense in ("", "x", "alpha:", "alpha:1", "alpha:9" * 5_000, "gamma:1-1", "alpha:1-1,,beta", "🦆"):
            async with asyncio.timeout(5):
                async for event in stream.events(nonsense, idle=0.02):
                    if event.name == IDLE:
                        break


def test_the_wire_format_cannot_be_broken_by_data():
    frame = sse("failed", {"reason": "line\n\nevent: forged\ndata: {}\r\n"}, "alpha:1-1")
    assert frame.count("\n\n") == 1
    assert frame.count("\nevent:") == 1
