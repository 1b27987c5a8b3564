"""A chat command that takes longer than the platform waits: acknowledge at once, answer by a job.

Discord's protocol: a signed POST per command, an answer within 3 s or the command fails, then up to 15 minutes
in which a token lets us edit that answer.

Promises
- Only what the platform signed is read: Ed25519 over timestamp + raw body, checked before any parsing; requests
  older than `max_age` seconds are refused: a recorded one is soon worthless, and until then the same interaction.
- `accept` answers at once: "thinking…" (type 5) when the job is queued; when the queue does not answer, a message
  that says so, which no late answer contradicts and no second delivery turns into "thinking…".
- One interaction is one answer, however often it is delivered or its worker is killed: the text is stored before
  it is sent, and sending edits one message, which is safe to repeat.
- Work and sending are tried until shortly before the token ends, and consume no attempt of the job: an answer that
  was paid for is sent even if the platform was away. If it is too slow, or fails with no time for another try, the
  user reads a friendly note. Internals are never shown; long answers are split.
- A job that ended silently (crash limit, max_age, dead letter) leaves nobody at "thinking…": `tell_late` says
  so before the token ends, `give_up` at once.
- The token is a secret: it lives in the database until the answer is sent, never in the job, never in a log.

When they do NOT hold: no process at all within the token's life: nobody is left to say sorry. A kill between a
second message (answers above 2,000 characters) and its note sends that message twice: follow-ups have no key.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sqlalchemy import Column, Double, Integer, String, Table, Text, delete, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from ..core.errors import FailedTwin, JobError, Permanent, QueueUnavailable, RateLimited, ResourceBusy, Snooze, describe
from ..core.store import begin, insert, metadata, read

__all__ = [
    "DISCORD",
    "PONG",
    "DeferredReplies",
    "Interaction",
    "NotSigned",
    "TokenEnded",
    "TokenUnknown",
    "Unreadable",
    "message",
    "parse",
    "received",
    "split",
    "verify",
]

MAX_AGE, MAX_AHEAD = 300.0, 5.0  # seconds: platforms deliver again, and clocks differ a little
MAX_LENGTH = 2_000
MAX_PARTS = 25
LONGEST_PAUSE = 60.0  # between two tries
ARRIVES = 10.0  # seconds in which our acknowledgement reaches the platform: a quick job may edit before that
QUEUE_SECONDS = 1.0  # a frozen queue may cost the first caller this much; the platform waits 3
PING, COMMAND = 1, 2
LONGEST = (100, 100, 1_000, 100, 100)  # id, application, token, user, command
PONG = {"type": 1}
# Sent with every message: no answer pings anybody.
DISCORD: Mapping[str, Any] = {"allowed_mentions": {"parse": []}}
DEFERRED = {"type": 5}
BUSY = "I cannot take questions right now. Please ask again in a minute."
SLOW = "This takes longer than I have. Please try again later, or ask something shorter."
FAILED = "I could not answer that. Please try again later."


class NotSigned(Permanent):
    """The request is not signed by the chat platform, or too old. Check the public key and this clock."""


class TokenEnded(Permanent):
    """The interaction's token is not valid any more: the answer came too late, or the message was deleted."""


class TokenUnknown(TokenEnded):
    """The platform knows no such message: it was deleted, or our acknowledgement has not arrived there yet."""


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
    """Sends for us: see `webhook`."""

    async def edit(self, application_id: str, token: str, text: str) -> None: ...
    async def follow_up(self, application_id: str, token: str, text: str) -> None: ...


chat_replies = Table(
    "chat_replies",
    metadata,
    Column("id", String(100), primary_key=True),
    Column("application_id", String(100), nullable=False),
    Column("token", Text, nullable=False),  # emptied as soon as it is not needed
    Column("expires_at", Double, nullable=False, index=True),
    Column("state", String(20), nullable=False),  # waiting, working, answered, refused, failed, expired
    Column("answer", Text),
    Column("sent", Integer, nullable=False),  # parts
)
_t = chat_replies.c


