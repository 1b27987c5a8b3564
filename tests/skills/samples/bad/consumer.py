import redis.asyncio
from celery import Celery

app = Celery("tasks", broker="redis://localhost")  # finds: acks-early

client = redis.asyncio.from_url("redis://localhost")  # finds: redis-default-timeout


async def consume(redis):
    await redis.xgroup_create("orders", "mail", id="$", mkstream=True)  # finds: stream-group-at-end
    while True:
        for _, entries in await redis.xreadgroup("mail", "one", {"orders": ">"}, block=5000):  # finds: stream-no-ack, stream-no-claim
            for _, fields in entries:
                print(fields)


async def publish(redis, order):
    await redis.xadd("orders", {"id": order}, maxlen=1000)  # finds: stream-maxlen


async def charge(provider, job):
    await provider.charge(5, idempotency_key=job.id)  # finds: job-id-as-key
