"""A chat command that takes longer than the platform waits: acknowledge at once, answer by a job.

Discord's protocol: a signed POST per command, an answer within 3 s or the command fails, then up to 15 minutes
in which a token lets us edit that answer.

Promises
- Only what the platform signed is read: Ed25519 over timestamp + raw body, checked before any parsing; a
  timestamp older than `MAX_AGE` or further ahead than `MAX_AHEAD` seconds is refused, so a recorded request is
  worthless soon, and until then it is the same interaction.
- `accept` answers at once: "thinking…" (type 5) when the job is queued; when the queue does not answer, a message
  that says so, and then no late answer contradicts it.
- One interaction is one answer, however often it is delivered or its worker is killed: the text is stored before
  it is sent, and sending edits one message, which repeated changes nothing.
- The work ends before the token does. Too slow, or failing with no time for another try: the user reads a
  friendly note instead of "thinking…" forever. Internals are never shown; long answers are split.
- The token is a secret: it lives in the database until the answer is sent, never in the job, never in a log.

When they do NOT hold: no worker at all within the token's life: nobody is left to say sorry. A kill between a
second message (answers above 2,000 characters) and its note sends that message twice: follow-ups have no key.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sqlalchemy import Column, Double, Integer, String, Table, Text, delete, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from ..core.errors import Permanent, QueueUnavailable, RateLimited, ResourceBusy
from ..core.store import begin, insert, metadata, read

__all__ = [
    "PONG",
    "DeferredReplies",
    "Interaction",
    "NotSigned",
    "Unreadable",
    "message",
    "parse",
    "split",
    "verify",
]

MAX_AGE, MAX_AHEAD = 30.0, 5.0  # seconds; the platform's clock and ours may differ a little
MAX_LENGTH = 2_000
MAX_PARTS = 5
QUEUE_SECONDS = 1.0  # a frozen queue may cost the first caller this much; the platform waits for 3
PING, COMMAND = 1, 2
LONGEST = (100, 100, 1_000, 100, 100)  # id, application, token, user, command
PONG = {"type": 1}
DEFERRED = {"type": 5}
BUSY = "I cannot take questions right now. Please ask again in a minute."
SLOW = "This takes longer than I have. Please try again later, or ask something shorter."
FAILED = "I could not answer that. Please try again later."


class NotSigned(Permanent):
    """The request is not signed by the chat platform, or too old. Check the public key and this clock."""


class Unreadable(Permanent):
    """Signed, but not an interaction we know: update the application's commands."""


@dataclass(frozen=True, slots=True)
class Interaction:
    id: str
    application_id: str
    token: str = field(repr=False)
    user: str = ""
    command: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


class Webhook(Protocol):
    """Sends for us: see `interaction_webhook`."""

    async def edit(self, application_id: str, token: str, text: str) -> None: ...
    async def follow_up(self, application_id: str, token: str, text: str) -> None: ...


chat_replies = Table(
    "chat_replies",
    metadata,
    Column("id", String(100), primary_key=True),
    Column("application_id", String(100), nullable=False),
    Column("token", Text, nullable=False),  # emptied as soon as it is not needed
    Column("expires_at", Double, nullable=False, index=True),
    Column("state", String(20), nullable=False),  # waiting, working, answered, refused, expired
    Column("answer", Text),
    Column("sent", Integer, nullable=False),  # parts
)
_t = chat_replies.c


def verify(public_key: str, signature: str, timestamp: str, body: bytes, *, now: float | None = None) -> None:
    """Raise `NotSigned` unless the platform signed exactly these bytes, just now."""
    # PyNaCl is needed by the process that is called, not by workers.
    from nacl.exceptions import (
        BadSignatureError,
    )
    from nacl.signing import VerifyKey

    try:
        VerifyKey(bytes.fromhex(public_key)).verify(timestamp.encode() + body, bytes.fromhex(signature))
        age = (time.time() if now is None else now) - float(timestamp)
    except (BadSignatureError, ValueError, TypeError):
        raise NotSigned(str(NotSigned.__doc__)) from None
    if not -MAX_AHEAD <= age <= MAX_AGE:  # false for NaN too
        raise NotSigned(str(NotSigned.__doc__))


def parse(body: bytes) -> Interaction | None:
    """The command; None for a PING, which is answered with PONG."""
    try:
        data = json.loads(body)
        if data["type"] == PING:
            return None
        if data["type"] != COMMAND:
            raise Unreadable(str(Unreadable.__doc__))
        user = (data.get("member") or data)["user"]["id"]
        asked = data["data"]
        options = {str(option["name"]): option.get("value") for option in asked.get("options", ())}
        names = [data["id"], data["application_id"], data["token"], user, asked["name"]]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Unreadable(str(Unreadable.__doc__)) from None
    if not all(
        isinstance(name, str) and 0 < len(name) <= most for name, most in zip(names, LONGEST, strict=True)
    ):
        raise Unreadable(str(Unreadable.__doc__))
    ident, application, token, user, command = names
    return Interaction(ident, application, token, user, command, options)


def message(text: str, *, only_to_the_user: bool = True) -> dict[str, Any]:
    """An answer in the response itself."""
    data = {"content": text[:MAX_LENGTH], "allowed_mentions": {"parse": []}}
    return {"type": 4, "data": {**data, **({"flags": 64} if only_to_the_user else {})}}


