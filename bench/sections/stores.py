"""What the store costs: the full pipeline with its markers in SQLite and in PostgreSQL, and sagas on both."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bench.figures import Column, Value
from bench.lab import Lab, Peer
from harness.postgres import PostgresServer
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin
from studyhall.patterns.saga import DbStep, Saga, SagaRunner, SagaStep, StepContext

from .throughput import Workload, once

TITLE = "The store: SQLite and PostgreSQL"
ABOUT = (
    "No-op jobs through the full pipeline, one process, as in the first table. Sagas: one runner drives those that "
    "wait, 32 side by side, three steps each: two outside calls that answer at once, and one row in the store. "
    "PostgreSQL runs on the same machine with fsync off, as in the tests."
)
COLUMNS = {"noop": Column("no-op, 1 process", "jobs/s"), "sagas": Column("sagas", "sagas/s")}


def measure(lab: Lab) -> dict[str, dict[str, Value]]:
    def on_postgres(server: PostgresServer) -> dict[str, Value]:
        for name in ("jobs", "sagas"):
            server.execute(f"CREATE DATABASE {name}")
        return _row(lab, server.database_url("jobs"), server.database_url("sagas"))

    return on_both(lab, _row(lab, ""), on_postgres, lambda row: f"{row['noop']:,} jobs/s, {row['sagas']:,} sagas/s")


def on_both(
    lab: Lab,
    sqlite: dict[str, Value],
    on_postgres: Callable[[PostgresServer], dict[str, Value]],
    summary: Callable[[dict[str, Value]], str],
) -> dict[str, dict[str, Value]]:
    """Also on PostgreSQL, if it is installed."""
    rows = {"SQLite": sqlite}
    try:
        server = PostgresServer.start()
    except pytest.skip.Exception as missing:
        lab.say(str(missing))
        return rows
    try:
        rows["PostgreSQL"] = on_postgres(server)
    finally:
        server.stop()
    for name, row in rows.items():
        lab.say(f"{name}: {summary(row)}")
    return rows


def _row(lab: Lab, jobs: str, sagas: str = "") -> dict[str, Value]:
    row = once(lab, Peer.load("queuesmith"), "noop", Workload(), store=jobs)
    url = sagas or f"sqlite:///{lab.folder / f'sagas-{lab.round}.db'}"
    return {"noop": row["noop"], "sagas": round(asyncio.run(_sagas(url, lab.scale(200, 1_000))))}


async def _sagas(url: str, count: int) -> float:
    """Sagas per second."""
    store, done, all_done = open_store(url), 0, asyncio.Event()
    await create_all(store)

    async def outside(ctx: StepContext) -> Mapping[str, Any]:
        return {"seen": ctx.data["n"]}

    async def confirm(ctx: StepContext, tx: Any) -> Mapping[str, Any]:
        nonlocal done
        done += 1
        if done == count:
            all_done.set()
        return {"n": ctx.data["n"]}

    order = Saga("order", [SagaStep("reserve", outside), SagaStep("charge", outside), DbStep("confirm", confirm)])
    runner = SagaRunner(store, order)
    for start in range(0, count, 100):
        async with begin(store) as tx:
            for n in range(start, start + 100):
                await runner.start(tx, "order", f"order-{n}", {"n": n})
    began = time.perf_counter()
    driving = asyncio.create_task(runner.run_forever(poll=0.05))
    async with asyncio.timeout(300):
        await all_done.wait()
    seconds = time.perf_counter() - began
    runner.stop()
    await driving
    await close(store)
    return count / seconds
