from __future__ import annotations

{@% if kind == 'async-flow' %@}
import json

{@% endif %@}
from fastapi.testclient import TestClient

from .example import BODY, URL
from .processes import Processes, until


def test_a_request_is_answered_at_once_and_done_by_a_worker(api: TestClient, processes: Processes) -> None:
    accepted = api.post(URL, json=BODY)
    assert accepted.status_code == 202
    where = accepted.headers["location"]
    assert api.get(where).json()["state"] == "waiting"
    processes.start("-m", "{@ package @}", "worker")
    until(lambda: api.get(where).json()["state"] == "completed", "completed job")
{@% if kind == 'async-flow' %@}


def test_progress_is_streamed_until_the_job_ends(api: TestClient, processes: Processes) -> None:
    ident = api.post(URL, json=BODY).json()["id"]
    processes.start("-m", "{@ package @}", "worker")
    with api.stream("GET", f"{URL}/{ident}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
    states = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert states[-1]["state"] == "completed"
    percents = [state["percent"] for state in states]
    assert percents == sorted(percents)
    assert len(set(percents)) > 2


def test_watching_what_does_not_exist_ends_at_once(api: TestClient) -> None:
    with api.stream("GET", f"{URL}/nobody/events") as stream:
        assert "event: unknown" in list(stream.iter_lines())
{@% endif %@}


def test_the_same_key_is_the_same_job(api: TestClient) -> None:
    key = {"Idempotency-Key": "once"}
    assert api.post(URL, json=BODY, headers=key).json() == api.post(URL, json=BODY, headers=key).json()
    assert 'queue_depth{queue="work",state="prioritized"} 1.0\n' in api.get("/metrics").text


def test_wrong_input_is_refused(api: TestClient) -> None:
    assert api.post(URL, json={**BODY, "surprise": 1}).status_code == 422
    assert api.get(f"{URL}/nobody").status_code == 404


def test_a_service_that_has_all_it_needs_is_ready(api: TestClient) -> None:
    assert [api.get(path).status_code for path in ("/healthz", "/readyz")] == [200, 200]
