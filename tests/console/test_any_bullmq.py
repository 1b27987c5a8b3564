"""`queuesmith console` on queues that others made: a Node.js service, 100,000 jobs, and no Redis at all."""

import asyncio
import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import insert

from harness.browser import TOKEN, ConsoleServer
from harness.redis import RedisServer
from harness.waiting import until_sync
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin
from studyhall.patterns.dead_letter import dead_letters
from studyhall.patterns.schedule.history import missed_slots, schedule_state

pytestmark = pytest.mark.slow

NODE_SIDE = Path(__file__).parent / "programs" / "node_side.mjs"
MANY = 100_000
LETTERS = 20_000
HOSTILE = "<img src=x onerror=alert(1)>"
SLOW_MICROSECONDS = 20_000
# As BullMQ lays them out; its own scripts act on them afterwards.
FILL = """
local base, state, from, to, now = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
redis.call('HSET', base .. 'meta', 'opts.maxLenEvents', '10000')
for number = from, to do
  local id = state .. '-' .. number
  redis.call('HSET', base .. id, 'name', 'job' .. number % 7, 'data', '{"number":' .. number .. '}', 'opts', '{}',
    'timestamp', now, 'delay', '0', 'priority', '0')
  if state == 'wait' then
    redis.call('LPUSH', base .. 'wait', id)
  elseif state == 'delayed' then
    redis.call('ZADD', base .. 'delayed', (now + 3600000 + number) * 4096, id)
  else
    redis.call('HSET', base .. id, 'finishedOn', now, 'processedOn', now - 5, 'atm', '1', 'failedReason', 'no')
    redis.call('ZADD', base .. state, now + number, id)
  end
end
"""


def fill(server, queue, state, count):
    with server.client() as client:
        for start in range(1, count + 1, 5_000):
            now = int(time.time() * 1000) - count
            client.eval(FILL, 1, f"bull:{queue}:", state, start, min(count, start + 4_999), now)


def make_store(url, *rows):
    async def make():
        store = open_store(url)
        await create_all(store)
        async with begin(store) as tx:
            for table, some in rows:
                await tx.execute(insert(table), some)
        await close(store)

    # Playwright keeps an event loop running in this thread.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, make()).result()


def client_of(console, token=TOKEN):
    return httpx2.Client(base_url=console.url, headers={"authorization": f"Bearer {token}"}, timeout=30)


def finished(client, wanted):
    started = client.post("/admin/actions", json=wanted)
    assert started.status_code == 202, started.text
    state = {}

    def ended():
        state.update(client.get(started.json()["href"]).json())
        return state["state"] != "running"

    until_sync(ended, timeout=120, what="the action on many jobs")
    return state


