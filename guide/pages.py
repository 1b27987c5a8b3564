"""The pages: skill references with figures and tests, and hand-written ones from guide/pages.

Links are written as `page:ADDRESS` and `code:PATH#L1`; `build` makes them relative when the HTML exists.
"""

import ast
import functools
import html
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from guide import cards, mermaid, prove_cards, quotes, sources, timelines
from queuesmith import catalogue
from queuesmith.catalogue import ROOT, SKILLS, Pattern, patterns, without_front_matter
from queuesmith.recipes import recipes

HERE = Path(__file__).parent
MODULES = catalogue.MODULES.relative_to(ROOT).as_posix()
# Reference pages that are not patterns: skill/page -> address.
READING = {
    "background-jobs/prove-it": "prove-it/jobs",
    "event-driven/prove-it": "prove-it/events",
    "review-jobs/checklist": "checklist",
    "review-jobs/wrong-findings": "wrong-findings",
} | {
    f"background-jobs/{name}": name
    for name in ("choosing", "combine", "migrate", "moving", "runbook", "stacks", "which-queue")
}
MOST_RELATED = 10
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]*)\]\((?P<to>[^)\s]+)\)")
HEADING = re.compile(r"^##+ (?P<text>[^{\n]+)$", re.MULTILINE)
LIMITS = re.compile(r"\bnot\s+hold\b", re.IGNORECASE)
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"^Lines (?P<spans>[\d–, ]+) of `patterns/(?P<file>[\w/]+\.py)`:$", re.MULTILINE)
QUOTING = re.compile(r"^(```\w+) [^\n]+$", re.MULTILINE)
DIRECTIVE = re.compile(r"\{\{ (?P<name>[\w-]+)(?: (?P<args>[^}]+?))? \}\}")


@functools.cache
def settings() -> dict[str, Any]:
    return tomllib.loads((HERE / "guide.toml").read_text())


@functools.cache
def antipatterns() -> dict[str, dict[str, Any]]:
    rows = tomllib.loads((HERE / "antipatterns.toml").read_text())["antipattern"]
    return {str(row["id"]): row for row in rows}


def all_pages() -> dict[str, str]:
    """Address -> markdown of every page of the guide."""
    result = {f"patterns/{ident}": pattern_page(pattern) for ident, pattern in sorted(patterns().items())}
    for name, address in READING.items():
        skill, stem = name.split("/")
        path = ROOT / "skills" / skill / "references" / f"{stem}.md"
        result[address] = from_file(path)
    for path in sorted((ROOT / "skills").glob("*/references/stacks/*.md")):
        result[f"stacks/{path.stem}"] = from_file(path)
    result |= {f"recipes/{recipe.id}": from_file(ROOT / recipe.page) for recipe in recipes().values()}
    for path in sorted((ROOT / "skills").glob("*/SKILL.md")):
        result[f"skills/{path.parent.name}"] = from_file(path)
    result["reference"] = from_file(ROOT / "reference" / "README.md")
    result |= {f"antipatterns/{ident}": antipattern_page(row) for ident, row in antipatterns().items()}
    for path in sorted((HERE / "pages").rglob("*.md")):
        address = path.relative_to(HERE / "pages").with_suffix("").as_posix()
        result["" if address == "index" else address] = written(path)
    return result


# ---- text from elsewhere in the repository


def from_file(path: Path) -> str:
    """A markdown file as a page: no front matter, no sync marks, links into the guide."""
    text = re.sub(r"<!-- /?sync.*?-->\n?", "", without_front_matter(path.read_text()))
    text = QUOTED.sub(_quote_links, QUOTING.sub(r"\1", text))
    text = "".join(
        part if part.startswith("```") else HEADING.sub(_with_anchor, LINK.sub(lambda match: _link(match, path), part))
        for part in FENCED.split(text)
    )
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    return mermaid.fences(text, title[1] if title else path.stem)


def _with_anchor(heading: re.Match[str]) -> str:
    """The anchor that the repository's own pages use, so that their links work here too."""
    anchor = re.sub(r"[^\w\s-]", "", heading["text"].lower()).strip().replace(" ", "-")
    return f"{heading[0]} {{ #{anchor} }}"


def _quote_links(match: re.Match[str]) -> str:
    path = f"{MODULES}/{match['file']}"
    spans = [span.strip() for span in match["spans"].split(",")]
    linked = ", ".join(f"[{span}]({sources.link(path, int(span.split('–')[0]))})" for span in spans)
    return f"[`{match['file']}`]({sources.link(path)}), lines {linked}:"


