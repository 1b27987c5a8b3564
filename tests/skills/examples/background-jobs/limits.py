# [rate]
from patterns.bullmq_worker import ReliableWorker
from patterns.connections import producer_client
from patterns.pipeline import Pipeline
from patterns.rate_limit import queue_limit, tenant_limit


def limited_workers(jobs, engine, url):
    redis = producer_client(url)
    # 2 jobs/s for each tenant, 5 at once; all tenants together 50/s. No attempt is spent by waiting.
    fair = tenant_limit(redis, 2, 5, tenant_of=lambda ctx, payload: payload.account, total=(50, 50))
    shared = ReliableWorker("credits", Pipeline(jobs, engine, guards=[fair]), url=url)
    # A plain queue-wide limit: the workers of all processes together start 10 jobs per second.
    plain = ReliableWorker("mail", Pipeline(jobs, engine), url=url, limiter=queue_limit(10, per=1.0))
    return shared, plain


# [/rate]
# [breaker]
from patterns.circuit_breaker import CircuitBreaker


def breaker_for(redis) -> CircuitBreaker:
    return CircuitBreaker(redis, "ai-provider", failures=5, window=30, cooldown=10, slow=60)


async def ask(breaker: CircuitBreaker, provider, prompt: str) -> str:
    # While open: BreakerOpen, a ResourceBusy. The job waits and spends no attempt; do not catch it.
    return await breaker.call(provider.complete, prompt)


# [/breaker]
# [admission]
from patterns.backpressure import Admission, Limits
from patterns.producer import Producer


def bounded_producer(jobs, url) -> Producer:
    producer = Producer(jobs, url)
    producer.admission = Admission(producer.redis, Limits(depth=10_000, age=300))
    return producer  # enqueue raises Overloaded(retry_after): answer 503 + Retry-After


# [/admission]


async def example(redis_url: str, store_url: str) -> None:
    from jobs import jobs
    from patterns import store
    from patterns.backpressure import Overloaded
    from patterns.circuit_breaker import BreakerOpen
    from patterns.producer import JobRequest

    engine = store.open_store(store_url)
    for worker in limited_workers(jobs, engine, redis_url):
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
    await store.close(engine)
