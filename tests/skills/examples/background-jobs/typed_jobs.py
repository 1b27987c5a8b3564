# [use]
from patterns.typed_jobs import JobTypes, Payload

jobs = JobTypes()


class SendReceipt(Payload):  # forbids unknown fields, hides the input in errors
    order_id: str
    locale: str


def add_locale(old: dict) -> dict:  # v1 had no locale; jobs of v1 may still be in the queue after a deploy
    return {**old, "locale": "en"}


@jobs.register(name="send-receipt", payload=SendReceipt, version=2, upcasts={1: add_locale}, queue="mail")
async def send_receipt(ctx, payload: SendReceipt) -> dict:
    return {"sent_to_order": payload.order_id, "locale": payload.locale}


# [/use]


async def example(redis_url: str, store_url: str) -> None:
    from patterns.typed_jobs import MalformedPayload, UnknownJob, UnknownVersion

    _, old = jobs.decode("send-receipt", {"v": 1, "payload": {"order_id": "7"}})
    assert old == SendReceipt(order_id="7", locale="en")
    for name, data, error in [
        ("send-reciept", {}, UnknownJob),
        ("send-receipt", {"v": 3, "payload": {}}, UnknownVersion),
        ("send-receipt", {"v": 2, "payload": {"order_id": 7}}, MalformedPayload),
    ]:
        try:
            jobs.decode(name, data)
        except error:
            continue
        raise AssertionError(name)