class DeferredReplies:
    """`accept` in the process that is called by the platform, `answer` in the job."""

    def __init__(self, store: AsyncEngine, *, life: float = 900.0, margin: float | None = None) -> None:
        """`life`: of a token in seconds. `margin`: kept for sending before its end, and for clocks that differ."""
        self._store, self._life = store, life
        self._margin = min(15.0, life / 5) if margin is None else margin
        self._away_until = 0.0

    async def accept(
        self, interaction: Interaction, enqueue: Callable[[], Awaitable[object]]
    ) -> dict[str, Any]:
        """What to answer now. `enqueue` adds the job, with the interaction's id as its key."""
        if time.monotonic() < self._away_until:
            return message(BUSY)
        await self._note(interaction)
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                await enqueue()
        except (QueueUnavailable, ResourceBusy, TimeoutError) as error:
            if not isinstance(error, ResourceBusy):
                self._away_until = time.monotonic() + 1.0  # the next ones need not find out for themselves
            # An add that timed out may have landed: whoever changes the row first decides which answer stands.
            if await self._move(interaction.id, "waiting", state="refused", token=""):
                return message(BUSY)
        return DEFERRED

    async def answer(
        self,
        ident: str,
        webhook: Webhook,
        work: Callable[[float], Awaitable[str]],
        *,
        last_try: bool,
        next_try_within: float = 60.0,
    ) -> str:
        """In the job: do `work(seconds it has)`, send its text. Returns the state the interaction is left in.

        Raises what `work` raised when a later try of the job fits: one that starts within `next_try_within`.
        """
        row = await self._row(ident)
        if row is None or row.state not in ("waiting", "working"):
            return row.state if row else "unknown"
        if row.state == "waiting" and not await self._move(ident, "waiting", state="working"):
            return "refused"
        left = row.expires_at - time.time()
        if left <= 0:
            await self._move(ident, "working", state="expired", token="")
            return "expired"
        text = row.answer or await self._work(work, left - self._margin, last_try, next_try_within)
        await self._move(ident, "working", answer=text)
        for number, part in enumerate(split(text)[row.sent :], row.sent):
            send = webhook.edit if number == 0 else webhook.follow_up
            try:
                await send(row.application_id, row.token, part)
            except Permanent:  # the token has ended: nothing can be said any more
                await self._move(ident, "working", state="expired", token="")
                raise
            await self._move(ident, "working", sent=number + 1)
        await self._move(ident, "working", state="answered", token="")
        return "answered"

    async def _work(
        self, work: Callable[[float], Awaitable[str]], left: float, last_try: bool, next_try: float
    ) -> str:
        try:
            async with asyncio.timeout(max(0.0, left)):
                return (await work(left)).strip() or FAILED
        except TimeoutError:
            return SLOW
        except Permanent:
            return FAILED
        except (RateLimited, ResourceBusy) as busy:  # consumes no attempt: all that counts is time
            if busy.retry_after + 1 < left:
                raise
            return SLOW
        except Exception:
            if not last_try and next_try < left:
                raise
            return FAILED

    async def purge(self, older_than: float) -> int:
        """Forget interactions whose token ended that many seconds ago."""
        async with begin(self._store) as tx:
            return (
                await tx.execute(delete(chat_replies).where(_t.expires_at < time.time() - older_than))
            ).rowcount

    async def _note(self, interaction: Interaction) -> None:
        row: dict[str, Any] = {
            "id": interaction.id,
            "application_id": interaction.application_id,
            "token": interaction.token,
        }
        row |= {"expires_at": time.time() + self._life, "state": "waiting", "sent": 0}
        async with begin(self._store) as tx:
            await tx.execute(insert(tx, chat_replies).values(**row).on_conflict_do_nothing())

    async def _row(self, ident: str) -> Any:
        async with read(self._store) as connection:
            return (await connection.execute(select(chat_replies).where(_t.id == ident))).first()

    async def _move(self, ident: str, state_now: str, **values: Any) -> bool:
        async with begin(self._store) as tx:
            reply = update(chat_replies).where(_t.id == ident, _t.state == state_now)
            return (await tx.execute(reply.values(**values))).rowcount == 1


def split(text: str, limit: int = MAX_LENGTH, most: int = MAX_PARTS) -> list[str]:
    """Parts the platform takes, cut at paragraphs, lines or blanks where there are any."""
    parts: list[str] = []
    rest = text.strip()
    while rest and len(parts) < most:
        end = _fits(rest, limit)
        if end < len(rest):
            cuts = (rest.rfind(mark, end // 2, end) for mark in ("\n\n", "\n", " "))
            end = next((cut for cut in cuts if cut > 0), end)
        parts.append(rest[:end].rstrip())
        rest = rest[end:].lstrip()
    if rest:
        parts[-1] = parts[-1][: _fits(parts[-1], limit - 2)].rstrip() + " …"
    return parts


def _fits(text: str, limit: int) -> int:
    """How many characters fit: counted as UTF-16, the platform's way at its strictest (an emoji is two)."""
    units = 0
    for index, character in enumerate(text):
        units += 2 if ord(character) > 0xFFFF else 1
        if units > limit:
            return index
    return len(text)
