"""`make guide`: the pattern guide, built into build/guide from skills/, the figures and the tests.

Open it with `make guide ARGS=--serve`. Nothing in it is a second copy, and it needs no other host.
"""

import argparse
import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from guide import mermaid, pages, sources
from queuesmith import catalogue
from queuesmith.catalogue import ROOT
from queuesmith.recipes import recipes

HERE = Path(__file__).parent
HREF = re.compile(r'href="(?P<kind>page|code):(?P<to>[^"#]*)(?P<anchor>#[^"]*)?"')
EMPTY_HEADER = re.compile(r"<th(\b[^>]*)></th>")  # the empty corner of a table
FEATURES = ["navigation.indexes", "navigation.top", "navigation.footer", "search.highlight", "content.code.copy"]
EXTENSIONS: list[Any] = [
    "admonition",
    "attr_list",
    "def_list",
    "md_in_html",
    "tables",
    {"toc": {"permalink": True}},
    "pymdownx.details",
    {"pymdownx.highlight": {"anchor_linenums": False}},
    "pymdownx.superfences",
]


def config(texts: dict[str, str]) -> dict[str, Any]:
    def entry(address: str) -> dict[str, str]:
        return {_title(texts[address]): _file(address)}

    nav: list[Any] = [{"Home": "index.md"}]
    nav += [{title: [entry(name) for name in names]} for title, names in pages.settings()["nav"].items()]
    nav.append({"Recipes": [entry(f"recipes/{ident}") for ident in recipes()]})
    groups = [{title: [entry(f"patterns/{name}") for name in names]} for title, names in pages.grouped()]
    nav.append({"Patterns": [_file("patterns"), *groups]})
    wrong = [entry(f"antipatterns/{name}") for name in pages.antipatterns()]
    nav.append({"Anti-patterns": [_file("antipatterns"), *wrong]})
    skills = [entry(address) for address in sorted(texts) if address.startswith("skills/")]
    nav.append({"Skills and reference app": [entry("reference"), *skills]})
    palette = [
        {"media": "(prefers-color-scheme)", "toggle": {"icon": "lucide/sun-moon", "name": "Switch to light"}},
        {
            "media": "(prefers-color-scheme: light)",
            "scheme": "default",
            "toggle": {"icon": "lucide/sun", "name": "Switch to dark"},
        },
        {
            "media": "(prefers-color-scheme: dark)",
            "scheme": "slate",
            "toggle": {"icon": "lucide/moon", "name": "Follow the system"},
        },
    ]
    return {
        "site_name": "Queuesmith",
        "site_description": "Patterns for background jobs and events that survive crashes, each with its proof",
        "docs_dir": "docs",
        "site_dir": "site",
        "use_directory_urls": True,
        # no repo_url: every page would ask that host for its stars
        "theme": {"font": False, "language": "en", "features": FEATURES, "palette": palette},
        "extra_css": ["assets/guide.css"],
        "extra_javascript": [f"assets/{name}.js" for name in ("timeline", "guide", "calculate", "calculators")],
        "markdown_extensions": EXTENSIONS,
        "nav": nav,
    }


def build(site: Path) -> list[str]:
    """Build into `site`; returns what a reader will miss, in sentences."""
    started, missed = time.monotonic(), []
    texts = pages.all_pages()
    work = site.with_name(f"{site.name}-src")
    docs = work / "docs"
    shutil.rmtree(work, ignore_errors=True)
    for address, text in texts.items():
        path = docs / _file(address)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copytree(HERE / "assets", docs / "assets", dirs_exist_ok=True)
    with (docs / "assets" / "source.css").open("a") as style:
        style.write(sources.stylesheet())
    if library := mermaid.library():
        shutil.copyfile(library, docs / "assets" / "mermaid.min.js")
    else:
        missed.append(
            "mermaid could not be fetched with npm: diagrams are shown as text. Install Node.js and build again."
        )
    (work / "mkdocs.yml").write_text(json.dumps(config(texts), indent=1))  # JSON is YAML
    zensical = [str(Path(sys.executable).with_name("zensical")), "build", "-f", str(work / "mkdocs.yml"), "-c"]
    done = subprocess.run(zensical, cwd=work, capture_output=True, text=True, check=False)
    built = work / "site"
    if done.returncode or not (built / "index.html").exists():
        raise SystemExit(f"zensical failed:\n{done.stdout}{done.stderr}")
    linked = finish(built, texts, drawn=library is not None)
    for file in sorted(linked):
        sources.write(file, built, catalogue.repository())
    shutil.rmtree(site, ignore_errors=True)
    shutil.move(built, site)
    taken = time.monotonic() - started
    print(f"{len(texts)} pages and {len(linked)} source files in {taken:.1f} s: {site}/index.html")
    return missed


def finish(site: Path, texts: dict[str, str], *, drawn: bool) -> set[str]:
    """Make `page:` and `code:` links relative; returns the linked source files."""
    linked: set[str] = set()
    for path in site.rglob("*.html"):
        up = "../" * (len(path.relative_to(site).parts) - 1)

        def relative(match: re.Match[str], up: str = up, path: Path = path) -> str:
            anchor = match["anchor"] or ""
            if match["kind"] == "code":
                linked.add(match["to"])
                return f'href="{up}{sources.FOLDER}/{match["to"]}.html{anchor}"'
            address = match["to"].strip("/")
            if address not in texts:
                raise SystemExit(f"{path.relative_to(site)} links to the page {address!r}, which does not exist")
            return f'href="{up}{address}{"/" if address else ""}{anchor}"' if up or address else f'href="./{anchor}"'

        text = HREF.sub(relative, path.read_text())
        text = EMPTY_HEADER.sub(r"<td\1></td>", text)
        mark = f' data-qs-base="{up or "./"}" data-qs-mermaid="{"yes" if drawn else "no"}"'
        path.write_text(text.replace("<html ", f"<html{mark} ", 1))
    return linked


def _file(address: str) -> str:
    return f"{address or 'index'}.md"


def _title(text: str) -> str:
    match = re.search(r"^# (.+)$", text, re.MULTILINE)
    return match[1].replace("`", "") if match else "?"


def serve(site: Path) -> None:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/ (ctrl-c ends it)", flush=True)
        server.serve_forever()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "guide", help="where to build")
    parser.add_argument("--serve", action="store_true", help="serve it on loopback afterwards")
    args = parser.parse_args()
    for sentence in build(args.site.resolve()):
        print(f"note: {sentence}")
    if args.serve:
        serve(args.site)
    return 0


if __name__ == "__main__":
    sys.exit(main())
