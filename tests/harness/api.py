"""StudyHall as a user runs it: `studyhall api` and workers as processes of their own, and a client for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2

from .ports import free_port
from .processes import Spawned, Spawner

__all__ = ["TOKEN", "Api", "api_at"]

TOKEN = "an admin token of the tests"


class Api:
    def __init__(self, spawn: Spawner, data_dir: Path, env: Mapping[str, str]) -> None:
        self._spawn, self._data_dir = spawn, data_dir
        self._env = {"STUDYHALL_ADMIN_TOKEN": TOKEN, "STUDYHALL_GRACE_SECONDS": "2", **env}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx2.AsyncClient(base_url=self.url, timeout=30)
        self.admin = httpx2.AsyncClient(
            base_url=self.url, timeout=30, headers={"authorization": f"Bearer {TOKEN}"}
        )
        self.workers: list[Spawned] = []

    async def start(self) -> None:
        """Start the API, or start it again after it was killed."""
        self.process = self._spawn(
            "studyhall", "api", "--port", self.port, "--data-dir", self._data_dir, env=self._env
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                await self.client.get("/healthz")
                return
            except httpx2.TransportError:
                assert time.monotonic() < deadline, str(self.process)
                assert self.process.returncode is None, str(self.process)
                await asyncio.sleep(0.05)

    async def worker(self, *args: object, env: Mapping[str, str] | None = None) -> Spawned:
        """One more worker process, ready."""
        made = self._spawn(
            "studyhall",
            "worker",
            "--processes",
            1,
            "--data-dir",
            self._data_dir,
            *args,
            env={**self._env, **(env or {})},
        )
        self.workers.append(made)
        await made.line('"ready"', 60)
        return made

    def logs(self) -> str:
        return "\n".join(
            one.log.read_text(encoding="utf-8", errors="replace") for one in (self.process, *self.workers)
        )


@asynccontextmanager
async def api_at(spawn: Spawner, data_dir: Path, redis_url: str, **env: str) -> AsyncIterator[Api]:
    """A running API on `redis_url`; settings by keyword: `provider_pace="1"`."""
    settings = {f"STUDYHALL_{name.upper()}": value for name, value in env.items()}
    api = Api(spawn, data_dir, {"REDIS_URL": redis_url, **settings})
    await api.start()
    try:
        yield api
    finally:
        await api.client.aclose()
        await api.admin.aclose()
