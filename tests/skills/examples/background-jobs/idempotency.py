# [use]
from sqlalchemy import Column, Integer, String, Table, insert

from patterns.idempotency import Inbox, fingerprint, provider_key
from patterns.store import metadata

refunds = Table("refunds", metadata, Column("order_id", String(40)), Column("cents", Integer))


async def refund(engine, provider, order_id: str, cents: int) -> dict:
    """Outside a `Pipeline` (which does this for every job): safe to call any number of times."""
    key, mark = f"refund/{order_id}", fingerprint({"order_id": order_id, "cents": cents})
    inbox = Inbox(engine, "refunds")
    if stored := await inbox.seen(key, mark):
        return stored.result
    # Outside effect first, under a key that is the same in every retry, replay and process.
    answer = await provider.refund(cents, idempotency_key=provider_key(key, "refund"))

    async def effect(tx) -> dict:  # marker + effect: one transaction
        await tx.execute(insert(refunds).values(order_id=order_id, cents=cents))
        return {"refund": answer}

    return await inbox.once(key, mark, effect)


# [/use]


async def example(redis_url: str, store_url: str) -> None:
    import asyncio

    from sqlalchemy import select

    from patterns import store
    from patterns.idempotency import KeyReused

    class Provider:
        async def refund(self, cents: int, idempotency_key: str) -> str:
            return idempotency_key[:6]

    engine = store.open_store(store_url)
    await store.create_all(engine)
    results = await asyncio.gather(*(refund(engine, Provider(), "o1", 500) for _ in range(50)))
    assert all(result == results[0] for result in results)
    async with store.read(engine) as tx:
        assert len((await tx.execute(select(refunds))).all()) == 1
    try:
        await refund(engine, Provider(), "o1", 501)
    except KeyReused:
        await store.close(engine)
        return
    raise AssertionError("the same key with another payload is an error")
