"""SQS jobs and SNS events that are neither lost nor repeated: an outbox before the queue, an inbox behind it.

    enqueue(db, "labels", f"label/{parcel}", parcel=parcel)              # inside your transaction: a queue,
    enqueue(db, "label-bought.fifo", f"bought/{parcel}", group=parcel, …)  # or a topic of `Worker(topics=…)`

    def buy_label(parcel):
        label = carrier.once(f"label/{parcel}", buy)                     # outside effects: `outside_call.sync`
        return lambda db: db.execute("INSERT INTO labels …")             # own effects: committed once

    Worker(connect, {"labels": buy_label}, longest=60).run()             # until SIGTERM

Promise: what `enqueue` wrote is sent when its transaction commits, and never when it does not. What a handler returns
takes effect once per queue and key (`sync_inbox`), however often SQS delivers. A message is invisible while a worker
has it, at most `longest` seconds, and visible again `visibility` seconds after the worker died. The error's class
decides: `RateLimited` and `Snooze` wait and consume no attempt, `Permanent` and the last attempt make a dead
letter, and so do `CRASHES` starts without an end. Messages of a FIFO group run in order: none overtakes a waiting one.

When it does not hold: effects outside the database without `outside_call`, and messages sent around the outbox without
`{"key": …, "payload": {…}}`, which become dead letters.
"""

import hashlib
import json
import logging
import math
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from typing import Any

import boto3
from botocore.config import Config

from studyhall.patterns import sync_inbox
from studyhall.patterns.core.errors import Permanent, RateLimited, ResourceBusy, Snooze, describe
from studyhall.patterns.sync_inbox import execute, is_sqlite, transaction

__all__ = ["Worker", "client", "create", "dead_letters", "declare", "enqueue", "redrive", "transaction"]

log = logging.getLogger("sqs_jobs")
ATTEMPTS, BASE, CAP, CRASHES = 8, 1.0, 60.0, 4
CLAIM, DAY, TWELVE_HOURS = 5.0, 86_400.0, 43_200
# SQS and SNS take ten messages in a batch, and SNS 256 KiB for all of them together.
BATCH, LARGEST, POLL = 10, 24_000, 5

_CREATE = (
    "CREATE TABLE IF NOT EXISTS sqs_outbox (key TEXT NOT NULL, target TEXT NOT NULL, body TEXT NOT NULL, ordered TEXT, "
    "at DOUBLE PRECISION NOT NULL, due DOUBLE PRECISION NOT NULL, PRIMARY KEY (target, key))",
    "CREATE TABLE IF NOT EXISTS sqs_runs (queue TEXT NOT NULL, key TEXT NOT NULL, starts INTEGER NOT NULL, "
    "failures INTEGER NOT NULL, first DOUBLE PRECISION NOT NULL, PRIMARY KEY (queue, key))",
    "CREATE TABLE IF NOT EXISTS dead_letters (queue TEXT NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL, "
    "ordered TEXT, reason TEXT NOT NULL, at DOUBLE PRECISION NOT NULL, PRIMARY KEY (queue, key))",
)
_ADD = "INSERT INTO sqs_outbox (key, target, body, ordered, at, due) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
# Only the first of an ordered group: with several relays the second could overtake it.
_CLAIM = (
    "UPDATE sqs_outbox SET due = ? WHERE (target, key) IN (SELECT target, key FROM sqs_outbox AS mine WHERE due <= ? "
    "AND NOT EXISTS (SELECT 1 FROM sqs_outbox AS other WHERE other.target = mine.target AND "
    "other.ordered = mine.ordered AND other.at < mine.at) ORDER BY at LIMIT 50 FOR UPDATE SKIP LOCKED) "
    "RETURNING key, target, body, ordered, at"
)
_SENT = "DELETE FROM sqs_outbox WHERE target = ? AND key = ? AND at = ?"
_START = (
    "INSERT INTO sqs_runs (queue, key, starts, failures, first) VALUES (?, ?, 1, 0, ?) ON CONFLICT (queue, key) "
    "DO UPDATE SET starts = sqs_runs.starts + 1 RETURNING starts, failures, first"
)
_LATER = "UPDATE sqs_runs SET starts = 0, failures = ? WHERE queue = ? AND key = ?"
_ENDED = "DELETE FROM sqs_runs WHERE queue = ? AND key = ?"
_BURY = (
    "INSERT INTO dead_letters (queue, key, body, ordered, reason, at) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
)
_UNBURY = "DELETE FROM dead_letters WHERE queue = ? AND key = ? RETURNING body, ordered"
_IS_DEAD = "SELECT 1 FROM dead_letters WHERE queue = ? AND key = ?"
_DEAD = "SELECT queue, key, reason FROM dead_letters ORDER BY at LIMIT ?"


