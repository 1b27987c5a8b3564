"""StudyHall over HTTP, as processes: documents, orders, events, probes, admin."""

import json
import time
from pathlib import Path

import pytest

from harness.api import standing_api
from harness.redis import RedisServer

SAMPLES = Path(__file__).parents[3] / "reference" / "samples"
TEXT = (SAMPLES / "water-cycle.md").read_bytes()
PROBLEM = "application/problem+json"


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.needs_postgres)])
def hall(request, tmp_path_factory):
    """Every test twice: on the embedded database and on PostgreSQL."""
    database = ""
    if request.param == "postgres":
        postgres = request.getfixturevalue("postgres_server")
        postgres.execute("CREATE DATABASE api")
        database = postgres.database_url("api")
    server = RedisServer.start()
    directory = tmp_path_factory.mktemp("api")
    with standing_api(directory, server.url, request_rate="10000", database=database) as standing:
        yield standing
    server.stop()
    assert (directory / "data" / "studyhall.db").exists() == (not database), "on the database it was given"
    if database:
        postgres.execute("DROP DATABASE api WITH (FORCE)")


def upload(hall, content=TEXT, name="water.md", **headers):
    return hall.client.post("/documents", files={"file": (name, content)}, headers=headers)


def all_through(document):
    return all(stage["state"] == "completed" for stage in document["stages"])


def test_a_document_goes_through_and_its_results_can_be_read(hall):
    made = upload(hall)
    assert made.status_code == 202
    assert made.headers["location"] == made.json()["href"]
    done = hall.until(made.json()["href"], all_through)
    assert done["status"] == "ready"
    assert done["graph"]["concepts"]
    assert done["quiz"]["questions"]
    assert done["explanations"]
    assert made.json()["id"] in [row["id"] for row in hall.client.get("/documents").json()]


def test_a_client_that_waits_gets_the_result_and_an_impatient_one_the_id(hall):
    waited = upload(hall, prefer="wait=25")
    assert waited.status_code == 201
    assert waited.headers["preference-applied"] == "wait=25"
    assert all_through(hall.client.get(waited.json()["href"]).json())
    assert upload(hall, prefer="wait=0").status_code == 202


def test_the_same_key_is_the_same_upload_and_another_body_is_refused(hall):
    first = upload(hall, **{"idempotency-key": "upload-1"})
    again = upload(hall, **{"idempotency-key": "upload-1"})
    assert again.json() == first.json()
    assert again.headers["idempotency-replayed"] == "true"
    other = upload(hall, TEXT + b"more", **{"idempotency-key": "upload-1"})
    assert other.status_code == 422
    assert other.json()["type"] == "urn:queuesmith:problem:key-reused"
    bobs = upload(hall, **{"idempotency-key": "upload-1", "x-user": "bob"})
    assert bobs.json()["id"] != first.json()["id"], "keys are per user"


@pytest.mark.parametrize(
    ("content", "name", "status"),
    [
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "notes.md", 415),
        (b"MZ" + bytes(500), "report.pdf", 415),
        (b"<!doctype html><script>alert(1)</script>", "page.txt", 415),
    ],
)
def test_the_type_of_a_file_comes_from_its_content(hall, content, name, status):
    refused = upload(hall, content, name)
    assert refused.status_code == status
    assert refused.headers["content-type"] == PROBLEM
    assert "Upload a PDF" in refused.json()["detail"]


def test_a_document_is_its_owners_alone(hall):
    made = upload(hall, **{"x-user": "ann"}).json()
    for method, path in (("GET", ""), ("POST", "/cancel")):
        assert hall.client.request(method, made["href"] + path, headers={"x-user": "bob"}).status_code == 404
    assert hall.client.get(made["href"], headers={"x-user": "ann"}).status_code == 200


def test_a_running_document_can_be_cancelled(hall):
    made = upload(hall, TEXT * 20)
    stopped = hall.client.post(made.json()["href"] + "/cancel", json={"reason": "wrong file"})
    assert stopped.status_code == 200
    assert {each["state"] for each in stopped.json()} & {"cancelled", "stopping", "too-late"}
    ended = hall.until(
        made.json()["href"], lambda d: all(s["state"] in ("completed", "cancelled") for s in d["stages"])
    )
    assert ended["explanations"] is None or all_through(ended)
    listed = {}
    for row in hall.admin.get("/admin/queues").json()["queues"]:
        wanted = {"queue": row["queue"], "state": "completed", "size": 100}
        listed |= {job["id"]: job["state"] for job in hall.admin.get("/admin/jobs", params=wanted).json()["jobs"]}
    stages = {f"{stage['name']}.{made.json()['id']}": stage["state"] for stage in ended["stages"]}
    assert {job: listed[job] for job in stages} == stages, "the list of jobs tells cancelled from completed"
    job = f"graph-generation.{made.json()['id']}"
    nodes = hall.admin.get(f"/admin/flows/graphs/{job}").json()["nodes"]
    assert {node["job_id"]: node["state"] for node in nodes} == stages


