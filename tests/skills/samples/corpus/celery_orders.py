import logging
import uuid

import requests
from celery import Celery, shared_task
from django.db import transaction

from shop.models import Order

app = Celery("shop", broker="redis://localhost")  # fault: acks-early
logger = logging.getLogger(__name__)


def checkout(cart):
    with transaction.atomic():
        order = Order.objects.create(cart=cart)
        send_receipt.delay(order.id)  # fault: publish-in-transaction
        capture.apply_async(args=[order.id], countdown=5)  # fault: publish-in-transaction


@transaction.atomic
def cancel(order_id):
    Order.objects.filter(id=order_id).update(state="cancelled")
    refund.delay(order_id)  # fault: publish-in-transaction


@transaction.atomic
def cancel_right(order_id):
    Order.objects.filter(id=order_id).update(state="cancelled")
    transaction.on_commit(lambda: refund.delay(order_id))


def after(order_id):
    send_receipt.delay(order_id)


def by_row(order_id):
    order = Order.objects.get(id=order_id)
    send_receipt.delay(order)  # fault: row-in-payload
    send_receipt.delay(order.id)


@shared_task
def send_receipt(order_id):
    try:
        mail(order_id)
    except Exception:  # fault: swallowed-error
        logger.exception("no receipt for %s", order_id)


@shared_task(bind=True, max_retries=5)
def send_again(self, order_id):
    try:
        mail(order_id)
    except Exception as error:
        raise self.retry(exc=error, countdown=2) from error


@shared_task(autoretry_for=(requests.RequestException,), retry_backoff=True)
def refund(order_id):
    answer = requests.post(  # fault: http-no-timeout
        "https://pay.example/refunds",
        json={"order": order_id},
        headers={"Idempotency-Key": str(uuid.uuid4())},  # fault: key-per-try
    )
    answer.raise_for_status()  # fault: retried-4xx


@shared_task(bind=True)
def capture(self, order_id):
    key = self.request.id
    gateway.capture(order_id, idempotency_key=key)  # fault: job-id-as-key


@shared_task
def capture_right(order_id):
    gateway.capture(order_id, idempotency_key=f"capture/{order_id}")
