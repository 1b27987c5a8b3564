"""One key is one job, whoever asks and however often."""

import asyncio
import socket

import pytest

from studyhall.patterns.core.errors import QueueUnavailable
from studyhall.patterns.core.request import JobRequest
from studyhall.patterns.producer import KeyReused, Producer


async def test_one_key_is_one_job_and_another_payload_under_it_is_refused(redis_url: str):
    producer = Producer(redis_url, timeout=30)
    try:
        asked = [JobRequest("mail", {"to": "ann"}, key="order-7", queue="mails") for _ in range(10)]
        refs = await asyncio.gather(*(producer.enqueue(request) for request in asked))
        assert len({ref.id for ref in refs}) == 1
        assert sum((await producer.queue("mails").getJobCounts()).values()) == 1
        with pytest.raises(KeyReused):
            await producer.enqueue(JobRequest("mail", {"to": "bob"}, key="order-7", queue="mails"))
    finally:
        await producer.close()


async def test_a_server_that_is_away_is_an_answer_in_time():
    with socket.socket() as nobody:  # bound and not listening: nobody serves the port
        nobody.bind(("127.0.0.1", 0))
        producer = Producer(f"redis://127.0.0.1:{nobody.getsockname()[1]}")
        try:
            with pytest.raises(QueueUnavailable):
                await producer.enqueue(JobRequest("mail", {}, key="order-8", queue="mails"))
        finally:
            await producer.close()
