"""Event schema: a CloudEvents 1.0 envelope, versioned types, upcasters, and named reasons to quarantine.

Promise: what `EventTypes.new` returns is valid and within the size limit; what `EventTypes.read` returns is
the payload in its newest version, whichever older version was on the wire. Everything else is an
`InvalidEvent` with a `reason`, a permanent failure: a consumer quarantines it at once instead of retrying it.

The version is part of the type (`order.placed.v2`), so brokers can route by it and a consumer that never
heard of v3 says so instead of misreading it. Renaming a field means a new version plus one upcaster.

When it does NOT hold: an upcaster can only use what the old event carries; a field that was never recorded
needs a default or a new event type. The order of deployment is not checked: consumers of v2 go first.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from .core.event import MAX_BYTES, Event, EventTooLarge, InvalidEvent, UnknownEventType, mistakes, name_and_version

__all__ = ["EventTypes", "InvalidEventData", "UnknownEventVersion"]

Payload = TypeVar("Payload", bound=BaseModel)
Upcaster = Callable[[dict[str, Any]], dict[str, Any]]


class UnknownEventVersion(InvalidEvent):
    """Newer than this consumer, or older with no upcaster: deploy the consumer, then replay."""

    reason = "unknown-version"


class InvalidEventData(InvalidEvent):
    """The payload does not fit the schema its type names: fix the producer, then replay."""

    reason = "invalid-data"


class EventTypes:
    """The registry: which types exist, in which versions, and how an old one becomes the newest."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._models: dict[str, dict[int, type[BaseModel]]] = {}
        self._types: dict[type[BaseModel], str] = {}
        self._upcasters: dict[tuple[str, int], Upcaster] = {}

    def event(self, event_type: str) -> Callable[[type[Payload]], type[Payload]]:
        """`@types.event("order.placed.v2")` over the payload's model."""
        name, version = name_and_version(event_type)

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
            self._upcasters[name_and_version(event_type)] = step
            return step

        return register

    def new(self, payload: BaseModel, *, subject: str, source: str, **attributes: Any) -> Event:
        """A valid event of the payload's registered type; refuses an oversized one before it is stored."""
        if (event_type := self._types.get(type(payload))) is None:
            raise UnknownEventType(f"{type(payload).__name__} is not a registered event payload")
        data = payload.model_dump(mode="json")
        event = Event(type=event_type, subject=subject, source=source, data=data, **attributes)
        if (size := len(event.encode())) > self.max_bytes:
            raise EventTooLarge(f"{event_type} has {size} bytes, limit {self.max_bytes}: send a reference instead")
        return event

    def decode(self, raw: bytes | str) -> Event:
        return Event.decode(raw, max_bytes=self.max_bytes)

    def read(self, event: Event) -> BaseModel:
        """The payload as the newest model this process knows."""
        name, version = name_and_version(event.type)
        if not (models := self._models.get(name)):
            raise UnknownEventType(f"unknown event type {name!r}: register it or do not subscribe to it")
        newest = max(models)
        if version > newest:
            raise UnknownEventVersion(f"{event.type} is newer than v{newest}: deploy this consumer, then replay")
        return _validated(models[newest], event.type, self._upcast(name, version, newest, event))

    def _upcast(self, name: str, version: int, newest: int, event: Event) -> dict[str, Any]:
        data = dict(event.data)
        if (model := self._models[name].get(version)) is not None and version < newest:
            _validated(model, event.type, data)  # so that an upcaster may rely on the old schema
        for step in range(version, newest):
            if (upcast := self._upcasters.get((name, step))) is None:
                raise UnknownEventVersion(f"no upcaster from {name}.v{step} to v{step + 1}: add one, then replay")
            try:
                data = upcast(data)
            except (LookupError, TypeError, ValueError) as error:
                raise InvalidEventData(f"upcaster of {name}.v{step} failed: {error!r}") from error
        return data


def _validated(model: type[Payload], event_type: str, data: Mapping[str, Any]) -> Payload:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InvalidEventData(f"{event_type} data does not fit {model.__name__}: {mistakes(error)}") from None
