"""The events that orders send. A renamed field means a new version and an upcaster."""

from pydantic import BaseModel

from studyhall.patterns.event_schema import EventTypes

SOURCE = "studyhall/orders"
TOPIC = "order"
types = EventTypes()


@types.event("order.placed.v1")
class OrderPlaced(BaseModel):
    order_id: str
    pack_id: str
    seats: int
    amount_cents: int


@types.event("order.confirmed.v1")
class OrderConfirmed(BaseModel):
    order_id: str
    pack_id: str
    pack_title: str
    author: str
    customer: str
    seats: int
    amount_cents: int


@types.event("order.cancelled.v1")
class OrderCancelled(BaseModel):
    order_id: str
    pack_id: str
    customer: str
    reason: str
