"""review_jobs.py finds every planted fault at its line, and nothing in code that is right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "skills" / "review-jobs" / "scripts" / "review_jobs.py"
SAMPLES = Path(__file__).parent / "samples"
sys.path.insert(0, str(SCRIPT.parent))
import review_jobs  # noqa: E402


def marked(folder: Path) -> set[tuple[str, int, str]]:
    """(file, line, rule) of every `finds: rule, rule` comment."""
    return {
        (path.name, number, rule)
        for path in folder.iterdir()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := re.search(r"(?:#|//) finds: ([\w, -]+)$", line))
        for rule in match[1].split(", ")
    }


def found(*paths: Path) -> set[tuple[str, int, str]]:
    return {(Path(item.file).name, item.line, item.rule) for item in review_jobs.review(paths)}


def test_every_planted_fault_is_found_at_its_line() -> None:
    assert found(SAMPLES / "bad") == marked(SAMPLES / "bad")


def test_every_rule_has_a_sample_that_it_finds() -> None:
    assert {rule for _, _, rule in marked(SAMPLES / "bad")} == set(review_jobs.RULES)


def test_nothing_is_found_in_code_that_is_right() -> None:
    assert found(SAMPLES / "good") == set()


def test_nothing_is_found_in_the_proven_code() -> None:
    """Ten thousand lines of queue code that does all of this right: the false positives would show here."""
    assert [
        (item.file, item.line, item.rule) for item in review_jobs.review([ROOT / "reference" / "studyhall"])
    ] == []


def test_rules_name_a_page_that_exists() -> None:
    for rule in review_jobs.RULES.values():
        skill, page = rule.page.split("/")
        assert (ROOT / "skills" / skill / "references" / f"{page}.md").is_file(), rule.page
        assert rule.severity in review_jobs.SEVERITIES


def test_finding_can_be_silenced_with_a_reason(tmp_path: Path) -> None:
    silent = "# queuesmith: ignore[task-not-held] a test"
    code = f"import asyncio\n\n\nasync def f(work):\n    asyncio.create_task(work())  {silent}\n"
    (tmp_path / "a.py").write_text(code)
    assert found(tmp_path) == set()
    (tmp_path / "a.py").write_text(code.replace("ignore[task-not-held]", "ignore[other]"))
    assert found(tmp_path) == {("a.py", 5, "task-not-held")}


def test_socket_timeout_is_no_finding_before_redis_py_8(tmp_path: Path) -> None:
    code = "import redis\n\nclient = redis.Redis.from_url(url)\nclient.xread({}, block=5000)\n"
    (tmp_path / "a.py").write_text(code)
    assert found(tmp_path) == {("a.py", 3, "redis-default-timeout")}
    (tmp_path / "requirements.txt").write_text("redis==7.1\n")
    assert found(tmp_path) == set()


@pytest.mark.parametrize("text", ["def broken(:\n", "\x00", "const a = `${", "queue.add('x', {", "'" * 3])
def test_files_that_do_not_parse_are_passed_over(text: str, tmp_path: Path) -> None:
    for name in ("a.py", "a.ts"):
        (tmp_path / name).write_text(text)
    assert found(tmp_path) == set()


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", SCRIPT, *args]  # isolated: the standard library has to be enough
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_exit_codes_say_clean_findings_and_misuse() -> None:
    assert run(SAMPLES / "good").returncode == 0
    assert run(SAMPLES / "bad").returncode == 1
    assert run(SAMPLES / "bad" / "nowhere.py").returncode == 2
    assert run("--fail-on", "sometimes").returncode == 2


def test_severity_decides_what_fails(tmp_path: Path) -> None:
    (tmp_path / "a.ts").write_text("const x = await job.waitUntilFinished(events)\n")
    assert run(tmp_path).returncode == 0
    assert run(tmp_path, "--fail-on", "medium").returncode == 1


def test_json_has_all_that_a_report_needs() -> None:
    findings = json.loads(run(SAMPLES / "bad", "--json").stdout)["findings"]
    assert findings
    for finding in findings:
        assert all(
            finding[key]
            for key in ("rule", "severity", "file", "line", "code", "why", "fix", "proof", "page")
        )
    order = [review_jobs.SEVERITIES.index(finding["severity"]) for finding in findings]
    assert order == sorted(order), "the worst first"


def test_tests_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "import asyncio\n\n\nasync def f(w):\n    asyncio.create_task(w())\n"
    )
    assert run(tmp_path).returncode == 0
    assert run(tmp_path, "--include-tests").returncode == 1
