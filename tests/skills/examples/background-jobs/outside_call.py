# [use]
# labels.py: a paid call to somebody else's API, made once or known to be unclear
import httpx2 as httpx

from patterns.outside_call import NotMade, OutsideCalls, check_status
from patterns.outside_call.store import StoreLedger


class Carrier:
    def __init__(self, store, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=20)  # at most `longest`
        # By the carrier's own documentation: a request ends within 30 s, a key lives for a day.
        self.calls = OutsideCalls(StoreLedger(store), "carrier", longest=30, key_life=86_400, look_up=self.find)

    async def label(self, parcel: str) -> dict:
        async def send(key: str) -> dict:
            body, head = {"parcel": parcel, "reference": key}, {"idempotency-key": key}
            try:
                answer = await self.http.post("/labels", json=body, headers=head)
            except httpx.ConnectError as error:  # any other error may be a label
                raise NotMade("no connection to the carrier") from error
            check_status(answer.status_code)
            return answer.json()

        return await self.calls.once(f"label/{parcel}", send)

    async def find(self, reference: str) -> dict | None:
        answer = await self.http.get("/labels", params={"reference": reference})
        return None if answer.status_code == 404 else answer.raise_for_status().json()


# [/use]


async def example(redis_url: str, store_url: str) -> None:
    import asyncio

    from patterns.core.open_store import close, create_all, open_store
    from patterns.outside_call import InFlight, Unclear

    printed, cut = {}, ["cut the first answer"]

    def provider(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            reference = request.url.params["reference"]
            return httpx.Response(200 if reference in printed else 404, json=printed.get(reference))
        key = request.headers["idempotency-key"]
        printed[key] = {"label": len(printed) + 1}
        if cut:
            raise httpx.ReadError(cut.pop())
        return httpx.Response(200, json=printed[key])

    store = open_store(store_url)
    await create_all(store)
    carrier = Carrier(store, "http://carrier")
    carrier.http = httpx.AsyncClient(base_url="http://carrier", transport=httpx.MockTransport(provider))
    carrier.calls = OutsideCalls(StoreLedger(store), "carrier", longest=0.2, look_up=carrier.find)
    try:
        await carrier.label("a")
        raise AssertionError("the answer was cut")
    except InFlight as busy:
        await asyncio.sleep(busy.delay + 0.1)
    assert await carrier.label("a") == await carrier.label("a") == {"label": 1}
    assert len(printed) == 1
    knows_nothing = OutsideCalls(StoreLedger(store), "fax", longest=0.1)
    carrier.calls, cut[:] = knows_nothing, ["cut"]
    for error in (InFlight, Unclear, Unclear):
        try:
            await carrier.label("b")
            raise AssertionError(error)
        except error:
            await asyncio.sleep(0.2)
    assert [call.key for call in await knows_nothing.unclear()] == ["label/b"]
    await knows_nothing.resolve("label/b", done={"label": 2})
    assert await carrier.label("b") == {"label": 2}
    assert len(printed) == 2
    await close(store)