def _link(match: re.Match[str], page: Path) -> str:
    to, _, anchor = match["to"].partition("#")
    if not to or re.match(r"[a-z]+:", to):
        return match[0]
    target = (page.parent / to).resolve()
    if not target.exists() or not target.is_relative_to(ROOT):
        raise SystemExit(f"{page.relative_to(ROOT)} links to {to}, which does not exist")
    address = address_of(target)
    if address is not None:
        return f"[{match['text']}](page:{address}{'#' + anchor if anchor else ''})"
    if target.is_dir():
        return f"[{match['text']}]({catalogue.repository()}/tree/main/{target.relative_to(ROOT).as_posix()})"
    return f"[{match['text']}]({sources.link(target.relative_to(ROOT).as_posix())})"


def address_of(path: Path) -> str | None:
    """The address of a file that is a page; None: it is not."""
    parts = path.relative_to(ROOT).parts
    match parts:
        case ("skills", _, "references", "recipes" | "stacks" as kind, _):
            return f"{kind}/{path.stem}"
        case ("skills", skill, "references", _):
            return READING.get(f"{skill}/{path.stem}", f"patterns/{path.stem}")
        case ("skills", skill, "SKILL.md"):
            return f"skills/{skill}"
        case ("reference", "README.md"):
            return "reference"
        case ("guide", "pages", *_):
            return path.relative_to(HERE / "pages").with_suffix("").as_posix()
    return None


# ---- one page per pattern


