# [cancel]
from patterns.cancel import CancelWatcher, cancel


async def stop_job(redis, store, job_id: str) -> str:
    """In an API or a command line: `cancelled`, `stopping` (it runs right now) or `too-late` (it is done)."""
    answers = await cancel(redis, store, "credits", job_id, "the customer changed their mind")
    return next(answer.state for answer in answers if answer.job_id == job_id)


def watch(redis, workers) -> CancelWatcher:
    return CancelWatcher(redis, workers)  # run_until_signalled([*workers, watch(redis, workers)], grace=25)


# [/cancel]
# [delayed]
from datetime import UTC, datetime, timedelta

from patterns.delayed import after, at, reschedule, withdraw
from patterns.producer import JobRef, JobRequest, Producer


async def remind(producer: Producer, order_id: str) -> JobRef:
    credit = {"account": "a", "cents": 1}
    soon = JobRequest("add-credit", credit, key=f"remind/{order_id}", delay=after(hours=24), max_age=3600)
    ref = await producer.enqueue(soon)  # max_age: pointless when it starts more than an hour late
    await reschedule(producer, ref, at(datetime.now(UTC) + timedelta(days=2)))  # needs a time zone
    return ref


async def forget(producer: Producer, ref: JobRef) -> None:
    await withdraw(producer, ref)  # AlreadyStarted if it runs or ran: then `cancel` is what you want


# [/delayed]
# [flow]
from patterns.flow import chain, fan_in, on_failure
from patterns.producer import JobRequest


def study(document: str, pictures: list[str]) -> JobRequest:
    """`Producer(…, Flows())` enqueues it: all of it or nothing. Children run before their parent."""
    steps = [JobRequest(name, {"document": document}, key=document) for name in ("extract", "graph", "quiz")]
    looks = [JobRequest("caption", {"picture": name}, key=name) for name in pictures]
    report = JobRequest("report", {"document": document}, key=document)
    return fan_in(report, [chain(*steps), *on_failure("ignore", *looks)])


# [/flow]
# [degraded]
from patterns.degraded import DegradedProducer
from patterns.degraded.pending import Drainer
from patterns.producer import JobRequest
from patterns.core.store import begin


async def place_order(degraded: DegradedProducer, store, order, add_order) -> str:
    request = JobRequest("add-credit", {"account": order, "cents": 1}, key=order)
    await degraded.admit(request)  # valid, and room for it? Redis being away is no reason to refuse
    async with begin(store) as tx:
        await add_order(tx, order)
        await degraded.accept(tx, request)  # the row and its job exist both or not at all
    accepted = await degraded.hand_over(request)  # queued now, or by a Drainer when Redis is back
    return "queued" if accepted.queued else "accepted"


def drainer(store, producer) -> Drainer:
    # Beside the workers: run_until_signalled([*workers, drainer(...)], grace=25)
    return Drainer(store, producer)


# [/degraded]
# [sign]
import os

from patterns.pipeline import Pipeline
from patterns.producer import Producer
from patterns.signed_payload import Signer, signed, signing
from patterns.typed_jobs import typed, validated


def sealed(jobs, url) -> tuple[Producer, Pipeline]:
    signer = Signer(os.environ["JOB_KEYS"].split(","))  # first key signs, all verify: rotate without a gap
    # The signature is checked before anything is read, and made when everything is said.
    return Producer(url, validated(jobs), signing(signer)), Pipeline(signed(signer), typed(jobs))


# [/sign]


async def example(redis_url: str, store_url: str) -> None:
    from jobs import AddCredit, jobs
    from patterns.core.open_store import close, create_all, open_store

    store = open_store(store_url)
    await create_all(store)
    producer = Producer(redis_url, validated(jobs))
    ref = await remind(producer, "o1")
    await forget(producer, ref)
    ident = (await remind(producer, "o1")).id
    assert await stop_job(producer.redis, store, ident) == "cancelled"
    assert (await stop_job(producer.redis, store, ident)) in ("cancelled", "too-late")
    assert [child.name for child in study("d", ["p1"]).children] == ["quiz", "caption"]

    orders: list[str] = []

    async def add_order(tx, order) -> None:
        orders.append(order)

    assert await place_order(DegradedProducer(producer, store), store, "o2", add_order) == "queued"
    dead = Producer("redis://127.0.0.1:1", validated(jobs))
    assert await place_order(DegradedProducer(dead, store), store, "o3", add_order) == "accepted"
    await dead.close()
    assert orders == ["o2", "o3"]
    os.environ["JOB_KEYS"] = "k" * 32
    safe, _ = sealed(jobs, redis_url)
    await safe.enqueue(JobRequest("add-credit", AddCredit(account="a", cents=1), key="signed"))
    assert "sig" in (await safe.queue("credits").getJob("add-credit.signed")).data
    await safe.close()
    await producer.close()
    await close(store)
