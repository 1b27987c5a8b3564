"""The consumers of order events: each a bus group of its own, each effect once through its inbox."""

import time

from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from studyhall.orders import GROUP_NAMES
from studyhall.orders.db import analytics, feed_entries, notifications, payouts
from studyhall.orders.events import OrderCancelled, OrderConfirmed, types
from studyhall.patterns.core.event import Event
from studyhall.patterns.event_bus import Handler
from studyhall.patterns.inbox import Effect, consumer

AUTHOR_SHARE = 70  # per cent of the price


async def notify(tx: AsyncConnection, event: Event) -> None:
    order = types.read(event)
    if isinstance(order, OrderConfirmed):
        text = f"Your pack “{order.pack_title}” is ready, {order.seats} seat(s)."
    elif isinstance(order, OrderCancelled):
        text = "Your order was cancelled. You were not charged, or got your money back."
    else:
        return
    row = {"order_id": order.order_id, "customer": order.customer, "text": text}
    await tx.execute(insert(notifications).values(**row, at=time.time()))


async def pay_author(tx: AsyncConnection, event: Event) -> None:
    order = types.read(event)
    if isinstance(order, OrderConfirmed):
        share = order.amount_cents * AUTHOR_SHARE // 100
        row = {"order_id": order.order_id, "author": order.author, "amount_cents": share}
        await tx.execute(insert(payouts).values(**row, at=time.time()))


async def count_sale(tx: AsyncConnection, event: Event) -> None:
    order = types.read(event)
    if isinstance(order, OrderConfirmed):
        row = order.model_dump(include={"order_id", "pack_id", "seats", "amount_cents"})
        await tx.execute(insert(analytics).values(**row, at=time.time()))


async def tell_feed(tx: AsyncConnection, event: Event) -> None:
    order = types.read(event)
    if isinstance(order, OrderConfirmed):
        text = f"Somebody just picked up “{order.pack_title}”"
        await tx.execute(insert(feed_entries).values(order_id=order.order_id, text=text, at=time.time()))


GROUPS: dict[str, Effect] = dict(zip(GROUP_NAMES, (notify, pay_author, count_sale, tell_feed), strict=True))


def inbox_name(group: str) -> str:
    """The group's name in the inbox, which it shares with the jobs."""
    return f"orders.{group}"


def handler(store: AsyncEngine, group: str) -> Handler:
    """The handler for the bus: a broken event goes to quarantine, a repeat does nothing."""
    return consumer(store, inbox_name(group), types, GROUPS[group])