def test_100000_jobs_in_each_state_are_shown_without_holding_redis(server, console):
    for state in ("wait", "delayed", "failed"):
        fill(server, "big", state, MANY)
    paths = [
        "/admin/queues",
        "/admin/workers",
        "/admin/schedules",
        "/admin/jobs",
        "/admin/jobs?queue=big&state=wait&page=1999&size=50",
        "/admin/jobs?queue=big&state=delayed&page=1000&size=50",
        "/admin/jobs?queue=big&state=failed&page=1000&size=50",
        "/admin/jobs?queue=big&q=failed-77777",
        "/admin/jobs?queue=big&state=delayed&q=nothing-like-this",
        "/admin/jobs/big/wait-5000",
        f"/admin/jobs/big/wait-{MANY}",
        "/admin/jobs/big/failed-50000",
        "/admin/flows/big/wait-50000",
    ]
    best = {}
    with client_of(console) as client, server.client() as redis:
        redis.lpush("bull:big:wait", "one", "more")
        assert client.get("/admin/jobs/big/no-such-job").status_code == 404
        redis.lpop("bull:big:wait", 2)
        until_sync(
            lambda: [row["queue"] for row in client.get("/admin/queues").json().get("queues", [])] == ["big"],
            timeout=60,
            what="the queue is found among 300,000 keys",
        )
        redis.config_set("slowlog-max-len", 100_000)
        redis.config_set("slowlog-log-slower-than", 0)
        worst = []
        for _round in range(3):
            redis.slowlog_reset()
            for path in paths:
                began = time.monotonic()
                answer = client.get(path)
                best[path] = min(best.get(path, 60.0), time.monotonic() - began)
                assert answer.status_code == 200, f"{path}: {answer.text}"
            for action, state, count in (
                ("retry", "failed", 1_000),
                ("remove", "failed", 500),
                ("remove", "delayed", 500),
                ("remove", "wait", 100),
                ("promote", "delayed", 500),
            ):
                wanted = {"action": action, "queue": "big", "state": state, "count": count}
                assert finished(client, wanted)["done"] == count
            took = {}
            for entry in redis.slowlog_get(100_000):
                kind = " ".join(entry["command"].decode().split()[:2])  # a script by its hash, a job by its queue
                kind = re.sub(r"-\d+\b.*| \d+$", "", kind)
                took[kind] = max(took.get(kind, 0), entry["duration"])
            assert len(took) > 10, took
            worst.append(took)
        redis.config_set("slowlog-log-slower-than", -1)
        deep = {"queue": "big", "state": "delayed", "page": 1_000, "size": 50}
        pages = client.get("/admin/jobs", params=deep).json()
        assert pages["total"] == MANY - 3_000
        assert all(row["due"] > time.time() for row in pages["jobs"])
        assert "cmdstat_keys" not in redis.info("commandstats")
    # The longest command of each kind, in the best of three rounds: a busy machine interrupts commands, but not the
    # same one every time.
    longest = {kind: min(took.get(kind, 0) for took in worst) for kind in worst[0]}
    print({path: f"{1000 * seconds:.0f} ms" for path, seconds in best.items()})
    print("longest µs", sorted(((time, kind) for kind, time in longest.items()), reverse=True)[:5])
    assert {kind: time for kind, time in longest.items() if time > SLOW_MICROSECONDS} == {}
    assert max(best.values()) < 0.3


def test_search_finds_any_job_by_id_and_goes_on_by_name(server, console):
    fill(server, "long", "wait", 30_000)
    fill(server, "long", "failed", 20)
    with client_of(console) as client:

        def ask(**more):
            return client.get("/admin/jobs", params={"queue": "long", **more}).json()

        assert [row["id"] for row in ask(q="wait-23456", size=1)["jobs"]] == ["wait-23456"]
        assert [row["state"] for row in ask(q="failed-20")["jobs"]] == ["failed"], "in whatever state"
        assert ask(q="failed-20", state="wait", offset=30_000)["jobs"] == []
        ids, offset = [], 0
        for _step in range(1_000):
            answer = ask(state="wait", q="T-2999", offset=offset)
            ids += [row["id"] for row in answer["jobs"]]
            if (offset := answer["next"]) is None:
                break
        assert sorted(ids) == sorted(f"wait-{n}" for n in (2999, *range(29990, 30_000)))
        whole = client.get("/admin/jobs/export", params={"queue": "long", "state": "failed"}).json()
        assert [row["payload"] for row in whole][:2] == [{"number": 20}, {"number": 19}]
        some = client.get("/admin/jobs/export", params={"queue": "long", "q": "T-2999"}).json()
        assert sorted(row["id"] for row in some) == sorted(ids), "what was searched for is what is exported"


