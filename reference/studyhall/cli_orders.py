"""`studyhall order` and `studyhall outbox`: buy a study pack, follow it, see what could not be published."""

import asyncio
import getpass
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from sqlalchemy import select

from .access import opened
from .orders import service
from .orders.db import packs
from .patterns.core.store import begin, read
from .patterns.outbox import quarantine as outbox_upkeep
from .patterns.saga import store as saga_store
from .payment_sandbox import CARDS
from .terminal import AsJson, DataDir, ago, fail, run, say, show_fields, show_json, show_table

order = typer.Typer(no_args_is_help=True, help="Orders: buy a study pack, list orders, follow one.")
outbox = typer.Typer(no_args_is_help=True, help="Events on their way to the bus: how many, how old, what is stuck.")
quarantine = typer.Typer(no_args_is_help=True, help="Events the event worker gave up on.")
outbox.add_typer(quarantine, name="quarantine")

ENDED = ("confirmed", "cancelled")


@order.command()
def buy(
    pack: Annotated[str, typer.Argument(help="Id of a pack, see `studyhall order packs`.")],
    *,
    seats: Annotated[int, typer.Option(min=1, max=service.MAX_SEATS, help="How many seats.")] = 1,
    customer: Annotated[str | None, typer.Option(help="Who buys (default: your user name).")] = None,
    card: Annotated[str, typer.Option(help=f"card_ok, or one that misbehaves: {', '.join(CARDS)}.")] = "card_ok",
    order_id: Annotated[str | None, typer.Option("--id", help="Same id again: same order, no second one.")] = None,
    wait: Annotated[float, typer.Option(min=0, max=600, help="Seconds to wait for its end.")] = 0.0,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Place an order. A running `studyhall event-worker` reserves, charges and confirms it."""
    if card != "card_ok" and card not in CARDS:
        raise fail(f"there is no card {card!r}; choose card_ok or one of {', '.join(CARDS)}", 2)

    async def work() -> dict[str, Any]:
        async with opened(data_dir) as store:
            async with begin(store) as tx:
                await service.seed_packs(tx)
                placed = await service.place_order(
                    tx,
                    pack_id=pack,
                    customer=customer or getpass.getuser(),
                    seats=seats,
                    method=card,
                    order_id=order_id,
                )
            deadline = time.monotonic() + wait
            while (row := await service.show_order(store, placed))["status"] not in ENDED:
                if time.monotonic() >= deadline:
                    break
                await asyncio.sleep(0.1)
            return row

    row = run(work())
    if as_json:
        show_json(row)
    else:
        why = f": {row['reason']}" if row["reason"] else ""
        say(f"order {row['id']} is {row['status']}{why}")
    if wait and row["status"] not in ENDED:
        raise fail(f"order {row['id']} did not end within {wait:g} s; is `studyhall event-worker` running?")


@order.command("packs")
def packs_(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """What there is to buy."""

    async def work() -> list[dict[str, Any]]:
        async with opened(data_dir) as store:
            async with begin(store) as tx:
                await service.seed_packs(tx)
            async with read(store) as tx:
                return [dict(row) for row in (await tx.execute(select(packs).order_by(packs.c.id))).mappings()]

    rows = run(work())
    if as_json:
        show_json(rows)
        return
    show_table(
        "Study packs",
        ["id", "title", "author", "price", "free seats"],
        [
            [
                row["id"],
                row["title"],
                row["author"],
                _money(row["price_cents"]),
                f"{row['seats_free']} of {row['seats']}",
            ]
            for row in rows
        ],
        "nothing to buy",
    )


@order.command("list")
def list_(
    status: Annotated[str | None, typer.Option(help="Only placed, processing, confirmed or cancelled ones.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most this many.")] = 50,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Newest first."""

    async def work() -> list[dict[str, Any]]:
        async with opened(data_dir) as store:
            return [dict(row) for row in await service.list_orders(store, status=status, limit=limit)]

    rows = run(work())
    if as_json:
        show_json(rows)
        return
    show_table(
        "Orders",
        ["id", "pack", "seats", "amount", "status", "placed", "why"],
        [
            [
                r["id"],
                r["pack_id"],
                r["seats"],
                _money(r["amount_cents"]),
                r["status"],
                ago(r["placed_at"]),
                r["reason"] or "",
            ]
            for r in rows
        ],
        "No orders. Try: studyhall order buy biology-101",
    )


@order.command()
def show(order_id: str, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """One order and the steps its saga has taken."""

    async def work() -> tuple[dict[str, Any], saga_store.SagaRow]:
        async with opened(data_dir) as store:
            return await service.show_order(store, order_id), await saga_store.load(store, order_id)

    row, saga = run(work())
    steps = {step.name: step.state for step in saga.steps}
    if as_json:
        show_json({**row, "saga": saga.state, "steps": steps})
    else:
        told = {**row, "amount_cents": _money(row["amount_cents"]), "placed_at": ago(row["placed_at"])}
        told["updated_at"] = ago(row["updated_at"])
        show_fields({**told, "saga": saga.state, **{f"step {name}": state for name, state in steps.items()}})


@outbox.command()
def status(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """How far behind the event worker is."""

    async def work() -> outbox_upkeep.Lag:
        async with opened(data_dir) as store:
            return await outbox_upkeep.lag(store)

    lag = run(work())
    if as_json:
        show_json(asdict(lag))
    else:
        show_fields({"waiting": lag.waiting, "oldest": f"{lag.oldest:.1f} s", "quarantined": lag.quarantined})


@quarantine.command("list")
def quarantine_list(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most this many.")] = 50,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Oldest first, with the reason and how many events wait behind each."""

    async def work() -> list[outbox_upkeep.QuarantinedRow]:
        async with opened(data_dir) as store:
            return await outbox_upkeep.quarantined(store, limit=limit)

    rows = run(work())
    if as_json:
        show_json([asdict(row) for row in rows])
        return
    show_table(
        "Quarantined events",
        ["event", "type", "subject", "tries", "held back", "reason"],
        [[row.event_id, row.type, row.subject, row.attempts, row.held, row.reason] for row in rows],
        "No event is stuck.",
    )


@outbox.command()
def replay(events: list[str], data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Publish quarantined events again, in their old place, with fresh attempts."""
    _released(events, data_dir, as_json, discard=None)


@outbox.command()
def discard(
    events: list[str],
    why: Annotated[str, typer.Option(help="Kept with the event.")],
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Give up quarantined events, so that those behind them go on."""
    _released(events, data_dir, as_json, discard=why)


def _released(events: list[str], data_dir: DataDir, as_json: bool, *, discard: str | None) -> None:
    async def work() -> int:
        async with opened(data_dir) as store:
            if discard is not None:
                return await outbox_upkeep.discard(store, events, discard)
            return await outbox_upkeep.requeue(store, events)

    count, verb = run(work()), "replayed" if discard is None else "discarded"
    show_json({verb: count}) if as_json else say(f"{verb} {count} of {len(events)}")
    if count < len(events):
        raise fail("the others are not in quarantine; see: studyhall outbox quarantine list", answered=True)


def _money(cents: int) -> str:
    return f"€ {cents / 100:.2f}"
