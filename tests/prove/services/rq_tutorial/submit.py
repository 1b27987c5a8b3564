import os
import sys

from labels import buy_label
from redis import Redis
from rq import Queue, Retry

queue = Queue(connection=Redis.from_url(os.environ["REDIS_URL"]))
for parcel in sys.argv[1:]:
    queue.enqueue(buy_label, parcel, retry=Retry(max=3, interval=1))
