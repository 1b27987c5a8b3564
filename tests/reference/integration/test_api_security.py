"""Hostile requests against the running API: each is refused with a reason, and nothing leaks."""

import io
import json
import time
import zipfile

import httpx2
import pytest

from harness.api import TOKEN, standing_api
from harness.chat_platform import ChatPlatform
from harness.redis import RedisServer

TEXT = b"Rain is water that falls from clouds. Clouds are made of tiny drops of water. Drops grow and fall."
LIMIT = 300_000
platform = ChatPlatform()


@pytest.fixture(scope="module")
def server():
    made = RedisServer.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def hall(tmp_path_factory, server):
    options = {"max_document_bytes": str(LIMIT), "chat_public_key": platform.public_key, "request_rate": "10000"}
    with standing_api(tmp_path_factory.mktemp("api"), server.url, **options) as standing:
        yield standing


@pytest.fixture(scope="module")
def bare(tmp_path_factory, server):
    """No admin token, no chat key, small limits, no worker; a Redis database of its own."""
    options = {"admin_token": "", "request_rate": "5", "queue_depth": "3"}
    url = server.url.removesuffix("/0") + "/1"
    with standing_api(tmp_path_factory.mktemp("bare"), url, worker=False, **options) as standing:
        yield standing


def upload(hall, name, content=TEXT, **headers):
    return hall.client.post("/documents", files={"file": (name, content)}, headers=headers)


def slug(response):
    assert response.headers["content-type"] == "application/problem+json", response.text
    return str(response.json()["type"]).rpartition(":")[2]


def test_only_signed_and_fresh_interactions_are_read(hall):
    def post(body, headers):
        return hall.client.post("/interactions", content=body, headers=headers)

    body, headers = platform.signed({"type": 1})
    assert post(body, headers).json() == {"type": 1}, "PING, PONG"
    stranger, forged = ChatPlatform().signed({"type": 1})
    unsigned = {"content-type": "application/json"}
    stale = platform.signed({"type": 1}, at=time.time() - 600)
    ahead = platform.signed({"type": 1}, at=time.time() + 60)
    altered = (body.replace(b"1", b"2"), headers)
    for request in ((body, unsigned), (stranger, forged), stale, ahead, altered):
        refused = post(*request)
        assert refused.status_code == 401
        assert slug(refused) == "not-signed"
    for nonsense in (b"", b"\xff\xfe", b"[]", b'{"type":2}', b"[" * 10_000):
        refused = post(*platform.signed(nonsense))
        assert refused.status_code == 422, "signed nonsense is refused, not an error of ours"


def test_admin_needs_the_token_in_its_header(hall):
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": TOKEN},
        {"cookie": f"token={TOKEN}"},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": "Bearer " + "ä"},
    ):
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        refused = hall.client.get("/admin/queues", headers=raw)
        assert refused.status_code == 401, headers
        assert refused.headers["www-authenticate"] == "Bearer"
    allowed = hall.admin.get("/admin/queues")
    assert allowed.status_code == 200
    assert "set-cookie" not in allowed.headers


def test_a_token_in_the_address_is_refused_even_with_the_right_header(hall):
    for path in ("/admin/queues", "/events", "/", "/documents"):
        for name in ("token", "access_token", "Admin_Token"):
            refused = hall.admin.get(path, params={name: TOKEN})
            assert refused.status_code == 400
            assert slug(refused) == "token-in-url"
            assert TOKEN not in refused.text


def test_another_site_cannot_make_a_browser_act(hall):
    for headers in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ):
        assert slug(upload(hall, "x.md", **headers)) == "cross-site"
        purge = {"older_than_days": 0, "confirm": "purge"}
        refused = hall.admin.post("/admin/dead-letters/purge", json=purge, headers=headers)
        assert refused.status_code == 403
    preflight = hall.client.options("/orders", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in preflight.headers
    assert upload(hall, "x.md", origin=hall.url).status_code == 202, "the console itself may"
    rebound = hall.client.get("/admin/queues", headers={"host": "evil.example"})
    assert rebound.status_code == 421, "another name for our address"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../../../etc/cron.d/evil", "evil"),
        ("..\\..\\windows\\evil.md", "evil.md"),
        ("/etc/passwd", "passwd"),
        ("..", ".."),
        ("a" * 400, "a" * 255),
        ("<script>alert(1)</script>.md", "script>.md"),
        ("\u202egnp.md", None),
    ],
)
def test_file_names_are_shown_and_never_opened(hall, name, shown):
    before = {path for path in hall.data_dir.parent.rglob("*") if "blobs" not in path.parts}
    made = upload(hall, name)
    assert made.status_code == 202
    stored = hall.client.get(made.json()["href"]).json()
    if shown is not None:
        assert stored["name"] == shown
    after = {path for path in hall.data_dir.parent.rglob("*") if "blobs" not in path.parts}
    assert {path.name for path in after - before} <= {"studyhall.db-wal", "studyhall.db-shm"}
    blobs = [path for path in hall.data_dir.rglob("*") if "blobs" in path.parts and path.is_file()]
    assert all(len(path.name) == 32 for path in blobs), "names of our own making only"


