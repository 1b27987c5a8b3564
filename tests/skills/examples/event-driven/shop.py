# [publish]
# shop.py: the event is a row in the transaction that makes it true
from sqlalchemy import text

from patterns import outbox
from patterns.event_schema import EventTypes
from patterns.core.store import begin
from pydantic import BaseModel

types = EventTypes()


@types.event("order.placed.v1")  # a renamed field is order.placed.v2 plus an upcaster
class OrderPlaced(BaseModel):
    order_id: str
    cents: int


async def place_order(store, order_id: str, cents: int) -> None:
    placed = OrderPlaced(order_id=order_id, cents=cents)
    # Subject: the aggregate, whose events stay in order. Id: derived, so a caller's retry adds nothing.
    event = types.new(placed, subject=order_id, source="shop/orders", id=f"{order_id}.placed")
    async with begin(store) as tx:
        await tx.execute(
            text("INSERT INTO orders VALUES (:order_id, :cents) ON CONFLICT DO NOTHING"), placed.model_dump()
        )
        await outbox.add(tx, event)  # never publish in here


# [/publish]
