# [claim]
from pathlib import Path

from patterns.claim_check import Blobs, Claim, needed_by_jobs
from patterns.dead_letter import needed_by_dead_letters
from patterns.job_ids import job_id
from patterns.producer import JobRequest, Producer
from patterns.typed_jobs import Payload


class Extract(Payload):
    file: Claim


async def upload(producer: Producer, blobs: Blobs, upload_id: str, body: bytes) -> str:
    # Blob first, then its job.
    claim = await blobs.put(body, owner=("documents", job_id("extract", upload_id)))
    return (await producer.enqueue(JobRequest("extract", Extract(file=claim), key=upload_id))).id


async def extract(ctx, payload: Extract) -> dict:
    path: Path = await ctx.services.blobs.fetch(payload.file)  # size and SHA-256 are checked
    return {"bytes": path.stat().st_size}


async def collect(blobs: Blobs, redis, store) -> int:  # from a schedule, once an hour
    return (await blobs.sweep("documents", needed_by_jobs(redis, needed_by_dead_letters(store)))).deleted


# [/claim]
# [retention]
from patterns import checkpoint, dead_letter, idempotency
from patterns.retention import DEFAULT  # also: Producer(…, retention=DEFAULT.job_options())


async def nightly(store) -> None:  # seconds: markers 60 days, dead letters 30, checkpoints 60
    await idempotency.purge(store, DEFAULT.markers_age)
    await dead_letter.purge(store, DEFAULT.letters_age)
    await checkpoint.purge(store, DEFAULT.checkpoints_age)


# [/retention]
# [health]
from patterns import dead_letter
from patterns.core.store import ping
from patterns.health import measure, problems
from patterns.health.alerts import Rule, evaluate

RULES = [
    Rule("*.oldest", raise_at=60, clear_at=30, because="jobs wait too long: add workers or look for a stuck one"),
    Rule("*.failure_rate", raise_at=0.2, clear_at=0.05, because="a fifth of the jobs fail: look at the dead letters"),
    Rule("dead_letters", raise_at=1, clear_at=0.5, because="somebody has to look"),
]


async def check(redis, store, queues, page_somebody) -> None:  # from a schedule; any number of instances
    health = await measure(redis, queues, dead_letters=dead_letter.counts(store))
    await evaluate(store, health.signals(), RULES, send=page_somebody)


async def readyz(redis, store) -> tuple[int, dict]:
    wrong = await problems(redis=redis.ping, database=lambda: ping(store))  # {} when both answer
    return (503 if wrong else 200), dict(wrong)


# [/health]


async def example(redis_url: str, store_url: str) -> None:
    from types import SimpleNamespace

    from patterns.core.open_store import close, create_all, open_store
    from patterns.typed_jobs import JobTypes, validated

    jobs, store = JobTypes(), open_store(store_url)
    await create_all(store)
    jobs.register(name="extract", payload=Extract, handler=extract, queue="documents")
    producer = Producer(redis_url, validated(jobs))
    blobs = Blobs(Path(store_url.removeprefix("sqlite:///")).parent / "blobs")
    await upload(producer, blobs, "u1", b"x" * 100_000)
    data = (await producer.queue("documents").getJob("extract.u1")).data
    _, payload = jobs.decode("extract", data)
    ctx = SimpleNamespace(services=SimpleNamespace(blobs=blobs))
    assert await extract(ctx, payload) == {"bytes": 100_000}
    assert await collect(blobs, producer.redis, store) == 0
    await nightly(store)
    alerts = []

    async def page(alert) -> None:
        alerts.append(alert)

    await check(producer.redis, store, ["documents"], page)
    assert alerts == [], "one fresh job is no reason to wake anybody"
    assert await readyz(producer.redis, store) == (200, {})
    await producer.close()
    await close(store)
