"""A carrier's API that prints labels for money and misbehaves: `misbehaving_provider.py '{"seed": 1, …}'`.

    POST /labels {"parcel": …, "reference": …} [Idempotency-Key]   prints, answers {"label": number}
    GET /labels?reference=…                                        what was printed under it, 404 if nothing was
    DELETE /labels?reference=…                                     voids it, 404 if nothing is there (yet)
    GET /printed                                                   every label so far, for the test

Of the POSTs, a share of `trouble` is answered 429 or 503 without an effect, 500 after it, is cut before or after it,
or is slow: the effect comes up to `slow` seconds after the request, whether or not the client still waits. A key is
known once its label is printed, as with many real providers: a second request that overtakes the first prints too.
`key_life`: seconds until a key is forgotten; 0: no keys. Prints `ready PORT`.
"""

import asyncio
import json
import random
import socket
import struct
import sys
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

SPEC = {"seed": 1, "trouble": 0.4, "slow": 1.8, "key_life": 0.0, **json.loads(sys.argv[1])}
TROUBLES = ("429", "503", "500 after", "cut before", "cut after", "slow", "slow")
rng = random.Random(SPEC["seed"])
printed: list[dict[str, Any]] = []
keys: dict[str, tuple[float, dict[str, Any]]] = {}
seen = {"requests": 0}

Answer = tuple[int, Any] | None  # None: the connection is cut


async def print_label(body, key):
    seen["requests"] += 1
    trouble = rng.choice(TROUBLES) if rng.random() < SPEC["trouble"] else ""
    if trouble in ("429", "503"):
        return int(trouble), {"error": "not now"}
    if trouble == "cut before":
        return None
    known, label = keys.get(key, (0.0, None))
    if key and label and time.monotonic() - known < SPEC["key_life"]:
        return 200, label
    await asyncio.sleep(rng.uniform(0.3, 1.0) * SPEC["slow"] if trouble == "slow" else rng.uniform(0.01, 0.05))
    label = {"label": len(printed) + 1}
    printed.append({**label, "parcel": body["parcel"], "reference": body["reference"], "void": False})
    if key:
        keys[key] = (time.monotonic(), label)
    if trouble == "cut after":
        return None
    return (500, {"error": "oops"}) if trouble == "500 after" else (200, label)


async def answer(method, target, headers, body):
    url = urlsplit(target)
    if (method, url.path) == ("POST", "/labels"):
        return await print_label(json.loads(body), headers.get("idempotency-key", ""))
    if url.path == "/printed":
        return 200, {"printed": printed, **seen}
    if rng.random() < SPEC["trouble"] / 4:
        return 503, {"error": "not now"}
    wanted = parse_qs(url.query)["reference"][0]
    labels = [label for label in printed if label["reference"] == wanted and not label["void"]]
    if method == "DELETE":
        for label in labels:
            label["void"] = True
        if labels and rng.random() < SPEC["trouble"] / 4:
            return None
    return (200, {"label": labels[0]["label"]}) if labels else (404, {"error": "unknown"})


async def serve(reader, writer):
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        reply = await answer(method, target, headers, body)
        if reply is None:
            linger = struct.pack("ii", 1, 0)  # close sends RST, as a crashing server does
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return
        text = json.dumps(reply[1]).encode()
        start = f"HTTP/1.1 {reply[0]} Said\r\nconnection: close\r\ncontent-length: {len(text)}\r\n\r\n"
        writer.write(start.encode() + text)
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print("ready", server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


asyncio.run(main())
