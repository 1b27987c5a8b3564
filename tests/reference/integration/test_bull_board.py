"""bull-board in a browser: it sees our worker, and every job in its state."""

import json
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest

PROGRAMS = Path(__file__).parent / "programs"
QUEUE = "mails"

pytestmark = [pytest.mark.needs_node, pytest.mark.needs_browser]


@pytest.fixture
def board(browser, board_home, redis_server, redis_url, spawn):
    """Its page of the queue; requests to other hosts (a font) are blocked."""
    script = board_home / "bull_board.mjs"
    shutil.copy(PROGRAMS / script.name, script)
    process = spawn.command("node", script, redis_server.port, QUEUE, cwd=board_home)
    url = json.loads(process.line_sync('"url"', timeout=60))["url"]
    context = browser.new_context(locale="en-US", viewport={"width": 1280, "height": 800})
    context.set_default_timeout(30_000)
    context.route(lambda address: urlsplit(address).hostname != "127.0.0.1", lambda route: route.abort())
    page = context.new_page()
    page.queue = f"{url}/queue/{QUEUE}"
    yield page
    context.close()


@pytest.mark.slow
def test_bull_board_shows_one_worker_and_every_state(board, redis_url, spawn):
    """It said "No workers" beside a worker that did all the work."""
    board.goto(board.queue)
    board.get_by_text("No workers").first.wait_for()

    worker = spawn(PROGRAMS / "board_worker.py", redis_url, QUEUE)
    worker.line_sync("ready", timeout=60)
    board.reload()
    for state, count in {"completed": 3, "failed": 1, "active": 1, "delayed": 1}.items():
        tab = board.locator(f"a[href$='?status={state}']")
        tab.filter(has_text=re.compile(rf"{state}\s*{count}$", re.IGNORECASE)).wait_for(state="attached")
    assert board.get_by_text("No workers").count() == 0
    board.get_by_label("Queue info").click()
    shown = board.locator("dt", has_text=re.compile("^Workers$")).locator("xpath=following-sibling::dd")
    assert shown.inner_text() == "1"