@pytest.mark.needs_browser
def test_nothing_is_squeezed_or_reaches_below_its_neighbour(server, console, open_page):
    """Seen: a list below the detail beside it, buttons one letter wide, a label over its number."""
    queue = "analytics-of-the-european-region"
    fill(server, queue, "delayed", 3)
    with server.client() as redis:
        redis.zadd(f"bull:{queue}:prioritized", {"delayed-2": 1 << 32})
        redis.zrem(f"bull:{queue}:delayed", "delayed-2")
        clock = {"name": "report", "pattern": "*/15 8-18 * * 1-5", "tz": "America/New_York", "ic": "1"}
        redis.hset(f"bull:{queue}:repeat:every-quarter-hour-of-a-working-day", mapping=clock)
        redis.zadd(f"bull:{queue}:repeat", {"every-quarter-hour-of-a-working-day": (time.time() + 90_000) * 1000})
    with client_of(console) as client:
        until_sync(
            lambda: queue in [row["queue"] for row in client.get("/admin/queues").json().get("queues", [])],
            timeout=60,
            what="the new queue is found among the keys that other tests left",
        )
    for width in (1280, 390):
        page = open_page(console, "#/schedules", token=True, viewport={"width": width, "height": 800})
        run = page.get_by_role("button", name="Run now every-quarter")
        run.wait_for()
        assert until_sync(run.bounding_box)["height"] < 40
        row = page.locator("tbody tr", has_text="every-quarter")
        assert row.locator("[data-label=Runs]").inner_text().split() == ["0"], "the one to come has not run"
        assert until_sync(page.locator("#nav [aria-current]").bounding_box)["x"] >= 0
        page.goto(f"/#/jobs/{queue}/delayed-2")
        page.locator(".detail .pill").first.wait_for()
        if width == 1280:
            # An element that is drawn again has no box for a moment.
            table, detail = (until_sync(page.locator(name).bounding_box) for name in ("table.rows", ".detail"))
            assert table["x"] + table["width"] <= detail["x"]


@pytest.fixture(scope="module")
def stored(server, tmp_path_factory):
    """A console with a database: many dead letters, and a schedule that missed two ticks."""
    folder = tmp_path_factory.mktemp("stored")
    url = f"sqlite:///{folder / 'service.db'}"

    snapshot = json.dumps({"fields": {"data": '{"text": "' + 1_000 * "x" + '"}'}, "logs": []})
    same = {"name": "charge", "cause": "exhausted", "reason": HOSTILE, "attempts_made": 3, "snapshot": snapshot}
    letters = [
        {**same, "id": f"{n:032x}", "queue": f"q{n % 3}", "job_id": f"order-{n}", "failed_at": n, "archived_at": n}
        for n in range(LETTERS)
    ]
    counted = {"id": "nightly", "last_slot": 1_790_000_000_000, "ticks": 5, "missed": 2, "skipped": 0}
    lost = [{"id": "nightly", "slot": 1_789_000_000_000 + n} for n in (0, 3_600_000)]
    make_store(url, (dead_letters, letters), (schedule_state, [counted]), (missed_slots, lost))
    with server.client() as redis:
        redis.hset("bull:clock:meta", "opts.maxLenEvents", "10000")
        redis.zadd("bull:clock:repeat", {"nightly": (time.time() + 3_600) * 1000})
        redis.hset("bull:clock:repeat:nightly", mapping={"name": "report", "every": "86400000", "ic": "5"})
    running = ConsoleServer(folder, server.url, "--database", url)
    yield running
    running.close()


def test_every_dead_letter_is_reached_in_time(stored):
    best = {}
    with client_of(stored) as client:

        def ask(**query):
            began = time.monotonic()
            answer = client.get("/admin/dead-letters", params=query).json()
            best[str(query)] = min(best.get(str(query), 60.0), time.monotonic() - began)
            return answer

        for _round in range(3):  # the best of them: the machine may be busy
            first, last = ask(), ask(page=399)
            assert [first["total"], first["queues"]] == [LETTERS, ["q0", "q1", "q2"]]
            assert first["dead_letters"][0]["job_id"] == f"order-{LETTERS - 1}"
            assert last["dead_letters"][-1]["job_id"] == "order-0"
            [letter] = ask(q="ORDER-16181", queue="q2")["dead_letters"]
            assert letter["job_id"] == "order-16181"
            assert ask(q="100%_")["total"] == 0, "the text is not a pattern"
    assert max(best.values()) < 0.3, best


@pytest.mark.needs_browser
def test_dead_letters_are_paged_and_missed_ticks_listed(stored, open_page):
    page = open_page(stored, "#/letters?queue=q1", token=True)
    page.get_by_text("1–50 of 6,667 dead letters").wait_for()
    page.get_by_role("button", name="Replay all 6,667…").wait_for()
    page.get_by_role("button", name="Next page").click()
    page.get_by_text("51–100 of 6,667 dead letters").wait_for()
    page.get_by_label("Search").fill("order-16182")
    page.get_by_text("No dead letter matches").wait_for()
    page.get_by_label("Queue").select_option("q0")
    page.get_by_text("1–1 of 1 dead letter").wait_for()
    assert page.url.endswith("#/letters?queue=q0&q=order-16182")
    page.get_by_role("link", name="charge").click()
    detail = page.locator(".detail")
    detail.get_by_text(HOSTILE).wait_for()
    detail.get_by_role("link", name="Close").click()
    page.get_by_text("1–1 of 1 dead letter").wait_for()

    page.goto("/#/schedules")
    page.get_by_text("2 missed").click()
    assert page.locator("details li:visible").count() == 2


