"""StudyHall as a user runs it: `studyhall api` and workers as processes of their own, and a client for them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2

from .ports import free_port
from .processes import Spawned, Spawner

TOKEN = "an admin token of the tests"


class Api:
    def __init__(self, spawn: Spawner, data_dir: Path, env: Mapping[str, str]) -> None:
        self._spawn, self._data_dir = spawn, data_dir
        self._env = {"STUDYHALL_ADMIN_TOKEN": TOKEN, "STUDYHALL_GRACE_SECONDS": "2", **env}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx2.AsyncClient(base_url=self.url, timeout=30)
        self.admin = httpx2.AsyncClient(base_url=self.url, timeout=30, headers={"authorization": f"Bearer {TOKEN}"})
        self.workers: list[Spawned] = []

    async def start(self) -> None:
        """Start the API, or start it again after it was killed."""
        self.process = self._spawn("studyhall", "api", "--port", self.port, "--data-dir", self._data_dir, env=self._env)
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
        return "\n".join(run.log.read_text(encoding="utf-8", errors="replace") for run in (self.process, *self.workers))


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


class StandingApi:
    """For many tests that only look: synchronous clients of one API with one worker."""

    def __init__(self, api: Spawned, worker: Spawned | None, url: str, data_dir: Path) -> None:
        self.process, self.worker, self.url, self.data_dir = api, worker, url, data_dir
        self.client = httpx2.Client(base_url=url, timeout=30)
        self.admin = httpx2.Client(base_url=url, timeout=30, headers={"authorization": f"Bearer {TOKEN}"})

    def logs(self) -> str:
        both = (process for process in (self.process, self.worker) if process is not None)
        return "\n".join(process.log.read_text(encoding="utf-8", errors="replace") for process in both)

    def until(self, path: str, done: Callable[[Any], object], seconds: float = 60) -> Any:
        """Ask until `done(answer)`; the answer."""
        deadline = time.monotonic() + seconds
        while True:
            answer = self.client.get(path).json()
            if done(answer):
                return answer
            assert time.monotonic() < deadline, f"{path} after {seconds:g} s: {answer}"
            time.sleep(0.05)


@contextmanager
def standing_api(
    directory: Path, redis_url: str, *, worker: bool = True, database: str = "", **env: str
) -> Iterator[StandingApi]:
    """`studyhall api` and, with `worker`, one worker; `database`: its URL instead of SQLite; settings by keyword."""
    settings = {f"STUDYHALL_{name.upper()}": value for name, value in env.items()}
    full = {
        "REDIS_URL": redis_url,
        "DATABASE_URL": database,
        "STUDYHALL_ADMIN_TOKEN": TOKEN,
        "STUDYHALL_GRACE_SECONDS": "2",
        **settings,
    }
    full = {name: value for name, value in full.items() if value}
    spawner, port = Spawner(directory), free_port()
    data = directory / "data"
    try:
        api = spawner("studyhall", "api", "--port", port, "--data-dir", data, env=full)
        beside = spawner("studyhall", "worker", "--processes", 1, "--data-dir", data, env=full) if worker else None
        standing = StandingApi(api, beside, f"http://127.0.0.1:{port}", data)
        deadline = time.monotonic() + 60
        while True:
            try:
                standing.client.get("/healthz")
                break
            except httpx2.TransportError:
                assert time.monotonic() < deadline, str(api)
                assert api.returncode is None, str(api)
                time.sleep(0.05)
        if beside is not None:
            beside.line_sync('"ready"', 60)
        yield standing
        standing.client.close()
        standing.admin.close()
    finally:
        spawner.close()
