"""Orders and their receipts with Django.

uvicorn django_shop:web | celery -A django_shop worker | python django_shop.py create
"""

import os
import sys
from typing import Any

import django
import requests
from celery import Celery
from celery_jobs import Job, Relay, create, enqueue, reliable
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.db import connection, models
from django.db.transaction import atomic, on_commit
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from studyhall.patterns import sync_inbox

LONGEST = float(os.environ.get("LONGEST", "60"))
# IMMEDIATE: else a SQLite transaction that reads, then writes, fails if another wrote in between.
SQLITE = {"transaction_mode": "IMMEDIATE", "timeout": 15}
STORE = {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["STORE"], "OPTIONS": SQLITE}
settings.configure(DATABASES={"default": STORE}, ROOT_URLCONF=__name__, ALLOWED_HOSTS=["127.0.0.1"], USE_TZ=True)
django.setup()

app = Celery("django_shop", broker=os.environ["REDIS_URL"])
app.conf.update(reliable(LONGEST))
Relay.resend = 2 * LONGEST
app.steps["worker"].add(Relay)


class Order(models.Model):
    number = models.CharField(primary_key=True, max_length=40)

    class Meta:
        app_label, db_table = "shop", "orders"


class Receipt(models.Model):
    order = models.ForeignKey(Order, on_delete=models.PROTECT)

    class Meta:
        app_label, db_table = "shop", "receipts"


# [django]
# The rows of the jobs and your models, on one connection and in one transaction.
Job.connect = staticmethod(lambda: connection)
Job.atomic = staticmethod(lambda _: atomic())


@csrf_exempt
def place(request: HttpRequest, number: str) -> HttpResponse:
    with atomic():
        Order.objects.get_or_create(number=number)
        enqueue(connection, "django_shop.receipt", f"receipt/{number}", order=number)
    return HttpResponse(status=202)


@app.task(base=Job)
def receipt(order: str) -> Any:
    key = {"Idempotency-Key": f"receipt/{order}"}
    mail = requests.post(
        os.environ["MAILER_URL"] + "/receipts", json={"order": order}, headers=key, timeout=LONGEST / 2
    )
    mail.raise_for_status()
    return lambda _: Receipt.objects.create(order_id=order)


# [/django]


# [on-commit]
@csrf_exempt
def place_on_commit(request: HttpRequest, number: str) -> HttpResponse:
    """As Django documents it. If the process dies after the commit, or Redis is away, the order has no task."""
    with atomic():
        Order.objects.get_or_create(number=number)
        on_commit(lambda: receipt_by_message.delay(number))
    return HttpResponse(status=202)


@app.task(autoretry_for=(OSError,), retry_backoff=True, max_retries=8)
def receipt_by_message(order: str) -> None:
    with atomic():
        sync_inbox.once(connection, "receipts", order, order, lambda _: Receipt.objects.create(order_id=order).pk)


# [/on-commit]

urlpatterns = [path("orders/<number>", place), path("on-commit/<number>", place_on_commit)]
web = get_asgi_application()

if __name__ == "__main__" and sys.argv[1:] == ["create"]:
    # A project has migrations for its models, and a RunPython of `create` for these tables.
    with connection.schema_editor() as editor:
        editor.create_model(Order)
        editor.create_model(Receipt)
    with atomic():
        create(connection)
