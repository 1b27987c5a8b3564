"""Alerts that leave the process: a webhook, a chat channel, e-mail, an error tracker. Standard library only.

Promise: a sender returns when the receiver has taken the alert and raises otherwise, within `TIMEOUT` seconds, so
`evaluate` knows which ones have to go out again. The text says what is wrong, since when, and what to do. An alert
that is sent twice carries the same id (`signal`, `since`, raised or cleared): as the header `Idempotency-Key`, in the
body, and as the `Message-ID` of the e-mail, so that a receiver can drop the second one.

When it does NOT hold: `to_all` is one alert for `evaluate`. When one of two receivers refuses, both get it again.
"""

import asyncio
import hashlib
import json
import smtplib
import ssl
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime, make_msgid
from urllib.parse import parse_qsl, unquote, urlsplit
from urllib.request import Request, urlopen

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

    async def send(alert: Alert) -> None:
        body = {
            "id": alert_id(alert),
            "signal": alert.signal,
            "state": "raised" if alert.raised else "cleared",
            "since": _moment(alert).isoformat(),
            "value": alert.value,
            "text": headline(alert),
        }
        await _post(url, body, {"Idempotency-Key": alert_id(alert), **(headers or {})})

    return send


def slack(url: str) -> Sender:
    """An incoming webhook of Slack, Mattermost, Rocket.Chat, or Discord with `/slack` behind its address."""

    async def send(alert: Alert) -> None:
        sign = ":red_circle:" if alert.raised else ":large_green_circle:"
        # These three mean something to Slack; the names of signals come from queue names, which anybody may choose.
        escaped = headline(alert).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        await _post(url, {"text": f"{sign} {escaped} (since {_moment(alert):%H:%M:%S} UTC)"}, {})

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
        await asyncio.to_thread(deliver, alert)

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

    async def send(alert: Alert) -> None:
        if alert.raised:
            await asyncio.to_thread(capture, headline(alert))

    return send


def to_all(*senders: Sender) -> Sender:
    """Every sender gets it, whichever of them fail; then the failures are raised."""

    async def send(alert: Alert) -> None:
        results = await asyncio.gather(*(sender(alert) for sender in senders), return_exceptions=True)
        failed = [result for result in results if isinstance(result, Exception)]
        if failed:
            raise ExceptionGroup(f"{len(failed)} of {len(senders)} receivers did not take it", failed)

    return send


async def _post(url: str, body: Mapping[str, object], headers: Mapping[str, str]) -> None:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})

    def send() -> None:
        # Raises HTTPError for 4xx and 5xx; follows no redirect of a POST.
        with urlopen(request, timeout=TIMEOUT) as answer:
            answer.read(1_000)

    await asyncio.to_thread(send)


def _moment(alert: Alert) -> datetime:
    return datetime.fromtimestamp(alert.since, UTC)
