"""Chromium through playwright, and a whole StudyHall (API, worker, embedded Redis) for it to look at.

A `Page` here records what must not happen: errors on the console, errors in scripts, requests to other hosts.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from .missing import missing, need_binary
from .ports import free_port
from .processes import Spawned, spawn_python

TOKEN = "console-admin-token-of-the-tests"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


class Served(Protocol):
    url: str


class ConsoleServer:
    """`queuesmith console` on a Redis server of the test."""

    def __init__(self, folder: Path, redis_url: str, *args: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        words = ("console", "--redis", redis_url, "--port", str(self.port), *args)
        env = {"QUEUESMITH_CONSOLE_TOKEN": TOKEN}
        self._child = spawn_python("queuesmith", *words, env=env, log=folder / f"console-{self.port}.log")
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(URLError, OSError), urlopen(f"{self.url}/console.json", timeout=2):
                return
            if self._child.returncode is not None or time.monotonic() > deadline:
                raise AssertionError(f"the console did not start: {self._child}")
            time.sleep(0.05)

    def close(self) -> None:
        if self._child.returncode is None:
            self._child.terminate()
            self._child.wait(20)
        self._child.close()


class StudyHall:
    """The API and a worker on one data directory. The API can be stopped and started again on its port."""

    def __init__(self, directory: Path, *, pace: float = 0.0, worker: bool = True, **settings: str) -> None:
        self.directory = directory
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._env = {
            "STUDYHALL_ADMIN_TOKEN": TOKEN,
            "STUDYHALL_DATA_DIR": str(directory / "data"),
            "STUDYHALL_PROVIDER_PACE": str(pace),
            "STUDYHALL_SWEEP_SECONDS": "0.5",
            "STUDYHALL_GRACE_SECONDS": "1",
            **settings,
        }
        self._started = 0
        self._api: Spawned | None = None
        self._worker: Spawned | None = None
        self.start_api()
        if worker:
            self.start_worker()

    def start_api(self, **settings: str) -> None:
        self._api = self._spawn("api", "--port", str(self.port), **settings)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(URLError, OSError), urlopen(f"{self.url}/readyz", timeout=2) as answer:
                if answer.status == 200:
                    return
            if self._api.returncode is not None or time.monotonic() > deadline:
                raise AssertionError(f"the API did not start: {self._api}")
            time.sleep(0.05)

    def stop_api(self) -> None:
        """As a deployment does it: SIGTERM, then wait for its end."""
        assert self._api is not None
        self._api.terminate()
        self._api.wait(20)

    def start_worker(self) -> None:
        self._worker = self._spawn("worker", "--processes", "1")
        self._worker.line_sync('"ready"', timeout=60)

    def command(self, *args: str) -> str:
        """`studyhall …` on the same data; its output."""
        child = self._spawn(*args)
        code = child.wait(60)
        assert code == 0, str(child)
        return "\n".join(child.lines())

    def upload(self, path: Path, name: str | None = None) -> str:
        """Upload by HTTP, as a browser would; the document's id."""
        bound = "boundary-of-the-tests"
        shown = (name or path.name).replace('"', "%22")
        head = f'--{bound}\r\nContent-Disposition: form-data; name="file"; filename="{shown}"\r\n\r\n'
        body = head.encode() + path.read_bytes() + f"\r\n--{bound}--\r\n".encode()
        headers = {"Content-Type": f"multipart/form-data; boundary={bound}"}
        with urlopen(Request(f"{self.url}/documents", body, headers), timeout=30) as answer:
            return str(json.load(answer)["id"])

    def program(self, path: Path, *args: object) -> None:
        """Run a program of the tests on the same data, to its end."""
        self._started += 1
        child = spawn_python(path, *args, env=self._env, log=self.directory / f"{self._started}-{path.stem}.log")
        assert child.wait(60) == 0, str(child)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        sent = Request(f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(sent, timeout=30) as answer:
            return json.load(answer)

    def close(self) -> None:
        """Ends the API, the worker and, with the last of them, the embedded server."""
        children = [child for child in (self._worker, self._api) if child]
        for child in children:
            if child.returncode is None:
                child.terminate()
        for child in children:
            if child.returncode is None:
                with contextlib.suppress(AssertionError):
                    child.wait(15)
            child.close()

    @property
    def redis_url(self) -> str:
        """With the embedded server's password, which the ready line does not show."""
        [state] = self.directory.rglob("state.json")
        server = json.loads(state.read_text())
        return f"redis://:{server['password']}@127.0.0.1:{server['port']}/0"

    def _spawn(self, *args: str, **settings: str) -> Spawned:
        self._started += 1
        log = self.directory / f"{self._started}-{args[0]}.log"
        return spawn_python("studyhall", *args, env={**self._env, **settings}, log=log)


class Watched:
    """What a page did and must not. `clean()` at the end of every test."""

    def __init__(self, page: Any, home: str) -> None:
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.expected: tuple[str, ...] = ()
        host = urlsplit(home).netloc
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(f"script: {error}"))
        page.on("dialog", self._asked)
        page.on("request", lambda request: self._requested(request.url, host))

    def expect(self, *texts: str) -> None:
        """Console errors with one of these texts are part of the test: a refused token, a stopped server."""
        self.expected = texts

    def clean(self) -> None:
        wrong = [error for error in self.errors if not any(text in error for text in self.expected)]
        assert wrong == []
        assert self.foreign == [], "the console may talk to its own server only"

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.type}: {message.text}")

    def _asked(self, dialog: Any) -> None:
        self.errors.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _requested(self, url: str, host: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and parts.netloc != host:
            self.foreign.append(url)


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """A headless browser with a profile of its own, as a playwright `Browser`."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright", "pip install playwright")
    binary = need_binary(*BROWSERS, how="install chromium with your package manager")
    folder = tempfile.mkdtemp(prefix="test-browser-")
    try:
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(
                executable_path=binary, headless=True, args=FLAGS, env={**os.environ, "HOME": folder}, timeout=60_000
            )
            try:
                yield chromium
            finally:
                chromium.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Module scope: playwright's synchronous API keeps an event loop running in this thread until it is stopped, and
# no asynchronous test can run meanwhile.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def hall(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[StudyHall]:
    """One StudyHall for the tests that only look and add. After the browser: no browser, no servers."""
    running = StudyHall(tmp_path_factory.mktemp("studyhall"), pace=0.25)
    yield running
    running.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """`open_page(hall, "#/jobs", token=True)`: a fresh profile each; every page must stay clean to the end."""
    contexts: list[Any] = []
    watched: list[Watched] = []

    def start(hall: Served, route: str = "", *, token: bool = False, **options: Any) -> Any:
        context = browser.new_context(base_url=hall.url, **options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        if token:
            context.add_init_script(f"sessionStorage.setItem('queuesmith.console-token', '{TOKEN}')")
        page = context.new_page()
        page.watched = Watched(page, hall.url)
        watched.append(page.watched)
        page.goto(f"/{route}")
        return page

    yield start
    for context in contexts:
        context.close()
    for each in watched:
        each.clean()
