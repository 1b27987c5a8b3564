"""The skills as documents: small, whole, linked, valid, and every line of code in them quoted or executed."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from guide import quotes
from queuesmith import catalogue
from queuesmith.catalogue import without_front_matter
from queuesmith.stacks import STACKS

ROOT = Path(__file__).resolve().parents[2]
SKILLS = sorted((ROOT / "skills").glob("*/SKILL.md"))
PAGES = sorted((ROOT / "skills").glob("*/references/**/*.md"))
EVERY = [*SKILLS, *PAGES]
BIN = Path(sys.executable).parent
BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r'queuesmith"? add ([a-z. -]+?) --into')


def label(path):
    return str(path.relative_to(ROOT / "skills"))


# ---- budgets


def test_descriptions_share_the_listing_fairly():
    lengths = {path.parent.name: len(quotes.description(path.read_text())) for path in SKILLS}
    assert sum(lengths.values()) <= 3_500, lengths
    assert max(lengths.values()) <= 1_024, lengths


@pytest.mark.parametrize("path", SKILLS, ids=label)
def test_skill_is_short_enough_to_be_read(path):
    text = path.read_text()
    # The description is listed always; what is read when the skill is called is the rest.
    assert quotes.tokens(text) - quotes.tokens(quotes.description(text)) <= 2_000
    assert len(text.splitlines()) <= 200
    assert re.search(r" Not for ", quotes.description(text)), "says what it is not for"


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_page_is_short_enough_to_be_read(path):
    pattern = catalogue.patterns().get(path.stem)
    most = 1_200 if pattern and pattern.page == path else 2_500
    assert quotes.tokens(path.read_text()) <= most


@pytest.mark.parametrize("ident", sorted(catalogue.patterns()))
def test_page_of_a_pattern_says_what_to_type_before_why(ident):
    text = without_front_matter(catalogue.patterns()[ident].page.read_text())
    assert text.index("**Get it**") < text.index("**Promise.**")
    assert quotes.tokens(text[: text.index("**Get it**")]) <= 150, "a problem is told in three lines"


@pytest.mark.parametrize("ident", sorted(catalogue.patterns()))
def test_page_of_a_pattern_has_no_comments_and_no_bare_signatures(ident):
    """Signatures are in the module; what to type is in the example."""
    text = catalogue.patterns()[ident].page.read_text()
    assert "<!--" not in text
    for _, _, block in BLOCK.findall(text):
        assert not re.search(r"^\s*\.\.\.$", block, re.MULTILINE), "a body that is left out"


# ---- whole


@pytest.mark.parametrize("ident", sorted(catalogue.patterns()))
def test_page_of_a_pattern_is_whole_and_its_skill_names_it(ident):
    page = catalogue.patterns()[ident].page
    text = page.read_text()
    assert quotes.CARD.search(text)
    entry = quotes.FILES.search(text)
    assert entry
    linked = re.findall(r"\]\(\.\./\.\./\.\./([^)]+)\)", entry[0])
    module, proof, *place = [(ROOT / path).relative_to(ROOT).as_posix() for path in linked if (ROOT / path).is_file()]
    assert module.startswith("reference/studyhall/patterns/")
    assert proof in catalogue.patterns()[ident].proof_files
    assert place or not quotes.in_studyhall(catalogue.patterns()[ident])
    assert f"references/{ident}.md" in (page.parents[1] / "SKILL.md").read_text()
    for part in ("**Not for**", "**Prove it.**", "**Traps**"):
        assert part in text or (part == "**Not for**" and "**Not fine**" in text), part


@pytest.mark.parametrize("path", EVERY, ids=label)
def test_links_resolve_inside_the_skill(path):
    """`npx skills add` copies the folder of one skill and nothing else: module and proof of a pattern are not in it."""
    skill = ROOT / "skills" / path.relative_to(ROOT / "skills").parts[0]
    for target in re.findall(r"\]\(([^)]+)\)", quotes.FILES.sub("", re.sub(BLOCK, "", path.read_text()))):
        if not target.startswith("https://"):
            linked = (path.parent / target.split("#")[0]).resolve()
            assert linked.exists(), target
            assert linked.is_relative_to(skill), f"{target} leaves the skill"


@pytest.mark.parametrize("path", SKILLS, ids=label)
def test_every_page_of_a_skill_is_reachable_from_it(path):
    linked = set(re.findall(r"references/((?:recipes/)?[\w-]+\.md)", path.read_text()))
    folder = path.parent / "references"
    if "stacks.md" in linked:  # leads to the page of each
        linked |= set(re.findall(r"\]\((stacks/[\w-]+\.md)\)", (folder / "stacks.md").read_text()))
    present = {page.relative_to(folder).as_posix() for page in folder.rglob("*.md")}
    assert linked == present


@pytest.mark.parametrize("path", SKILLS, ids=label)
def test_skill_ends_in_a_checklist_with_a_proof_under_kills(path):
    last = path.read_text().rstrip().splitlines()[-1]
    assert last.startswith("- [ ] ")
    assert re.search(r"kill -9|SIGKILL|queuesmith prove|prove\.toml", last)


@pytest.mark.parametrize("path", SKILLS, ids=label)
def test_skill_has_no_placeholder_that_the_client_would_fill(path):
    """`$1` becomes an argument of the command; SQL placeholders would be eaten."""
    assert not re.findall(r"\$\d|\$ARGUMENTS", path.read_text())
    assert set(re.findall(r"\$\{(\w+)\}", path.read_text())) <= {"CLAUDE_PLUGIN_ROOT", "CLAUDE_SKILL_DIR"}


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_page_uses_no_variable_of_the_client(path):
    assert "${CLAUDE" not in path.read_text(), "replaced in SKILL.md and agents only"


def test_voice_has_no_persona_and_no_shouting():
    for path in [*EVERY, *(ROOT / "agents").glob("*.md")]:
        text = re.sub(BLOCK, "", path.read_text())
        assert not re.findall(r"(?i:you are an? (?:elite|expert|world|senior))|\bIMPORTANT\b|\bMUST\b|🚨", text), path


# ---- code


@pytest.mark.parametrize("path", SKILLS, ids=label)
def test_a_skill_that_was_installed_alone_says_how_to_get_the_command(path):
    """Other clients copy the folder of one skill: no plugin root, no command, and no copies of the modules."""
    if "queuesmith add" in path.read_text():
        command = f"uvx --from git+{catalogue.repository()} queuesmith add"
        assert command in " ".join(path.read_text().split())
    assert not (path.parent / "modules").exists()


@pytest.mark.parametrize("path", EVERY, ids=label)
def test_python_blocks_are_quoted_and_have_no_undefined_name(path, tmp_path):
    """All Python is quoted, from modules that are linted and proven or examples that the tests run."""
    blocks = [
        (source.strip(), block) for language, source, block in BLOCK.findall(path.read_text()) if language == "python"
    ]
    for source, block in blocks:
        assert source, "Python that nobody runs: move it to tests/skills/examples"
        ast.parse(block)
    examples = [block for source, block in blocks if source.startswith("tests/skills/examples/")]
    for number, block in enumerate(examples):
        (tmp_path / f"block{number}.py").write_text(block)
    if examples:
        command = [BIN / "ruff", "check", "--isolated", "--output-format", "concise", "--select", "F821", tmp_path]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("path", EVERY, ids=label)
def test_commands_bring_every_module_that_the_code_imports(path):
    """The command of the skill is run first, that of the page after it."""
    skill = ROOT / "skills" / path.relative_to(ROOT / "skills").parts[0] / "SKILL.md"
    texts = [page.read_text() for page in (skill, path)]
    named = {name for text in texts for names in COMMAND.findall(text) for name in names.split()}
    of_stacks = [ident for name in named if name in STACKS for ident in STACKS[name].patterns]
    patterns = [name for name in named if name not in STACKS] + of_stacks
    brought = {module for name in patterns for module in catalogue.find(name).modules}
    assert quotes.imported(path) - brought == set()


def test_no_other_language_is_shown_unchecked():
    for path in EVERY:
        loose = {language for language, source, _ in BLOCK.findall(path.read_text()) if not source}
        # toml: tests/prove loads it. yaml: a step of somebody's workflow. diff: tests/recipes applies it.
        assert loose <= {"sh", "text", "mermaid", "toml", "yaml", "diff"}, path


def test_commands_that_the_skills_name_exist():
    """Every option after `queuesmith new` or `queuesmith add` in a skill is one that the command knows."""
    for verb in ("new", "start", "add", "list", "diff", "prove"):
        shown = subprocess.run(
            [sys.executable, ROOT / "bin" / "queuesmith", verb, "--help"], capture_output=True, text=True, check=False
        )
        assert shown.returncode == 0, shown.stderr
        for path in SKILLS:
            for line in re.findall(rf'queuesmith"? {verb}\b[^`\n]*', path.read_text()):
                assert [option for option in re.findall(r"--[a-z-]+", line) if option not in shown.stdout] == [], line


# ---- coverage and validators

TOPICS = tomllib.loads((Path(__file__).parent / "coverage.toml").read_text())["topics"]


@pytest.mark.parametrize("topic", TOPICS)
def test_topic_is_answered(topic):
    page, *words = TOPICS[topic]
    text = (ROOT / "skills" / page).read_text()
    assert [word for word in words if word.lower() not in text.lower()] == []


@pytest.mark.parametrize("path", SKILLS, ids=label)
def test_skill_is_valid_by_the_reference_library(path):
    done = subprocess.run([BIN / "agentskills", "validate", path.parent], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_linter_of_skills_and_plugins_finds_nothing():
    done = subprocess.run([BIN / "skillsaw", "lint", ROOT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Errors:\s+0\s+Warnings:\s+0", done.stdout), done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "agents").glob("*.md")), ids=lambda path: path.stem)
def test_agent_has_limits_examples_and_loads_skills(path):
    head, body = path.read_text().split("---\n", 2)[1:]
    assert f"name: {path.stem}" in head
    assert head.count("<example>") >= 2
    tools = re.search(r"^tools: (.*)$", head, re.MULTILINE)
    assert tools
    assert "Skill" in tools[1]
    skills = {path.parent.name for path in SKILLS}
    named = set(re.findall(r"`queuesmith:([\w-]+)`", body))
    assert named
    assert named <= skills
    if path.stem.endswith(("reviewer", "responder")):
        assert not {"Edit", "Write"} & set(re.split(r",\s*", tools[1])), "reads only"


# What a builder has to ask and to hand over, and what keeps a responder from making it worse.
DUTIES = {
    "bullmq-job-processor": ("who is told", "connections", "decisions taken", "how it is watched", "queuesmith prove"),
    "event-flow-architect": ("who is told", "connections", "decisions taken", "how it is watched", "queuesmith prove"),
    "queue-incident-responder": ("`runbook`", "read-only", "before the first change", "seen", "done", "left"),
}


@pytest.mark.parametrize("agent", DUTIES)
def test_agent_asks_watches_and_hands_over(agent):
    head, body = (ROOT / "agents" / f"{agent}.md").read_text().split("---\n", 2)[1:]
    assert [words for words in DUTIES[agent] if words not in body.lower()] == []
    assert re.search(r"Context: (Asked for something else|A command or a log)", head), "called without being asked"
