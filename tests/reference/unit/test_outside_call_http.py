"""What an HTTP answer says about an effect."""

from __future__ import annotations

import time
from email.utils import formatdate

import httpx2 as httpx
import pytest

from studyhall.patterns.core.errors import RateLimited
from studyhall.patterns.outside_call import NotMade
from studyhall.patterns.outside_call.http import answer_of


async def answered(status: int, **options: object) -> object:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, **options))
    async with httpx.AsyncClient(transport=transport, base_url="http://provider") as http:
        return await answer_of(http.post("/labels"))


async def test_a_good_answer_is_its_json_or_its_text() -> None:
    assert await answered(201, json={"id": 7}) == {"id": 7}
    assert await answered(200, text="taken") == "taken"
    assert await answered(204) == ""


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_retry_after_is_kept(form: str) -> None:
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
async def test_only_a_request_that_never_left_was_not_made(error: Exception, kind: type[Exception]) -> None:
    def broken(_request: httpx.Request) -> httpx.Response:
        raise error

    async with httpx.AsyncClient(transport=httpx.MockTransport(broken), base_url="http://provider") as http:
        with pytest.raises(kind):
            await answer_of(http.post("/labels"))
