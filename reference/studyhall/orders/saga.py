"""Buying a study pack, in the words of the business. Each step names its undo."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from studyhall.patterns import outbox
from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.retry import surviving
from studyhall.patterns.saga import DbStep, Saga, SagaStep, StepContext

from .db import orders, packs, seat_reservations
from .events import SOURCE, OrderCancelled, OrderConfirmed, types

if TYPE_CHECKING:
    from .payments import Payments

SAGA = "buy-study-pack"
# A minute without the provider cancels no order.
CHARGE = replace(surviving(60, base=0.5, cap=10), max_age=900)
REFUND = RetryPolicy(base=0.5, cap=60, attempts=20)


class SoldOut(Permanent):
    """There are not enough free seats in this pack."""


def buy_pack(
    payments: "Payments | None" = None,
    *,
    deadline: float = 15.0,
    charge: RetryPolicy = CHARGE,
    refund: RetryPolicy = REFUND,
) -> Saga:
    """Without `payments` it can be started, not driven.

    `deadline` covers looking a charge up and making it: more than twice the client's time limit.
    """
    money = _Money(payments)
    return Saga(
        SAGA,
        steps=[
            DbStep("place-order", undo=cancel),  # done by service.place_order
            DbStep("reserve-seats", do=reserve, undo=release),
            SagaStep(
                "charge",
                do=money.charge,
                undo=money.refund,
                resolve=money.find,
                deadline=deadline,
                retry=charge,
                undo_retry=refund,
            ),
            DbStep("confirm", do=confirm),
        ],
    )


async def cancel(ctx: StepContext, tx: AsyncConnection) -> None:
    reason = ctx.error or "cancelled"
    row = update(orders).where(orders.c.id == ctx.saga_id)
    await tx.execute(row.values(status="cancelled", reason=reason, updated_at=time.time()))
    order = OrderCancelled(
        order_id=ctx.saga_id, pack_id=ctx.data["pack_id"], customer=ctx.data["customer"], reason=reason
    )
    await outbox.add(tx, types.new(order, subject=ctx.saga_id, source=SOURCE, id=f"{ctx.saga_id}.cancelled"))


async def reserve(ctx: StepContext, tx: AsyncConnection) -> dict[str, Any]:
    await _set_status(tx, ctx.saga_id, "placed", "processing")
    pack_id, seats = ctx.data["pack_id"], ctx.data["seats"]
    free = update(packs).where(packs.c.id == pack_id, packs.c.seats_free >= seats)
    if (await tx.execute(free.values(seats_free=packs.c.seats_free - seats))).rowcount != 1:
        raise SoldOut(f"pack {pack_id} has fewer than {seats} free seats")
    await tx.execute(insert(seat_reservations).values(order_id=ctx.saga_id, pack_id=pack_id, seats=seats))
    return {"seats": seats}


async def release(ctx: StepContext, tx: AsyncConnection) -> None:
    reserved = delete(seat_reservations).where(seat_reservations.c.order_id == ctx.saga_id)
    row = (await tx.execute(reserved.returning(seat_reservations.c.pack_id, seat_reservations.c.seats))).one()
    back = update(packs).where(packs.c.id == row.pack_id)
    await tx.execute(back.values(seats_free=packs.c.seats_free + row.seats))


async def confirm(ctx: StepContext, tx: AsyncConnection) -> None:
    await _set_status(tx, ctx.saga_id, "processing", "confirmed", charge_id=ctx.results["charge"]["id"])
    pack = (await tx.execute(select(packs).where(packs.c.id == ctx.data["pack_id"]))).one()
    order = OrderConfirmed(
        order_id=ctx.saga_id,
        pack_id=pack.id,
        pack_title=pack.title,
        author=pack.author,
        customer=ctx.data["customer"],
        seats=ctx.data["seats"],
        amount_cents=ctx.data["amount_cents"],
    )
    await outbox.add(tx, types.new(order, subject=ctx.saga_id, source=SOURCE, id=f"{ctx.saga_id}.confirmed"))


class _Money:
    def __init__(self, payments: "Payments | None") -> None:
        self._given = payments

    @property
    def _payments(self) -> "Payments":
        if self._given is None:
            raise RuntimeError("this process only takes orders: drive sagas with buy_pack(Payments(url))")
        return self._given

    async def charge(self, ctx: StepContext) -> dict[str, Any]:
        data = ctx.data
        charge = await self._payments.charge(
            ctx.key, amount=data["amount_cents"], customer=data["customer"], method=data["method"]
        )
        return {"id": charge["id"]}

    async def find(self, ctx: StepContext) -> dict[str, Any] | None:
        charge = await self._payments.find(ctx.key)
        # A declined charge is not an effect. The same key is refused again.
        return {"id": charge["id"]} if charge and charge["status"] == "succeeded" else None

    async def refund(self, ctx: StepContext) -> None:
        # By the charge's key, not its id: that also takes back a charge whose answer never came.
        await self._payments.refund(ctx.undo_key, charge_key=ctx.key)


async def _set_status(tx: AsyncConnection, order_id: str, before: str, after: str, **values: Any) -> None:
    row = update(orders).where(orders.c.id == order_id, orders.c.status == before)
    if (await tx.execute(row.values(status=after, updated_at=time.time(), **values))).rowcount != 1:
        status = await tx.scalar(select(orders.c.status).where(orders.c.id == order_id))
        raise Permanent(f"order is {status}, not {before}")