def pattern_page(pattern: Pattern) -> str:
    text = from_file(pattern.page)
    text, _ = _cut(text, r"\A\s*# (?P<text>.+)\n")
    text, _ = _cut(text, quotes.CARD.pattern)
    text, files = _cut(text, quotes.FILES.pattern)
    text, not_for = _cut(text, r"^(?P<text>\*\*Not for\*\*.*?)(?:\n\n|\Z)")
    text, traps = _cut(text, r"^\*\*Traps\*\*\n(?P<text>.*?)(?=^## |\Z)")
    text, prove = _cut(text, r"^\*\*Prove it\.\*\* (?P<text>.*?)(?:\n\n|\Z)")
    text, stacks = _cut(text, r"^(?:## |\*\*)(?:The same in )?[Oo]ther stacks[^\n]*\n(?P<text>.*?)(?=^## |\Z)")
    lead, code = _split_lead(text)
    diagram = mermaid.drawn(pattern.id, f"{pattern.title}: what goes wrong without it")
    kind = f'<a href="page:skills/{pattern.skill}">{SKILLS[pattern.skill]}</a>'
    parts = [
        f"# {pattern.title}",
        f'<p class="qs-kind">Pattern <code>{pattern.id}</code> · {kind}</p>',
        "## What goes wrong without it" if lead or diagram else "",
        lead,
        timelines.timeline(pattern.id),
        diagram,
        "## The promise",
        cards.card(pattern),
        _limits(pattern),
        not_for,
        "## The code",
        _modules(pattern),
        code,
        files,
        "## The proof",
        "\n".join(f"- {sources.proof_link(proof)}{{ .qs-proof }}" for proof in pattern.proofs),
        prove,
        "## Traps" if traps else "",
        traps,
        "## The same in other stacks" if stacks else "",
        stacks,
        "## Related",
        _related(pattern.id),
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _cut(text: str, pattern: str) -> tuple[str, str]:
    """The text without the first match, and its group `text`."""
    match = re.search(pattern, text, (re.DOTALL if ".*?" in pattern else re.NOFLAG) | re.MULTILINE)
    if match is None:
        return text, ""
    return text[: match.start()] + text[match.end() :], match["text"]


def _split_lead(text: str) -> tuple[str, str]:
    """The paragraphs before the first table, list, code or heading, and the rest."""
    blocks = text.strip().split("\n\n")
    lead: list[str] = []
    while blocks and not re.match(r"```|\||#|- |\d\. |<|\[`", blocks[0].lstrip("\n")) and len(lead) < 2:
        lead.append(blocks.pop(0))
    return "\n\n".join(lead), "\n\n".join(blocks)


def _limits(pattern: Pattern) -> str:
    """When the promise does not hold, in the words of the module."""
    docstring = ast.get_docstring(ast.parse((catalogue.MODULES / pattern.own[0]).read_text())) or ""
    limits = []
    for paragraph in docstring.split("\n\n"):
        if LIMITS.search(paragraph):
            text = re.sub(r"\A(When|Where) (it|they) (does|do) not hold:?\s*", "", paragraph, flags=re.IGNORECASE)
            limits.append(re.sub(r"^(?=- )", "\n", text, count=1, flags=re.MULTILINE).strip())
    return "**When it does not hold**{ .qs-limits }\n\n" + "\n\n".join(limits) if limits else ""


def _modules(pattern: Pattern) -> str:
    lines = []
    for name in (*pattern.own, *pattern.parts):
        length = len((catalogue.MODULES / name).read_text().splitlines())
        lines.append(f"[`{name}`]({sources.link(f'{MODULES}/{name}')}) ({length} lines)")
    return "Modules: " + ", ".join(lines) + "."


def _related(ident: str) -> str:
    near = sorted(_neighbours().get(ident, set()) - {ident})
    groups = [group for group in settings()["group"] if ident in group["patterns"]]
    mates = [name for group in groups for name in group["patterns"] if name != ident]
    lines = [f"- {pattern_link(name)}" for name in list(dict.fromkeys([*mates, *near]))[:MOST_RELATED]]
    wrong = [row for row in antipatterns().values() if row["pattern"] == ident]
    lines += [f"- Mistake: [{row['title']}](page:antipatterns/{row['id']})" for row in wrong]
    return "\n".join(lines) or "- [All patterns](page:patterns)"


def pattern_link(ident: str) -> str:
    pattern = patterns()[ident]
    return f"[{pattern.title}](page:patterns/{ident}): {pattern.summary}"


@functools.cache
def _neighbours() -> dict[str, set[str]]:
    """Patterns that link to each other in their pages, or whose modules import each other."""
    owner = {
        name: pattern.id for pattern in patterns().values() for name in pattern.own if not name.startswith("core/")
    }
    result: dict[str, set[str]] = {}

    def join(left: str, right: str) -> None:
        if left != right and right in patterns():
            result.setdefault(left, set()).add(right)
            result.setdefault(right, set()).add(left)

    for ident, pattern in patterns().items():
        for match in LINK.finditer(pattern.page.read_text()):
            if match["to"].endswith(".md"):
                join(ident, Path(match["to"]).stem)
        for module in pattern.own:
            for name in catalogue.imports(module)[0]:
                if name in owner:
                    join(ident, owner[name])
    return result


# ---- anti-patterns


def antipattern_page(row: dict[str, Any]) -> str:
    """The mistake, its experiment (a naive twin that runs in the tests), what it cost there, what to do instead."""
    path, _, name = row["proof"].partition("::")
    twin_path, _, twin = row.get("twin", row["proof"]).partition("::")
    parts = [
        f"# {row['title']}",
        '<p class="qs-kind">Anti-pattern</p>',
        row["text"],
        "## The experiment",
        f"{sources.proof_link(row['proof'])}, run by `pytest {path} -k {name}`.",
        cards.box(dict(cards.of_proof(row["proof"]))),
        "## The naive version, as it runs there",
        sources.excerpt(twin_path, twin),
        "## Instead",
        pattern_link(row["pattern"]),
    ]
    return "\n\n".join(parts) + "\n"


# ---- hand-written pages and their directives


def written(path: Path) -> str:
    text = from_file(path)
    return DIRECTIVE.sub(lambda match: _directive(path, match), text)


def _directive(path: Path, match: re.Match[str]) -> str:
    known: dict[str, Callable[[str], str]] = {
        "figure": cards.figure,
        "bench": cards.bench,
        "benchmark": lambda _: cards.benchmark(),
        "charts": cards.charts,
        "peers": lambda _: cards.peers(),
        "prove-cards": prove_cards.cards,
        "prove-seeds": prove_cards.seeds,
        "section": section,
        "tree": lambda _: tree(),
        "patterns": lambda _: pattern_index(),
        "antipatterns": lambda _: antipattern_index(),
        "errors": lambda _: errors(),
        "diagram": lambda args: mermaid.drawn(args.split(" ")[0], args.partition(" ")[2]) or _no(path, args),
        "code": lambda args: sources.excerpt(*args.split("::")),
        "file": lambda args: f"[`{Path(args).name}`]({sources.link(args)})",
        "proof": sources.proof_link,
    }
    if match["name"] not in known:
        raise SystemExit(f"{path}: unknown directive {match['name']!r}; known: {', '.join(known)}")
    return known[match["name"]](match["args"] or "")


def _no(path: Path, name: str) -> str:
    raise SystemExit(f"{path}: guide/diagrams has no {name}.mmd")


def section(args: str) -> str:
    """`README.md#Three ways in`: the text below a heading of another file, its links adapted."""
    name, _, heading = args.partition("#")
    text = from_file(ROOT / name)
    match = re.search(
        rf"^(#+) {re.escape(heading)}(?: \{{ #[^\n]*)?\n(.*?)(?=^#{{1,2}} |\Z)", text, re.DOTALL | re.MULTILINE
    )
    if match is None:
        raise SystemExit(f"{name} has no heading {heading!r}; the guide shows that section")
    return match[2].strip()


def tree() -> str:
    """The decision tree: nested <details>, so it works with a keyboard, on paper and without scripts."""
    return f'<div class="qs-tree">{_branches(tomllib.loads((HERE / "decisions.toml").read_text())["choice"])}</div>'


def _branches(choices: list[dict[str, Any]]) -> str:
    parts = []
    for choice in choices:
        label = html.escape(choice["label"])
        if "choice" in choice:
            ask = f"<p>{html.escape(choice['ask'])}</p>" if "ask" in choice else ""
            inner = _branches(choice["choice"])
            parts.append(f"<details><summary>{label}</summary>{ask}{inner}</details>")
        else:
            links = " + ".join(_leaf(address) for address in choice["to"])
            why = f" <span>{html.escape(choice['why'])}</span>" if "why" in choice else ""
            parts.append(f'<p class="qs-leaf">{label} → {links}{why}</p>')
    return "".join(parts)


def _leaf(address: str) -> str:
    if "/" in address:
        return f'<a href="page:{address.strip("/")}">{html.escape(address.rpartition("/")[2])}</a>'
    if address not in patterns():
        raise SystemExit(f"guide/decisions.toml leads to the pattern {address!r}, which does not exist")
    return f'<a href="page:patterns/{address}">{html.escape(patterns()[address].title)}</a>'


def grouped() -> list[tuple[str, list[str]]]:
    """Pattern ids by the problem they solve; those in no group come last."""
    named = {name for group in settings()["group"] for name in group["patterns"]}
    if unknown := named - {*patterns()}:
        raise SystemExit(f"guide/guide.toml groups {', '.join(sorted(unknown))}: no such pattern")
    groups = [(group["title"], group["patterns"]) for group in settings()["group"]]
    rest = sorted({*patterns()} - named)
    return groups + ([("More", rest)] if rest else [])


def pattern_index() -> str:
    lines = []
    for title, names in grouped():
        lines += [f"## {title}", "", *(f"- {pattern_link(name)}" for name in names), ""]
    return "\n".join(lines)


def errors() -> str:
    """Every error that the modules raise, with its docstring (its message) and the pattern to read."""
    owner = {name: pattern for pattern in patterns().values() for name in (*pattern.own, *pattern.parts)}
    known, rows = {"Exception", "RuntimeError", "ValueError", "LookupError"}, []
    classes = [
        (path.relative_to(catalogue.MODULES).as_posix(), node)
        for path in sorted(catalogue.MODULES.rglob("*.py"), key=lambda path: ("core" not in path.parts, path))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    for module, node in classes:
        if known.isdisjoint(getattr(base, "id", "") for base in node.bases):
            continue
        known.add(node.name)
        message = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()).replace("|", "\\|")
        link = f"[`{node.name}`]({sources.link(f'{MODULES}/{module}', node.lineno)})"
        page = owner.get(module)
        read = f"[{page.title}](page:patterns/{page.id})" if page else ""
        if message and not node.name.startswith("_"):
            rows.append((node.name, f"| {link} | {message} | {read} |"))
    return "\n".join(["| error | says | read |", "|---|---|---|", *(line for _, line in sorted(rows))])


def antipattern_index() -> str:
    rows = ["| mistake | what it costs | instead |", "|---|---|---|"]
    for row in antipatterns().values():
        cost = " ".join(row["text"].split()).split(". ")[0].rstrip(".")
        rows.append(
            f"| [{row['title']}](page:antipatterns/{row['id']}) | {cost} | "
            f"[{patterns()[row['pattern']].title}](page:patterns/{row['pattern']}) |"
        )
    return "\n".join(rows)
