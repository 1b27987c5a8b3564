# [consume]
# revenue.py: marker and effect in one transaction, once per consumer name
from sqlalchemy import text

from patterns import inbox
from shop import types


async def add_revenue(tx, event) -> None:
    order = types.read(event)  # the newest version, whatever was on the wire
    await tx.execute(text("UPDATE revenue SET cents = cents + :cents"), {"cents": order.cents})


def revenue_consumer(store):
    return inbox.consumer(store, "revenue", types, add_revenue)


# [/consume]
