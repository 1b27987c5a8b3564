"""The app of Celery's first steps; its task asks a carrier for a label and retries."""

import json
import os
import urllib.request

from celery import Celery

app = Celery("tasks", broker=os.environ["REDIS_URL"])


@app.task(autoretry_for=(OSError,), retry_backoff=True, max_retries=5)
def buy_label(parcel):
    data = json.dumps({"parcel": parcel}).encode()
    request = urllib.request.Request(os.environ["CARRIER_URL"] + "/labels", data)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)["id"]
