"""Alerts that leave the process, to receivers on this machine: an HTTP server and a mail server."""

import asyncio
import gzip
import json
import os
import sys
import threading
from contextlib import asynccontextmanager
from email import message_from_string
from pathlib import Path
from urllib.error import HTTPError

import pytest

from harness.waiting import until
from studyhall.patterns.health import senders
from studyhall.patterns.health.alerts import Alert

RAISED = Alert("documents.oldest", True, 1_790_000_000.0, 312.4, "jobs wait too long: add workers")
CLEARED = Alert("documents.oldest", False, 1_790_000_600.0, 3.0)


class Receiver:
    """Answers each request with the next status; remembers what it was sent."""

    def __init__(self, *statuses):
        self.statuses = list(statuses)
        self.requests: list[tuple[dict[str, str], dict[str, object]]] = []

    async def __call__(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = [line.split(": ", 1) for line in head.splitlines()[1:] if line]
        headers = {name.lower(): value for name, value in lines}
        body = await reader.readexactly(int(headers["content-length"]))
        self.requests.append((headers, json.loads(body)))
        status = self.statuses.pop(0) if self.statuses else 200
        writer.write(f"HTTP/1.1 {status} .\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()


class MailServer:
    """As much of SMTP as one mail needs."""

    def __init__(self, *, refuse=""):
        self.refuse = refuse
        self.mails: list[str] = []

    async def __call__(self, reader, writer):
        def say(line):
            writer.write(f"{line}\r\n".encode())

        say("220 here")
        while line := (await reader.readline()).decode().strip():
            if line.upper() == "DATA":
                say("354 go on")
                mail = (await reader.readuntil(b"\r\n.\r\n")).decode()
                self.mails.append(mail.removesuffix(".\r\n"))
                say("250 taken")
            elif line.upper() == "QUIT":
                say("221 bye")
                break
            elif self.refuse and self.refuse in line:
                say("550 nobody of that name")
            else:
                say("250 fine")
        writer.close()


@asynccontextmanager
async def listening(handle):
    server = await asyncio.start_server(handle, "127.0.0.1", 0)  # type: ignore[arg-type]
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_a_webhook_gets_the_alert_under_an_id_that_stays():
    receiver = Receiver(503, 200, 200)
    async with listening(receiver) as port:
        send = senders.webhook(f"http://127.0.0.1:{port}/", {"Authorization": "Bearer of the tests"})
        with pytest.raises(HTTPError):
            await send(RAISED)
        await send(RAISED)
        await send(CLEARED)
    (first, body), (again, _), (_, cleared) = receiver.requests
    assert first["idempotency-key"] == again["idempotency-key"] == body["id"] != cleared["id"]
    assert first["authorization"] == "Bearer of the tests"
    assert (body["state"], cleared["state"]) == ("raised", "cleared")
    assert body["text"] == "documents.oldest is at 312.4: jobs wait too long: add workers"
    assert body["since"] == "2026-09-21T14:13:20+00:00"


async def test_a_chat_channel_gets_a_line_that_cannot_mention_everybody():
    receiver = Receiver()
    async with listening(receiver) as port:
        await senders.slack(f"http://127.0.0.1:{port}/")(Alert("<!channel>.oldest", True, 0.0, 1.0))
    [(_, body)] = receiver.requests
    assert body == {"text": ":red_circle: &lt;!channel&gt;.oldest is at 1 (since 00:00:00 UTC)"}


async def test_a_mail_is_one_mail_however_often_it_is_sent():
    server = MailServer()
    async with listening(server) as port:
        send = senders.email(
            "127.0.0.1", "alerts@example.org", "one@example.org, two@example.org", port=port, starttls=False
        )
        await send(RAISED)
        await send(RAISED)
    first, again = map(message_from_string, server.mails)
    assert first["Subject"] == "[alert] documents.oldest"
    assert first["Message-ID"] == again["Message-ID"]
    assert first["Message-ID"].endswith("@example.org>")
    assert "add workers" in first.get_payload()


async def test_a_mail_that_was_refused_for_one_address_was_not_taken():
    async with listening(MailServer(refuse="two@")) as port:
        send = senders.email(
            "127.0.0.1", "alerts@example.org", "one@example.org, two@example.org", port=port, starttls=False
        )
        with pytest.raises(ConnectionError, match="refused 1"):
            await send(RAISED)


async def test_all_receivers_are_tried_whichever_fail():
    receiver, events = Receiver(500), list[str]()
    async with listening(receiver) as port:
        send = senders.to_all(
            senders.webhook(f"http://127.0.0.1:{port}/"),
            senders.webhook("http://127.0.0.1:1/"),
            senders.tracker(events.append),
        )
        with pytest.raises(ExceptionGroup, match="2 of 3"):
            await send(RAISED)
        await senders.tracker(events.append)(CLEARED)
    assert events == [senders.headline(RAISED)]
    assert len(receiver.requests) == 1


async def test_a_tracker_that_exits_ends_nothing_and_gets_the_next_alert():
    texts = []

    def capture(text):
        texts.append(text)
        sys.exit(1)

    send = senders.tracker(capture)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="SystemExit"):
            await send(RAISED)
    assert len(texts) == 2


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_a_receiver(status):
    """urllib follows the first three with a GET without a body, whose 200 would count as taken."""
    receiver = Receiver(f"{status} .\r\nLocation: /landing")
    async with listening(receiver) as port:
        with pytest.raises(HTTPError):
            await senders.webhook(f"http://127.0.0.1:{port}/")(RAISED)
    assert len(receiver.requests) == 1


async def test_a_receiver_that_trickles_holds_up_no_other_one_and_no_exit(monkeypatch):
    monkeypatch.setattr(senders, "TIMEOUT", 2.0)
    receiver = Receiver()

    async def trickle(_reader, writer):
        while not writer.is_closing():
            writer.write(b"H")
            await asyncio.sleep(0.05)

    async with listening(trickle) as slow, listening(receiver) as well:
        send = senders.to_all(*(senders.webhook(f"http://127.0.0.1:{port}/") for port in (slow, well)))
        for _ in range(40):
            with pytest.raises(ExceptionGroup, match="1 of 2"):
                await send(RAISED)
        assert len(receiver.requests) == 40
        alerting = lambda: [thread for thread in threading.enumerate() if thread.name == "alert"]  # noqa: E731
        await until(lambda: len(alerting()) == 1, 10, "only the thread of the one that trickles")
        assert alerting()[0].daemon, "the interpreter's exit would wait for it"


SENTRY = """
import asyncio, sys
import sentry_sdk
from studyhall.patterns.health.alerts import Alert
from studyhall.patterns.health.senders import tracker

sentry_sdk.init(dsn=sys.argv[1], default_integrations=False)
send = tracker(lambda text: sentry_sdk.capture_message(text, "error"))
asyncio.run(send(Alert("documents.oldest", True, 1_790_000_000.0, 312.4, "jobs wait too long")))
sentry_sdk.flush(20)
"""


@pytest.mark.full
async def test_the_example_for_an_error_tracker_works_with_sentrys_own_library(tmp_path):
    taken = list[bytes]()

    async def receive(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        body = await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r")[0]))
        taken.append(gzip.decompress(body) if "content-encoding: gzip" in head else body)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def run(*command):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        process = await asyncio.create_subprocess_exec(*map(str, command), env=env)
        assert await asyncio.wait_for(process.wait(), 120) == 0

    await run(Path(sys.executable).with_name("uv"), "pip", "install", "-q", "--target", tmp_path, "sentry-sdk")
    async with listening(receive) as port:
        await run(sys.executable, "-c", SENTRY, f"http://key@127.0.0.1:{port}/1")
    assert b"documents.oldest is at 312.4: jobs wait too long" in b"".join(taken)


async def test_a_receiver_is_named_by_one_address():
    receiver, mails = Receiver(), MailServer()
    async with listening(receiver) as web, listening(mails) as smtp:
        for url in (
            f"http://127.0.0.1:{web}/hook",
            f"slack+http://127.0.0.1:{web}/chat",
            f"smtp://127.0.0.1:{smtp}/?from=alerts@example.org&to=ops@example.org&tls=no",
        ):
            await senders.sender(url)(RAISED)
    assert [set(body) >= {"id", "signal"} for _, body in receiver.requests] == [True, False]
    assert len(mails.mails) == 1


@pytest.mark.parametrize("url", ["ftp://secret@host/", "smtp://user:secret@host/", "https:", "secret"])
def test_an_invalid_address_is_refused_without_being_shown(url):
    with pytest.raises(ValueError, match="is not one of") as refused:
        senders.sender(url)
    assert "secret" not in str(refused.value).replace("'secret'", "")
