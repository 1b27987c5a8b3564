"""How much of the API one client may use: guesses, addresses, half-sent requests, event streams; and how it stops."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from harness.api import TOKEN, api_at, standing_api
from harness.ports import free_port
from harness.redis import RedisServer
from harness.waiting import until, until_sync
from queuesmith.console import gate
from studyhall.api import impatient

SLOW = 0.4  # seconds that the tests' servers wait for a client


@pytest.fixture(scope="module")
def redis():
    made = RedisServer.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def api(tmp_path_factory, redis):
    options = {"request_rate": "2", "event_streams_per_client": "3"}
    with standing_api(tmp_path_factory.mktemp("api"), redis.url, worker=False, **options) as standing:
        yield standing


def test_guessing_the_admin_token_is_answered_429_and_so_is_a_right_guess(tmp_path, redis):
    with standing_api(tmp_path, redis.url, worker=False) as api:
        guesses = [
            api.client.get("/admin/queues", headers={"authorization": f"Bearer guess {number}"}).status_code
            for number in range(30)
        ]
        assert guesses[:10] == [401] * 10
        assert set(guesses[12:]) == {429}
        answer = api.client.get("/admin/queues", headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) <= 6
        assert api.client.get("/healthz").status_code == 200, "only the admin side is closed to them"


def _orders(api, forwarded):
    wanted = {"pack_id": "no-such-pack"}
    return [
        api.client.post("/orders", json=wanted, headers={"x-forwarded-for": address}).status_code
        for address in forwarded
    ]


def test_a_forwarded_address_does_not_get_around_the_rate_limit(api):
    assert 429 in _orders(api, (f"10.0.0.{number}" for number in range(40)))


def test_a_trusted_proxy_says_who_the_client_is(tmp_path, redis):
    options = {"request_rate": "2", "trusted_proxies": "127.0.0.1"}
    with standing_api(tmp_path, redis.url, worker=False, **options) as behind:
        assert set(_orders(behind, (f"10.0.0.{number}" for number in range(40)))) == {422}
        assert 429 in _orders(behind, ("10.0.0.99" for _ in range(40)))


def test_listening_beyond_loopback_says_that_anybody_may_be_anybody(api, tmp_path):
    port = api.url.rpartition(":")[2]  # taken: it says so and ends before it listens
    command = [sys.executable, "-m", "studyhall", "api", "--host", "0.0.0.0", "--port", port]
    done = subprocess.run(
        [*command, "--data-dir", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "X-User is believed" in done.stderr
    assert "cannot listen" in done.stderr


def test_event_streams_are_limited_per_client_and_a_closed_one_makes_room(api):
    with contextlib.ExitStack() as readers:
        for _ in range(3):
            stream = readers.enter_context(api.client.stream("GET", "/events"))
            assert stream.status_code == 200
        refused = api.client.get("/events")
        assert (refused.status_code, refused.json()["type"]) == (503, "urn:queuesmith:problem:too-many-streams")
        assert refused.headers["retry-after"]
        assert api.client.get("/documents").status_code == 200
    deadline = time.monotonic() + 20
    while True:
        with api.client.stream("GET", "/events") as again:
            if again.status_code == 200:
                return
        assert time.monotonic() < deadline, "closed streams still count"
        time.sleep(0.05)


def test_half_sent_requests_beyond_the_limit_are_refused_and_gone_ones_make_room(api):
    """uvicorn's own limit keeps every connection that has not sent a whole request."""
    address = ("127.0.0.1", int(api.url.rpartition(":")[2]))
    with contextlib.ExitStack() as held:
        for _ in range(impatient.MAX_CONNECTIONS):
            client = held.enter_context(socket.create_connection(address, 10))
            with contextlib.suppress(ConnectionError):  # the last ones: the tests before have connections too
                client.sendall(b"POST /orders HTTP/1.1\r\nHost: localhost\r\nX-Half")
        for _ in range(20):
            client = held.enter_context(socket.create_connection(address, 10))
            assert client.recv(100).startswith(b"HTTP/1.1 503 ")
            assert client.recv(100) == b""
    until_sync(lambda: answers(api.url), 20, "room for a request")


def answers(url):
    try:
        return httpx2.get(f"{url}/healthz", timeout=10).status_code == 200
    except httpx2.TransportError:
        return False


async def test_the_api_stops_at_once_on_sigterm_while_a_client_reads_its_events(spawn, tmp_path, redis):
    """The stream ends with its last chunk, as every answer does. It was cut off after the grace of 3 s."""
    async with api_at(spawn, tmp_path / "data", redis.url) as api:
        async with api.client.stream("GET", "/events") as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith("retry:")
            began = time.monotonic()
            api.process.signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                async for _ in lines:
                    pass  # an answer that is cut off raises
            ended = time.monotonic() - began
        await api.process.exited(30)
        log = api.process.log.read_text()
        assert "timeout graceful shutdown exceeded" not in log
        assert ended < 2.5, f"the stream ended after {ended:.1f} s"


@contextlib.asynccontextmanager
async def impatient_server(monkeypatch):
    """A server with our protocol and gate, and little patience, in this process; its port."""
    monkeypatch.setattr(impatient, "HEADER_SECONDS", SLOW)
    monkeypatch.setattr(gate, "BODY_PAUSE", SLOW)

    async def echo(request):
        return PlainTextResponse(str(len(await request.body())))

    app = gate.Gate(
        Starlette(routes=[Route("/echo", echo, methods=["POST"])], exception_handlers=_handlers()), ["localhost"]
    )
    port = free_port()
    config = uvicorn.Config(
        app,
        port=port,
        http=impatient.Impatient,
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=impatient.MAX_HEADERS,
    )
    running = uvicorn.Server(config)
    task = asyncio.create_task(running._serve())
    try:
        await until(lambda: running.started, 20, "the server")
        yield port
    finally:
        running.should_exit = True
        await task


def _handlers():
    async def problem(_, error):
        return PlainTextResponse(str(error.detail), error.status_code)

    return {gate.Problem: problem}


HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\n"


async def test_a_request_whose_headers_trickle_in_is_not_waited_for(monkeypatch):
    async with impatient_server(monkeypatch) as port, asyncio.timeout(30):
        for first in (b"", HEAD + b"Content-Length: 0\r\n\r\n"):  # at once, and on a connection kept alive
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first)
            if first:
                assert await reader.readuntil(b"\r\n\r\n0")
            with contextlib.suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"X")
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await reader.read(100)
            writer.close()


async def test_a_body_that_stops_coming_is_answered_408(monkeypatch):
    async with impatient_server(monkeypatch) as port, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"Content-Length: 100\r\n\r\nhalf of it")
        assert b" 408 " in await reader.readline()
        writer.close()


async def test_headers_without_end_are_refused(monkeypatch):
    async with impatient_server(monkeypatch) as port, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"X-Long: " + b"x" * (2 * impatient.MAX_HEADERS))
        with contextlib.suppress(ConnectionError):
            assert b" 400 " in await reader.readline()
        writer.close()


async def test_a_slow_answer_is_not_mistaken_for_a_slow_request(monkeypatch):
    async with impatient_server(monkeypatch) as port, httpx2.AsyncClient() as client:
        answers = [await client.post(f"http://localhost:{port}/echo", content=b"x" * size) for size in (0, 10, 60_000)]
        assert [answer.text for answer in answers] == ["0", "10", "60000"]
