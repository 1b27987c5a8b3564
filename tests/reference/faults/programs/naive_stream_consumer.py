"""The Redis Streams consumer of most tutorials, kept as it is usually published. Do not copy it.

Arguments: Redis URL, stream, group, work | freeze | poison. `freeze` reads a batch and hangs in its first entry
(to be killed there), `poison` fails on entries that say so. Prints `done <n>`.
"""

import sys
import time

import redis


def main(url, stream, group, mode):
    client = redis.Redis.from_url(url, decode_responses=True)
    # Only what comes from now on; fails if it exists.
    client.xgroup_create(stream, group, id="$", mkstream=True)
    print("ready", flush=True)
    while True:
        for _, entries in client.xreadgroup(group, "consumer-1", {stream: ">"}, count=5, block=500) or []:
            print("batch", len(entries), flush=True)
            for _, fields in entries:
                if mode == "freeze":
                    time.sleep(3600)
                if mode == "poison" and fields.get("poison"):
                    raise RuntimeError("poison")
                print("done", fields["n"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