def verify(
    public_key: str, signature: str, timestamp: str, body: bytes, *, now: float | None = None, max_age: float = MAX_AGE
) -> None:
    """Raise `NotSigned` unless the platform signed exactly these bytes, at most `max_age` seconds ago."""
    # PyNaCl is needed by the process that is called, not by workers.
    from nacl.exceptions import BadSignatureError
    from nacl.signing import VerifyKey

    try:
        VerifyKey(bytes.fromhex(public_key)).verify(timestamp.encode() + body, bytes.fromhex(signature))
        age = (time.time() if now is None else now) - float(timestamp)
    except (BadSignatureError, ValueError, TypeError):
        raise NotSigned(str(NotSigned.__doc__)) from None
    if not -MAX_AHEAD <= age <= max_age:  # false for NaN too
        raise NotSigned(str(NotSigned.__doc__))


def received(public_key: str, headers: Mapping[str, str], body: bytes) -> Interaction | None:
    """The interaction in these headers (lower-case, or a framework's) and raw body: `verify`, then `parse`."""
    signature, at = (headers.get(f"x-signature-{name}", "") for name in ("ed25519", "timestamp"))
    verify(public_key, signature, at, body)
    return parse(body)


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
    if not all(isinstance(name, str) and 0 < len(name) <= most for name, most in zip(names, LONGEST, strict=True)):
        raise Unreadable(str(Unreadable.__doc__))
    ident, application, token, user, command = names
    return Interaction(ident, application, token, user, command, options)


def message(text: str, *, only_to_the_user: bool = True, fields: Mapping[str, Any] = DISCORD) -> dict[str, Any]:
    """An answer in the response itself. `fields`: what else the platform takes, {} if not Discord."""
    return {"type": 4, "data": {"content": text[:MAX_LENGTH], **fields, **({"flags": 64} if only_to_the_user else {})}}


