"""What an HTTP answer says about an effect."""

import socket
import threading
import time
import urllib.request
from email.utils import formatdate

import httpx2 as httpx
import pytest
import requests

from studyhall.patterns.core.errors import RateLimited
from studyhall.patterns.outside_call import NotMade
from studyhall.patterns.outside_call.http import answer_of, sync_answer_of


async def answered(status, **options):
    transport = httpx.MockTransport(lambda request: httpx.Response(status, **options))
    async with httpx.AsyncClient(transport=transport, base_url="http://provider") as http:
        return await answer_of(http.post("/labels"))


async def test_a_good_answer_is_its_json_or_its_text():
    assert await answered(201, json={"id": 7}) == {"id": 7}
    assert await answered(200, text="taken") == "taken"
    assert await answered(204) == ""


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_retry_after_is_kept(form):
    now = time.time()  # not when the tests are collected: this one may run minutes later
    header = "7" if form == "seconds" else formatdate(now + 7.9, usegmt=True)
    with pytest.raises(RateLimited) as raised:
        await answered(429, headers={"Retry-After": header})
    took = time.time() - now
    assert 6.8 - took <= raised.value.retry_after <= 8


@pytest.mark.parametrize(
    ("error", "kind"),
    {httpx.ConnectError("refused"): NotMade, httpx.ReadTimeout("late"): httpx.ReadTimeout}.items(),
    ids=["no connection", "no answer"],
)
async def test_only_a_request_that_never_left_was_not_made(error, kind):
    def broken(_request):
        raise error

    async with httpx.AsyncClient(transport=httpx.MockTransport(broken), base_url="http://provider") as http:
        with pytest.raises(kind):
            await answer_of(http.post("/labels"))


def test_clients_without_an_event_loop_are_judged_alike():
    def respond(request):
        return httpx.Response(int(request.url.path[1:]), json={"id": 7}, headers={"Retry-After": "7"})

    with httpx.Client(transport=httpx.MockTransport(respond), base_url="http://provider") as http:
        assert sync_answer_of(lambda: http.post("/201")) == {"id": 7}
        with pytest.raises(RateLimited) as raised:
            sync_answer_of(lambda: http.post("/429"))
    assert raised.value.retry_after == 7
    closed = "http://127.0.0.1:1/"
    for request in (
        lambda: httpx.post(closed),
        lambda: requests.post(closed, timeout=5),
        lambda: urllib.request.urlopen(closed, b""),
    ):
        with pytest.raises(NotMade, match="no connection"):
            sync_answer_of(request)


def test_an_answer_that_is_cut_off_may_have_been_made():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def cut():
            for _ in range(2):
                connection = server.accept()[0]
                connection.recv(65536)
                connection.close()

        thread = threading.Thread(target=cut)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        with pytest.raises(requests.ConnectionError):
            sync_answer_of(lambda: requests.post(url, timeout=10))
        with pytest.raises(httpx.RemoteProtocolError):
            sync_answer_of(lambda: httpx.post(url, timeout=10))
        thread.join(10)
