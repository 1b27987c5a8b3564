"""Study packs and orders. An order is a row, an event and a saga in one transaction: Redis is not needed for it."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from studyhall.orders import db, service
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.saga import store as saga_store

from .problems import Problem
from .state import Api, Caller, RequestKey

router = APIRouter(tags=["orders"])
OrderId = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,100}$")]


class Pack(BaseModel):
    id: str
    title: str
    author: str
    price_cents: int
    seats: int
    seats_free: int


class NewOrder(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    pack_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")]
    seats: Annotated[int, Field(ge=1, le=service.MAX_SEATS)] = 1
    card: Annotated[str, Field(pattern=r"^card_[a-z_]{1,40}$", description="a payment method of the sandbox")] = (
        "card_ok"
    )


class OrderView(BaseModel):
    id: str
    pack_id: str
    seats: int
    amount_cents: int
    status: Annotated[str, Field(description="placed, processing, cancelling, confirmed or cancelled")]
    reason: str | None
    placed_at: float
    updated_at: float


class OrderStep(BaseModel):
    name: str
    state: str
    attempts: int


class OrderDetail(OrderView):
    saga: str | None = None
    steps: list[OrderStep] = []


@router.get("/packs")
async def list_packs(api: Api) -> list[Pack]:
    """The packs for sale."""
    async with read(api.app.store) as connection:
        rows = (await connection.execute(select(db.packs).order_by(db.packs.c.id))).mappings()
        return [Pack(**dict(row)) for row in rows]


@router.post("/orders", status_code=201)
async def place_order(
    api: Api, caller: Caller, wanted: NewOrder, response: Response, key: RequestKey = None
) -> OrderView:
    """Order a study pack. It is reserved, charged and confirmed in the background; follow it by its id."""
    store = api.app.store

    async def work(ident: str) -> str:
        async with begin(store) as tx:
            return await service.place_order(
                tx,
                pack_id=wanted.pack_id,
                customer=caller,
                seats=wanted.seats,
                method=wanted.card,
                order_id=f"ord-{ident[:16]}",
            )

    answer = await api.orders.run(caller, key, wanted.model_dump(), work)
    if answer.replayed:
        response.headers["Idempotency-Replayed"] = "true"
    response.headers["Location"] = f"/orders/{answer.value}"
    return OrderView(**_shown(await service.show_order(store, answer.value)))


@router.get("/orders")
async def list_orders(api: Api, caller: Caller, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> list[OrderView]:
    """The caller's orders, newest first."""
    own_orders = select(db.orders).where(db.orders.c.customer == caller)
    async with read(api.app.store) as connection:
        rows = await connection.execute(own_orders.order_by(db.orders.c.placed_at.desc()).limit(limit))
        return [OrderView(**_shown(dict(row))) for row in rows.mappings()]


@router.get("/orders/{order_id}")
async def show_order(api: Api, caller: Caller, order_id: OrderId) -> OrderDetail:
    """One order and the steps its saga has taken."""
    row = await _mine(api, caller, order_id)
    try:
        saga = await saga_store.load(api.app.store, order_id)
    except saga_store.UnknownSaga:
        return OrderDetail(**_shown(row))
    steps = [OrderStep(name=s.name, state=s.state, attempts=s.attempts) for s in saga.steps]
    return OrderDetail(**_shown(row), saga=saga.state, steps=steps)


@router.post("/orders/{order_id}/cancel", status_code=202)
async def cancel_order(api: Api, caller: Caller, order_id: OrderId) -> OrderView:
    """Ask to cancel an order. Only a running one can be cancelled."""
    await _mine(api, caller, order_id)
    try:
        async with begin(api.app.store) as tx:
            await service.cancel_order(tx, order_id)
    except service.OrderRefused as refused:
        raise Problem(409, "conflict", str(refused)) from refused
    return OrderView(**_shown(await service.show_order(api.app.store, order_id)))


async def _mine(api: Any, caller: str, order_id: str) -> dict[str, Any]:
    try:
        row = await service.show_order(api.app.store, order_id)
    except service.OrderRefused:
        row = {}
    if row.get("customer") != caller:
        raise Problem(404, "not-found", "You have no such order.")
    return row


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in OrderView.model_fields}
