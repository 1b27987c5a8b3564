"""One process that uses the embedded server: counts up forever and prints what was acknowledged."""

import json
import os
import sys
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from studyhall.patterns.engine import ensure_redis

data_dir, key = Path(sys.argv[1]), sys.argv[2]
server = ensure_redis(data_dir)
print("server " + json.dumps({"url": server.url, "pid": server.pid, "user": os.getpid()}))
# No retries: a repeated INCR would hide a lost one.
client = redis.Redis.from_url(server.url, socket_timeout=5, retry=Retry(NoBackoff(), 0))
while True:
    try:
        print(f"acked {client.incr(key)} {time.time():.3f}")
    except redis.RedisError as error:
        print(f"refused {type(error).__name__} {time.time():.3f}")
    time.sleep(0.01)
