"""What is known about a call to somebody else's API, and what may be done next.

    intended ──► in flight since … ──► done (with its answer)
        ▲             │    │    └────► refused
        └─ not made ──┘    └─────────► unclear: a human decides

The rules are here and need no server, so that asynchronous and synchronous callers follow the same ones. Times are
those of the ledger's clock: a worker whose own clock is wrong neither hurries nor waits too long. SQLite's clock is the
machine's: after it was put back a wait begins again, after it was put forward a wait may be too short.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from ..core.errors import Permanent, RateLimited, ResourceBusy, Snooze, Transient, clean_text, describe
from ..core.job import provider_key
from ..core.plain_json import NotJson, dumps

__all__ = [
    "ENDED",
    "NOTHING_HAPPENED",
    "Call",
    "InFlight",
    "Ledger",
    "Next",
    "NotMade",
    "Refused",
    "Rules",
    "State",
    "SyncLedger",
    "Unclear",
    "check_status",
]


class NotMade(Transient):
    """The provider certainly did nothing (no connection, wrong credentials): the call may be repeated."""


class InFlight(Snooze):
    """A request may still be running at the provider. Come back after `delay` seconds; no attempt is consumed."""


class Refused(Permanent):
    """Refused for good. Fix its cause, `outside_call.command PROVIDER KEY --again`, then replay the job."""


class Unclear(Permanent):
    """Nobody knows whether the provider did it. Look there, `resolve(key, …)`, then replay the job."""


class State(StrEnum):
    INTENDED = "intended"
    IN_FLIGHT = "in flight"
    DONE = "done"
    REFUSED = "refused"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Call:
    """One row of the ledger. `version` counts its changes and is the fence: a stale run cannot write."""

    provider: str
    key: str
    state: State = State.INTENDED
    version: int = 0
    tries: int = 0  # requests that may have reached the provider
    first: float = 0.0  # when the first of them was claimed: from then on the provider's key may live
    since: float = 0.0  # when the last of them was claimed
    result: str | None = None  # JSON
    reason: str = ""
    now: float = 0.0  # the ledger's clock when this was read

    @property
    def provider_key(self) -> str:
        """The idempotency key, and our reference: the same in every retry, replay and process."""
        return provider_key(self.key, self.provider)

    def to(self, state: State, **changes: Any) -> Call:
        reason = clean_text(str(changes.pop("reason", "")), 500)
        return replace(self, state=state, version=self.version + 1, reason=reason, **changes)

    def claimed(self) -> Call:
        first = self.first if self.tries else self.now
        return self.to(State.IN_FLIGHT, tries=self.tries + 1, first=first, since=self.now)

    def ahead_of_clock(self) -> bool:
        return self.state is State.IN_FLIGHT and self.since > self.now + 1

    def seen_now(self) -> Call:
        """The clock was put back since the claim: wait from now, not until the clock is there again."""
        return self.to(State.IN_FLIGHT, first=min(self.first, self.now), since=self.now)

    def not_made(self) -> Call:
        """As before its claim: this request reached nobody. An earlier one may have; the wait for it is over."""
        if self.tries == 1:
            return self.to(State.INTENDED, tries=0)
        return self.to(State.IN_FLIGHT, tries=self.tries - 1, since=0.0)

    def answered(self, answer: Any) -> Call:
        try:
            return self.to(State.DONE, result=dumps(answer))
        except NotJson as error:
            return self.to(State.UNCLEAR, reason=f"it was made, but its answer cannot be kept: {error}")

    def refused(self, error: Exception) -> Call:
        return self.to(State.REFUSED, reason=describe(error))

    def set_aside(self) -> Call:
        return self.to(State.UNCLEAR, reason=f"sent {self.tries} times, no answer")

    def resolved(self, done: Any, again: bool) -> Call:
        if self.state not in (State.UNCLEAR, State.REFUSED):
            stands = self.state if self.version else "not known here"
            raise Permanent(f"{self.key!r} is {stands}: only unclear and refused calls are resolved by hand")
        return self.to(State.INTENDED, tries=0) if again else self.to(State.DONE, result=dumps(done))

    def outcome(self) -> Any:
        """The answer; raises if the call ended otherwise."""
        match self.state:
            case State.DONE:
                return json.loads(self.result or "null")
            case State.REFUSED:
                raise Refused(f"{self.provider} refused {self.key!r}: {self.reason}. {Refused.__doc__}")
            case State.UNCLEAR:
                raise Unclear(f"{self.provider}, {self.key!r}: {self.reason}. {Unclear.__doc__}")
        raise InFlight(1.0, f"another run has taken {self.key!r} over")


class Ledger(Protocol):
    """Where calls are kept. What `write` stored is durable when it returns, whatever its caller rolls back."""

    async def read(self, provider: str, key: str) -> Call:
        """The call as it stands; version 0 if there is none yet."""

    async def write(self, call: Call) -> bool:
        """Store it if the stored version is the one before it (1: nothing is stored). False: it is another."""

    async def unclear(self, provider: str, limit: int) -> list[Call]:
        """The calls that wait for a human, oldest first."""

    async def purge(self, provider: str, older_than: float) -> int:
        """Forget done and refused calls older than this many seconds."""


class SyncLedger(Protocol):
    """`Ledger` for code without an event loop."""

    def read(self, provider: str, key: str) -> Call: ...
    def write(self, call: Call) -> bool: ...
    def unclear(self, provider: str, limit: int) -> list[Call]: ...
    def purge(self, provider: str, older_than: float) -> int: ...


ENDED = (State.DONE, State.REFUSED, State.UNCLEAR)
NOTHING_HAPPENED = (NotMade, RateLimited, ResourceBusy, Snooze)


class Next(StrEnum):
    SEND = "send"
    LOOK_UP = "look up"
    SET_ASIDE = "set aside"


@dataclass(frozen=True, slots=True)
class Rules:
    """What the provider promises. See `OutsideCalls`."""

    longest: float
    key_life: float
    tries: int
    looks_up: bool

    def next(self, call: Call) -> Next:
        """The next step for a call that has not ended; raises `InFlight` while there is none."""
        if call.state is State.INTENDED:
            return Next.SEND
        # A request may leave us at the last moment of its own limit and then run as long: see `OutsideCalls`.
        if (left := call.since + 2 * self.longest - call.now) > 0:
            raise InFlight(left, f"a request to {call.provider} may still be running, {left:.1f} s left")
        if self.looks_up:
            return Next.LOOK_UP
        return self.after_look_up(call)

    def lost(self, call: Call, error: Exception, began: float) -> InFlight:
        """What to raise when a request, begun at this `time.monotonic()`, may have been carried out."""
        wait = began + 2 * self.longest - time.monotonic()
        reason = f"{type(error).__name__}: {describe(error, 200)}"
        return InFlight(max(wait, 0.0), f"{call.provider} may have carried {call.key!r} out ({reason})")

    def after_look_up(self, call: Call) -> Next:
        """The provider does not have it, or cannot be asked."""
        if call.tries >= self.tries:
            return Next.SET_ASIDE
        # The key has to live until the next request arrives, not only until it is sent.
        lives = call.now + self.longest < call.first + self.key_life
        return Next.SEND if self.looks_up or lives else Next.SET_ASIDE


def check_status(status: int, retry_after: float | None = None) -> None:
    """What an HTTP status says about an effect. Raises, unless it was made."""
    if status < 400:
        return
    if status == 429:
        raise RateLimited("HTTP 429", retry_after=5.0 if retry_after is None else retry_after)
    if status in (401, 403, 407):  # about our credentials, not about this call
        raise NotMade(f"HTTP {status}: check the credentials")
    # 409 is how providers answer a second request while the first one runs; a gateway's 5xx hides what happened.
    if status in (408, 409, 425) or status >= 500:
        raise Transient(f"HTTP {status}")
    raise Permanent(f"HTTP {status}")
