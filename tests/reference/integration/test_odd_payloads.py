"""Values that JSON cannot carry: refused by name at enqueue, and at the worker if a stranger wrote them."""

import json
import math
from typing import Any

import pytest
from pydantic import BaseModel

from harness.pipelines import JobSetup, full_producer
from harness.waiting import until
from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.core.plain_json import NotJson
from studyhall.patterns.idempotency import fingerprint
from studyhall.patterns.job_ids import InvalidKey
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.signed_payload import Signer
from studyhall.patterns.typed_jobs import JobTypes, MalformedPayload, Payload

SECRET = "the value itself"


class Strict(Payload):
    value: Any = None
    note: str = SECRET


class Loose(BaseModel):
    """Somebody's own model, with pydantic's defaults."""

    value: Any = None
    number: float = 0.0
    count: int = 0
    note: str = SECRET


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def endless(kind):
    value = kind()
    if isinstance(value, dict):
        value["again"] = value
    else:
        value.append(value)
    return value


ODD: dict[str, Any] = {
    "nan": math.nan,
    "infinity": [-math.inf],
    "5,000 digits": 10**5_000,
    "lone surrogate": "file-\ud800.txt",
    "lone surrogate as key": {"\udc80": 1},
    "list in itself": endless(list),
    "dict in itself": endless(dict),
    "deep": nested(100_000),
}


async def ignore(_ctx, _payload):
    return None


def jobs_of(model):
    jobs = JobTypes()
    jobs.register(name="odd", payload=model, handler=ignore, queue="setup")
    return jobs


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("model", [Strict, Loose])
@pytest.mark.parametrize("form", ["mapping", "model"])
async def test_a_value_that_json_cannot_carry_is_refused_by_name_at_enqueue(form, model, odd, redis_url):
    jobs, value = jobs_of(model), {"value": ODD[odd]}
    payload = value if form == "mapping" else model.model_construct(**value)
    with pytest.raises(MalformedPayload) as raised:
        jobs.encode("odd", payload)
    assert SECRET not in str(raised.value)
    producer = full_producer(jobs, redis_url)
    request = JobRequest("odd", payload, key="k")
    with pytest.raises(MalformedPayload):
        await producer.enqueue(request)
    with pytest.raises(MalformedPayload):
        await producer.enqueue_many([request])
    with pytest.raises(NotJson):
        Signer(["a key of sixteen bytes"]).sign("odd", "1", value)
    with pytest.raises(NotJson):
        fingerprint(value)
    await producer.close()


@pytest.mark.parametrize("odd", ODD)
async def test_a_value_that_json_cannot_carry_is_refused_in_key_and_meta_too(odd, redis_url):
    for signer in (None, Signer(["a key of sixteen bytes"])):
        producer = full_producer(jobs_of(Strict), redis_url, signer=signer)
        with pytest.raises(NotJson):
            await producer.enqueue(JobRequest("odd", {}, key="k", meta={"more": ODD[odd]}))
        with pytest.raises(InvalidKey):
            await producer.enqueue(JobRequest("odd", {}, key="\ud800"))
        await producer.close()


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_float_that_is_no_number_is_refused(number):
    with pytest.raises(MalformedPayload, match="not JSON"):
        jobs_of(Loose).encode("odd", {"number": number})


def test_nesting_that_only_pydantic_refuses_has_the_same_name():
    with pytest.raises(MalformedPayload, match="depth"):
        jobs_of(Strict).encode("odd", {"value": nested(700)})


def test_numbers_and_numbers_in_text_and_emoji_are_carried():
    for value in (2**63, -1.5e300, "12345" * 2_000, "😀 \\ud800", {"😀": None}, nested(100)):
        assert jobs_of(Loose).encode("odd", {"value": value})["payload"]["value"] == value


RAW = {
    "nan": ('{"value":NaN}', "NotJson"),
    "infinity": ('{"value":[-Infinity]}', "NotJson"),
    "beyond double": ('{"value":1e999}', "NotJson"),
    "lone surrogate": (r'{"value":"\ud800"}', "NotJson"),
    "lone surrogate as key": (r'{"value":{"\udc80":1}}', "NotJson"),
    "5,000 digits": ('{"value":' + "9" * 5_000 + "}", "unreadable job"),
    "deep": ('{"value":' + "[" * 20_000 + "]" * 20_000 + "}", "unreadable job"),
}


@pytest.mark.parametrize("raw", RAW)
async def test_what_a_foreign_producer_wrote_fails_once_by_name_and_its_neighbour_runs(raw, redis_url, tmp_path):
    payload, name = RAW[raw]
    jobs = jobs_of(Strict)
    async with JobSetup.open(redis_url, tmp_path, jobs) as setup:
        odd, good = JobRequest("odd", {}, key="odd"), JobRequest("odd", {}, key="good")
        refs = await setup.producer.enqueue_many([odd, good])
        data = f'{{"v":1,"key":"odd","meta":{{}},"payload":{payload}}}'
        await setup.producer.redis.hset(f"bull:setup:{refs[0].id}", "data", data)
        async with setup.working(signer=None):
            assert await setup.ended(good) == ["completed"]
            await until(lambda: _failed(setup), what="the odd one failed")
        fields = await setup.producer.redis.hgetall(f"bull:setup:{refs[0].id}")
        assert fields["failedReason"].startswith(name), fields["failedReason"]
        assert fields["atm"] == "1", "what can never pass is not tried again"


async def _failed(setup):
    return (await setup.counts("setup")).get("failed") == 1


@pytest.mark.parametrize("raw", ["nan", "lone surrogate", "beyond double"])
def test_a_worker_without_the_pipeline_refuses_them_too(raw):
    payload = json.loads(RAW[raw][0])
    with pytest.raises(Permanent):
        jobs_of(Loose).decode("odd", {"v": 1, "payload": payload})
