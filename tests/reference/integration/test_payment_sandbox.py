"""The payment sandbox, as a process, and the client that turns its answers into what to do next."""

import json
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from harness.waiting import until
from studyhall.orders.payments import Declined, OutcomeUnknown, Payments
from studyhall.patterns.core.errors import Permanent, RateLimited, Transient


class Provider:
    def __init__(self, process, url):
        self.process, self.url = process, url

    async def fault(self, kind, operation="charge", **more):
        async with httpx2.AsyncClient(base_url=self.url) as http:
            answer = await http.post("/admin/faults", json={"kind": kind, "operation": operation, **more})
            assert answer.status_code == 201, answer.text

    async def ledger(self):
        async with httpx2.AsyncClient(base_url=self.url) as http:
            return dict((await http.get("/admin/ledger")).json())


async def start(spawn, directory, port=0):
    process = spawn("studyhall.payment_sandbox", "--port", port, "--data-dir", directory)
    return Provider(process, json.loads(await process.line('"url"'))["url"])


@pytest_asyncio.fixture
async def provider(spawn, tmp_path):
    return await start(spawn, tmp_path)


BUY: dict[str, Any] = {"amount": 500, "customer": "ann", "method": "card_ok"}


async def test_one_charge_and_one_refund_per_key_however_often_asked(provider):
    async with Payments(provider.url) as payments:
        assert await payments.find("k") is None
        made = [await payments.charge("k", **BUY) for _ in range(3)]
        assert made[0] == made[1] == made[2]
        assert (await payments.find("k") or {})["id"] == made[0]["id"]
        assert (await provider.ledger())["net"] == 500
        back = [await payments.refund("r", charge_key="k") for _ in range(3)]
        assert back[0] == back[1] == back[2]
        assert back[0]["status"] == "refunded"
        with pytest.raises(Permanent, match="already_refunded"):
            await payments.refund("another", charge_key="k")
    ledger = await provider.ledger()
    assert (len(ledger["charges"]), len(ledger["refunds"]), ledger["net"]) == (1, 1, 0)


async def test_key_with_another_body_is_refused(provider):
    async with Payments(provider.url) as payments:
        await payments.charge("k", **BUY)
        with pytest.raises(Permanent, match="422 key_reused"):
            await payments.charge("k", **{**BUY, "amount": 501})
        await payments.refund("r", charge_key="k")
        with pytest.raises(Permanent, match="422 key_reused"):
            await payments.refund("r", charge_key="other")


async def test_a_charge_that_was_refunded_before_it_arrived_is_refused_forever(provider):
    async with Payments(provider.url) as payments:
        assert (await payments.refund("r", charge_key="k"))["status"] == "voided"
        with pytest.raises(Permanent, match="409 voided"):
            await payments.charge("k", **BUY)
    assert (await provider.ledger())["charges"] == []


async def test_kill_9_forgets_nothing_that_was_answered(spawn, tmp_path):
    provider = await start(spawn, tmp_path)
    async with Payments(provider.url) as payments:
        made = await payments.charge("k", **BUY)
        provider.process.kill()
        with pytest.raises(Transient):
            await payments.find("k")
        again = await start(spawn, tmp_path, int(provider.url.rsplit(":", 1)[1]))
        assert (await payments.find("k") or {})["id"] == made["id"]
        assert (await payments.refund("r", charge_key="k"))["status"] == "refunded"
    assert (await again.ledger())["net"] == 0


async def test_every_fault_becomes_the_error_that_says_what_to_do(provider):
    async with Payments(provider.url, timeout=30) as payments, Payments(provider.url, timeout=0.5) as hasty:
        await provider.fault("decline")
        with pytest.raises(Declined, match="402 declined"):
            await payments.charge("declined", **BUY)
        with pytest.raises(Declined):  # it stays declined under its key
            await payments.charge("declined", **BUY)
        await provider.fault("rate-limit", seconds=7)
        with pytest.raises(RateLimited) as limited:
            await payments.charge("limited", **BUY)
        assert limited.value.retry_after == 7
        await provider.fault("unavailable", times=2)
        for _ in range(2):
            with pytest.raises(Transient, match="503"):
                await payments.charge("down", **BUY)
        assert await payments.find("down") is None
        assert await payments.charge("down", **BUY), "the fault is used up"
        await provider.fault("lost-answer")
        with pytest.raises(OutcomeUnknown):
            await payments.charge("lost", **BUY)
        assert await payments.find("lost"), "it happened, only the answer was lost"
        await provider.fault("hang")
        with pytest.raises(OutcomeUnknown, match="Timeout"):
            await hasty.charge("hung", **BUY)
        assert await payments.find("hung") is None, "it never happened"
        await provider.fault("late", seconds=1)
        with pytest.raises(OutcomeUnknown, match="Timeout"):
            await hasty.charge("late", **BUY)
        await until(lambda: payments.find("late"), what="the late charge lands after the client gave up")


@pytest.mark.parametrize("body", [{"error": "too many"}, "busy", None])
async def test_an_answer_of_a_proxy_is_judged_by_its_status(body):
    """An error that is not an object raised AttributeError: Retry-After was lost, and orders were cancelled."""
    answer = httpx2.Response(429, json=body, headers={"Retry-After": "7"})
    async with Payments("http://nowhere") as payments:
        played = httpx2.MockTransport(lambda request: answer)
        payments._http = httpx2.AsyncClient(base_url="http://nowhere", transport=played)
        with pytest.raises(RateLimited) as limited:
            await payments.charge("k", **BUY)
    assert limited.value.retry_after == 7
