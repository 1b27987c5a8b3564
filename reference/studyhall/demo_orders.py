"""The tour's orders: three study packs are bought from a payment provider that misbehaves."""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from sqlalchemy import func, select

from .app import App
from .orders import service
from .orders.db import feed_entries, notifications, orders, payouts
from .patterns.core.store import begin, read

WISHES = (("card_ok", "confirmed"), ("card_lost_answer", "confirmed"), ("card_declined", "cancelled"))
PATIENCE = 30.0


async def buy_packs(app: App, folder: Path, console: Console) -> dict[str, object]:
    """Buy, wait for the ends, count. The rows are for the table at the end; `held` says whether all is right."""
    console.print(
        "\n[bold]4.[/] Three orders: a good card, a charge whose answer is lost on the way, a declined card.\n"
        "   Each is a saga: seats are reserved, money is taken, the order confirmed, or all of it taken back."
    )
    async with _process(folder, "studyhall.payment_sandbox", "--data-dir", str(folder / "payments")) as sandbox:
        url = str(sandbox["url"])
        async with _process(folder, "studyhall", "event-worker", "--data-dir", str(folder), "--payment-url", url):
            placed = await _place(app)
            ended = await _ends(app, placed)
            async with httpx2.AsyncClient() as client:
                ledger = (await client.get(f"{url}/admin/ledger")).json()
            duplicated = await _duplicated(app, placed)
    charged = sum(charge["status"] == "succeeded" for charge in ledger["charges"])
    expected, actual = Counter(state for _, state in WISHES), Counter(ended.values())
    console.print(f"   confirmed {actual['confirmed']}, taken back {actual['cancelled']}, charged {charged} times")
    return {
        "held": actual == expected and charged == expected["confirmed"] and duplicated == 0,
        "orders": len(placed),
        "confirmed / taken back": f"{actual['confirmed']} / {actual['cancelled']}",
        "charges": charged,
        "messages, payouts and feed entries duplicated": duplicated,
    }


async def _place(app: App) -> list[str]:
    placed = []
    async with begin(app.store) as tx:
        await service.seed_packs(tx)
        for method, _ in WISHES:
            order = await service.place_order(tx, pack_id=service.PACKS[0][0], customer="demo", method=method)
            placed.append(str(order))
    return placed


async def _ends(app: App, placed: list[str]) -> dict[str, str]:
    deadline = time.monotonic() + PATIENCE
    while True:
        async with read(app.store) as connection:
            rows = await connection.execute(select(orders.c.id, orders.c.status).where(orders.c.id.in_(placed)))
            states = {row.id: row.status for row in rows}
            paid = await connection.scalar(select(func.count()).select_from(payouts)) or 0
        ended = all(state in ("confirmed", "cancelled") for state in states.values())
        if (ended and paid >= list(states.values()).count("confirmed")) or time.monotonic() > deadline:
            return states
        await asyncio.sleep(0.1)


async def _duplicated(app: App, placed: list[str]) -> int:
    duplicated = 0
    async with read(app.store) as connection:
        for table in (payouts, feed_entries, notifications):
            # An order may get two messages (placed, then its end), but never the same one twice.
            columns = (table.c.order_id, table.c.text) if "text" in table.c else (table.c.order_id,)
            rows = await connection.execute(select(func.count()).where(table.c.order_id.in_(placed)).group_by(*columns))
            duplicated += sum(int(count) - 1 for (count,) in rows)
    return duplicated


@asynccontextmanager
async def _process(folder: Path, module: str, *args: str) -> AsyncIterator[dict[str, Any]]:
    """A process of the tour that ends with the block; gives the first line it prints, a JSON object."""
    log = folder / f"{module}.log"
    args = (*args, "--parent", str(os.getpid()))
    env = {**os.environ, "DATABASE_URL": ""}  # nobody's real data
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *args, stdout=out, stderr=out, env=env, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 30
        while "\n" not in (text := log.read_text(errors="replace")):
            if process.returncode is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{module} did not start:\n{text[-2000:]}")
            await asyncio.sleep(0.05)
        yield json.loads(text.splitlines()[0])
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
