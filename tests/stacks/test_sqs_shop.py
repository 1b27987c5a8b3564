"""What `prove` does not see of the SQS modules: heartbeat, order in a group, parts of a batch, dead letters, the claim.

Each test is a script that runs beside boto3, against the SQS and SNS of a moto server.
"""

import os
import subprocess
import textwrap
import time

import pytest

from guide import stacks
from harness.missing import missing
from harness.ports import free_port
from queuesmith.prove.probes import http

pytestmark = pytest.mark.slow

SOURCE = stacks.SERVICES / "sqs"
BEFORE = """
import json, os, signal, sqlite3, threading, time
from contextlib import closing
from sqs_jobs import Worker, create, dead_letters, declare, enqueue, redrive
from studyhall.patterns.core.errors import Permanent, Snooze, Transient

def connect():
    store = os.environ["STORE"]
    if store.startswith("postgresql"):
        import psycopg
        return psycopg.connect(store, autocommit=True)
    return sqlite3.connect(store, timeout=30, isolation_level=None)

def rows(query):
    with closing(connect()) as own:
        return own.execute(query).fetchall()

def work(worker, enough):
    def watch():
        deadline = time.monotonic() + 60
        try:
            while time.monotonic() < deadline and not enough():
                time.sleep(0.05)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=watch, daemon=True).start()
    worker.run()
    assert enough(), "not within 60 s"

db = connect()
create(db)
"""


