"""Record `studyhall demo` and draw it as a terminal that plays once: guide/assets/demo.svg, for the README.

    python -m guide.draw_demo      (make demo-picture)

Nothing is edited: every line appears when the run wrote it; only pauses longer than 1.5 s are cut. CSS
shows each line at its time and scrolls, so no script is needed; without motion the end of the run is shown.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from html import escape
from itertools import pairwise
from pathlib import Path

PICTURE = Path(__file__).parent / "assets" / "demo.svg"
PROMPT = "$ make demo"
COLUMNS, ROWS, CHAR, LINE, LONGEST = 80, 20, 7.25, 17, 1.5
STYLE = (
    "text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#e6edf3;white-space:pre}"
    ".c{fill:#7ee787}.k{fill:#ffa198}.h{font-weight:600}"
    "@keyframes s{from{opacity:0}}g{animation:s .01s both}"
)
STILL = "@media(prefers-reduced-motion:reduce){g,#m{animation:none}}"


def record() -> list[tuple[float, str]]:
    """(seconds since the start, line) of a real run."""
    command = [str(Path(sys.executable).with_name("studyhall")), "demo"]
    environment = os.environ | {"COLUMNS": str(COLUMNS), "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    began = time.monotonic()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        lines = [(time.monotonic() - began, line.rstrip()) for line in run.stdout]
    assert run.returncode == 0, f"the demo ended with {run.returncode}"
    return lines[: next(row for row in range(len(lines), 0, -1) if lines[row - 1][1])]


def kind(line: str) -> str:
    if line.startswith("Nothing was lost") or " done" in line or line == PROMPT:
        return "c"
    if "SIGKILL" in line or "dead letter:" in line:
        return "k"
    return "h" if line[:2] in {"1.", "2.", "3.", "4."} else ""


def draw(recorded: Iterable[tuple[float, str]]) -> str:
    drawn, scrolls, clock, last, shown = "", {}, 0.3, 0.0, 0.0
    lines = [(0.0, PROMPT), *recorded]
    length = clock + sum(min(after[0] - before[0], LONGEST) for before, after in pairwise(lines))
    for row, (at, line) in enumerate(lines):
        clock, last = clock + min(at - last, LONGEST), at
        if row >= ROWS:
            scrolls[f"{100 * clock / length:.1f}%"] = (row + 1 - ROWS) * LINE
        if line.strip():
            # Lines of one moment are a group.
            drawn += f'</g>\n<g style="animation-delay:{clock:.1f}s">' if clock > shown + 0.05 else ""
            shown = clock
            name = f' class="{kind(line)}"' if kind(line) else ""
            drawn += f'<text y="{row * LINE + 14}"{name}>{escape(line, quote=False)}</text>\n'
    width, height, up = round(COLUMNS * CHAR + 28), ROWS * LINE + 28, max(len(lines) - ROWS, 0) * LINE
    moves = "".join(f"{at}{{transform:translateY(-{y}px)}}" for at, y in scrolls.items())
    still = f"#m{{transform:translateY(-{up}px);animation:m {length:.1f}s step-end}}"
    style = f"{STYLE}@keyframes m{{0%{{transform:none}}{moves}}}{still}{STILL}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="make demo: '
        f'a worker is killed in the middle of its jobs. {escape(lines[-1][1])}"><style>{style}</style>'
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117" stroke="#6e7681"/>'
        f'<svg x="14" y="14" width="{width}" height="{ROWS * LINE}"><g id="m"><g>{drawn}</g></g></svg></svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(record()))
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")
