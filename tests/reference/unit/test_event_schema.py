"""The envelope, the registry, and a named reason for everything that is neither."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.core.event import Event, EventTooLarge, InvalidEvent, MalformedEvent, UnknownEventType
from studyhall.patterns.event_schema import EventTypes, InvalidEventData, UnknownEventVersion


class PlacedV1(BaseModel):
    order: str
    total: int


class PlacedV2(BaseModel):
    order: str
    total_cents: int
    currency: str


class PlacedV3(BaseModel):
    order_id: str
    total_cents: int
    currency: str


@pytest.fixture
def types():
    registry = EventTypes(max_bytes=2000)
    registry.event("order.placed.v1")(PlacedV1)
    registry.event("order.placed.v2")(PlacedV2)
    registry.event("order.placed.v3")(PlacedV3)

    @registry.upcaster("order.placed.v1")
    def _(old: dict[str, Any]) -> dict[str, Any]:
        return {"order": old["order"], "total_cents": old["total"] * 100, "currency": "EUR"}

    @registry.upcaster("order.placed.v2")
    def _(old: dict[str, Any]) -> dict[str, Any]:
        return {**old, "order_id": old["order"]}

    return registry


def placed(version, **data):
    return Event(source="/shop", type=f"order.placed.v{version}", subject="o-1", data=data)


def test_an_event_survives_the_wire_unchanged():
    event = Event(
        source="/shop",
        type="order.placed.v1",
        subject="o-1",
        data={"order": "o-1", "note": None, "lines": [1, {"x": None}]},
        correlationid="c-7",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )
    wire = json.loads(event.encode())
    assert Event.decode(event.encode()) == event
    assert wire["specversion"] == "1.0"
    assert wire["datacontenttype"] == "application/json"
    assert "dataschema" not in wire  # CloudEvents forbids null attributes
    assert wire["data"]["note"] is None  # but null is a value inside data


def test_extension_attributes_nobody_knows_pass_through():
    raw = placed(1).encode().replace(b'"specversion"', b'"partitionkey":"eu","specversion"')
    assert json.loads(Event.decode(raw).encode())["partitionkey"] == "eu"


@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text()))
def test_any_json_data_survives_the_wire(data):
    event = Event(source="/s", type="order.placed.v1", subject="o", data=data)
    assert Event.decode(event.encode()).data == data


def test_consumer_written_for_v3_breaks_on_v1_without_upcasters_and_not_with_them(types, figures):
    events = [placed(1, order=f"o-{n}", total=n) for n in range(10)]
    events += [placed(3, order_id=f"p-{n}", total_cents=n, currency="EUR") for n in range(10)]

    def naive(event):
        return str(event.data["order_id"])  # the field was called `order` in v1 and v2

    broke = 0
    for event in events:
        try:
            naive(event)
        except KeyError:
            broke += 1
    read = [types.read(event) for event in events]
    assert broke == 10
    assert all(isinstance(payload, PlacedV3) for payload in read)
    figures(
        "event-schema",
        name="field-rename",
        events=len(events),
        unreadable=len(events) - len(read),
        naive_unreadable=broke,
    )


def test_new_stamps_the_registered_type_and_refuses_what_is_too_large(types):
    payload = PlacedV3(order_id="o-1", total_cents=1, currency="EUR")
    event = types.new(payload, subject="o-1", source="/shop", correlationid="c")
    assert (event.type, event.name, event.version) == ("order.placed.v3", "order.placed", 3)
    with pytest.raises(EventTooLarge, match="send a reference"):
        types.new(payload.model_copy(update={"order_id": "x" * 3000}), subject="o-1", source="/shop")
    with pytest.raises(UnknownEventType):
        types.new(Event(source="/s", type="a.v1", subject="s"), subject="o-1", source="/shop")


BAD: dict[str, tuple[Callable[[EventTypes], object], type[InvalidEvent], str]] = {
    "not json": (lambda t: t.decode(b"\x00nope"), MalformedEvent, "malformed"),
    "no envelope": (lambda t: t.decode(b'{"order": 1}'), MalformedEvent, "malformed"),
    "cloudevents 0.3": (
        lambda t: t.decode(placed(1).encode().replace(b'"1.0"', b'"0.3"')),
        MalformedEvent,
        "malformed",
    ),
    "too large": (lambda t: t.decode(placed(1, order="x" * 3000).encode()), EventTooLarge, "too-large"),
    "unknown type": (
        lambda t: t.read(Event(source="/s", type="order.lost.v1", subject="o")),
        UnknownEventType,
        "unknown-type",
    ),
    "no version": (
        lambda t: t.read(Event(source="/s", type="order.placed", subject="o")),
        UnknownEventType,
        "unknown-type",
    ),
    "newer version": (lambda t: t.read(placed(4)), UnknownEventVersion, "unknown-version"),
    "missing field": (lambda t: t.read(placed(3, order_id="o")), InvalidEventData, "invalid-data"),
    "wrong type in an old version": (
        lambda t: t.read(placed(1, order="o", total="many")),
        InvalidEventData,
        "invalid-data",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_a_permanent_error_with_a_reason(case, types):
    act, error, reason = BAD[case]
    with pytest.raises(error) as caught:
        act(types)
    assert isinstance(caught.value, Permanent)
    assert caught.value.reason == reason
    assert str(caught.value)


def test_a_version_without_upcaster_says_which_one_is_missing():
    registry = EventTypes()
    registry.event("order.placed.v1")(PlacedV1)
    registry.event("order.placed.v2")(PlacedV2)
    with pytest.raises(UnknownEventVersion, match=r"no upcaster from order\.placed\.v1 to v2"):
        registry.read(placed(1, order="o", total=1))


def test_the_reason_names_the_field_and_never_the_value(types):
    with pytest.raises(InvalidEventData) as caught:
        types.read(placed(3, order_id="o", total_cents="4111-1111-1111-1111", currency="EUR"))
    assert "total_cents" in str(caught.value)
    assert "4111" not in str(caught.value)


def test_registering_a_version_twice_is_an_error(types):
    with pytest.raises(ValueError, match="add a new version"):
        types.event("order.placed.v1")(PlacedV1)
