# [use]
from sqlalchemy import Column, Integer, String, Table, insert

from patterns.core.job import provider_key
from patterns.idempotency import Inbox, fingerprint
from patterns.core.store import metadata

refunds = Table("refunds", metadata, Column("order_id", String(40)), Column("cents", Integer))


async def refund(store, provider, order_id: str, cents: int) -> dict:
    """Outside a `Pipeline` (which does this for every job): safe to call any number of times."""
    key, mark = f"refund/{order_id}", fingerprint({"order_id": order_id, "cents": cents})
    inbox = Inbox(store, "refunds")
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

    from patterns.core.open_store import close, create_all, open_store
    from patterns.core.store import read
    from patterns.idempotency import KeyReused

    class Provider:
        async def refund(self, cents: int, idempotency_key: str) -> str:
            return idempotency_key[:6]

    store = open_store(store_url)
    await create_all(store)
    results = await asyncio.gather(*(refund(store, Provider(), "o1", 500) for _ in range(50)))
    assert all(result == results[0] for result in results)
    async with read(store) as tx:
        assert len((await tx.execute(select(refunds))).all()) == 1
    try:
        await refund(store, Provider(), "o1", 501)
    except KeyReused:
        await close(store)
        return
    raise AssertionError("the same key with another payload is an error")
