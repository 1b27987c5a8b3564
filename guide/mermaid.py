"""Diagrams: a `<figure>` with the text of the diagram, drawn in the page by a locally served mermaid.

The library is fetched from npm into build/ at build time, never committed. Without npm the text stays, readable.
"""

import html
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from queuesmith.catalogue import ROOT

DIAGRAMS = Path(__file__).parent / "diagrams"
VERSION = "11.17.2"
CACHE = Path(os.environ.get("GUIDE_MERMAID", ROOT / "build" / "guide-mermaid"))
MEMBER = "package/dist/mermaid.min.js"
FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def library() -> Path | None:
    """The path of mermaid.min.js, fetched once; None when npm or its registry is out of reach."""
    script = CACHE / f"mermaid-{VERSION}.min.js"
    if script.exists():
        return script
    if not shutil.which("npm"):
        return None
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:  # of its own: another build may fetch it too
        pack = ["npm", "pack", f"mermaid@{VERSION}", "--silent"]
        done = subprocess.run(pack, cwd=folder, capture_output=True, timeout=180, check=False)
        archive, partial = Path(folder, f"mermaid-{VERSION}.tgz"), Path(folder, "partial")
        if done.returncode or not archive.exists():
            return None
        with tarfile.open(archive) as packed:
            member = packed.extractfile(MEMBER)
            if member is None:
                return None
            partial.write_bytes(member.read())
        partial.rename(script)
    return script


def figure(text: str, caption: str, name: str = "") -> str:
    """The text is for readers and printers without scripts, and for screen readers."""
    return (
        f'<figure class="qs-diagram" data-diagram="{html.escape(name)}">'
        f'<div class="qs-drawing" role="img" aria-label="{html.escape(caption)}" hidden></div>'
        f'<details open><summary>Diagram as text</summary><pre class="qs-text" tabindex="0">'
        f"{html.escape(text.strip(), quote=False)}</pre></details>"
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def drawn(name: str, caption: str) -> str:
    """The figure of guide/diagrams/NAME.mmd; empty if there is none."""
    path = DIAGRAMS / f"{name}.mmd"
    return figure(path.read_text(), caption, name) if path.exists() else ""


def fences(text: str, caption: str) -> str:
    """The same for fenced diagrams in a page."""
    return FENCE.sub(lambda match: figure(match[1], caption), text)