@pytest.fixture(scope="module")
def moto():
    try:
        stacks.install("sqs")
    except stacks.NotHere as error:
        missing("moto", str(error))
    port = free_port()
    command = [stacks.BUILT / "sqs" / "bin" / "moto_server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 90
    while True:
        try:
            http("GET", f"{url}/moto-api/data.json", timeout=5)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    yield url
    server.kill()
    server.wait()


@pytest.fixture
def run(moto, tmp_path):
    def go(script, store=str(tmp_path / "shop.db")):
        http("POST", f"{moto}/moto-api/reset", timeout=30)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
            **{"AWS_ENDPOINT_URL": moto, "AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local"},
            **{"AWS_DEFAULT_REGION": "eu-central-1", "STORE": store},
            "PYTHONPATH": f"{SOURCE}{os.pathsep}{SOURCE.parents[1]}",
        }
        python = stacks.BUILT / "sqs" / "bin" / "python"
        done = subprocess.run(
            [python, "-c", BEFORE + textwrap.dedent(script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    return go


SLOW = """
declare(["slow"], {}, 2)
seen = []
def slow(n):
    seen.append(n)
    # As long as three visibility timeouts, or until it was delivered twice.
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline and len(seen) < 2:
        time.sleep(0.05)
enqueue(db, "slow", "a", n=1)
worker = Worker(connect, {"slow": slow}, longest=60, visibility=2)
"""


def test_a_job_longer_than_the_visibility_timeout_is_held_by_the_heartbeat(run):
    run(SLOW + 'work(worker, lambda: rows("SELECT 1 FROM inbox"))\nassert seen == [1], seen')


def test_without_the_heartbeat_it_is_delivered_again_while_it_runs(run):
    run(SLOW + "worker._beat = lambda: None\nwork(worker, lambda: len(seen) == 2)")


def test_after_a_failed_message_none_of_its_group_is_begun_and_other_groups_go_on(run):
    """Within one delivery: moto forgets the order of redelivered messages."""
    run("""
        declare(["steps.fifo"], {"events.fifo": ["steps.fifo"]}, 30)
        begun = []
        def step(of, n):
            begun.append((of, n))
            if of == "a" and n == 1:
                raise Snooze(1)
        for n in range(3):
            for of in "ab":
                enqueue(db, "events.fifo", f"{of}/{n}", group=of, of=of, n=n)
        worker = Worker(connect, {"steps.fifo": step}, longest=60, visibility=30, topics=["events.fifo"])
        while worker.relay(db):
            pass
        got = worker._receive("steps.fifo", 10)
        for of in "ab":
            worker._in_order("steps.fifo", [one for one in got if one["Attributes"]["MessageGroupId"] == of])
        assert begun == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2)], begun
        """)


def test_a_lambda_function_returns_what_failed_and_what_follows_it_in_its_group(run):
    run("""
        declare(["jobs", "steps.fifo"], {}, 30)
        def handle(n):
            if n == 1:
                raise Transient("later")
        worker = Worker(connect, {"jobs": handle, "steps.fifo": handle}, longest=60)
        def records(queue, groups):
            url = worker._url(queue)
            for n, group in enumerate(groups):
                more = {"MessageGroupId": group, "MessageDeduplicationId": str(n)} if group else {}
                body = json.dumps({"key": str(n), "payload": {"n": n}})
                worker._sqs.send_message(QueueUrl=url, MessageBody=body, **more)
            got = worker._sqs.receive_message(
                QueueUrl=url, MaxNumberOfMessages=10, MessageSystemAttributeNames=["MessageGroupId"])["Messages"]
            return {"Records": [
                {"messageId": one["MessageId"], "receiptHandle": one["ReceiptHandle"], "body": one["Body"],
                 "attributes": one.get("Attributes", {}), "eventSourceARN": f"arn:aws:sqs:eu-central-1:1:{queue}"}
                for one in got]}
        def failed(event):
            ids = {one["itemIdentifier"] for one in worker.lambda_handler(event)["batchItemFailures"]}
            return [json.loads(one["body"])["key"] for one in event["Records"] if one["messageId"] in ids]
        assert failed(records("jobs", ["", "", ""])) == ["1"]
        assert sorted(failed(records("steps.fifo", ["a", "a", "a", "b"]))) == ["1", "2"]
        assert sorted(rows("SELECT consumer, key FROM inbox")) == [
            ("jobs", "0"), ("jobs", "2"), ("steps.fifo", "0"), ("steps.fifo", "3")]
        """)


def test_a_part_of_a_batch_that_sqs_refused_is_sent_again(run):
    run("""
        declare(["jobs"], {}, 30)
        worker, refused = Worker(connect, {"jobs": lambda n: None}, longest=60), []
        def spoil(params, **_):
            if not refused:
                refused.append(params["Entries"][1]["MessageBody"])
                params["Entries"][1]["DelaySeconds"] = 10_000
        worker._sqs.meta.events.register("before-parameter-build.sqs.SendMessageBatch", spoil)
        for n in range(3):
            enqueue(db, "jobs", str(n), n=n)
        worker.relay(db)
        assert len(rows("SELECT key FROM sqs_outbox")) == 1 and refused
        work(worker, lambda: len(rows("SELECT key FROM inbox")) == 3)
        assert not rows("SELECT key FROM sqs_outbox")
        """)


def test_a_dead_letter_does_not_run_from_a_copy_and_runs_once_when_redriven(run):
    run("""
        declare(["jobs.fifo"], {}, 30)
        seen, refuses = [], [True]
        def handle(n):
            seen.append(n)
            if refuses[0]:
                raise Permanent("no")
        worker = Worker(connect, {"jobs.fifo": handle}, longest=60)
        body = json.dumps({"key": "a", "payload": {"n": 1}})
        assert worker._handle("jobs.fifo", "id", body, "g") is None
        assert worker._handle("jobs.fifo", "id", body, "g") is None
        assert seen == [1] and dead_letters(db) == [("jobs.fifo", "a", "Permanent: no")]
        refuses[0] = False
        redrive(db, "jobs.fifo", "a")
        work(worker, lambda: len(seen) == 2 and rows("SELECT 1 FROM inbox"))
        assert not dead_letters(db)
        """)


def test_what_sqs_put_aside_becomes_a_dead_letter_with_a_reason(run):
    run("""
        declare(["jobs"], {}, 30)
        worker = Worker(connect, {"jobs": lambda: None}, longest=60)
        url = worker._url("jobs")
        policy = json.loads(worker._sqs.get_queue_attributes(
            QueueUrl=url, AttributeNames=["RedrivePolicy"])["Attributes"]["RedrivePolicy"])
        policy = json.dumps({**policy, "maxReceiveCount": 2})
        worker._sqs.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": policy})
        worker._sqs.send_message(QueueUrl=url, MessageBody="not ours")
        for _ in range(3):
            worker._sqs.receive_message(QueueUrl=url, VisibilityTimeout=0)
        worker.collect(db)
        (queue, _, reason), = dead_letters(db)
        assert queue == "jobs" and "times without an end" in reason, reason
        """)


@pytest.mark.needs_postgres
def test_of_an_ordered_group_only_the_first_is_claimed_also_on_postgresql(run, postgres_url):
    run(
        """
        declare(["steps.fifo"], {}, 30)
        worker = Worker(connect, {"steps.fifo": lambda n: None}, longest=60)
        for n in range(3):
            enqueue(db, "steps.fifo", str(n), group="a", n=n)
        assert [worker.relay(db) for _ in range(4)] == [1, 1, 1, 0]
        got = worker._sqs.receive_message(QueueUrl=worker._url("steps.fifo"), MaxNumberOfMessages=10)["Messages"]
        assert [json.loads(one["Body"])["key"] for one in got] == ["0", "1", "2"]
        """,
        postgres_url,
    )