@pytest.mark.needs_browser
def test_odd_names_and_html_are_shown_as_text_and_acted_on(server, console, open_page):
    queue = f"a/b %2F ü?#&{HOSTILE}"
    fill(server, queue, "failed", 2)
    with server.client() as redis:
        hostile = {"name": HOSTILE, "failedReason": HOSTILE, "stacktrace": json.dumps([HOSTILE])}
        redis.rename(f"bull:{queue}:failed-1", f"bull:{queue}:x/{HOSTILE}")
        redis.hset(f"bull:{queue}:x/{HOSTILE}", mapping={**hostile, "data": json.dumps({HOSTILE: HOSTILE})})
        redis.zadd(f"bull:{queue}:failed", {f"x/{HOSTILE}": time.time() * 1000})
        redis.zrem(f"bull:{queue}:failed", "failed-1")
    page = open_page(console, "#/jobs", token=True, viewport={"width": 390, "height": 800})
    page.get_by_label("Queue").select_option(queue)
    page.get_by_text("1–2 of 2 jobs").wait_for()
    page.get_by_role("link", name=HOSTILE).click()
    detail = page.locator(".detail")
    until_sync(lambda: HOSTILE in detail.locator("[data-part=payload]").inner_text(), what="the payload")
    assert page.locator("img[src=x]").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    detail.get_by_role("button", name="Retry").click()
    page.get_by_text("Retry: the job was retried.").wait_for()
    page.goto("/#/overview")
    page.get_by_role("button", name=f"Pause {queue}").click()
    page.get_by_role("button", name="Pause it").click()
    page.get_by_text("is paused.").wait_for()
    with server.client() as redis:
        assert redis.hget(f"bull:{queue}:meta", "paused") == "1"


@pytest.mark.needs_node
def test_a_node_service_is_seen_and_acted_on_and_its_worker_agrees(server, console, spawn, node_home):
    script = node_home / NODE_SIDE.name  # modules are looked up from where the script lies
    shutil.copy(NODE_SIDE, script)
    node = spawn.command("node", script, server.port, cwd=node_home)
    node.line_sync('"ready"', timeout=60)
    with client_of(console) as client:

        def job(ident):
            return client.get(f"/admin/jobs/mail/{ident}").json()

        def ends(ident, state):
            until_sync(lambda: job(ident).get("state") == state, timeout=60, what=f"{ident} is {state}")
            return job(ident)

        done = ends("welcome-ann", "completed")
        assert done["result"] == {"sent": "ann"}
        assert done["logs"] == ["to ann"]
        assert done["payload"]["password"] == "[redacted]"
        failed = ends("breaks-bob", "failed")
        assert "the mail server said no" in failed["reason"]
        assert "node_side.mjs" in failed["attempts_failed"][0]["error"], "a stack trace"
        until_sync(
            lambda: "mail" in client.get("/admin/workers").json()["queues"], timeout=60, what="found by its keys"
        )
        who = client.get("/admin/workers").json()
        assert {each["name"] for each in who["workers"] if each["queue"] == "mail"} == {"post-office"}
        [held] = [each for each in who["active"] if each["id"] == "hold-zoe"]
        assert [held["worker"], held["held"]] == ["post-office", True]
        [row] = [row for row in client.get("/admin/queues").json()["queues"] if row["queue"] == "mail"]
        assert row["workers"] == 1

        assert client.post("/admin/jobs/mail/breaks-bob/retry").status_code == 200
        ends("breaks-bob", "completed")
        assert client.post("/admin/jobs/mail/hold-zoe/remove").status_code == 409, "a worker holds it"
        assert client.post("/admin/queues/mail/pause").json() == {"paused": True}
        added = client.post(
            "/admin/jobs", json={"queue": "mail", "name": "news", "data": {"to": "new"}, "job_id": "n1"}
        )
        assert added.status_code == 201
        twin = client.post("/admin/jobs", json={"queue": "mail", "name": "news", "data": {}, "job_id": "n1"})
        assert twin.status_code == 409, "BullMQ would drop it silently"
        assert client.post("/admin/jobs/mail/later-eve/promote").status_code == 200
        assert job("n1")["state"] == job("later-eve")["state"] == "wait"
        assert client.post("/admin/queues/mail/resume").json() == {"paused": False}
        assert ends("n1", "completed")["result"] == {"sent": "new"}
        ends("later-eve", "completed")

        def digest():
            return next(each for each in client.get("/admin/schedules").json()["schedules"] if each["id"] == "digest")

        schedule = digest()
        assert [schedule["tz"], schedule["overdue"]] == ["Europe/Berlin", False]
        assert schedule["next"] > time.time()
        made = client.post("/admin/schedules/mail/digest/run").json()
        assert ends(made["job_id"], "completed")["result"] == {"sent": "all"}
        assert digest()["next"] == schedule["next"], "beside the regular runs"


