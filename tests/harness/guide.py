"""The built pattern guide: as files, and served on loopback."""

import html.parser
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .processes import ROOT


class Document(html.parser.HTMLParser):
    """What the tests ask of a page: its ids, what it links to and loads, its elements with their text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.classes: dict[str, int] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev") and "href" in given:
            self.loads.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])
        for name in given.get("class", "").split():
            self.classes[name] = self.classes.get(name, 0) + 1


class Guide:
    """A built guide in a folder."""

    def __init__(self, folder: Path, output: str) -> None:
        self.folder, self.output = folder, output
        self.url = ""

    def addresses(self) -> list[str]:
        """Every page but the source pages and 404.html."""
        folders = (path.parent.relative_to(self.folder).as_posix() for path in self.folder.rglob("index.html"))
        return sorted("" if address == "." else f"{address}/" for address in folders)

    def text(self, address: str) -> str:
        return (self.folder / address / "index.html").read_text()


def build_guide(folder: Path, **env: str) -> Guide:
    done = subprocess.run(
        [sys.executable, "-m", "guide.build", "--site", str(folder)],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Guide(folder, done.stdout)


@pytest.fixture(scope="session")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guide]:
    """The guide of this working tree, served on loopback."""
    built = build_guide(tmp_path_factory.mktemp("guide") / "guide")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(built.folder))

        def log_message(self, *_: Any) -> None: ...

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None: ...  # a browser that leaves a page hangs up

    with Server(("127.0.0.1", 0), Quiet) as server:
        built.url = f"http://127.0.0.1:{server.server_port}/"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield built
        server.shutdown()
