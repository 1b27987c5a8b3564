"""What comes from outside: other customers' keys, strange hosts, huge bodies, secrets in wrong places."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from fastapi.testclient import TestClient

from {@ package @} import edge
from {@ package @}.api import create_api
from {@ package @}.settings import Settings

from .example import BODY, OTHER_BODY, URL

HUGE = 100_000


def post(api: TestClient, customer: str, key: str, body: Mapping[str, object]) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {customer}", "Idempotency-Key": key}
    answer = api.post(URL, json=body, headers=headers)
    return answer.status_code, answer.json().get("id", "")


def test_two_customers_may_use_the_same_key(api: TestClient) -> None:
    first, second = post(api, "ann", "1", BODY), post(api, "ben", "1", OTHER_BODY)
    assert first[0] == second[0] == 202
    assert first[1] != second[1]
    assert post(api, "ann", "1", BODY) == first
    assert post(api, "ben", "1", OTHER_BODY) == second
    assert post(api, "ben", "2", BODY)[1] not in (first[1], second[1])


def test_a_key_that_was_used_for_another_body_is_refused(api: TestClient) -> None:
    status, ident = post(api, "ann", "1", BODY)
    assert post(api, "ann", "1", OTHER_BODY) == (422, "")
    assert (status, ident) == post(api, "ann", "1", BODY)


def test_requests_without_a_key_are_as_many_as_were_sent(api: TestClient) -> None:
    assert len({api.post(URL, json=BODY).json()["id"] for _ in range(3)}) == 3


def test_the_console_is_at_its_place_and_needs_the_token(settings: Settings) -> None:
    pytest.importorskip("queuesmith", reason="pip install -e '.[console]'")
    token = "a-token-of-the-tests"
    watched = settings.model_copy(update={"admin_token": token})
    with TestClient(create_api(watched), base_url="http://localhost") as api:
        assert "<title>Console</title>" in api.get("/console").text
        views = api.get("/console/console.json").json()["views"]
        assert {"overview", "{@ 'sagas' if kind == 'event-driven' else 'letters' @}"} <= set(views)
        queues = "/console/admin/queues"
        assert api.get(queues).status_code == 401
        assert api.get(queues, headers={"Authorization": f"Bearer {token}"}).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body_is_refused(api: TestClient, chunked: bool) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(HUGE // 1000):
            yield b" " * 1000

    headers = {"content-type": "application/json"}
    answer = api.post(URL, content=pieces() if chunked else b" " * HUGE, headers=headers)
    assert answer.status_code == 413


async def test_a_body_that_stops_coming_is_not_waited_for(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "BODY_SECONDS", 0.1)
    headers = {"host": "localhost", "content-type": "application/json", "content-length": "9"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": URL,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    sent: list[Any] = []

    async def nothing_comes() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async with asyncio.timeout(10):
        await create_api(settings)(scope, nothing_comes, send)
    assert sent[0]["status"] == 408


def test_another_host_name_is_not_served(api: TestClient) -> None:
    strange = {"host": "attacker.example"}
    assert api.post(URL, json=BODY, headers=strange).status_code == 421
    assert api.get("/readyz", headers=strange).status_code == 200  # probes call by address


def test_an_error_does_not_repeat_what_was_sent(api: TestClient) -> None:
    for body in ({**BODY, "hunter2": "hunter2"}, dict.fromkeys(BODY, {"hunter2": "hunter2"}), "hunter2"):
        answer = api.post(URL, json=body)
        assert "hunter2" not in answer.text
    assert api.post(URL, json=dict.fromkeys(BODY, {})).status_code == 422
    assert "hunter2" not in api.get(f"{URL}/hunter2").text


def test_no_page_loads_anything_from_another_host(api: TestClient) -> None:
    for page in ("/docs", "/redoc"):
        assert api.get(page).status_code == 404
    assert api.get("/openapi.json").status_code == 200
