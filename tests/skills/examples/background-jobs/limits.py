# [rate]
from patterns.bullmq_worker import ReliableWorker
from patterns.core.connections import producer_client
from patterns.pipeline import Pipeline
from patterns.rate_limit import limited, queue_limit, tenant_limit
from patterns.typed_jobs import typed


def limited_workers(jobs, url):
    redis = producer_client(url)
    # 2 jobs/s for each tenant, 5 at once; all tenants together 50/s. Waiting consumes no attempt.
    fair = tenant_limit(redis, 2, 5, tenant_of=lambda ctx, payload: payload.account, total=(50, 50))
    shared = ReliableWorker("credits", Pipeline(typed(jobs), limited(fair)), url=url)
    # A plain queue-wide limit: the workers of all processes together start 10 jobs per second.
    plain = ReliableWorker("mail", Pipeline(typed(jobs)), url=url, limiter=queue_limit(10, per=1.0))
    return shared, plain


# [/rate]
# [breaker]
from patterns.circuit_breaker import CircuitBreaker


def breaker_for(redis) -> CircuitBreaker:
    return CircuitBreaker(redis, "ai-provider", failures=5, window=30, cooldown=10, slow=60)


async def ask(breaker: CircuitBreaker, provider, prompt: str) -> str:
    # While open: BreakerOpen, a ResourceBusy. The job waits and consumes no attempt; do not catch it.
    return await breaker.call(provider.complete, prompt)


# [/breaker]
# [admission]
from patterns.backpressure import Admission, Limits
from patterns.producer import Producer
from patterns.typed_jobs import validated


def bounded_producer(jobs, url) -> Producer:
    producer = Producer(url, validated(jobs))
    producer.admission = Admission(producer.redis, Limits(depth=10_000, age=300))
    return producer  # enqueue raises Overloaded(retry_after): answer 503 + Retry-After


# [/admission]


async def example(redis_url: str, store_url: str) -> None:
    from jobs import jobs
    from patterns.core.errors import Overloaded
    from patterns.circuit_breaker import BreakerOpen
    from patterns.producer import JobRequest

    for worker in limited_workers(jobs, redis_url):
        await worker.drain(0)
    producer = bounded_producer(jobs, redis_url)
    producer.admission = Admission(producer.redis, Limits(depth=1), cache=0)
    breaker, calls = breaker_for(producer.redis), []

    class Provider:
        async def complete(self, prompt: str) -> str:
            calls.append(prompt)
            raise OSError("down")

    refused = 0
    for _ in range(20):
        try:
            await ask(breaker, Provider(), "hello")
        except BreakerOpen:
            refused += 1
        except OSError:
            continue
    assert (len(calls), refused) == (5, 15)
    await producer.enqueue(JobRequest("add-credit", {"account": "a", "cents": 1}, key="one"))
    try:
        await producer.enqueue(JobRequest("add-credit", {"account": "a", "cents": 1}, key="two"))
    except Overloaded as error:
        refused = error.retry_after
    assert 0 < refused < 15, "a full queue refuses, and says for how long"
    await producer.close()