def create(db: Any) -> None:
    sync_inbox.create(db)
    for statement in _CREATE:
        execute(db, statement)


def enqueue(db: Any, target: str, key: str, *, group: str | None = None, **payload: Any) -> None:
    """In the caller's transaction. `target`: a queue or a topic; a name ending in .fifo needs a `group`."""
    body = json.dumps({"key": key, "payload": payload})
    if len(body.encode()) > LARGEST:
        raise Permanent(f"{key!r} has more than {LARGEST} bytes: store it, and send a reference")
    if target.endswith(".fifo") and group is None:
        raise Permanent(f"{target} is ordered by group: name the group of {key!r}")
    execute(db, _ADD, key, target, body, group, time.time(), time.time())


def dead_letters(db: Any, limit: int = 100) -> list[tuple[str, str, str]]:
    """(queue, key, reason), the oldest first."""
    return [tuple(row) for row in execute(db, _DEAD, limit).fetchall()]


def redrive(db: Any, queue: str, key: str) -> None:
    """With all its attempts. First resolve an outside call that was refused: `calls.resolve(key, again=True)`."""
    with transaction(db):
        row = execute(db, _UNBURY, queue, key).fetchone()
        if row is None:
            raise Permanent(f"{key!r} is not a dead letter of {queue}: see dead_letters()")
        execute(db, _ADD, key, queue, *row, time.time(), time.time())


def client(service: str) -> Any:
    # The defaults wait 60 s for every answer and try five times: minutes, with SQS away.
    limits = Config(connect_timeout=3, read_timeout=POLL + 5, retries={"mode": "standard", "total_max_attempts": 2})
    return boto3.client(service, config=limits)


def declare(queues: Iterable[str], topics: Mapping[str, Sequence[str]], visibility: int) -> None:
    """Queues, each with its `…-dead`, and topics with the queues that get a copy: what Terraform does elsewhere."""
    sqs, sns, arns = client("sqs"), client("sns"), dict[str, str]()
    for name in queues:
        fifo = {"FifoQueue": "true"} if name.endswith(".fifo") else {}
        for queue in (_dead(name), name):
            more = {"MessageRetentionPeriod": "1209600", "VisibilityTimeout": str(visibility), **fifo}
            if queue == name:
                # Counts every delivery, waits and crashes too: far above `ATTEMPTS`, for what never reaches our code.
                policy = {"deadLetterTargetArn": arns[_dead(name)], "maxReceiveCount": 1000}
                more["RedrivePolicy"] = json.dumps(policy)
            url = sqs.create_queue(QueueName=queue, Attributes=more)["QueueUrl"]
            asked = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
            arns[queue] = asked["Attributes"]["QueueArn"]
    for topic, subscribers in topics.items():
        fifo = {"FifoTopic": "true"} if topic.endswith(".fifo") else {}
        arn = sns.create_topic(Name=topic, Attributes=fifo)["TopicArn"]
        for name in subscribers:
            raw = {"RawMessageDelivery": "true"}
            sns.subscribe(TopicArn=arn, Protocol="sqs", Endpoint=arns[name], Attributes=raw)
            # Without it SNS silently drops every copy.
            allow = {
                **{"Effect": "Allow", "Principal": {"Service": "sns.amazonaws.com"}, "Action": "sqs:SendMessage"},
                **{"Resource": arns[name], "Condition": {"ArnEquals": {"aws:SourceArn": arn}}},
            }
            policy_text = json.dumps({"Version": "2012-10-17", "Statement": [allow]})
            url = sqs.get_queue_url(QueueName=name)["QueueUrl"]
            sqs.set_queue_attributes(QueueUrl=url, Attributes={"Policy": policy_text})


