"""One key that is not of BullMQ's form is named with its reason, and everything else is shown."""

import httpx2
import pytest

from harness.browser import TOKEN
from harness.waiting import until_sync

pytestmark = pytest.mark.slow

VIEWS = ("queues", "jobs", "jobs/export", "schedules", "workers", "jobs/good/1", "flows/good/1")
NOW = 1_790_000_000_000


def job(ident, **fields):
    new = {"name": "n", "data": "{}", "opts": "{}", "timestamp": NOW, **fields}
    pairs = [text for pair in new.items() for text in pair]
    return [("HSET", f"bull:odd:{ident}", *pairs), ("LPUSH", "bull:odd:wait", ident)]


SURROGATE = job(9, data=r'{"s":"\ud800!"}', stacktrace=r'["\udfff"]', progress=r'{"\ud800":1}')
# What is there, the view that names it, its words
CASES = {
    "wait": ([("SET", "bull:odd:wait", "s")], "queues", "wait is a string, not a list"),
    "failed": ([("LPUSH", "bull:odd:failed", "s")], "jobs", "failed is a list, not a zset"),
    "one-queue": ([("SET", "bull:odd:wait", "s")], "jobs?queue=odd", "wait is a string, not a list"),
    "active": ([("SET", "bull:odd:active", "s")], "workers", "active is a string, not a list"),
    "meta": ([("DEL", "bull:odd:meta"), ("SET", "bull:odd:meta", "s")], "queues", "meta is a string, not a hash"),
    "repeat": ([("SET", "bull:odd:repeat", "s")], "schedules", "repeat is a string, not a zset"),
    "schedule": (
        [("ZADD", "bull:odd:repeat", "inf", "x"), ("SET", "bull:odd:repeat:x", "s")],
        "schedules",
        "its key holds no schedule",
    ),
    "never": (
        [("ZADD", "bull:odd:repeat", "inf", "x"), ("HSET", "bull:odd:repeat:x", "every", 5, "ic", "y")],
        "schedules",
        '"next":null',
    ),
    "stalls": ([("SET", "bull:odd:stalls", "s")], "queues", '"odd"'),
    "job": ([("SET", "bull:odd:9", "s"), ("LPUSH", "bull:odd:wait", "9")], "jobs/odd/9", "its key holds no job"),
    "running": ([("SET", "bull:odd:9", "s"), ("LPUSH", "bull:odd:active", "9")], "jobs", "its key holds no job"),
    "timestamp": (job(9, timestamp="abc"), "jobs/odd/9", "odd: timestamp"),
    "opts": (job(9, opts="[1,2]"), "jobs", "odd: opts"),
    "atm": (job(9, atm="many", stc="1e999", ats="x"), "jobs/odd/9", "odd: atm"),
    "not-a-number": (job(9, data='{"n":NaN}'), "jobs/odd/9", '"payload":{"n":null}'),
    "surrogate": (SURROGATE, "jobs/odd/9", '"s":"\ufffd!"'),
    "slash": (job("a/b"), "jobs/odd/a%2Fb", '"id":"a/b"'),
}


def lay_out(server, commands):
    with server.client() as redis:
        redis.flushall()
        good = [(name, *rest) for name, key, *more in job(1) for rest in [(key.replace("odd", "good"), *more)]]
        every = ("HSET", "bull:good:repeat:tick", "name", "n", "every", 60_000)
        meta = [("HSET", f"bull:{queue}:meta", "opts.maxLenEvents", 10_000) for queue in ("good", "odd")]
        for command in (*meta, *good, ("ZADD", "bull:good:repeat", NOW, "tick"), every, *commands):
            redis.execute_command(*command)


@pytest.mark.parametrize("case", CASES)
def test_an_odd_key_is_named_and_hides_nothing_else(server, console, case):
    commands, view, words = CASES[case]
    lay_out(server, commands)
    with httpx2.Client(base_url=console.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=30) as client:
        seen = ["good", "odd"]
        until_sync(lambda: client.get("/admin/workers").json().get("queues", seen) == seen, what="both queues")
        answers = {path: client.get(f"/admin/{path}") for path in (*VIEWS, view)}
        assert {path: answer.text for path, answer in answers.items() if answer.status_code != 200} == {}
        assert words in answers[view].text
        assert '"good"' in answers["queues"].text
        assert [row["id"] for row in answers["jobs"].json()["jobs"] if row["queue"] == "good"] == ["1"]
        assert "tick" in [row["id"] for row in answers["schedules"].json()["schedules"]]
        exported = answers["jobs/export"].json(parse_constant=pytest.fail)
        assert {row["id"] for row in exported} == {row["id"] for row in answers["jobs"].json()["jobs"]}
        refused = client.post("/admin/queues/odd/pause")
        assert "does not answer" not in refused.text


@pytest.mark.needs_browser
def test_what_cannot_be_read_is_said_in_the_page(server, console, open_page):
    commands = [command for case in ("failed", "repeat") for command in CASES[case][0]]
    lay_out(server, commands)
    page = open_page(console, "#/overview", token=True)
    for view, words in (("overview", "failed is a list"), ("jobs", "failed is a list"), ("schedules", "repeat is a s")):
        page.goto(f"/#/{view}")
        page.get_by_text(f"odd cannot be read: {words}").wait_for()
        page.locator("main :text('good'):visible").first.wait_for()
