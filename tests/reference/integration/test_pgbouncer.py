"""Outbox, relay and sagas behind a real PgBouncer in transaction mode: three server connections for everybody."""

import asyncio
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sqlalchemy import text

from harness.ports import free_port
from harness.processes import start_tied
from harness.relays import Sink
from harness.waiting import until
from studyhall.patterns.core.event import Event
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import StoreUnavailable, begin
from studyhall.patterns.outbox import add
from studyhall.patterns.outbox.relay import Relay
from studyhall.patterns.saga import DbStep, Saga, SagaRunner, SagaStep
from studyhall.patterns.saga import store as saga_store

pytestmark = pytest.mark.needs_postgres
# Debian keeps it off users' PATH. Never a failure: what has to hold everywhere is in `test_store`.
PROGRAM = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin") or shutil.which("pgbouncer")
COUNT = 40


@pytest.fixture
def pooled(postgres_server, postgres_url):
    if PROGRAM is None:
        pytest.skip("pgbouncer is missing; to run this test: install your system's package of that name")
    port, home = free_port(), postgres_server.directory  # which belongs to a user that may run servers
    lines = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "any",
        "pool_mode": "transaction",
        "default_pool_size": 3,
    }
    config = Path(home, f"pgbouncer-{port}.ini")
    database = f"[databases]\n* = host=127.0.0.1 port={postgres_server.port} user=test\n[pgbouncer]\n"
    config.write_text(database + "".join(f"{name} = {value}\n" for name, value in lines.items()))
    config.chmod(0o644)
    quiet = subprocess.DEVNULL
    process = start_tied([PROGRAM, str(config)], stdin=quiet, stdout=quiet, stderr=quiet, **postgres_server._as_user)
    yield f"postgresql://test@127.0.0.1:{port}{urlsplit(postgres_url).path}"
    process.kill()
    process.wait(30)


async def opened(url):
    try:
        return open_store(url)
    except StoreUnavailable:  # it starts
        return None


async def test_events_and_sagas_go_through_a_pooler_of_transactions(pooled, postgres_url):
    sink = Sink()

    async def inside(ctx, tx):
        await tx.execute(text("INSERT INTO effects VALUES (:id, :step)"), {"id": ctx.saga_id, "step": ctx.step})
        await add(tx, Event(id=f"{ctx.saga_id}-{ctx.step}", source="/t", type="order.changed.v1", subject=ctx.saga_id))

    async def outside(ctx): ...

    direct = open_store(postgres_url)
    await create_all(direct)
    async with begin(direct) as tx:
        await tx.execute(text("CREATE TABLE effects (saga text, step text, PRIMARY KEY (saga, step))"))
    await until(lambda: opened(pooled), 20, "PgBouncer")
    naive = open_store(pooled)
    with pytest.raises(StoreUnavailable, match="startup parameter"):
        async with begin(naive) as tx:
            await tx.execute(text("SELECT 1"))
    await close(naive)

    store = open_store(f"{pooled}?pooler=transaction")
    saga = Saga("s", [DbStep("a", inside), SagaStep("b", outside), DbStep("c", inside)])
    relay, runners = Relay(store, sink, poll=0.1), [SagaRunner(store, saga) for _ in range(2)]
    tasks = [asyncio.create_task(runner.run_forever(poll=0.1)) for runner in runners]
    tasks.append(asyncio.create_task(relay.run()))
    try:
        for number in range(COUNT):
            async with begin(store) as tx:
                await runners[0].start(tx, "s", f"s{number}", {})
        await until(lambda: len(sink.ids) >= 2 * COUNT, 90, lambda: f"{len(sink.ids)} events")

        async def ended():
            return len(await saga_store.list_sagas(direct, state="completed")) == COUNT

        await until(ended, 60, "every saga", every=0.2)
    finally:
        relay.stop()
        for runner in runners:
            runner.stop()
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert sorted(sink.ids) == sorted(f"s{n}-{step}" for n in range(COUNT) for step in "ac")
    history = [line.event for n in range(COUNT) for line in await saga_store.history(direct, f"s{n}")]
    assert not {"failed", "taken over"} & set(history)
    assert relay.counts.outages == 0
    await close(store)
    await close(direct)
