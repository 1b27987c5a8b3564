{@% set process = 'relay' if kind == 'event-driven' else 'worker' %@}
"""SIGTERM ends the service in time, whatever clients do; and there is a limit of open connections."""

from __future__ import annotations

import contextlib
{@% if kind == 'async-flow' %@}
import json
{@% endif %@}
import random
import signal
import socket
import time
import urllib.error
import urllib.request

from {@ package @}.impatient import MAX_CONNECTIONS

{@% if kind == 'async-flow' %@}
from .example import BODY, URL
{@% else %@}
from .example import URL
{@% endif %@}
from .processes import Processes, until

# Far more than it takes: an open connection used to delay it for as long as the client liked.
STOP_SECONDS = 45


def free_port() -> int:
    """Below the ports of outgoing connections: one of those could take it before the server does."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def hold(port: int) -> socket.socket:
    """A client that does not go away: {@ 'it watches a job that nobody works on' if kind == 'async-flow' else 'it has sent half of its request' @}."""
{@% if kind == 'async-flow' %@}
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{URL}", json.dumps(BODY).encode(), headers)
    with urllib.request.urlopen(asked, timeout=10) as answer:
        where = answer.headers["location"]
    client = socket.create_connection(("127.0.0.1", port), 10)
    client.sendall(f"GET {where}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert b"200 OK" in client.recv(1000)
{@% else %@}
    client = socket.create_connection(("127.0.0.1", port), 10)
    head = [f"POST {URL} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Content-Length: 9"]
    client.sendall("\r\n".join([*head, "", "{"]).encode())
{@% endif %@}
    return client


def test_an_open_connection_does_not_hold_up_the_end(processes: Processes) -> None:
    port = free_port()
    service = processes.start(
        "-m",
        "{@ package @}",
        "run",
        port=port,
        grace_seconds=1,
{@% if kind == 'async-flow' %@}
        step_seconds=60,  # five of them: the stream would stay open
{@% endif %@}
    )
    until(lambda: answers(port), "service that is ready")
    until(lambda: "{@ process @} ready" in processes.output(), "{@ process @} that is ready")
    with hold(port):
        began = time.monotonic()
        service.send_signal(signal.SIGTERM)
        service.wait(STOP_SECONDS)
    assert time.monotonic() - began < STOP_SECONDS


def test_half_sent_requests_are_limited_and_gone_ones_make_room(processes: Processes) -> None:
    port = free_port()
    processes.start("-m", "{@ package @}", "api", port=port)
    until(lambda: answers(port), "service that is ready")
    with contextlib.ExitStack() as held:
        for _ in range(MAX_CONNECTIONS):
            client = held.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            with contextlib.suppress(ConnectionError):
                client.sendall(b"GET /readyz HTTP/1.1\r\nX-Half")
        for _ in range(20):
            client = held.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            assert client.recv(100).startswith(b"HTTP/1.1 503 ")
    until(lambda: answers(port), "room for a request")
