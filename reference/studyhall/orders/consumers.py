"""Everybody who cares about orders: each a bus group of its own, each effect once through its inbox."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from pydantic import BaseModel
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from studyhall.patterns.event_bus import Handler
from studyhall.patterns.event_schema import Event
from studyhall.patterns.idempotency import Inbox, fingerprint

from .db import analytics, feed_entries, notifications, payouts
from .events import OrderCancelled, OrderConfirmed, types

__all__ = ["GROUPS", "handler"]

AUTHOR_SHARE = 70  # per cent of the price

Effect = Callable[[AsyncConnection, BaseModel], Awaitable[None]]


async def notify(tx: AsyncConnection, order: BaseModel) -> None:
    if isinstance(order, OrderConfirmed):
        text = f"Your pack “{order.pack_title}” is ready, {order.seats} seat(s)."
    elif isinstance(order, OrderCancelled):
        text = "Your order was cancelled. You have not been charged, or got your money back."
    else:
        return
    row = {"order_id": order.order_id, "customer": order.customer, "text": text}
    await tx.execute(insert(notifications).values(**row, at=time.time()))


async def pay_author(tx: AsyncConnection, order: BaseModel) -> None:
    if isinstance(order, OrderConfirmed):
        share = order.amount_cents * AUTHOR_SHARE // 100
        row = {"order_id": order.order_id, "author": order.author, "amount_cents": share}
        await tx.execute(insert(payouts).values(**row, at=time.time()))


async def count_sale(tx: AsyncConnection, order: BaseModel) -> None:
    if isinstance(order, OrderConfirmed):
        row = order.model_dump(include={"order_id", "pack_id", "seats", "amount_cents"})
        await tx.execute(insert(analytics).values(**row, at=time.time()))


async def tell_feed(tx: AsyncConnection, order: BaseModel) -> None:
    if isinstance(order, OrderConfirmed):
        text = f"Somebody just picked up “{order.pack_title}”"
        await tx.execute(insert(feed_entries).values(order_id=order.order_id, text=text, at=time.time()))


GROUPS: dict[str, Effect] = {
    "notifications": notify,
    "payouts": pay_author,
    "analytics": count_sale,
    "feed": tell_feed,
}


def handler(engine: AsyncEngine, group: str) -> Handler:
    """What the bus calls for each event of this group. The marker and the effect are one transaction."""
    inbox, effect = Inbox(engine, f"orders.{group}"), GROUPS[group]

    async def handle(event: Event) -> None:
        order = types.read(event)  # an unknown version or a broken payload goes to the group's quarantine

        async def once(tx: AsyncConnection) -> None:
            await effect(tx, order)

        await inbox.once(event.id, fingerprint(event.data), once)

    return handle
