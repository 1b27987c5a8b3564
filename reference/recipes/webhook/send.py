"""python send.py CHARGE… --amount 1: what the sender does, for tests."""

import argparse
import json
import os
import urllib.request

from jobs import Task
from patterns.signed_http import sign


def send(body: bytes):
    signature = sign(os.environ["SIGNING_SECRETS"].split()[0], body)
    head = {"Signature": signature, "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["WEBHOOK_URL"], body, head)
    urllib.request.urlopen(request, timeout=10).close()  # raises unless 2xx


if __name__ == "__main__":
    first, *others = Task.model_fields
    parser = argparse.ArgumentParser()
    parser.add_argument("keys", nargs="+", metavar=first)
    for name in others:
        parser.add_argument(f"--{name}", required=Task.model_fields[name].is_required())
    parser.add_argument("--unreadable", action="store_true")
    given = vars(parser.parse_args())
    unreadable = given.pop("unreadable")
    for key in given.pop("keys"):
        task = Task.model_validate({first: key, **given}).model_dump(mode="json")
        if unreadable:  # signed and taken; no worker can read it: a dead letter
            task[first] = [task[first]]
        send(json.dumps(task).encode())