def test_an_order_is_taken_once_per_key_and_followed(hall):
    packs = {pack["id"]: pack for pack in hall.client.get("/packs").json()}
    wanted, key = {"pack_id": "biology-101", "seats": 2}, {"idempotency-key": "order-1"}
    first = hall.client.post("/orders", json=wanted, headers=key)
    assert first.status_code == 201
    assert first.json()["amount_cents"] == 2 * packs["biology-101"]["price_cents"]
    assert hall.client.post("/orders", json=wanted, headers=key).json() == first.json()
    assert hall.client.post("/orders", json={**wanted, "seats": 3}, headers=key).status_code == 422
    shown = hall.client.get(f"/orders/{first.json()['id']}").json()
    assert [step["name"] for step in shown["steps"]] == ["place-order", "reserve-seats", "charge", "confirm"]
    assert hall.client.get(f"/orders/{first.json()['id']}", headers={"x-user": "bob"}).status_code == 404
    unknown = hall.client.post("/orders", json={"pack_id": "nothing"})
    assert unknown.status_code == 422
    assert "biology-101" in unknown.json()["detail"], "it names the packs"
    assert [order["id"] for order in hall.client.get("/orders").json()] == [first.json()["id"]]


def events(response):
    """(id, event, data) of a stream."""
    fields = {}
    for line in response.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield fields.get("id", ""), fields["event"], json.loads(fields["data"])
            fields = {}


