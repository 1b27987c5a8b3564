"""Makes guide/assets/screenshots: StudyHall at work, in a real browser. Needs chromium and playwright.

One run: an API, a worker, a relay and a payment sandbox on a temporary data directory, documents on their way,
one damaged document among the dead letters, three orders. Pictures are WebP, small enough for a README.
"""

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "reference")]

from harness.browser import TOKEN, StudyHall, launched  # noqa: E402

SAMPLES = ROOT / "reference" / "samples"
TARGET = ROOT / "guide" / "assets" / "screenshots"
DESKTOP = {"width": 1280, "height": 533}
LARGEST = 8_000


def main() -> None:
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as folder:
        # Two jobs at a time per queue: some have to wait, as in real life.
        hall = StudyHall(Path(folder), pace=0.7, STUDYHALL_CONCURRENCY="2")
        try:
            with launched() as browser:
                _show(hall, browser, Path(folder))
        finally:
            hall.close()


def _show(hall: StudyHall, browser: Any, folder: Path) -> None:
    hall.start_relay()
    good = (SAMPLES / "photosynthesis.pdf").read_bytes()
    damaged = folder / "damaged.pdf"
    damaged.write_bytes(good[: len(good) // 3])
    for name in ("lecture-notes-week-3.pdf", "cell-biology.pdf", "scan-of-a-book.pdf"):
        hall.upload(damaged, name)
    for pack, card in (
        ("biology-101", "card_ok"),
        ("chemistry-lab", "card_declined"),
        ("biology-101", "card_lost_answer"),
    ):
        _order(hall, pack, card)
    light = _page(browser, hall, DESKTOP, "light")
    light.goto("/#/overview")
    for _ in range(4):  # enough work to give the charts a shape
        for sample in ("water-cycle.md", "plate-tectonics.docx", "photosynthesis.pdf"):
            hall.upload(SAMPLES / sample)
        light.wait_for_timeout(9_000)
    hall.upload(SAMPLES / "water-cycle.md", "The water cycle.md")
    hall.upload(SAMPLES / "plate-tectonics.docx", "Plate tectonics.docx")
    _save(light, "overview")


def _order(hall: StudyHall, pack: str, card: str) -> None:
    listed = hall.command("order", "packs", "--json")
    known = pack if pack in listed else "biology-101"
    hall.command("order", "buy", known, "--card", card, "--customer", "alex")


def _page(browser: Any, hall: StudyHall, size: dict[str, int], theme: str) -> Any:
    context = browser.new_context(base_url=hall.url, viewport=size, color_scheme=theme, reduced_motion="reduce")
    context.add_init_script(f"sessionStorage.setItem('queuesmith.console-token', '{TOKEN}')")
    return context.new_page()


def _save(page: Any, name: str) -> None:
    from PIL import Image

    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.LANCZOS)
    for quality in (70, 60, 50, 45, 40, 35):
        out = io.BytesIO()
        picture.save(out, "WEBP", quality=quality, method=6)
        if out.tell() <= LARGEST:
            break
    (TARGET / f"{name}.webp").write_bytes(out.getvalue())
    print(f"{name}.webp  {out.tell():,} bytes, quality {quality}")


if __name__ == "__main__":
    main()
