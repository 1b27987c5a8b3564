"""The event model: one fact on its way to others, how it is written, and what may be wrong with it.

Every pattern that stores, publishes or handles events speaks these types, so none imports another for a name. The
wire form is the JSON format of CloudEvents 1.0. The version is part of the type (`order.placed.v2`).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .failures import Permanent, Transient

__all__ = [
    "MAX_BYTES",
    "BrokerUnavailable",
    "Event",
    "EventTooLarge",
    "Handler",
    "InvalidEvent",
    "MalformedEvent",
    "UnknownEventType",
    "mistakes",
    "name_and_version",
    "topic_of",
]

MAX_BYTES = 256 * 1024  # NATS refuses 1 MiB, SQS 256 KiB: larger payloads belong behind a claim check
VERSIONED = re.compile(r"^(?P<name>[a-z][a-z0-9_-]*(?:\.[a-z0-9_-]+)*)\.v(?P<version>[1-9][0-9]*)$")


class BrokerUnavailable(Transient):
    """The broker did not confirm in time. Keep the event (outbox) and publish it again under the same id."""


class InvalidEvent(Permanent):
    """Retrying cannot help. Quarantine it with `reason`; replay it after the fix."""

    reason = "invalid"


class MalformedEvent(InvalidEvent):
    """Not a CloudEvents 1.0 JSON document: find out who writes to this channel."""

    reason = "malformed"


class EventTooLarge(InvalidEvent):
    """Over the size limit: store the body elsewhere and send a reference (claim check)."""

    reason = "too-large"


class UnknownEventType(InvalidEvent):
    """Nobody registered this type here: register it, or do not subscribe to it."""

    reason = "unknown-type"


class Event(BaseModel):
    """One fact about one aggregate. `id` names it forever: publish id, dedup key, job id derive from it."""

    # Unknown extension attributes pass through untouched.
    model_config = ConfigDict(frozen=True, extra="allow")

    specversion: Literal["1.0"] = "1.0"
    id: str = Field(default_factory=lambda: str(uuid4()), min_length=1, max_length=200)
    source: str = Field(min_length=1, max_length=300)
    type: str = Field(min_length=1, max_length=200)
    subject: str = Field(min_length=1, max_length=300)  # the aggregate's key: order is kept per subject
    time: datetime = Field(default_factory=lambda: datetime.now(UTC))
    datacontenttype: Literal["application/json"] = "application/json"
    dataschema: str | None = None
    data: dict[str, Any] = Field(default_factory=dict)
    traceparent: str | None = None
    correlationid: str | None = None

    @property
    def name(self) -> str:
        return name_and_version(self.type)[0]

    @property
    def version(self) -> int:
        return name_and_version(self.type)[1]

    @property
    def fact(self) -> list[Any]:
        """What is true whoever sends it; time and trace may differ when a producer retries."""
        return [self.type, self.subject, self.data]

    def encode(self) -> bytes:
        """The CloudEvents JSON format, absent attributes left out (the specification forbids null)."""
        return self.model_dump_json(exclude_none=True).encode()

    @classmethod
    def decode(cls, raw: bytes | str, *, max_bytes: int = MAX_BYTES) -> Event:
        if (size := len(raw) if isinstance(raw, bytes) else len(raw.encode())) > max_bytes:
            raise EventTooLarge(f"event has {size} bytes, limit {max_bytes}: send a reference instead")
        try:
            return cls.model_validate_json(raw)
        except ValidationError as error:
            raise MalformedEvent(f"not a CloudEvents 1.0 JSON event: {mistakes(error)}") from None


Handler = Callable[[Event], Awaitable[None]]


def topic_of(event: Event) -> str:
    """The channel it travels on: the first word of its type."""
    return event.type.split(".", 1)[0]


def name_and_version(event_type: str) -> tuple[str, int]:
    if (match := VERSIONED.match(event_type)) is None:
        raise UnknownEventType(f"{event_type!r} has no version: types read like 'order.placed.v1'")
    return match["name"], int(match["version"])


def mistakes(error: ValidationError) -> str:
    """Field and rule of each mistake, never the value: reasons end up in logs and on consoles."""
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'document'}: {e['msg']}" for e in error.errors()[:5])
