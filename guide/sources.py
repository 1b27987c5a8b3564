"""Code links: `code:PATH#L12` in a page becomes a local, highlighted source page with an anchor on every line.

So a link to code works offline, shows the tree the guide was built from, and can be checked.
"""

import ast
import functools
import hashlib
import html
import os
import re
import textwrap
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound

from queuesmith.catalogue import ROOT

FOLDER = "source"
CACHE = ROOT / "build" / "guide-highlighted"  # by content: highlighting takes most of a build
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{path}</title>
<link rel="icon" href="{up}assets/images/favicon.png"><link rel="stylesheet" href="{up}assets/source.css"></head>
<body><header><a href="{up}">Queuesmith guide</a> / <h1>{path}</h1>
<a href="{remote}">in the repository</a></header>
<main tabindex="0" aria-label="source of {path}">{code}</main></body></html>
"""


def link(path: str, line: int | None = None) -> str:
    """The address to write into a page; `build` makes it relative."""
    if not (ROOT / path).is_file():
        raise SystemExit(f"the guide links to {path}, which does not exist")
    return f"code:{path}#L{line}" if line else f"code:{path}"


@functools.cache
def _definitions(path: str) -> dict[str, tuple[int, int, int]]:
    """Dotted name -> first line, last line and line of the `def` of functions, classes and variables, also nested."""
    result: dict[str, tuple[int, int, int]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([child.lineno, *(mark.lineno for mark in child.decorator_list)])
                result.setdefault(prefix + child.name, (first, child.end_lineno or child.lineno, child.lineno))
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                target = child.targets[0] if isinstance(child, ast.Assign) else child.target
                lines = child.lineno, child.end_lineno or child.lineno, child.lineno
                result.setdefault(prefix + getattr(target, "id", ""), lines)
            else:
                visit(child, prefix)

    visit(ast.parse((ROOT / path).read_text()), "")
    return result


def lines_of(path: str, name: str) -> tuple[int, int, int]:
    lines = _definitions(path).get(name)
    if lines is None:
        raise SystemExit(f"{path} has no {name}; the guide names it")
    return lines


def proof_link(proof: str) -> str:
    """`tests/x.py::test_y[postgres]` -> a link to its lines, worded as the promise in its name."""
    path, _, name = proof.partition("::")
    name = name.partition("[")[0].replace("::", ".")
    words = name.rpartition(".")[2].removeprefix("test_").replace("_", " ")
    return f"[{words}]({link(path, lines_of(path, name)[2])})"


def excerpt(path: str, name: str) -> str:
    """A function as a fenced block, below a link to its lines."""
    first, last, _ = lines_of(path, name)
    body = textwrap.dedent("\n".join((ROOT / path).read_text().splitlines()[first - 1 : last]))
    return f"[`{path}`, lines {first}–{last}]({link(path, first)})\n\n```python\n{body}\n```"


def write(path: str, site: Path, repository: str) -> None:
    """The source page of one file."""
    text = (ROOT / path).read_text()
    inner = _highlighted(path, text)
    numbered = "".join(
        f'<span class="line" id="L{number}"><a href="#L{number}">{number}</a>{line}</span>'
        for number, line in enumerate(inner.rstrip("\n").split("\n"), 1)
    )
    target = site / FOLDER / f"{path}.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    up = "../" * (path.count("/") + 1)
    remote = f"{repository}/blob/main/{path}"
    target.write_text(PAGE.format(path=html.escape(path), up=up, remote=remote, code=f"<pre>{numbered}</pre>"))


def _highlighted(path: str, text: str) -> str:
    cached = CACHE / hashlib.sha256(f"{Path(path).suffix}\0{text}".encode()).hexdigest()
    if cached.exists():
        return cached.read_text()
    try:
        lexer = get_lexer_for_filename(path)
    except ClassNotFound:
        lexer = TextLexer()
    lexer.stripnl = False
    inner: str = highlight(text, lexer, HtmlFormatter(nowrap=True))
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = cached.with_suffix(f".{os.getpid()}")
    partial.write_text(inner)
    partial.rename(cached)  # builds may run side by side
    return inner


def stylesheet() -> str:
    """Pygments' colours for both schemes; the layout is in assets/source.css."""
    light = HtmlFormatter(style="default").get_style_defs("pre")
    dark = HtmlFormatter(style="github-dark").get_style_defs("pre")
    # their own backgrounds would clash with the page's
    light, dark = (re.sub(r"background(-color)?: [^;}]+;?", "", css) for css in (light, dark))
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
