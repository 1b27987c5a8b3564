# [both]
# While both run: the same consumer, key and payload, so what one of them did the other skips.
from patterns import sync_inbox
from patterns.idempotency import Inbox, fingerprint


def in_celery(db, payment: str, payload: dict, effect):
    return sync_inbox.once(db, "add-credit", payment, payload, effect)


async def in_bullmq(store, payment: str, payload: dict, effect):  # what `once(inboxes(store))` does in a pipeline
    return await Inbox(store, "add-credit").once(payment, fingerprint(payload), effect)


# [/both]


async def example(redis_url: str, store_url: str) -> None:
    import sqlite3

    from patterns.core.open_store import close, create_all, open_store

    store, done = open_store(store_url), []
    await create_all(store)

    def sync_effect(db):
        done.append("celery")
        return {"added": 1}

    async def effect(tx):
        done.append("bullmq")
        return {"added": 2}

    db = sqlite3.connect(store_url.removeprefix("sqlite:///"), isolation_level=None)
    payload = {"account": "ann", "cents": 100}
    for payment, first in (("p1", "celery"), ("p2", "bullmq")):
        for _ in range(2):
            for runner in (first, "bullmq" if first == "celery" else "celery"):
                if runner == "celery":
                    result = in_celery(db, payment, payload, sync_effect)
                else:
                    result = await in_bullmq(store, payment, payload, effect)
                assert result == {"added": 1 if first == "celery" else 2}
    assert done == ["celery", "bullmq"]
    db.close()
    await close(store)