def test_a_zip_bomb_is_refused_and_hurts_nobody(hall):
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("word/document.xml", b" " * 200_000_000)
    assert len(bomb.getvalue()) < LIMIT
    made = upload(hall, "bomb.docx", bomb.getvalue())
    rejected = hall.until(made.json()["href"], lambda d: d["status"] == "rejected")
    assert rejected["error"]
    fine = upload(hall, "fine.md")
    hall.until(fine.json()["href"], lambda d: d["stages"][0]["state"] == "completed")


def test_bodies_are_limited_while_they_stream(hall):
    assert upload(hall, "x.md", b"word " * (LIMIT // 4)).status_code == 413
    sent = 0

    def endless():
        nonlocal sent
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="x.md"\r\n\r\n'
        for _ in range(2_000):
            sent += 65_536
            yield b"word " * 13_107 + b"x"

    headers = {"content-type": "multipart/form-data; boundary=b"}
    try:
        refused = hall.client.post("/documents", content=endless(), headers=headers)
        assert refused.status_code == 413
    except httpx2.TransportError:
        pass  # the server hung up while we were sending
    assert sent < 100 * LIMIT, "it was stopped on the way"
    assert hall.client.post("/orders", json={"pack_id": "x" * 100_000}).status_code == 413
    assert hall.client.get("/healthz").status_code == 200


def test_what_people_send_reaches_neither_the_logs_nor_the_jobs(hall, server):
    secret = "hunter2-hunter2-hunter2"
    hall.client.get("/admin/queues", headers={"authorization": f"Bearer {secret}"})
    hall.client.get("/documents", params={"token": secret})
    hall.client.post("/orders", json={"pack_id": secret, "seats": secret}, headers={"idempotency-key": secret})
    hall.client.post("/orders", content=f'{{"password": "{secret}'.encode())
    made = upload(hall, f"{secret}.md", TEXT + secret.encode(), **{"idempotency-key": secret})
    hall.until(made.json()["href"], lambda d: d["stages"][0]["state"] == "completed")
    assert secret not in hall.logs()
    assert TOKEN not in hall.logs()
    assert platform.public_key not in hall.logs()
    with server.client() as client:
        jobs = [key for key in client.scan_iter("bull:*") if client.type(key) == "hash"]
        dumped = json.dumps([client.hgetall(key) for key in jobs])
    assert made.json()["id"] in dumped
    assert secret not in dumped


def test_pages_may_load_and_talk_to_nobody_else(hall):
    for path in ("/docs", "/openapi.json", "/documents", "/"):
        headers = hall.client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "server" not in headers


def test_without_a_token_admin_is_off_and_without_a_key_chat_is(bare):
    for path in ("/admin/queues", "/admin/dead-letters", "/admin/events", "/admin/sagas"):
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "Bearer None"}):
            refused = bare.client.get(path, headers=headers)
            assert refused.status_code == 403
            assert slug(refused) == "admin-off"
    body, headers = platform.signed({"type": 1})
    assert slug(bare.client.post("/interactions", content=body, headers=headers)) == "chat-off"


def test_a_full_queue_and_a_busy_client_are_told_when_to_come_back(bare):
    statuses = []
    full = None
    for number in range(40):
        response = upload(bare, f"{number}.md")
        statuses.append(response.status_code)
        if response.status_code == 503:
            full = response
        if {429, 503} <= set(statuses):
            break
    assert full is not None, statuses
    assert slug(full) == "overloaded"
    assert int(full.headers["retry-after"]) >= 1
    assert 429 in statuses, "more than the rate and its burst"
    assert statuses.count(202) < 10, "a flow puts jobs into four queues; each holds three"
