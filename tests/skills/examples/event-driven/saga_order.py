# [saga]
from sqlalchemy import text

from patterns.core.errors import Permanent
from patterns.core.store import begin
from patterns.saga import DbStep, Saga, SagaRunner, SagaStep


async def reserve(ctx, tx) -> None:  # DbStep: its effect commits with the saga's own record
    if (await tx.execute(text("UPDATE stock SET free = free - 1 WHERE free > 0"))).rowcount != 1:
        raise Permanent("sold out")  # a business no: compensate now


async def release(ctx, tx) -> None:
    await tx.execute(text("UPDATE stock SET free = free + 1"))


async def confirm(ctx, tx) -> None:
    await tx.execute(text("INSERT INTO sold VALUES (:id)"), {"id": ctx.saga_id})


def buy(payments) -> Saga:
    async def charge(ctx) -> dict:  # called at least once, always with the same ctx.key
        return {"charge": await payments.charge(ctx.data["cents"], idempotency_key=ctx.key)}

    async def refund(ctx) -> None:  # by the charge's key: right even if nobody ever saw the answer
        await payments.refund(charge_key=ctx.key, idempotency_key=ctx.undo_key)

    steps = [
        DbStep("reserve", do=reserve, undo=release),
        SagaStep("charge", do=charge, undo=refund, deadline=60, longest=30),  # a request ends within 30 s
        DbStep("confirm", do=confirm),  # what cannot be undone goes last
    ]
    return Saga("buy", steps=steps)


async def order(store, runner: SagaRunner, order_id: str, cents: int) -> None:
    async with begin(store) as tx:  # beside your own rows
        await runner.start(tx, "buy", order_id, {"cents": cents})  # False: started before
    runner.wake()  # do not wait for its next poll


# [/saga]
async def cancel(store, runner: SagaRunner, order_id: str) -> None:
    async with begin(store) as tx:  # running or completed; False: it goes back already
        await runner.cancel(tx, order_id, by="customer", reason="changed my mind")
    runner.wake()


# [run]
import time

from patterns.bullmq_worker import ReliableWorker, RetryLater
from patterns.saga import SagaRunner


async def without_a_queue(runner: SagaRunner) -> None:
    await runner.run_forever()  # any number of processes; runner.stop() finishes the steps at hand


def with_bullmq(runner: SagaRunner, url: str) -> ReliableWorker:
    """A job per saga: add {"saga": order_id} after the commit. One `run_forever` somewhere finds what got no job."""

    async def process(job, token):
        saga = await runner.run(job.data["saga"])
        if saga.due_at is not None:  # it waits for its next try, or another process has it
            raise RetryLater(max(saga.due_at - time.time(), 0.1), reason=saga.state)
        return saga.state

    return ReliableWorker("sagas", process, url=url)


# [/run]


async def example(redis_url: str, store_url: str) -> None:
    from patterns.core.open_store import close, create_all, open_store
    from patterns.core.store import read

    class Payments:
        def __init__(self) -> None:
            self.charged: dict[str, int] = {}

        async def charge(self, cents: int, idempotency_key: str) -> str:
            if cents == 13:
                raise Permanent("card declined")
            self.charged[idempotency_key] = cents
            return f"ch-{len(self.charged)}"

        async def refund(self, charge_key: str, idempotency_key: str) -> None:
            self.charged.pop(charge_key, None)

    store, payments = open_store(store_url), Payments()
    await create_all(store)
    async with begin(store) as tx:
        await tx.execute(text("CREATE TABLE stock (free INTEGER)"))
        await tx.execute(text("INSERT INTO stock VALUES (3)"))
        await tx.execute(text("CREATE TABLE sold (id TEXT)"))
    runner = SagaRunner(store, buy(payments))
    await order(store, runner, "good", 500)
    await order(store, runner, "bad", 13)
    assert (await runner.run("good")).state == "completed"
    assert (await runner.run("bad")).state == "compensated"
    async with read(store) as tx:
        assert (await tx.execute(text("SELECT free FROM stock"))).scalar_one() == 2
    assert list(payments.charged.values()) == [500]

    import asyncio

    from bullmq import Queue

    from patterns.core.connections import producer_client
    from patterns.saga.store import load

    await cancel(store, runner, "good")
    loop = asyncio.create_task(without_a_queue(runner))
    async with asyncio.timeout(20):
        while (await load(store, "good")).state != "compensated":
            await asyncio.sleep(0.02)
    assert payments.charged == {}
    runner.stop()
    await loop

    runner = SagaRunner(store, buy(payments))
    queue = Queue("sagas", {"connection": producer_client(redis_url)})
    await order(store, runner, "queued", 700)
    await queue.add("drive", {"saga": "queued"}, {})
    worker = with_bullmq(runner, redis_url)
    working = asyncio.create_task(worker.run())
    async with asyncio.timeout(20):
        while (await load(store, "queued")).state != "completed":
            await asyncio.sleep(0.02)
    await worker.drain(5)
    await working
    assert list(payments.charged.values()) == [700]
    await queue.close()
    await close(store)
