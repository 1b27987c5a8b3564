"""`once` and the ledger of `outside_call` in Django: models and markers share an atomic block, the ledger does not."""

import json
import sys
from typing import Any

import django
from django.conf import settings

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}}, INSTALLED_APPS=[]
)
django.setup()

from django.db import connection, models, transaction  # noqa: E402

from studyhall.patterns.core.errors import Permanent  # noqa: E402
from studyhall.patterns.outside_call.dbapi import DbApiLedger  # noqa: E402
from studyhall.patterns.outside_call.sync import SyncOutsideCalls  # noqa: E402
from studyhall.patterns.sync_inbox import create, once  # noqa: E402


class Mail(models.Model):
    class Meta:
        app_label = "shop"


def send(_):
    Mail.objects.create()
    return "sent"


report: dict[str, Any] = {}
with connection.schema_editor() as editor:
    editor.create_model(Mail)
with transaction.atomic():
    create(connection)
try:
    with transaction.atomic():
        once(connection, "mails", "order-1", {"to": "ann"}, send)
        raise OSError("the view failed after it")
except OSError:
    report["rolled back"] = Mail.objects.count()
report["results"] = []
for _ in range(2):
    with transaction.atomic():
        report["results"].append(once(connection, "mails", "order-1", {"to": "ann"}, send))
report["mails"] = Mail.objects.count()
try:
    once(connection, "mails", "order-2", {}, send)
except Permanent as error:
    report["outside atomic"] = type(error).__name__

made: list[str] = []
ledger = DbApiLedger(connection.copy)
ledger.create()
calls = SyncOutsideCalls(ledger, "carrier", longest=1)
for _ in range(2):
    try:
        with transaction.atomic():
            calls.once("label/1", lambda key: made.append(key) or {"label": 1})
            raise OSError("the view failed after the call")
    except OSError:
        pass
report["ledger after a rollback"] = ledger.read("carrier", "label/1").state
report["calls"] = len(made)
print(json.dumps(report))
