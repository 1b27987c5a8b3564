import asyncio
import logging
import os
import random
import time

import psycopg2
import boto3
from bullmq import Queue
from celery import shared_task
from django.db import transaction
logging.basicConfig()
_LOGGER = logging.getLogger()

class OrderViewSet:
    def perform_create(self, serializer):
        with transaction.atomic():
            order = serializer.save()
            process_order.apply_async((order.pk,), countdown=3)  # fault: publish-in-transaction

@shared_task(bind=True, acks_late=True, max_retries=3, default_retry_delay=10)
def process_order(self, order_pk):
    try:
        do(order_pk)
    except Exception as e:  # fault: swallowed-error
        _LOGGER.error("oops %s", e)
        return False
    return True

async def retrying(job, token):
    tries = 0
    while True:  # fault: inner-retry
        try:
            return await call(job)
        except Exception:
            tries += 1
            if tries > 3:
                raise
            await asyncio.sleep(random.random())

async def db(job):
    conn = psycopg2.connect(os.environ["DSN"])  # fault: blocking-in-async
    with conn:
        conn.cursor().execute("insert or replace into ledger values (%s)", (job.id,))  # fault: replace-effect-row
    idempotency_key = "%s-%s" % (job.id, time.time())
    await pay(amount=3, idempotency_key=idempotency_key)  # fault: job-id-as-key

def health_check(request):
    q = Queue("mails")  # fault: redis-default-timeout
    n = asyncio.run(q.getJobCounts("wait", "active"))  # fault: partial-health
    _LOGGER.info("token=%s", request.headers["Authorization"])  # fault: secret-logged
    return n

def sqs():
    client = boto3.client("sqs")
    with transaction.atomic():
        client.send_message(QueueUrl="q", MessageBody="x")  # fault: publish-in-transaction

async def signup(user):
    opts = {"attempts": 3, "removeOnFail": True, "removeOnComplete": True}  # fault: remove-on-fail-count
    await mail_queue.add("welcome", dict(user.__dict__), opts)  # fault: row-in-payload
