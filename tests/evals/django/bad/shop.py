"""Labels for the orders of a Django shop: python shop.py create | submit ORDER… | work"""

import json
import os
import sys
import time
import urllib.request

import django
from django.conf import settings
from django.db import connection, models

DATABASE = {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["STORE"], "OPTIONS": {"timeout": 20}}
settings.configure(DATABASES={"default": DATABASE})
django.setup()


class Order(models.Model):
    id = models.CharField(primary_key=True, max_length=64)
    status = models.CharField(max_length=8, default="open")

    class Meta:
        app_label = "shop"


class Label(models.Model):
    id = models.AutoField(primary_key=True)
    order = models.CharField(max_length=64)

    class Meta:
        app_label = "shop"


def buy(order):
    body = json.dumps({"order": order.id}).encode()
    urllib.request.urlopen(os.environ["CARRIER_URL"] + "/labels", body, timeout=5).close()


def work():
    while True:
        for order in Order.objects.filter(status="open"):
            try:
                buy(order)
            except OSError:
                continue
            Label.objects.create(order=order.id)
            order.status = "done"
            order.save()
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
