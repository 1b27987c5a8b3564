# [publish]
# shop.py: the event is a row in the transaction that makes it true
from sqlalchemy import text

from patterns import outbox
from patterns.event_schema import EventTypes
from patterns.store import begin
from pydantic import BaseModel

types = EventTypes()


@types.event("order.placed.v1")  # a renamed field is order.placed.v2 plus an upcaster
class OrderPlaced(BaseModel):
    order_id: str
    cents: int


async def place_order(engine, order_id: str, cents: int) -> None:
    placed = OrderPlaced(order_id=order_id, cents=cents)
    # Subject: the aggregate, whose events stay in order. Id: derived, so a caller's retry adds nothing.
    event = types.new(placed, subject=order_id, source="shop/orders", id=f"{order_id}.placed")
    async with begin(engine) as tx:
        await tx.execute(
            text("INSERT INTO orders VALUES (:order_id, :cents) ON CONFLICT DO NOTHING"), placed.model_dump()
        )
        await outbox.add(tx, event)  # never publish in here


# [/publish]
# [consume]
from patterns import inbox


async def add_revenue(tx, event) -> None:  # marker and effect: one transaction, once per consumer name
    order = types.read(event)  # the newest version, whatever was on the wire
    await tx.execute(text("UPDATE revenue SET cents = cents + :cents"), {"cents": order.cents})


def revenue_consumer(engine):
    return inbox.consumer(engine, "revenue", types, add_revenue)


# [/consume]
# [upcast]
def versions() -> EventTypes:
    newer = EventTypes()

    @newer.event("order.placed.v2")
    class OrderPlacedInCurrency(BaseModel):
        order_id: str
        cents: int
        currency: str

    @newer.upcaster("order.placed.v1")  # v1 data -> v2 data; plain dicts, no calls
    def add_currency(data: dict) -> dict:
        return {**data, "currency": "EUR"}

    return newer


# [/upcast]


async def example(redis_url: str, store_url: str) -> None:
    from patterns.event_schema import UnknownEventVersion

    old = types.new(OrderPlaced(order_id="o1", cents=5), subject="o1", source="shop")
    assert versions().read(old).currency == "EUR"
    try:
        types.read(old.model_copy(update={"type": "order.placed.v7"}))
    except UnknownEventVersion:
        return
    raise AssertionError("a newer version is refused, not misread")