def test_everything_needs_the_token_in_a_header_and_guessing_ends(server, tmp_path):
    console = ConsoleServer(tmp_path, server.url)
    try:
        with client_of(console, "wrong") as guess, httpx2.Client(base_url=console.url) as bare:
            for method, path in (
                ("GET", "/admin/queues"),
                ("GET", "/admin/session"),
                ("GET", "/admin/jobs/export"),
                ("GET", "/admin/jobs/a/b"),
                ("GET", "/admin/workers"),
                ("GET", "/admin/schedules"),
                ("POST", "/admin/queues/a/pause"),
                ("POST", "/admin/jobs/a/b/remove"),
                ("POST", "/admin/schedules/a/b/run"),
            ):
                assert bare.request(method, path).status_code == 401, path
            for method, path in (("POST", "/admin/jobs"), ("POST", "/admin/actions")):
                assert bare.request(method, path, json={}).status_code in (401, 422), path
            page = bare.get("/")
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert bare.get("/", headers={"host": "evil.example"}).status_code == 421
            assert bare.get("/admin/queues", params={"token": TOKEN}).status_code == 400
            statuses = [guess.get("/admin/session").status_code for _ in range(14)]
            assert (statuses[:10], statuses[-1]) == ([401] * 10, 429)
            right = guess.get("/admin/session", headers={"authorization": f"Bearer {TOKEN}"})
            assert (right.status_code, int(right.headers["retry-after"]) <= 6) == (429, True), "the right token, too"
            assert bare.get("/").status_code == 200
        with client_of(console) as client:
            foreign = {"origin": "https://evil.example"}
            assert client.post("/admin/queues/long/pause", headers=foreign).status_code == 403
    finally:
        console.close()


@pytest.mark.needs_browser
def test_an_outage_of_redis_is_shown_and_the_token_stays_valid(tmp_path, open_page):
    own = RedisServer.start()
    url = f"sqlite:///{tmp_path / 'service.db'}"
    make_store(url)
    console = ConsoleServer(tmp_path, own.url, "--database", url)
    try:
        fill(own, "mail", "failed", 3)
        own.kill()
        page = open_page(console, "#/overview")
        page.watched.expect("503", "401", "ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE")
        page.get_by_role("button", name="Enter the admin token").first.click()
        field = page.get_by_label("Token: the token")
        field.fill("not the token at all")
        field.press("Enter")
        page.get_by_text("Token refused.").wait_for()
        field.fill(TOKEN)
        field.press("Enter")
        page.get_by_text("Admin: accepted").wait_for()
        page.get_by_role("alert").filter(has_text="Redis").first.wait_for()
        page.goto("/#/jobs")
        page.locator("main .note.tone-bad").wait_for()
        page.goto("/#/letters")
        page.get_by_text("No dead letters").wait_for()  # the database is there
        page.goto("/#/jobs")
        own.restart()
        fill(own, "mail", "failed", 3)
        page.locator("tbody tr").first.wait_for(timeout=60_000)
        until_sync(lambda: page.locator("#banner").is_hidden(), timeout=30, what="the banner is gone")
        own.kill()  # while somebody looks
        page.get_by_role("alert").filter(has_text="Redis").first.wait_for()
        assert page.locator("tbody tr").count(), "what was seen last stays"
    finally:
        console.close()
        own.stop()


