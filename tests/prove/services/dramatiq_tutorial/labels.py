"""The actor of dramatiq's guide; it asks a carrier for a label."""

import json
import os
import urllib.request

import dramatiq
from dramatiq.brokers.redis import RedisBroker

dramatiq.set_broker(RedisBroker(url=os.environ["REDIS_URL"]))


@dramatiq.actor
def buy_label(parcel):
    data = json.dumps({"parcel": parcel}).encode()
    request = urllib.request.Request(os.environ["CARRIER_URL"] + "/labels", data)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)["id"]
