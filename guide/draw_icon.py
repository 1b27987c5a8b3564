"""Draw .claude-plugin/icon.png: jobs on their way through a queue, one of them under the hammer.

Run it again after a change: `.venv/bin/python guide/draw_icon.py`. The same code draws the same bytes.
"""

import sys
from pathlib import Path

from PIL import Image, ImageDraw

SIZE = 512
SHARP = 4  # drawn larger, then scaled down: smooth edges without an anti-aliasing brush
INK, PAPER, EMBER, STEEL = "#12202f", "#f4efe6", "#f2703f", "#7f93a8"
TARGET = Path(__file__).resolve().parents[1] / ".claude-plugin" / "icon.png"


def draw() -> Image.Image:
    side = SIZE * SHARP
    picture = Image.new("RGB", (side, side), INK)
    pen = ImageDraw.Draw(picture)

    def box(x: float, y: float, w: float, h: float, colour: str, round_by: float = 0.02) -> None:
        corners = (x * side, y * side, (x + w) * side, (y + h) * side)
        pen.rounded_rectangle(corners, radius=round_by * side, fill=colour)

    def shape(points: list[tuple[float, float]], colour: str) -> None:
        pen.polygon([(x * side, y * side) for x, y in points], fill=colour)

    for x, colour in ((0.10, STEEL), (0.28, STEEL), (0.46, EMBER)):  # three jobs in a row, one at work
        box(x, 0.50, 0.15, 0.15, colour, 0.025)
    shape([(0.66, 0.515), (0.66, 0.635), (0.76, 0.575)], PAPER)  # where it goes
    box(0.08, 0.69, 0.78, 0.05, PAPER)  # the anvil they move on
    shape([(0.30, 0.74), (0.64, 0.74), (0.57, 0.84), (0.37, 0.84)], PAPER)
    box(0.26, 0.84, 0.42, 0.05, PAPER)
    shape([(0.555, 0.30), (0.585, 0.27), (0.87, 0.135), (0.895, 0.18)], STEEL)  # the hammer, lifted
    shape([(0.43, 0.28), (0.57, 0.215), (0.64, 0.36), (0.50, 0.425)], PAPER)
    return picture.resize((SIZE, SIZE), Image.Resampling.LANCZOS).quantize(64)


if __name__ == "__main__":
    draw().save(TARGET, optimize=True)
    print(f"{TARGET.name}: {TARGET.stat().st_size} bytes")
    sys.exit(0)