def follow(hall, document, last="", stop_after=""):
    """Events of a document until its last stage is completed, or until the first `stop_after`."""
    headers = {"last-event-id": last} if last else {}
    seen = []
    with hall.client.stream("GET", f"/events?document={document}", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for ident, event, data in events(response):
            if event == "idle":
                continue
            seen.append((ident, event, data))
            job = data.get("job_id", "")
            if event == stop_after or (event == "completed" and job.startswith("connection-explanations")):
                return seen
    raise AssertionError(f"the stream ended: {seen}")


def test_a_browser_that_reconnects_sees_every_event_once(hall):
    start = next(iter(_first_id(hall)))
    document = upload(hall, **{"idempotency-key": f"events-{time.time_ns()}"}).json()["id"]
    first = follow(hall, document, last=start, stop_after="active")
    rest = follow(hall, document, last=first[-1][0])
    whole = follow(hall, document, last=start)
    assert in_order(first + rest) == in_order(whole), "in two parts or in one: the same"
    kinds = {event for _, event, _ in first + rest}
    assert {"added", "active", "progress", "completed"} <= kinds
    assert "gap" not in kinds


def in_order(seen):
    """By time, then queue: the order of two queues within one millisecond is not promised."""
    rows = [(event, data) for _, event, data in seen]
    return sorted(rows, key=lambda row: (row[1].get("at", 0), row[1].get("queue", "")))


def _first_id(hall):
    """The stream's present position: what the admin stream tells when something happens."""
    upload(hall)
    with hall.admin.stream("GET", "/admin/events") as response:
        upload(hall)
        for ident, _, _ in events(response):
            yield ident


def test_events_are_the_owners_alone(hall):
    start = next(iter(_first_id(hall)))
    document = upload(hall, **{"x-user": "ann"}).json()["id"]
    hall.admin.get("/admin/queues")
    own = upload(hall).json()["id"]
    with hall.client.stream("GET", "/events", headers={"last-event-id": start}) as response:
        for _, event, data in events(response):
            assert document not in data.get("job_id", "")
            if event == "completed" and data["job_id"] == f"connection-explanations.{own}":
                break


def test_probes_and_metrics(hall):
    assert hall.client.get("/healthz").json() == {"status": "ok"}
    assert hall.client.get("/readyz").json() == {"status": "ready", "problems": {}}
    text = hall.client.get("/metrics").text
    assert 'queue_depth{queue="documents",state="waiting"}' in text
    assert "redis_up 1" in text


def test_admin_sees_queues_jobs_flows_and_what_each_job_went_through(hall):
    document = upload(hall, prefer="wait=25").json()["id"]
    queues = {row["queue"]: row for row in hall.admin.get("/admin/queues").json()["queues"]}
    assert queues["graphs"]["completed_last_minute"] >= 1
    assert {row["queue"] for row in hall.admin.get("/admin/history").json()[-1]["queues"]} == set(queues)
    page = hall.admin.get("/admin/jobs", params={"queue": "graphs", "state": "completed", "size": 1}).json()
    assert page["total"] >= 1
    assert len(page["jobs"]) == 1
    job = hall.admin.get(f"/admin/jobs/graphs/graph-generation.{document}").json()
    assert [entry["event"] for entry in job["timeline"]][-2:] == ["active", "completed"]
    assert job["payload"]["payload"]["document_id"] == document
    assert "sig" not in job["payload"]
    flow = hall.admin.get(f"/admin/flows/graphs/graph-generation.{document}").json()
    assert [len(flow["nodes"]), len(flow["edges"])] == [4, 3]
    for path in ("/admin/jobs/graphs/none", "/admin/jobs/none/x", "/admin/flows/graphs/none"):
        assert hall.admin.get(path).status_code == 404


def test_outbox_breakers_and_limits_can_be_looked_at(hall):
    hall.client.post("/orders", json={"pack_id": "biology-101"}, headers={"x-user": "outbox"})
    outbox = hall.admin.get("/admin/outbox").json()
    assert outbox["waiting"] >= 1, "no relay runs here"
    assert outbox["oldest"] >= 0
    limits = hall.admin.get("/admin/breakers").json()
    assert limits["depth_limit"] == 10_000
    assert limits["pending"]["parked"] == {}
    assert hall.admin.post("/admin/outbox/quarantine", json={"ids": ["none"]}).json() == {"requeued": 0}
    discard = {"ids": ["none"], "action": "discard"}
    assert hall.admin.post("/admin/outbox/quarantine", json=discard).status_code == 422


def test_the_api_describes_itself_without_another_host(hall):
    page = hall.client.get("/docs")
    assert page.status_code == 200
    assert "/documents/{document_id}/cancel" in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert "<script" not in page.text
    assert "/interactions" in hall.client.get("/openapi.json").json()["paths"]


def test_every_error_is_a_problem(hall):
    for response in (
        hall.client.get("/nowhere.json"),
        hall.client.delete("/documents"),
        hall.client.get("/documents/none"),
        hall.client.get("/documents?limit=0"),
        hall.client.post("/orders", content=b"{", headers={"content-type": "application/json"}),
        hall.client.post("/documents"),
        hall.client.get("/admin/queues"),
    ):
        assert response.status_code >= 400
        assert response.headers["content-type"] == PROBLEM
        assert response.json()["status"] == response.status_code
        assert response.json()["detail"]
        assert response.json()["correlation_id"] == response.headers["x-correlation-id"]


def _letters(hall):
    return hall.admin.get("/admin/dead-letters").json()["dead_letters"]


@pytest.mark.slow
def test_dead_letters_are_listed_shown_replayed_and_purged(hall):
    broken = upload(hall, b"%PDF-1.7 cut off", "broken.pdf").json()["id"]
    hall.until(f"/documents/{broken}", lambda d: d["status"] == "rejected")
    letters = []
    deadline = time.monotonic() + 30
    while not (letters := [x for x in _letters(hall) if broken in x["job_id"]]):
        assert time.monotonic() < deadline, "the sweep moves it to the dead letters"
        time.sleep(0.1)
    shown = hall.admin.get(f"/admin/dead-letters/{letters[0]['id']}").json()
    assert shown["attempts_failed"]
    replayed = hall.admin.post(f"/admin/dead-letters/{letters[0]['id']}/replay")
    assert replayed.json()["job_id"] == letters[0]["job_id"]
    again = hall.admin.post(f"/admin/dead-letters/{letters[0]['id']}/replay")
    assert again.status_code == 409, "a letter is replayed once"
    deadline = time.monotonic() + 30
    while not (newer := [x for x in _letters(hall) if broken in x["job_id"]]):
        assert time.monotonic() < deadline, "it dies again"
        time.sleep(0.1)
    many = hall.admin.post("/admin/dead-letters/replay", json={"ids": [newer[0]["id"], "nonsense"]})
    assert many.status_code == 202
    done = {}
    deadline = time.monotonic() + 30
    while (done := hall.admin.get(many.json()["href"]).json())["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert done["replayed"] == [letters[0]["job_id"]]
    assert "nonsense" in done["refused"]
    for wrong in ({}, {"ids": ["a"], "every": True}, {"ids": ["a"], "per_second": 0}):
        assert hall.admin.post("/admin/dead-letters/replay", json=wrong).status_code == 422
    assert hall.admin.post("/admin/dead-letters/purge", json={"older_than_days": 0}).status_code == 422
    purged = hall.admin.post("/admin/dead-letters/purge", json={"older_than_days": 0, "confirm": "purge"})
    assert purged.json()["purged"] >= 2


def test_a_stuck_saga_is_repaired_with_a_name_and_a_note(hall):
    order = hall.client.post("/orders", json={"pack_id": "history-1848"}, headers={"x-user": "saga"}).json()["id"]
    assert order in [saga["id"] for saga in hall.admin.get("/admin/sagas").json()]
    shown = hall.admin.get(f"/admin/sagas/{order}").json()
    assert [step["name"] for step in shown["steps"]] == ["place-order", "reserve-seats", "charge", "confirm"]
    repair = {"action": "compensate", "by": "ann", "note": "customer called"}
    repaired = hall.admin.post(f"/admin/sagas/{order}/repair", json=repair)
    assert repaired.json()["state"] == "compensating"
    assert "customer called" in str(repaired.json()["history"])
    assert hall.admin.post(f"/admin/sagas/{order}/repair", json={**repair, "note": ""}).status_code == 422
    assert hall.admin.post("/admin/sagas/none/repair", json=repair).status_code == 404
    wrong = {**repair, "action": "mark", "step": "charge", "outcome": "done"}
    assert hall.admin.post(f"/admin/sagas/{order}/repair", json=wrong).status_code == 409