@pytest.mark.needs_browser
def test_an_operator_pages_searches_retries_and_sends_the_address(server, console, open_page):
    fill(server, "posts", "failed", 5_000)
    fill(server, "posts", "delayed", 2)
    page = open_page(console, "#/jobs/posts?state=failed", token=True)
    page.get_by_text("1–50 of 5,000 jobs").wait_for()
    page.get_by_role("button", name="Next page").click()
    page.get_by_text("51–100 of 5,000 jobs").wait_for()
    assert page.url.endswith("#/jobs/posts?state=failed&page=1")
    page.reload()
    page.get_by_text("51–100 of 5,000 jobs").wait_for()
    page.get_by_label("Id or name").fill("failed-4321")
    page.get_by_role("link", name="job2").wait_for()
    assert "q=failed-4321" in page.url
    page.get_by_text("1 job found").wait_for()
    page.get_by_label("Select all shown").check()
    page.get_by_role("button", name="Remove 1 selected…").wait_for()
    page.get_by_role("link", name="job2").click()
    detail = page.locator(".detail")
    detail.get_by_text("failed-4321", exact=True).wait_for()
    detail.get_by_role("button", name="Copy Payload").click()
    page.get_by_text("Copied.").or_(page.get_by_text("Selected: press Ctrl+C.")).wait_for()
    detail.get_by_role("button", name="Retry").click()
    page.get_by_text("Retry: the job was retried.").wait_for()
    detail.locator(".card-head .pill", has_text="waiting").first.wait_for()

    page.goto("/#/jobs/posts?state=failed")
    page.get_by_role("button", name="Retry all 4,999…").click()
    page.get_by_role("heading", name="Retry: all 4,999 failed jobs of posts?").wait_for()
    page.get_by_role("button", name="Retry 4,999").click()
    page.get_by_text("4,999 jobs retried.").wait_for(timeout=60_000)
    page.goto("/#/jobs/posts?state=delayed")
    page.locator("tbody time", has_text=re.compile(r"^in (59|60) min")).first.wait_for()

    page.goto("/#/overview")
    card = page.locator("[data-key=posts]")
    card.get_by_text("nobody is working").wait_for()
    card.get_by_role("button", name="Pause posts").click()
    page.get_by_role("button", name="Pause it").click()
    card.locator(".pill", has_text="paused").wait_for()
    assert "Times in " in page.locator("#zone").inner_text()
    fresh = open_page(console, "#/overview", token=True)
    label = fresh.locator("[data-key=posts] svg[role=img]").first.get_attribute("aria-label")
    assert int(re.findall(r"last (\d+) samples", label)[0]) > 1, "what was before the page"

    page.goto("/#/jobs/posts")
    page.get_by_role("button", name="Add a job…").click()
    page.get_by_label("Name of the job").fill("by-hand")
    page.get_by_label("Id (optional").fill("new-1")
    page.get_by_role("button", name="Add it").click()
    page.locator(".detail").get_by_text("by-hand").first.wait_for()


@pytest.mark.needs_browser
def test_a_detail_on_a_phone_is_in_sight_and_the_list_is_where_it_was(server, console, open_page):
    fill(server, "phone", "failed", 60)
    page = open_page(console, "#/jobs/phone", token=True, viewport={"width": 390, "height": 800})
    last = page.locator("tbody tr a").nth(49)
    last.scroll_into_view_if_needed()
    before = page.evaluate("scrollY")
    assert before > 3_000
    last.click()
    heading = page.locator(".detail h2")
    until_sync(lambda: bool(heading.inner_text()), what="the detail")
    box = heading.bounding_box()
    assert box is not None
    assert 0 <= box["y"] < 800, "8,000 pixels further down it was never found"
    page.locator(".detail").get_by_role("link", name="Close").click()
    until_sync(lambda: abs(page.evaluate("scrollY") - before) < 200, what="back in the list")
