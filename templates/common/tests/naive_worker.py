"""The worker that people write first: take a job off a list, do it. Killed in between, the job is gone."""

from __future__ import annotations

import json
import sys
import time

import redis

if __name__ == "__main__":
    url, seconds = sys.argv[1:]
    client = redis.Redis.from_url(url, decode_responses=True, socket_timeout=30)
    while taken := client.blpop(["naive-jobs"], timeout=20):
        print("started", flush=True)
        time.sleep(float(seconds))  # the work
        client.rpush("naive-results", json.dumps(taken[1]))
