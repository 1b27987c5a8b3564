"""Makes guide/assets/screenshots: StudyHall at work in a real browser, and its metrics in a real Prometheus. Needs
chromium, playwright and prometheus.

One run: an API, a worker, a relay and a payment sandbox on a temporary data directory, documents on their way,
one damaged document among the dead letters, three orders. Pictures are WebP, small enough for a README.
"""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "reference")]

from harness.browser import TOKEN, StudyHall, launched  # noqa: E402
from harness.ports import free_port  # noqa: E402

SAMPLES = ROOT / "reference" / "samples"
TARGET = ROOT / "guide" / "assets" / "screenshots"
LARGEST = 8_000


def main(which: str = "") -> None:
    """Both, or the one named."""
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as folder:
        # Two jobs at a time per queue: some have to wait, as in real life.
        metrics = free_port()
        hall = StudyHall(Path(folder), pace=0.7, STUDYHALL_CONCURRENCY="2", STUDYHALL_METRICS_PORT=str(metrics))
        try:
            with launched() as browser, _prometheus(Path(folder), hall.port, metrics) as prometheus:
                if which != "prometheus":
                    _show(hall, browser, Path(folder))
                if which != "overview":
                    _chart(hall, browser, prometheus)
        finally:
            hall.close()


def _show(hall: StudyHall, browser: Any, folder: Path) -> None:
    hall.start_relay()
    good = (SAMPLES / "photosynthesis.pdf").read_bytes()
    damaged = folder / "damaged.pdf"
    damaged.write_bytes(good[: len(good) // 3])
    for name in ("lecture-notes-week-3.pdf", "cell-biology.pdf", "scan-of-a-book.pdf"):
        hall.upload(damaged, name)
    for card in ("card_ok", "card_declined", "card_lost_answer"):
        hall.command("order", "buy", "biology-101", "--card", card, "--customer", "alex")
    size = {"width": 1280, "height": 533}
    context = browser.new_context(base_url=hall.url, viewport=size, color_scheme="light", reduced_motion="reduce")
    context.add_init_script(f"sessionStorage.setItem('queuesmith.console-token', '{TOKEN}')")
    page = context.new_page()
    page.goto("/#/overview")
    for _ in range(4):  # enough work to give the charts a shape
        for sample in ("water-cycle.md", "plate-tectonics.docx", "photosynthesis.pdf"):
            hall.upload(SAMPLES / sample)
        page.wait_for_timeout(9_000)
    hall.upload(SAMPLES / "water-cycle.md", "The water cycle.md")
    hall.upload(SAMPLES / "plate-tectonics.docx", "Plate tectonics.docx")
    _save(page, "overview")


@contextlib.contextmanager
def _prometheus(folder: Path, *ports: int) -> Iterator[str]:
    """Its address; the rules are those of every generated service."""
    rules = ROOT / "templates" / "common" / "ops" / "alerts.yml"
    targets, port = json.dumps([f"127.0.0.1:{number}" for number in ports]), free_port()
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{rules}]\n"
        f"scrape_configs: [{{job_name: studyhall, static_configs: [{{targets: {targets}}}]}}]\n"
    )
    listen = f"--web.listen-address=127.0.0.1:{port}"
    with (folder / "prometheus.log").open("w") as log:
        command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=tsdb", listen]
        running = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait(20)


def _chart(hall: StudyHall, browser: Any, prometheus: str) -> None:
    """What the dashboard shows of the jobs' ends, drawn by Prometheus."""
    board = json.loads((ROOT / "templates" / "common" / "ops" / "dashboard.json").read_text())
    [expr] = [
        target["expr"] for panel in board["panels"] for target in panel["targets"] if "jobs_total" in target["expr"]
    ]
    page = browser.new_context(viewport={"width": 1000, "height": 1400}, reduced_motion="reduce").new_page()
    for _ in range(6):
        for sample in ("water-cycle.md", "photosynthesis.pdf"):
            with contextlib.suppress(OSError):  # refused: the machine is busy
                hall.upload(SAMPLES / sample)
        page.wait_for_timeout(8_000)
    page.goto(f"{prometheus}/classic/graph?{urlencode({'g0.expr': expr, 'g0.tab': 0, 'g0.range_input': '1m'})}")
    page.locator(".rickshaw_graph path").first.wait_for()
    chart, legend = (page.locator(f"div.{part}").first.bounding_box() for part in ("rickshaw_graph", "legend"))
    clip = {"x": chart["x"] - 50, "y": chart["y"], "width": chart["width"] + 60}
    _save(page, "prometheus", clip={**clip, "height": legend["y"] + legend["height"] - chart["y"]})


def _save(page: Any, name: str, **part: Any) -> None:
    from PIL import Image

    picture = Image.open(io.BytesIO(page.screenshot(**part))).convert("RGB")
    picture = picture.resize((640, 640 * picture.height // picture.width), Image.Resampling.LANCZOS)
    for quality in (70, 60, 50, 45, 40, 35, 30):
        out = io.BytesIO()
        picture.save(out, "WEBP", quality=quality, method=6)
        if out.tell() <= LARGEST:
            break
    (TARGET / f"{name}.webp").write_bytes(out.getvalue())
    print(f"{name}.webp  {out.tell():,} bytes, quality {quality}")


if __name__ == "__main__":
    main(*sys.argv[1:])
