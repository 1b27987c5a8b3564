"""python send.py INTERACTION… --question text: what the platform does, for tests."""

import argparse
import json
import os
import time
import urllib.request

from nacl.signing import SigningKey

from jobs import KEY, Task


def send(task: Task):
    fields = task.model_dump()
    ident = str(fields.pop(KEY))
    options = [{"name": name, "value": value} for name, value in fields.items()]
    body = {"type": 2, "id": ident, "application_id": "app", "token": f"token-{ident}"}
    body |= {"user": {"id": "1"}, "data": {"name": "ask", "options": options}}
    text, at = json.dumps(body).encode(), str(int(time.time()))
    key = SigningKey(bytes.fromhex(os.environ["SIGNING_KEY"]))
    head = {
        "Content-Type": "application/json",
        "X-Signature-Timestamp": at,
        "X-Signature-Ed25519": key.sign(at.encode() + text).signature.hex(),
    }
    request = urllib.request.Request(os.environ["API_URL"], text, head)
    with urllib.request.urlopen(request, timeout=10) as answer:
        reply = json.load(answer)
    if reply["type"] != 5:
        raise SystemExit(reply["data"]["content"])


if __name__ == "__main__":
    first, *others = Task.model_fields
    parser = argparse.ArgumentParser()
    parser.add_argument("keys", nargs="+", metavar=first)
    for name in others:
        parser.add_argument(f"--{name}", required=Task.model_fields[name].is_required())
    given = vars(parser.parse_args())
    for key in given.pop("keys"):
        send(Task.model_validate({first: key, **given}))
