"""Event schema: a CloudEvents 1.0 envelope, versioned types, upcasters, and named reasons to quarantine.

Promise: what `EventTypes.new` returns is valid and within the size limit; what `EventTypes.read` returns is
the payload in its newest version, whichever older version was on the wire. Everything else is an
`InvalidEvent` with a `reason`, a permanent failure: a consumer quarantines it at once instead of retrying it.

The version is part of the type (`order.placed.v2`), so brokers can route by it and a consumer that never
heard of v3 says so instead of misreading it. Renaming a field means a new version plus one upcaster.

When it does NOT hold: an upcaster can only use what the old event carries; a field that was never recorded
needs a default or a new event type. Nobody checks the order of deployment: consumers of v2 go first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .core.errors import Permanent

__all__ = [
    "Event",
    "EventTooLarge",
    "EventTypes",
    "InvalidEvent",
    "InvalidEventData",
    "MalformedEvent",
    "UnknownEventType",
    "UnknownEventVersion",
]

MAX_BYTES = 256 * 1024  # NATS refuses 1 MiB, SQS 256 KiB: larger payloads belong behind a claim check
VERSIONED = re.compile(r"^(?P<name>[a-z][a-z0-9_-]*(?:\.[a-z0-9_-]+)*)\.v(?P<version>[1-9][0-9]*)$")

Payload = TypeVar("Payload", bound=BaseModel)
Upcaster = Callable[[dict[str, Any]], dict[str, Any]]


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


class UnknownEventVersion(InvalidEvent):
    """Newer than this consumer, or older with no upcaster: deploy the consumer, then replay."""

    reason = "unknown-version"


class InvalidEventData(InvalidEvent):
    """The payload does not fit the schema its type names: fix the producer, then replay."""

    reason = "invalid-data"


class Event(BaseModel):
    """One fact about one aggregate. `id` names it for ever: publish id, dedup key, job id derive from it."""

    # Extension attributes nobody here knows pass through untouched.
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
        return _parts(self.type)[0]

    @property
    def version(self) -> int:
        return _parts(self.type)[1]

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
            raise MalformedEvent(f"not a CloudEvents 1.0 JSON event: {_where(error)}") from None


class EventTypes:
    """The registry: which types exist, in which versions, and how an old one becomes the newest."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._models: dict[str, dict[int, type[BaseModel]]] = {}
        self._types: dict[type[BaseModel], str] = {}
        self._upcasters: dict[tuple[str, int], Upcaster] = {}

    def event(self, event_type: str) -> Callable[[type[Payload]], type[Payload]]:
        """`@types.event("order.placed.v2")` over the payload's model."""
        name, version = _parts(event_type)

        def register(model: type[Payload]) -> type[Payload]:
            if version in self._models.setdefault(name, {}):
                raise ValueError(f"{event_type} is already registered: add a new version instead")
            self._models[name][version] = model
            self._types[model] = event_type
            return model

        return register

    def upcaster(self, event_type: str) -> Callable[[Upcaster], Upcaster]:
        """`@types.upcaster("order.placed.v1")` turns v1 data into v2 data."""

        def register(step: Upcaster) -> Upcaster:
            self._upcasters[_parts(event_type)] = step
            return step

        return register

    def new(self, payload: BaseModel, *, subject: str, source: str, **attributes: Any) -> Event:
        """A valid event of the payload's registered type; refuses an oversized one before it is stored."""
        if (event_type := self._types.get(type(payload))) is None:
            raise UnknownEventType(f"{type(payload).__name__} is no registered event payload")
        data = payload.model_dump(mode="json")
        event = Event(type=event_type, subject=subject, source=source, data=data, **attributes)
        if (size := len(event.encode())) > self.max_bytes:
            raise EventTooLarge(
                f"{event_type} has {size} bytes, limit {self.max_bytes}: send a reference instead"
            )
        return event

    def decode(self, raw: bytes | str) -> Event:
        return Event.decode(raw, max_bytes=self.max_bytes)

    def read(self, event: Event) -> BaseModel:
        """The payload as the newest model this process knows."""
        name, version = _parts(event.type)
        if not (models := self._models.get(name)):
            raise UnknownEventType(f"unknown event type {name!r}: register it or do not subscribe to it")
        newest = max(models)
        if version > newest:
            raise UnknownEventVersion(
                f"{event.type} is newer than v{newest}: deploy this consumer, then replay"
            )
        return _validated(models[newest], event.type, self._upcast(name, version, newest, event))

    def _upcast(self, name: str, version: int, newest: int, event: Event) -> dict[str, Any]:
        data = dict(event.data)
        if (model := self._models[name].get(version)) is not None and version < newest:
            _validated(model, event.type, data)  # so that an upcaster may rely on the old schema
        for step in range(version, newest):
            if (upcast := self._upcasters.get((name, step))) is None:
                raise UnknownEventVersion(
                    f"no upcaster from {name}.v{step} to v{step + 1}: add one, then replay"
                )
            try:
                data = upcast(data)
            except (LookupError, TypeError, ValueError) as error:
                raise InvalidEventData(f"upcaster of {name}.v{step} failed: {error!r}") from error
        return data


def _parts(event_type: str) -> tuple[str, int]:
    if (match := VERSIONED.match(event_type)) is None:
        raise UnknownEventType(f"{event_type!r} has no version: types read like 'order.placed.v1'")
    return match["name"], int(match["version"])


def _validated(model: type[Payload], event_type: str, data: Mapping[str, Any]) -> Payload:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InvalidEventData(f"{event_type} data does not fit {model.__name__}: {_where(error)}") from None


def _where(error: ValidationError) -> str:
    """Field and rule of each mistake, never the value: reasons end up in logs and on consoles."""
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'document'}: {e['msg']}" for e in error.errors()[:5])