def _dead(queue: str) -> str:
    return f"{queue.removesuffix('.fifo')}-dead{'.fifo' if queue.endswith('.fifo') else ''}"


class Worker:
    """`handlers`: queue -> function. `topics`: which targets of the outbox are topics. `also`: called every second.

    `connect()`: an autocommit connection to SQLite or PostgreSQL. `threads`: handlers at a time, per queue.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        handlers: Mapping[str, Callable[..., Any]],
        *,
        longest: float,
        visibility: int = 30,
        threads: int = 4,
        topics: Iterable[str] = (),
        also: Callable[[], None] | None = None,
    ) -> None:
        self._connect, self._handlers, self._longest = connect, handlers, longest
        self._visibility, self._threads, self._also = visibility, threads, also
        self._sqs, self._sns, self._topics = client("sqs"), client("sns"), frozenset(topics)
        self._urls, self._arns = dict[str, str](), dict[str, str]()
        self._held: dict[str, tuple[str, float]] = {}  # receipt -> (queue, since)
        self._over, self._idle = threading.Event(), threading.Event()

    def run(self) -> None:
        """Until SIGTERM or SIGINT; then the running handlers end, and nothing new begins."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._over.set())
        tending = [threading.Thread(target=run, daemon=True) for run in (self._beat, self._tend)]
        for thread in tending:
            thread.start()
        log.info("ready")
        with ThreadPoolExecutor(len(self._handlers)) as pool:
            polling = [pool.submit(self._poll, queue) for queue in self._handlers]
            # A failing poll ends the worker: the others would hide that a queue is no longer read.
            wait(polling, return_when=FIRST_EXCEPTION)
            self._over.set()
        # The heartbeat goes on until the last handler has ended.
        self._idle.set()
        for thread in tending:
            thread.join(5)
        for ended in polling:
            ended.result()

    def lambda_handler(self, event: Mapping[str, Any], context: object = None) -> dict[str, Any]:
        """For a queue that calls a Lambda function, with `ReportBatchItemFailures`: only what failed comes back."""
        failed, stuck = list[dict[str, str]](), set[str]()
        for record in event["Records"]:
            queue = record["eventSourceARN"].rpartition(":")[2]
            group = record["attributes"].get("MessageGroupId", record["messageId"])
            delay = 0 if group in stuck else self._handle(queue, record["messageId"], record["body"], group)
            if delay is not None:
                stuck.add(group)
                failed.append({"itemIdentifier": record["messageId"]})
                self._show_again(queue, record["receiptHandle"], delay)
        return {"batchItemFailures": failed}

    # receiving

    def _poll(self, queue: str) -> None:
        room = threading.Semaphore(self._threads)
        with ThreadPoolExecutor(self._threads, queue) as pool:
            while not self._over.is_set():
                if not room.acquire(timeout=0.5):
                    continue
                taken = 1
                while taken < BATCH and room.acquire(blocking=False):
                    taken += 1
                groups = defaultdict[str, list[Any]](list)
                for message in self._receive(queue, taken):
                    self._held[message["ReceiptHandle"]] = queue, time.monotonic()
                    groups[message["Attributes"].get("MessageGroupId", message["MessageId"])].append(message)
                for _ in range(taken - len(groups)):
                    room.release()
                for messages in groups.values():
                    pool.submit(self._in_order, queue, messages).add_done_callback(lambda _: room.release())

    def _receive(self, queue: str, most: int) -> list[Any]:
        try:
            answer = self._sqs.receive_message(
                QueueUrl=self._url(queue),
                MaxNumberOfMessages=most,
                WaitTimeSeconds=POLL,
                VisibilityTimeout=self._visibility,
                MessageSystemAttributeNames=["MessageGroupId"],
            )
            return list(answer.get("Messages", ()))
        except Exception as error:
            log.warning("receive from %s: %s", queue, describe(error, 200))
            self._over.wait(1)
            return []

    def _in_order(self, queue: str, messages: list[Any]) -> None:
        """Messages of one group: when one has to come again, the others wait for it."""
        delay: float | None = None
        for message in messages:
            receipt = message["ReceiptHandle"]
            group = message["Attributes"].get("MessageGroupId")
            try:
                if delay is None and self._over.is_set():
                    delay = 0
                if delay is None:
                    delay = self._handle(queue, message["MessageId"], message["Body"], group)
                self._held.pop(receipt, None)
                if delay is None:
                    self._sqs.delete_message(QueueUrl=self._url(queue), ReceiptHandle=receipt)
                else:
                    self._show_again(queue, receipt, delay)
            except Exception as error:  # SQS is away: the message comes back, and the inbox knows it
                log.warning("%s: %s", queue, describe(error, 200))

    def _handle(self, queue: str, message_id: str, body: str, group: str | None) -> float | None:
        """None: it ended, well or as a dead letter. Otherwise the seconds until it comes again."""
        try:
            with closing(self._connect()) as db:
                try:
                    told = json.loads(body)
                    key, payload = str(told["key"]), dict(told["payload"])
                except (ValueError, TypeError, KeyError) as error:
                    _bury(db, queue, message_id, body, group, f"not a message of ours: {type(error).__name__}")
                    return None
                # A copy: sent again by a relay that died, or delivered again.
                if execute(db, _IS_DEAD, queue, key).fetchone():
                    return None
                starts, failures, first = execute(db, _START, queue, key, time.time()).fetchone()
                if starts > CRASHES:
                    _bury(db, queue, key, body, group, f"its worker died {CRASHES} times")
                    return None
                try:
                    effect = self._handlers[queue](**payload)

                    def take_effect(db: Any) -> None:
                        if effect is not None:
                            effect(db)

                    with transaction(db):
                        sync_inbox.once(db, queue, key, payload, take_effect)
                        execute(db, _ENDED, queue, key)
                    return None
                except Exception as error:
                    delay, failures = _decide(error, failures, first)
                    if delay is None:
                        _bury(db, queue, key, body, group, f"{type(error).__name__}: {describe(error, 300)}")
                    else:
                        execute(db, _LATER, failures, queue, key)
                    return delay
        except Exception as error:  # the database is away
            log.warning("%s: %s", queue, describe(error, 200))
            return BASE

    # tending: heartbeat, relay, dead letters

    def _beat(self) -> None:
        """A crash shows within `visibility` seconds, a job may take hours."""
        while not self._idle.wait(self._visibility / 3):
            held = defaultdict[str, list[str]](list)
            for receipt, (queue, since) in list(self._held.items()):
                if time.monotonic() - since < self._longest:
                    held[queue].append(receipt)
            for queue, receipts in held.items():
                for start in range(0, len(receipts), BATCH):
                    self._hold(queue, receipts[start : start + BATCH])

    def _hold(self, queue: str, receipts: list[str]) -> None:
        entries = [
            {"Id": str(n), "ReceiptHandle": receipt, "VisibilityTimeout": self._visibility}
            for n, receipt in enumerate(receipts)
        ]
        try:
            # A batch answers 200 even if some of it failed.
            answer = self._sqs.change_message_visibility_batch(QueueUrl=self._url(queue), Entries=entries)
            for failure in answer.get("Failed", ()):
                log.warning("%s: a message is lost to another worker: %s", queue, failure["Code"])
        except Exception as error:
            log.warning("heartbeat of %s: %s", queue, describe(error, 200))

    def _show_again(self, queue: str, receipt: str, delay: float) -> None:
        seconds = min(math.ceil(delay), TWELVE_HOURS - int(self._longest))
        self._sqs.change_message_visibility(QueueUrl=self._url(queue), ReceiptHandle=receipt, VisibilityTimeout=seconds)

    def _tend(self) -> None:
        called = collected = 0.0
        while not self._idle.is_set():
            try:
                with closing(self._connect()) as db:
                    while not self._idle.is_set():
                        if not self.relay(db):
                            self._idle.wait(0.2)
                        now = time.monotonic()
                        if self._also and now - called > 1:
                            called = now
                            self._also()
                        if now - collected > 60:
                            collected = now
                            self.collect(db)
            except Exception as error:
                log.warning("tending: %s", describe(error, 200))
                self._idle.wait(1)

    def relay(self, db: Any) -> int:
        """Send what is due; returns how many. What a crash leaves in doubt is sent again after a few seconds."""
        now, targets = time.time(), defaultdict[str, list[Any]](list)
        claim = _CLAIM.replace("FOR UPDATE SKIP LOCKED", "") if is_sqlite(db) else _CLAIM
        rows = execute(db, claim, now + CLAIM, now).fetchall()
        for row in sorted(rows, key=lambda row: row[4]):
            targets[row[1]].append(row)
        for target, waiting in targets.items():
            for start in range(0, len(waiting), BATCH):
                batch = waiting[start : start + BATCH]
                answer = self._send(target, [_entry(n, row, target in self._topics) for n, row in enumerate(batch)])
                # A batch answers 200 even if some of it failed: that stays, and is sent again.
                for failure in answer.get("Failed", ()):
                    log.warning("%s refused a message: %s %s", target, failure["Code"], failure.get("Message", ""))
                for sent in answer.get("Successful", ()):
                    key, _, _, _, at = batch[int(sent["Id"])]
                    execute(db, _SENT, target, key, at)
        return len(rows)

    def _send(self, target: str, entries: list[dict[str, Any]]) -> Any:
        if target in self._topics:
            if target not in self._arns:
                # Creating an existing one returns its address.
                fifo = {"FifoTopic": "true"} if target.endswith(".fifo") else {}
                self._arns[target] = self._sns.create_topic(Name=target, Attributes=fifo)["TopicArn"]
            return self._sns.publish_batch(TopicArn=self._arns[target], PublishBatchRequestEntries=entries)
        return self._sqs.send_message_batch(QueueUrl=self._url(target), Entries=entries)

    def collect(self, db: Any) -> None:
        """What SQS itself set aside: its dead-letter queue forgets after 14 days, gives no reason, alerts nobody."""
        for queue in self._handlers:
            url = self._url(_dead(queue))
            names = ["MessageGroupId", "ApproximateReceiveCount"]
            answer = self._sqs.receive_message(
                QueueUrl=url, MaxNumberOfMessages=BATCH, MessageSystemAttributeNames=names
            )
            for message in answer.get("Messages", ()):
                try:
                    key = str(json.loads(message["Body"])["key"])
                except (ValueError, TypeError, KeyError):
                    key = message["MessageId"]
                group, count = (message["Attributes"].get(name) for name in names)
                _bury(db, queue, key, message["Body"], group, f"delivered {count} times without an end")
                self._sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])

    def _url(self, queue: str) -> str:
        if queue not in self._urls:
            self._urls[queue] = self._sqs.get_queue_url(QueueName=queue)["QueueUrl"]
        return self._urls[queue]


