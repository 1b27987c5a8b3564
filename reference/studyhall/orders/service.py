"""Placing, cancelling and reading orders. Writers take the caller's transaction: all commits or nothing."""

import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from studyhall.patterns import outbox
from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.core.store import read
from studyhall.patterns.saga import SagaRunner

from .db import orders, packs
from .events import SOURCE, OrderPlaced, types
from .saga import SAGA, buy_pack

MAX_SEATS = 50
PACKS = (
    ("biology-101", "Cells and how they talk", "a. okafor", 1900, 500),
    ("history-1848", "The year 1848", "m. lindqvist", 1400, 500),
    ("chess-endgames", "Ten endgames, last three seats", "r. batista", 2500, 3),
)


class OrderRefused(Permanent):
    """The order cannot be taken as it is; the message says what to change."""


async def place_order(
    tx: AsyncConnection,
    *,
    pack_id: str,
    customer: str,
    seats: int = 1,
    method: str = "card_ok",
    order_id: str | None = None,
) -> str:
    """Order, event and saga in one transaction. The same `order_id` again is the same order."""
    if not 1 <= seats <= MAX_SEATS:
        raise OrderRefused(f"seats must be 1 to {MAX_SEATS}, got {seats}")
    if not customer.strip():
        raise OrderRefused("customer is missing")
    order_id = order_id or f"ord-{uuid4().hex[:16]}"
    request = {"pack_id": pack_id, "customer": customer, "seats": seats, "method": method}
    existing = (await tx.execute(select(orders).where(orders.c.id == order_id))).mappings().first()
    if existing is not None:
        if any(existing[name] != value for name, value in request.items()):
            raise OrderRefused(f"order {order_id} exists with other contents: use a new id")
        return order_id
    pack = (await tx.execute(select(packs).where(packs.c.id == pack_id))).first()
    if pack is None:
        known_packs = ", ".join((await tx.scalars(select(packs.c.id).order_by(packs.c.id).limit(10))).all())
        raise OrderRefused(f"there is no pack {pack_id!r}; packs: {known_packs or 'none yet'}")
    amount, now = pack.price_cents * seats, time.time()
    row = {"id": order_id, **request, "amount_cents": amount, "status": "placed"}
    await tx.execute(insert(orders).values(**row, placed_at=now, updated_at=now))
    placed = OrderPlaced(order_id=order_id, pack_id=pack_id, seats=seats, amount_cents=amount)
    await outbox.add(tx, types.new(placed, subject=order_id, source=SOURCE, id=f"{order_id}.placed"))
    # This process only starts the saga: the event worker drives it, so no payment provider is needed here.
    await SagaRunner(tx.engine, buy_pack()).start(
        tx, SAGA, order_id, {"order_id": order_id, **request, "amount_cents": amount}
    )
    return order_id


async def cancel_order(tx: AsyncConnection, order_id: str) -> None:
    """Ask to cancel an order while its saga runs; the saga then takes everything back."""
    running = update(orders).where(orders.c.id == order_id, orders.c.status.in_(("placed", "processing")))
    if (await tx.execute(running.values(status="cancelling", updated_at=time.time()))).rowcount != 1:
        status = await tx.scalar(select(orders.c.status).where(orders.c.id == order_id))
        raise OrderRefused(f"order {order_id} is {status or 'unknown'}: only a running one can be cancelled")


async def add_pack(tx: AsyncConnection, pack_id: str, *, title: str, author: str, price_cents: int, seats: int) -> None:
    row = {"id": pack_id, "title": title, "author": author, "price_cents": price_cents}
    await tx.execute(insert(packs).values(**row, seats=seats, seats_free=seats))


async def seed_packs(tx: AsyncConnection) -> None:
    """Something to buy in demo and tests; does nothing if there is."""
    if await tx.scalar(select(packs.c.id).limit(1)) is None:
        for pack_id, title, author, price_cents, seats in PACKS:
            await add_pack(tx, pack_id, title=title, author=author, price_cents=price_cents, seats=seats)


async def list_orders(engine: AsyncEngine, *, status: str | None = None, limit: int = 50) -> Sequence[Any]:
    query = select(orders).order_by(orders.c.placed_at.desc()).limit(limit)
    if status is not None:
        query = query.where(orders.c.status == status)
    async with read(engine) as tx:
        return (await tx.execute(query)).mappings().all()


async def show_order(engine: AsyncEngine, order_id: str) -> dict[str, Any]:
    async with read(engine) as tx:
        row = (await tx.execute(select(orders).where(orders.c.id == order_id))).mappings().first()
    if row is None:
        raise OrderRefused(f"there is no order {order_id!r}")
    return dict(row)
