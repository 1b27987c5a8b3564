# [upcast]
from pydantic import BaseModel

from patterns.event_schema import EventTypes

types = EventTypes()


@types.event("order.placed.v2")
class OrderPlaced(BaseModel):
    order_id: str
    cents: int
    currency: str


@types.upcaster("order.placed.v1")  # v1 data -> v2 data; plain dicts, no calls
def add_currency(data: dict) -> dict:
    return {**data, "currency": "EUR"}


# [/upcast]


async def example(redis_url: str, store_url: str) -> None:
    import shop
    from patterns.event_schema import UnknownEventVersion

    old = shop.types.new(shop.OrderPlaced(order_id="o1", cents=5), subject="o1", source="shop")
    assert types.read(old) == OrderPlaced(order_id="o1", cents=5, currency="EUR")
    try:
        shop.types.read(old.model_copy(update={"type": "order.placed.v2"}))
    except UnknownEventVersion:
        return
    raise AssertionError("a newer version is refused, not misread")