def _decide(error: Exception, failures: int, first: float) -> tuple[float | None, int]:
    """Seconds until the next try (None: never), and the attempts consumed."""
    if isinstance(error, RateLimited | ResourceBusy | Snooze) and time.time() - first < DAY:
        return (error.delay if isinstance(error, Snooze) else error.retry_after), failures
    if isinstance(error, Permanent) or failures + 1 >= ATTEMPTS:
        return None, failures
    return random.random() * min(CAP, BASE * 2**failures), failures + 1


def _entry(number: int, row: Any, topic: bool) -> dict[str, Any]:
    key, target, body, group, at = row
    entry = {"Id": str(number), "Message" if topic else "MessageBody": body}
    if target.endswith(".fifo"):
        # With the time: SQS would swallow a redrive within its five minutes of deduplication.
        once = hashlib.sha256(f"{key} {at!r}".encode()).hexdigest()
        entry |= {"MessageGroupId": group, "MessageDeduplicationId": once}
    return entry


def _bury(db: Any, queue: str, key: str, body: str, group: str | None, reason: str) -> None:
    with transaction(db):
        execute(db, _BURY, queue, key, body, group, reason, time.time())
        execute(db, _ENDED, queue, key)
    log.error("dead letter %s of %s: %s", key, queue, reason)
