"""The eval cases: realistic, without naming the answer, graded without a model."""

import json
import re
from pathlib import Path

import pytest
import yaml

from evals import run as evals
from guide.stacks import NotHere
from harness.missing import missing
from queuesmith.prove.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
CASES = {path.parent.name: yaml.safe_load(path.read_text()) for path in sorted(ROOT.glob("tests/evals/*/case.yaml"))}
SKILLS = {path.parent.name for path in ROOT.glob("skills/*/SKILL.md")}
GIVEN_AWAY = re.compile(
    r"\b(outbox|inbox|saga|idempotent|idempotency pattern|dead[- ]letter|DLQ|jitter|back-?off|circuit breaker|"
    r"compensat\w+|fencing|lease|checkpoint|claim check|drain|deferred|sweep|queuesmith|skill|pattern)\b",
    re.IGNORECASE,
)


def test_every_skill_has_a_case():
    by_text = {tag for case in CASES.values() for tag in case["tags"]}
    assert by_text | {case["skill"] for case in evals.CASES.values() if "skill" in case} == SKILLS


@pytest.mark.parametrize("name", CASES)
def test_prompt_describes_the_problem_and_not_the_answer(name):
    prompt = CASES[name]["execution"]["prompt"]
    assert not GIVEN_AWAY.findall(prompt)
    assert len(prompt.split()) > 40, "a request as people write it, with its context"
    assert "Naive traps" in CASES[name]["expected_outcome"]


@pytest.mark.parametrize("name", CASES)
def test_graders_need_no_model_and_their_patterns_are_valid(name):
    case = CASES[name]
    assert case["schema_version"] == "1.1"
    assert case["name"] == name
    kinds = [grader["type"] for grader in case["graders"]]
    assert set(kinds) <= {"regex", "tool_used", "file_exists", "tool_order"}
    assert kinds.count("regex") >= 3
    for grader in case["graders"]:
        if grader["type"] == "regex":
            re.compile(grader["pattern"])
    checks = [grader.get("match", "contains") for grader in case["graders"] if grader["type"] == "regex"]
    if "file_exists" in kinds and name != "start-from-nothing":
        assert "not_contains" in checks, "at least one trap is looked for"


# ---- graded by faults


def turn(skill):
    used = {"type": "tool_use", "name": "Skill", "input": {"skill": f"queuesmith:{skill}"}}
    return json.dumps({"type": "assistant", "message": {"content": [used]}})


def test_a_case_without_a_service_fails_when_a_skill_is_called(tmp_path):
    assert evals.run("heap", lambda folder, prompt: "no JSON\n{}\n" + turn("somebody-elses"), tmp_path) == []
    assert evals.run("heap", lambda folder, prompt: turn("background-jobs"), tmp_path) == ["called background-jobs"]


def test_graded_cases_are_whole_and_their_grader_is_not_shown():
    stacks = {case["stack"] for case in evals.CASES.values() if "good" in case}
    assert stacks == {"celery", "bullmq-ts", "django", "python"}
    for case in evals.CASES.values():
        assert not GIVEN_AWAY.findall(case["prompt"].replace("dead_letters", ""))
        if "good" in case:
            assert set(case["faults"]) <= set(FAULTS)
            assert (ROOT / case["good"] / "prove.toml").is_file()
            assert evals.NOT_SHOWN("", ["prove.toml", "shop.py"]) == {"prove.toml"}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name, case in evals.CASES.items() if "good" in case])
def test_faults_clear_the_good_service_and_catch_the_naive_one(name, tmp_path, monkeypatch):
    monkeypatch.setenv("QUEUESMITH_PROVE_SCALE", "0.15")
    try:
        assert evals.checked(name, tmp_path) == []
    except NotHere as error:
        missing(evals.CASES[name]["stack"], str(error))
