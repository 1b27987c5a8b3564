"""A chat platform on loopback that speaks Discord's side of the interactions protocol, and its rules.

    async with ChatPlatform() as platform:
        body, headers = platform.command("what is rain?", id="1")      # signed, to be posted to the API
        platform.posts["token-1"]                                      # the messages the user sees

Answers above 2,000 characters are refused with 400, ended tokens with 401, `busy(times, seconds)` makes the next
requests get a 429, and `fail(*statuses)` any other one.
"""

import asyncio
import json
import time
from typing import Any, Self

import uvicorn
from nacl.signing import SigningKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from .ports import free_port


class ChatPlatform:
    def __init__(self, *, life: float = 900.0) -> None:
        self._key = SigningKey.generate()
        self._life = life
        self._busy: list[float] = []
        self._failing: list[int] = []
        self.bodies: list[dict[str, Any]] = []  # of every request
        self.ends: dict[str, float] = {}  # token -> when it ends
        self.posts: dict[str, list[str]] = {}  # token -> messages, as the user sees them
        self.requests: list[tuple[float, str, str, int]] = []  # when, method, token, status
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def public_key(self) -> str:
        return self._key.verify_key.encode().hex()

    def edits(self, token: str) -> int:
        """Edits of the first message that were taken."""
        return sum(1 for _, method, of, status in self.requests if (method, of, status) == ("PATCH", token, 200))

    def busy(self, times: int, seconds: float) -> None:
        self._busy += [seconds] * times

    def fail(self, *statuses: int) -> None:
        self._failing += statuses

    def signed(self, body: Any, *, at: float | None = None) -> tuple[bytes, dict[str, str]]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        timestamp = str(int(time.time() if at is None else at))
        signature = self._key.sign(timestamp.encode() + raw).signature.hex()
        return raw, {
            "x-signature-ed25519": signature,
            "x-signature-timestamp": timestamp,
            "content-type": "application/json",
        }

    def command(self, question: str, *, id: str) -> tuple[bytes, dict[str, str]]:
        """A user types /ask; the token's life starts."""
        token = f"token-{id}"
        self.ends.setdefault(token, time.time() + self._life)
        return self.signed(
            {
                "id": id,
                "application_id": "app-1",
                "type": 2,
                "token": token,
                "member": {"user": {"id": "user-1"}},
                "data": {"name": "ask", "options": [{"name": "question", "value": question}]},
            }
        )

    async def __aenter__(self) -> Self:
        path = "/webhooks/{application}/{token}"
        routes = [
            Route(f"{path}/messages/@original", self._edit, methods=["PATCH"]),
            Route(path, self._follow_up, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=self.port, log_config=None)
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.01)
            assert not self._serving.done(), "the chat platform did not start"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._serving

    async def _edit(self, request: Request) -> JSONResponse:
        return await self._take(request, lambda posts, text: [text, *posts[1:]])

    async def _follow_up(self, request: Request) -> JSONResponse:
        return await self._take(request, lambda posts, text: [*posts, text])

    async def _take(self, request: Request, change: Any) -> JSONResponse:
        token = request.path_params["token"]
        body = await request.json()
        self.bodies.append(body)
        status, answer = self._judge(token, str(body.get("content", "")))
        if status == 200:
            self.posts[token] = change(self.posts.get(token, []), body["content"])
        self.requests.append((time.time(), request.method, token, status))
        headers = {"retry-after": "1"} if status == 429 else None
        return JSONResponse(answer, status, headers)

    def _judge(self, token: str, text: str) -> tuple[int, dict[str, Any]]:
        if self._busy:
            return 429, {"message": "You are being rate limited.", "retry_after": self._busy.pop(0)}
        if self._failing:
            return self._failing.pop(0), {"message": "as the test wants it"}
        if token not in self.ends:
            return 404, {"code": 10015, "message": "Unknown Webhook"}
        if time.time() > self.ends[token]:
            return 401, {"code": 50027, "message": "Invalid Webhook Token"}
        if not 0 < len(text.encode("utf-16-le")) // 2 <= 2000:
            return 400, {"code": 50035, "message": "Must be 2000 or fewer in length."}
        return 200, {"id": "1"}