class DeferredReplies:
    """`accept` in the process that is called by the platform, `answer` in the job."""

    def __init__(
        self,
        store: AsyncEngine,
        *,
        life: float = 900.0,
        margin: float | None = None,
        fields: Mapping[str, Any] = DISCORD,
    ) -> None:
        """`life`: of a token in seconds. `margin`: kept for sending before its end, and for clocks that differ.
        `fields`: see `message`."""
        self._store, self._life, self._fields = store, life, fields
        self._margin = min(15.0, life / 5) if margin is None else margin
        self._away_until = 0.0

    async def accept(self, interaction: Interaction, enqueue: Callable[[], Awaitable[object]]) -> dict[str, Any]:
        """What to answer now. `enqueue` adds the job, with the interaction's id as its key."""
        if time.monotonic() < self._away_until:
            return self._message(BUSY)
        state = await self._note(interaction)
        if state == "refused":  # delivered again: what the user was told stands
            return self._message(BUSY)
        if state in ("failed", "expired"):
            return self._message(FAILED)
        try:
            async with asyncio.timeout(QUEUE_SECONDS):
                await enqueue()
        except FailedTwin:  # its job has failed before: nobody will answer
            for open_state in ("waiting", "working"):
                if await self._move(interaction.id, open_state, state="failed", token=""):
                    return self._message(FAILED)
        except (QueueUnavailable, ResourceBusy, TimeoutError) as error:
            if not isinstance(error, ResourceBusy):
                self._away_until = time.monotonic() + 1.0  # the next ones need not find out for themselves
            # An add that timed out may have landed: whoever changes the row first decides which answer stands.
            if await self._move(interaction.id, "waiting", state="refused", token=""):
                return self._message(BUSY)
        return DEFERRED

    async def answer(self, ident: str, webhook: Webhook, work: Callable[[float], Awaitable[str]]) -> str:
        """In the job: do `work(seconds it has)`, send its text. Returns the state the interaction is left in.

        A failure that may pass is raised as `Snooze` while the token lives, with pauses that grow to a minute: it
        consumes no attempt. `work` is not called again once it has answered.
        """
        row = await self._row(ident)
        if row is None or row.state not in ("waiting", "working"):
            return row.state if row else "unknown"
        if row.state == "waiting" and not await self._move(ident, "waiting", state="working"):
            return "refused"
        if row.expires_at <= time.time():
            await self._move(ident, "working", state="expired", token="")
            return "expired"
        text = row.answer or await self._work(work, row.expires_at)
        await self._move(ident, "working", answer=text)
        try:
            await self._send(row, webhook, text)
        except (RateLimited, ResourceBusy, Snooze):
            raise
        except TokenEnded as error:
            if isinstance(error, TokenUnknown) and time.time() < row.expires_at - self._life + ARRIVES:
                raise Snooze(1.0, "the acknowledgement has not arrived yet") from error
            await self._move(ident, "working", state="expired", token="")
            raise
        except Permanent:  # the platform never takes this message: a plain note, and the reason to the dead letters
            await self._move(ident, "working", answer=FAILED)
            if text != FAILED:
                await webhook.edit(row.application_id, row.token, FAILED)
            await self._move(ident, "working", state="failed", token="")
            raise
        except Exception as error:
            if again := self._again(row.expires_at, row.expires_at, error):
                raise again from error
            raise
        await self._move(ident, "working", state="answered", token="")
        return "answered"

    async def give_up(self, ident: str, webhook: Webhook) -> str:
        """Its job is dead: tell the user now, or send the answer it already had. For the sweep's alert."""

        async def sorry(_seconds: float) -> str:
            return FAILED

        return await self.answer(ident, webhook, sorry)

    async def tell_late(self, webhook: Webhook, limit: int = 100) -> int:
        """Run it every few seconds beside the workers: tells users who still wait when their token is about to end."""
        soon = time.time() + self._margin / 2  # the workers' own notes come first
        late = select(_t.id).where(_t.state.in_(("waiting", "working")), _t.expires_at.between(time.time(), soon))
        async with read(self._store) as connection:
            ids = (await connection.scalars(late.limit(limit))).all()
        for ident in ids:
            with contextlib.suppress(JobError):  # the next round tries again
                await self.give_up(ident, webhook)
        return len(ids)

    async def _work(self, work: Callable[[float], Awaitable[str]], expires_at: float) -> str:
        ends = expires_at - self._margin
        seconds = ends - time.time()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                return (await work(seconds)).strip() or FAILED
        except TimeoutError:
            return SLOW
        except Permanent:
            return FAILED
        except (RateLimited, ResourceBusy, Snooze) as busy:
            wait = busy.delay if isinstance(busy, Snooze) else busy.retry_after
            if time.time() + wait + 1 < ends:
                raise
            return SLOW
        except Exception as error:
            if again := self._again(expires_at, ends, error):
                raise again from error
            return FAILED

    def _again(self, expires_at: float, ends: float, error: Exception) -> Snooze | None:
        """Come back after about as long as it took so far: pauses double. None if that is too late."""
        now = time.time()
        so_far = now - (expires_at - self._life)
        pause = min(max(so_far, 1.0), LONGEST_PAUSE) * random.uniform(0.5, 1.0)
        return Snooze(pause, f"{type(error).__name__}: {describe(error)}") if now + pause + 1 < ends else None

    async def _send(self, row: Any, webhook: Webhook, text: str) -> None:
        for number, part in enumerate(split(text)[row.sent :], row.sent):
            send = webhook.edit if number == 0 else webhook.follow_up
            await send(row.application_id, row.token, part)
            await self._move(row.id, "working", sent=number + 1)

    def _message(self, text: str) -> dict[str, Any]:
        return message(text, fields=self._fields)

    async def purge(self, older_than: float) -> int:
        """Forget interactions whose token ended that many seconds ago."""
        async with begin(self._store) as tx:
            return (await tx.execute(delete(chat_replies).where(_t.expires_at < time.time() - older_than))).rowcount

    async def _note(self, interaction: Interaction) -> str:
        """Its state; a first delivery creates it."""
        row: dict[str, Any] = {
            "id": interaction.id,
            "application_id": interaction.application_id,
            "token": interaction.token,
        }
        row |= {"expires_at": time.time() + self._life, "state": "waiting", "sent": 0}
        async with begin(self._store) as tx:
            await tx.execute(insert(tx, chat_replies).values(**row).on_conflict_do_nothing())
            state = await tx.scalar(select(_t.state).where(_t.id == interaction.id))
        return str(state)

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
            # In the last quarter: from the half on, five parts held little more than half of what they could.
            cuts = (rest.rfind(mark, end * 3 // 4, end) for mark in ("\n\n", "\n", " "))
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
