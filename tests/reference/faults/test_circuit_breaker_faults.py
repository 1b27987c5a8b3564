"""A dead provider and several processes that want to call it: the shared breaker beside plain retries."""

import asyncio
import contextlib
import json
import time
from pathlib import Path

import pytest

from harness.waiting import until
from studyhall.patterns.circuit_breaker import BreakerOpen, CircuitBreaker
from studyhall.patterns.core.connections import producer_client

pytestmark = pytest.mark.fault
PROGRAM = Path(__file__).parent / "programs" / "provider_callers.py"


class Provider:
    """A real HTTP server on loopback that counts: healthy, broken (500) or hanging."""

    def __init__(self):
        self.mode = "broken"
        self.calls: list[tuple[float, int]] = []  # (when, pid of the caller)
        self.open_calls = self.most_at_once = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls):
        self = cls()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length:")[1].split("\r\n")[0])
                pid = json.loads(await reader.readexactly(length))["pid"]
                self.calls.append((time.monotonic(), pid))
                self.open_calls += 1
                self.most_at_once = max(self.most_at_once, self.open_calls)
                try:
                    if self.mode == "hanging":
                        await reader.read(1)  # until the caller is gone
                        return
                finally:
                    self.open_calls -= 1
                status = 200 if self.mode == "healthy" else 500
                writer.write(f"HTTP/1.1 {status} Said\r\ncontent-length: 2\r\n\r\n{{}}".encode())
                await writer.drain()
        writer.close()

    def since(self, moment):
        return [pid for when, pid in self.calls if when >= moment]


async def callers(spawn, count, **options):
    args = [f"--{name}={value}" if value is not True else f"--{name}" for name, value in options.items()]
    started = [spawn(PROGRAM, *args) for _ in range(count)]
    for process in started:
        await process.line('"ready"', 60)
    return started


@pytest.mark.slow
async def test_three_processes_leave_a_dead_provider_alone_and_one_of_them_probes(redis_url, spawn, figures):
    processes, each, failures, cooldown = 3, 4, 5, 2.0
    watched = 3.0 * cooldown
    client = producer_client(redis_url)
    look = CircuitBreaker(client, "provider")
    async with Provider.start() as provider:
        await callers(
            spawn, processes, redis=redis_url, provider=provider.url, callers=each, failures=failures, cooldown=cooldown
        )
        await until(lambda: provider.calls, 20, "the first call")
        first = provider.calls[0][0]
        await until(lambda: time.monotonic() - first > watched, watched + 5, "several cooldowns")
        opening = [when for when, _ in provider.calls if when - first < cooldown * 0.9]
        probes = [when for when, _ in provider.calls if when - first >= cooldown * 0.9]
        gaps = [later - earlier for earlier, later in zip([opening[-1], *probes], probes, strict=False)]
        state = await look.state()
        total = len(provider.calls)

        provider.mode = "healthy"
        healed = time.monotonic()
        await until(lambda: len(provider.since(healed)) > 100, 20, "everybody to call again")
        back = await look.state()
    await client.aclose()

    async with Provider.start() as provider:
        await callers(spawn, processes, provider=provider.url, callers=each, naive=True)
        await until(lambda: provider.calls, 20, "the first naive call")
        start = provider.calls[0][0]
        await until(lambda: time.monotonic() - start > watched, watched + 5, "the same time")
        naive = len(provider.calls)

    in_flight = processes * each - 1
    figures(
        "circuit-breaker",
        name="dead-provider",
        processes=processes,
        callers=processes * each,
        failures_to_open=failures,
        calls_until_open=len(opening),
        probes=len(probes),
        cooldowns_watched=round(watched / cooldown),
        calls=total,
        naive_calls=naive,
    )
    assert len(opening) <= failures + in_flight
    assert 1 <= len(probes) <= 3, "one probe per cooldown"
    assert all(gap >= cooldown * 0.9 for gap in gaps), "two probes at once"
    assert state.state in ("open", "half-open")
    assert back.state == "closed"
    assert naive > 10 * total, "plain retries were as gentle: nothing is proven"


@pytest.mark.slow
async def test_probe_of_a_killed_process_is_free_after_its_lease_and_there_is_never_a_second(redis_url, spawn, figures):
    cooldown, lease = 2.0, 1.5
    async with Provider.start() as provider:
        processes = await callers(
            spawn, 3, redis=redis_url, provider=provider.url, callers=2, cooldown=cooldown, lease=lease
        )
        client = producer_client(redis_url)
        look = CircuitBreaker(client, "provider")

        async def quiet():
            calm = provider.calls and time.monotonic() - provider.calls[-1][0] > cooldown / 2
            return bool(calm) and (await look.state()).state == "open"

        await until(quiet, 20, "the breaker to be open and every earlier call over", every=0.01)
        provider.mode = "hanging"
        await until(lambda: provider.open_calls == 1, 20, "a probe to hang")
        provider.most_at_once = provider.open_calls
        begun = len(provider.calls)
        await asyncio.sleep(2 * lease)  # renewed: nobody else may probe while its process lives
        assert len(provider.calls) == begun, "a second probe beside one that runs"
        pid = provider.calls[-1][1]
        [victim] = [process for process in processes if process.pid == pid]
        victim.kill()
        killed = time.monotonic()
        await until(lambda: provider.since(killed), 20, "another process to probe")
        freed = time.monotonic() - killed
        assert provider.since(killed)[0] != pid
        assert provider.most_at_once == 1
        figures(
            "circuit-breaker",
            name="killed-probe",
            lease_seconds=lease,
            next_probe_after_seconds=round(freed, 2),
            probes_at_once=provider.most_at_once,
        )
        assert freed < lease + 3
        await client.aclose()


async def test_breaker_without_redis_allows_or_refuses_as_told_in_bounded_time(own_redis):
    client = producer_client(own_redis.url)
    allows = CircuitBreaker(client, "a")
    refuses = CircuitBreaker(client, "b", on_outage="refuse")
    done = 0

    async def work():
        nonlocal done
        done += 1

    for away in (own_redis.pause, own_redis.kill):
        away()
        began = time.monotonic()
        await allows.call(work)
        with pytest.raises(BreakerOpen):
            await refuses.call(work)
        assert (await allows.state()).state == "unknown"
        assert time.monotonic() - began < 15
    assert done == 2
    own_redis.restart()
    await refuses.call(work)
    assert (await allows.state()).state == "closed"
    await client.aclose()
