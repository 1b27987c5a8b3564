"""What the skill pages take from the code: quotes, guarantee cards, lists of files, and the modules themselves.

    <!-- sync:quote reference/studyhall/patterns/retry.py#decide full_jitter -->   functions, classes, Class.method
    <!-- sync:quote …/bullmq_worker.py#ReliableWorker~ -->                         ~ : signatures and docstrings only
    <!-- sync:quote tests/skills/examples/background-jobs/worker.py#[wiring] -->   from `# [wiring]` to `# [/wiring]`
    <!-- sync:card retry -->      the promise, and what the last full fault run measured
    <!-- sync:files retry -->     which modules to copy, which packages they need

A skill may be installed alone, so `modules()` lists for each one the pattern modules that its pages and examples
use, with all they import: `make sync` copies those byte for byte to `skills/<skill>/modules/`.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from queuesmith.catalogue import closure, imports, packages  # noqa: E402

PATTERNS = ROOT / "reference" / "studyhall" / "patterns"
CARD_LINES, CARD_NUMBERS = 3, 7  # what is worth its tokens; the figures have their own files
PROSE, CODE = 4, 3  # characters per token: an offline estimate that errs on the high side


@functools.cache
def catalogue() -> dict[str, dict[str, Any]]:
    rows = tomllib.loads((ROOT / "reference" / "catalogue.toml").read_text())["pattern"]
    return {str(row["id"]): row for row in rows}


MISSING = (
    "Not in the catalogue yet."  # a test looks for it: a page may be written before its pattern is proven
)


# ---- quotes


def quote(args: str) -> str:
    """A fenced block with the named parts of a file, and where they are from."""
    path, _, names = args.partition("#")
    source = (ROOT / path).read_text()
    parts, spans = [], []
    for name in names.split() or [""]:
        text, first, last = _part(path, source, name)
        parts.append(text)
        spans.append(f"{first}–{last}" if first != last else f"{first}")
    where = f"Lines {', '.join(spans)} of "
    if Path(path).parent == PATTERNS.relative_to(ROOT):
        where += f"[`modules/{Path(path).name}`](../modules/{Path(path).name}):"
    else:
        where = (
            ""  # an example, which runs in the tests; `patterns` is the package the modules were copied to
        )
    body = "\n\n\n".join(parts) if any("\n" in part for part in parts) else "\n".join(parts)
    return f"{where}\n\n```python\n{body}\n```".lstrip()


def _part(path: str, source: str, name: str) -> tuple[str, int, int]:
    lines = source.splitlines()
    if not name:
        return source.rstrip(), 1, len(lines)
    if region := re.fullmatch(r"\[([\w-]+)\]", name):
        marks = [
            i for i, line in enumerate(lines) if line.strip() in (f"# [{region[1]}]", f"# [/{region[1]}]")
        ]
        if len(marks) != 2:
            raise SystemExit(f"{path}: needs the lines `# [{region[1]}]` and `# [/{region[1]}]` once each")
        first, last = marks[0] + 1, marks[1]
    else:
        node = _node(path, ast.parse(source).body, name.removesuffix("~").split("."))
        if name.endswith("~"):
            return textwrap.dedent(_outline(node, lines)), *_span(node)
        first, last = _span(node)[0] - 1, _span(node)[1]
    return textwrap.dedent("\n".join(lines[first:last])).strip("\n"), first + 1, last


def _node(path: str, body: list[ast.stmt], names: list[str]) -> ast.stmt:
    for node in body:
        found = getattr(node, "name", None)
        if isinstance(node, ast.Assign):
            found = getattr(node.targets[0], "id", None)
        elif isinstance(node, ast.AnnAssign):
            found = getattr(node.target, "id", None)
        if found == names[0]:
            return _node(path, getattr(node, "body", []), names[1:]) if names[1:] else node
    raise SystemExit(f"{path}: there is no {'.'.join(names)}")


def _span(node: ast.stmt) -> tuple[int, int]:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(mark.lineno for mark in decorators)]), node.end_lineno or node.lineno


def _outline(node: ast.stmt, lines: list[str]) -> str:
    """Signatures and docstrings of a class or function; public methods and `__init__` only."""
    if isinstance(node, ast.ClassDef):
        head = lines[_span(node)[0] - 1 : node.lineno]
        inner: list[str] = []
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if not child.name.startswith("_") or child.name in ("__init__", "__call__"):
                    inner += ["", _outline(child, lines)]
            elif _is_docstring(child) or (
                isinstance(child, ast.AnnAssign) and not getattr(child.target, "id", "_").startswith("_")
            ):
                inner += lines[child.lineno - 1 : child.end_lineno]
        return "\n".join([*head, *inner]) if inner else "\n".join([*head, "    ..."])
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    first = node.body[0]
    until = first.end_lineno or first.lineno if _is_docstring(first) else first.lineno - 1
    while not _is_docstring(first) and lines[until - 1].strip().startswith("#"):
        until -= 1
    return "\n".join([*lines[_span(node)[0] - 1 : until], " " * (node.col_offset + 4) + "..."])


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


# ---- cards


def card(ident: str) -> str:
    """The promise of a pattern, and what was measured under faults."""
    row = catalogue().get(ident)
    if row is None:
        return MISSING
    lines = [f"**Promise.** {row['summary']}", ""]
    path = ROOT / "reference" / "figures" / row.get("figures", "none")
    measured = json.loads(path.read_text()) if path.is_file() else {}
    full = {name: entry for name, entry in measured.items() if entry["mode"] == "full"}
    if not full:
        proof = row["proofs"][0].split("::")
        return "\n".join(
            [*lines, f"**Measured** by `{proof[0]}`, run `make faults` in the Queuesmith repository."]
        )
    merged: dict[str, dict[str, dict[str, Any]]] = {}  # proof -> database ("" if it needs none) -> figures
    for name, entry in sorted(full.items()):
        plain, _, store = name.rpartition("-")
        known = store in ("sqlite", "postgresql")
        merged.setdefault(plain if known else name, {})[store if known else ""] = entry["figures"]
    first = sorted(
        merged, key=lambda name: (not any("kills" in figures for figures in merged[name].values()), name)
    )
    date = max(entry["date"] for entry in full.values())
    lines += [
        f"**Measured** (full fault run of {date}, real kills; `naive` is the usual version under the same fault):",
        "",
    ]
    for name in first[:CARD_LINES]:
        (store, figures), *others = sorted(merged[name].items())  # PostgreSQL's, where both were measured
        same = [other for other, numbers in others if numbers == figures]
        on = f" ({', '.join([store, *same])})" if store else ""
        lines.append(f"- {name.replace('-', ' ')}{on}: {_numbers(figures)}")
    return "\n".join(lines)


def _numbers(figures: dict[str, Any]) -> str:
    plain = {key: value for key, value in figures.items() if isinstance(value, int | float | str)}
    telling = ["jobs", "events", "orders", "kills", "lost", "doubled"]
    order = sorted(
        plain, key=lambda key: (telling.index(key) if key in telling else len(telling), "naive" not in key)
    )
    return ", ".join(f"{key.replace('_', ' ')} {_number(plain[key])}" for key in order[:CARD_NUMBERS])


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.6g}" if isinstance(value, float) else f"{value:,}"


# ---- modules


def own(row: dict[str, Any]) -> list[str]:
    return [row["module"], *row.get("also", [])]


def _requirements(names: Iterable[str]) -> list[str]:
    """What to install for these modules; the driver of PostgreSQL where one of them can use it."""
    postgres = any("psycopg" in imports(name)[1] for name in names)
    return packages(names, postgres=postgres)


def files(ident: str) -> str:
    """What to copy, and what to install."""
    row = catalogue().get(ident)
    if row is None:
        return MISSING
    mine = own(row)
    others = sorted({*closure(mine)} - {*mine, "__init__.py"})
    wanted = _requirements([*mine, *others])
    text = f"**Copy** from this skill's `modules/` into one package: {_listed(mine)}"
    if len(others) > 12:
        text += f", plus the {len(others)} modules these import (copy the whole folder)"
    elif others:
        text += f", plus what these import: {_listed(others)}"
    text += ". "
    if wanted:
        text += "**Install** " + " ".join(f'`"{item}"`' for item in wanted) + "."
    return text.rstrip()


def _listed(names: list[str]) -> str:
    return " ".join(f"`{name}`" for name in names)


def modules(skill: str) -> dict[str, bytes]:
    """File name -> content of everything the pages of this skill tell the reader to copy."""
    names = {name for row in catalogue().values() if row["skill"] == skill for name in own(row)}
    for page in (ROOT / "skills" / skill).rglob("*.md"):
        names |= set(re.findall(rf"sync:quote {PATTERNS.relative_to(ROOT)}/(\w+\.py)#", page.read_text()))
    for example in (ROOT / "tests" / "skills" / "examples" / skill).glob("*.py"):
        for node in ast.walk(ast.parse(example.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "patterns":
                names |= {f"{alias.name}.py" for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("patterns."):
                names.add(f"{str(node.module).split('.')[1]}.py")
    whole = closure(names)
    copies = {name: (PATTERNS / name).read_bytes() for name in whole}
    optional = ("bus_", "kafka_")  # who takes a broker's adapter reads on its page what it needs
    needed = _requirements([name for name in whole if not name.startswith(optional)])
    copies["requirements.txt"] = ("\n".join(needed) + "\n").encode()
    return copies


# ---- tokens


def tokens(text: str) -> int:
    """Estimate without a tokenizer: 4 characters per token of prose, 3 per token of code."""
    code = sum(len(block) for block in re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE))
    return -(-(len(text) - code) // PROSE) + -(-code // CODE)


def description(skill_md: str) -> str:
    found = re.search(r"^description: (.*)$", skill_md, re.MULTILINE)
    assert found, "a skill has a description on one line"
    return found[1].strip().strip('"')


def token_table(_: str = "") -> str:
    """For the README: what a skill costs before and after it is used."""
    lines = ["| skill | listed always | SKILL.md | pages | largest page |", "|---|---:|---:|---:|---:|"]
    for path in sorted((ROOT / "skills").glob("*/SKILL.md")):
        text = path.read_text()
        pages = [page.read_text() for page in sorted((path.parent / "references").glob("*.md"))]
        largest = max((tokens(page) for page in pages), default=0)
        listed = tokens(f"{path.parent.name} {description(text)}")
        lines.append(f"| `{path.parent.name}` | {listed} | {tokens(text):,} | {len(pages)} | {largest:,} |")
    return "\n".join([*lines, "", f"Tokens, estimated: {PROSE} characters of prose or {CODE} of code each."])
