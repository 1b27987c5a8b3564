import uuid

import requests
from celery import Celery
from celery.exceptions import Reject

app = Celery("right", broker="redis://localhost")
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True)


@app.task(bind=True, autoretry_for=(requests.ConnectionError,), retry_backoff=True, max_retries=8)
def push(self, order_id):
    answer = requests.put(f"https://erp.example/orders/{order_id}", timeout=(3, 10))
    if 400 <= answer.status_code < 500 and answer.status_code not in (408, 409, 425, 429):
        raise Reject(f"HTTP {answer.status_code}", requeue=False)
    answer.raise_for_status()


def begin_refund(payment):
    # the key is stored with the row, before anybody is called
    return Refund.objects.create(payment=payment, idempotency_key=str(uuid.uuid4()))


@app.task
def import_rows(rows):
    bad = []
    for row in rows:
        try:
            load(row)
        except Exception as error:
            bad.append((row, error))
    if bad:
        raise ExceptionGroup("rows", [error for _, error in bad])
