"""Labels for the orders of a Django shop: python shop.py create | submit ORDER… | work"""

import json
import os
import sys
import time
import urllib.request

import django
from django.conf import settings
from django.db import connection, models, transaction

OPTIONS = {"timeout": 20, "transaction_mode": "IMMEDIATE"}
DATABASE = {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["STORE"], "OPTIONS": OPTIONS}
settings.configure(DATABASES={"default": DATABASE})
django.setup()


class Order(models.Model):
    id = models.CharField(primary_key=True, max_length=64)
    status = models.CharField(max_length=8, default="open")
    due = models.FloatField(default=0)

    class Meta:
        app_label = "shop"


class Label(models.Model):
    id = models.AutoField(primary_key=True)
    order = models.CharField(max_length=64, unique=True)

    class Meta:
        app_label = "shop"


def buy(order):
    body, key = json.dumps({"order": order.id}).encode(), {"Idempotency-Key": f"label/{order.id}"}
    request = urllib.request.Request(os.environ["CARRIER_URL"] + "/labels", body, key)
    urllib.request.urlopen(request, timeout=5).close()


def claimed(order):
    """By one machine at a time; whoever dies with it loses the claim after a few seconds."""
    now = time.time()
    free = Order.objects.filter(id=order.id, status="open", due__lte=now)
    return free.update(due=now + 8) == 1


def work():
    while True:
        for order in Order.objects.filter(status="open", due__lte=time.time()):
            if not claimed(order):
                continue
            try:
                buy(order)
            except OSError:
                Order.objects.filter(id=order.id).update(due=time.time() + 1)
                continue
            with transaction.atomic():
                Label.objects.get_or_create(order=order.id)
                Order.objects.filter(id=order.id).update(status="done")
        time.sleep(0.2)


if sys.argv[1] == "create":
    with connection.schema_editor() as editor:
        editor.create_model(Order)
        editor.create_model(Label)
elif sys.argv[1] == "submit":
    for ident in sys.argv[2:]:
        Order.objects.get_or_create(id=ident)
else:
    work()
