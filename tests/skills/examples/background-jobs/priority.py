# [use]
from patterns.priority import Priority
from patterns.producer import JobRequest

urgent = JobRequest("add-credit", {"account": "a", "cents": 1}, key="pay-1", priority="critical")
cleanup = JobRequest("add-credit", {"account": "a", "cents": 1}, key="pay-2", priority=Priority.LOW)
# [/use]


async def example(redis_url: str, store_url: str) -> None:
    import asyncio

    from jobs import jobs
    from patterns.bullmq_worker import ReliableWorker
    from patterns.producer import Producer
    from patterns.typed_jobs import validated

    producer, order = Producer(redis_url, validated(jobs)), []
    await producer.enqueue_many([cleanup, *(JobRequest("add-credit", urgent.payload, key=f"n{i}") for i in range(3))])
    await producer.enqueue(urgent)

    async def note(job, token) -> None:
        order.append(job.id)

    worker = ReliableWorker("credits", note, url=redis_url, concurrency=1)
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(20):
        while len(order) < 5:
            await asyncio.sleep(0.01)
    await worker.drain(5)
    await running
    assert order[0] == "add-credit.pay-1"
    assert order[-1] == "add-credit.pay-2"
    await producer.close()
