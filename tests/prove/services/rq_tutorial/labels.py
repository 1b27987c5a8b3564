"""A job of RQ's first page: it asks a carrier for a label."""

import json
import os
import urllib.request


def buy_label(parcel):
    data = json.dumps({"parcel": parcel}).encode()
    request = urllib.request.Request(os.environ["CARRIER_URL"] + "/labels", data)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)["id"]
