"""Alerts that leave the process: a webhook, a chat channel, e-mail, an error tracker. Standard library only.

Promise: a sender returns when the receiver has taken the alert and raises otherwise, within `TIMEOUT` seconds, so
`evaluate` knows which ones have to go out again. A receiver that hangs or trickles holds up no other one and no exit.
The text says what is wrong, since when, and what to do. An alert that is sent twice carries the same id (`signal`,
`since`, raised or cleared): as the header `Idempotency-Key`, in the body, and as the `Message-ID` of the e-mail, so
that a receiver can drop the second one.

When it does NOT hold: `to_all` is one alert for `evaluate`. When one of two receivers refuses, both get it again.
"""

import asyncio
import hashlib
import json
import smtplib
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime, make_msgid
from functools import partial
from urllib.error import HTTPError
from urllib.parse import parse_qsl, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from .alerts import Alert

__all__ = ["Sender", "email", "headline", "sender", "slack", "to_all", "tracker", "webhook"]

TIMEOUT = 8.0  # seconds; `evaluate` gives an alert 10
Sender = Callable[[Alert], Awaitable[object]]


def alert_id(alert: Alert) -> str:
    """The same every time this change is sent."""
    change = f"{alert.signal}\n{alert.since}\n{alert.raised}"
    return hashlib.sha256(change.encode()).hexdigest()[:32]


def headline(alert: Alert) -> str:
    """One line for a person: "documents.oldest is at 312.4: jobs wait too long, add workers"."""
    if not alert.raised:
        return f"{alert.signal} is well again ({alert.value:g})"
    return f"{alert.signal} is at {alert.value:g}" + (f": {alert.because}" if alert.because else "")


def webhook(url: str, headers: Mapping[str, str] | None = None) -> Sender:
    """POSTs the alert as JSON. Anything but 2xx means not taken."""
    post = _poster()

    async def send(alert: Alert) -> None:
        body = {
            "id": alert_id(alert),
            "signal": alert.signal,
            "state": "raised" if alert.raised else "cleared",
            "since": _moment(alert).isoformat(),
            "value": alert.value,
            "text": headline(alert),
        }
        await post(url, body, {"Idempotency-Key": alert_id(alert), **(headers or {})})

    return send


def slack(url: str) -> Sender:
    """An incoming webhook of Slack, Mattermost, Rocket.Chat, or Discord with `/slack` behind its address."""
    post = _poster()

    async def send(alert: Alert) -> None:
        sign = ":red_circle:" if alert.raised else ":large_green_circle:"
        # These three mean something to Slack; the names of signals come from queue names, which anybody may choose.
        escaped = headline(alert).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        await post(url, {"text": f"{sign} {escaped} (since {_moment(alert):%H:%M:%S} UTC)"}, {})

    return send


def email(
    host: str,
    sender: str,
    to: str,
    *,
    port: int = 587,
    user: str | None = None,
    password: str | None = None,
    starttls: bool = True,
) -> Sender:
    """One mail per change; `to` may name several addresses, separated by commas."""
    domain = sender.rpartition("@")[2].rstrip("> ")
    apart = _apart()

    def deliver(alert: Alert) -> None:
        message = EmailMessage()
        message["From"], message["To"] = sender, to
        message["Subject"] = f"[{'alert' if alert.raised else 'well again'}] {alert.signal}"
        message["Date"] = format_datetime(datetime.now(UTC))
        message["Message-ID"] = f"<{alert_id(alert)}@{domain}>" if domain else make_msgid()
        message.set_content(f"{headline(alert)}\n\nSince {_moment(alert).isoformat()}\n")
        with smtplib.SMTP(host, port, timeout=TIMEOUT) as server:
            if starttls:
                server.starttls(context=ssl.create_default_context())
            if user is not None:
                server.login(user, password or "")
            refused = server.send_message(message)
        if refused:
            raise ConnectionError(f"the mail server refused {len(refused)} of the addresses")

    async def send(alert: Alert) -> None:
        await apart(partial(deliver, alert))

    return send


def sender(url: str) -> Sender:
    """From one setting: `https://…` a webhook, `slack+https://…` a chat channel,
    `smtp://user:password@host:587/?from=alerts@example.org&to=ops@example.org` e-mail (`&tls=no` without STARTTLS)."""
    parts = urlsplit(url)
    if parts.scheme in ("http", "https") and parts.hostname:
        return webhook(url)
    if parts.scheme in ("slack+http", "slack+https") and parts.hostname:
        return slack(url.removeprefix("slack+"))
    options = dict(parse_qsl(parts.query))
    if parts.scheme == "smtp" and parts.hostname and {"from", "to"} <= set(options):
        return email(
            parts.hostname,
            options["from"],
            options["to"],
            port=parts.port or 587,
            user=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password or ""),
            starttls=options.get("tls") != "no",
        )
    # Without the address: it may hold a password.
    raise ValueError(
        f"an alert address with scheme {parts.scheme!r} is not one of https://…, slack+https://…, "
        "smtp://user:password@host:587/?from=…&to=…"
    )


def tracker(capture: Callable[[str], object]) -> Sender:
    """An error tracker, for raised alerts only:
    `tracker(lambda text: sentry_sdk.capture_message(text, "error"))`."""

    apart = _apart()

    async def send(alert: Alert) -> None:
        if alert.raised:
            await apart(partial(capture, headline(alert)))

    return send


def to_all(*senders: Sender) -> Sender:
    """Every sender gets it, whichever of them fail; then the failures are raised."""

    async def send(alert: Alert) -> None:
        results = await asyncio.gather(*(sender(alert) for sender in senders), return_exceptions=True)
        failed = [result for result in results if isinstance(result, Exception)]
        if failed:
            raise ExceptionGroup(f"{len(failed)} of {len(senders)} receivers did not take it", failed)

    return send


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """urllib would repeat a POST as a GET without its body, and take the answer to that for an alert taken."""


def _poster() -> Callable[[str, Mapping[str, object], Mapping[str, str]], Awaitable[None]]:
    apart, opener = _apart(), build_opener(_NoRedirect)

    async def post(url: str, body: Mapping[str, object], headers: Mapping[str, str]) -> None:
        request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})

        def send() -> None:
            try:
                opener.open(request, timeout=TIMEOUT).close()
            except HTTPError as refused:  # 3xx, 4xx or 5xx
                refused.close()
                raise

        await apart(send)

    return post


def _apart() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Runs a call in a thread of its own, one at a time, for at most `TIMEOUT` seconds. A socket's time limit is one
    for each byte, the threads of asyncio are few and shared, and the interpreter's exit waits for them."""
    turn = threading.Lock()

    async def run(call: Callable[[], object]) -> None:
        if not turn.acquire(blocking=False):
            raise ConnectionError("the receiver has not answered to the alert before this one")
        ended = Future[None]()
        ended.set_running_or_notify_cancel()  # who gives up waiting for it does not cancel it

        def work() -> None:
            failed: Exception | None = None
            try:
                call()
            except Exception as error:
                failed = error
            except BaseException as error:  # sys.exit() in a library; raised in the loop it would end the process
                failed = RuntimeError(repr(error))
            turn.release()
            ended.set_exception(failed) if failed else ended.set_result(None)

        try:
            threading.Thread(target=work, name="alert", daemon=True).start()
        except RuntimeError:  # the machine has no thread left
            turn.release()
            raise
        async with asyncio.timeout(TIMEOUT):
            await asyncio.wrap_future(ended)

    return run


def _moment(alert: Alert) -> datetime:
    return datetime.fromtimestamp(alert.since, UTC)
