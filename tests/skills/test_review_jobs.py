"""review_jobs.py finds every planted fault at its line, and nothing in code that is right."""

import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "skills" / "review-jobs" / "scripts" / "review_jobs.py"
SAMPLES = Path(__file__).parent / "samples"
sys.path.insert(0, str(SCRIPT.parent))
import review_jobs  # noqa: E402


def marked(folder):
    """(file, line, rule) of every `finds: rule, rule` or `fault: rule` comment."""
    return {
        (path.name, number, rule)
        for path in folder.iterdir()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := re.search(r"(?:#|//|--) (?:finds|fault): ([\w, -]+)$", line))
        for rule in match[1].split(", ")
    }


def findings(*paths):
    return {(Path(item.file).name, item.line, item.rule) for item in review_jobs.review(paths)}


def test_every_planted_fault_is_found_at_its_line():
    assert findings(SAMPLES / "bad") == marked(SAMPLES / "bad")


def test_every_rule_has_a_sample_that_it_finds():
    planted = marked(SAMPLES / "bad") | marked(SAMPLES / "corpus")
    # Its version decides: test_repeat_is_judged_by_the_version_of_bullmq.
    assert {rule for _, _, rule in planted} == set(review_jobs.RULES) - {"repeat-deprecated"}


def test_nothing_is_found_in_code_that_is_right():
    assert findings(SAMPLES / "good") == set()


def test_precision_and_recall_on_the_corpus():
    """Each file alone, as the work of one author. Run with -s to see what is missed and what is wrong."""
    corpus = SAMPLES / "corpus"
    planted = marked(corpus)
    reported = set().union(*(findings(path) for path in sorted(corpus.iterdir())))
    right = planted & reported
    precision, recall = len(right) / len(reported), len(right) / len(planted)
    print(f"\n{len(planted)} faults, {len(reported)} reported: precision {precision:.3f}, recall {recall:.3f}")
    print("missed:", sorted(planted - reported), "\nwrong:", sorted(reported - planted))
    assert precision >= 0.9
    assert recall >= 0.9


def test_no_wrong_finding_in_public_code_is_listed_more_often_than_seen():
    counted = json.loads((ROOT / "guide" / "scanned.json").read_text())
    judged = tomllib.loads((ROOT / "guide" / "scanned.toml").read_text())
    assert counted.keys() == judged.keys()
    for name, notes in judged.items():
        wrong = Counter(place.split(" ")[0] for place in notes.get("wrong", {}))
        assert wrong <= Counter(counted[name]["found"]), name


@pytest.mark.slow
def test_nothing_is_found_in_the_proven_code():
    """Ten thousand lines of queue code that is right: false positives would show here."""
    assert [(item.file, item.line, item.rule) for item in review_jobs.review([ROOT / "reference" / "studyhall"])] == []


def test_recipes_and_stacks_have_only_the_faults_they_show():
    """A sender "as others write it" is the point of one recipe; the naive twins are wrong on purpose."""
    assert {
        (Path(item.file).parent.name, Path(item.file).name, item.rule)
        for item in review_jobs.review([ROOT / "reference" / "recipes", ROOT / "reference" / "stacks"])
        if item.severity in ("critical", "high") and "naive" not in item.file
    } == {("shared-queue", "submit.py", "missing-attempts")}


@pytest.mark.parametrize("stack", ["asynq", "bullmq-ts", "celery"])
def test_naive_twins_are_found(stack):
    assert review_jobs.review([ROOT / "reference" / "stacks" / stack / "naive"])


def test_rules_name_a_page_that_exists():
    for rule in review_jobs.RULES.values():
        skill, page = rule.page.split("/", maxsplit=1)
        assert (ROOT / "skills" / skill / "references" / f"{page}.md").is_file(), rule.page
        assert rule.severity in review_jobs.SEVERITIES


def test_finding_can_be_silenced_with_a_reason(tmp_path):
    silent = "# queuesmith: ignore[task-not-held] a test"
    code = f"import asyncio\n\n\nasync def f(work):\n    asyncio.create_task(work())  {silent}\n"
    (tmp_path / "a.py").write_text(code)
    assert findings(tmp_path) == set()
    (tmp_path / "a.py").write_text(code.replace("ignore[task-not-held]", "ignore[other]"))
    assert findings(tmp_path) == {("a.py", 5, "task-not-held")}


def test_socket_timeout_is_not_a_finding_before_redis_py_8(tmp_path):
    code = "import redis\n\nclient = redis.Redis.from_url(url)\nclient.xread({}, block=5000)\n"
    (tmp_path / "a.py").write_text(code)
    assert findings(tmp_path) == {("a.py", 3, "redis-default-timeout")}
    (tmp_path / "requirements.txt").write_text("redis==7.1\n")
    assert findings(tmp_path) == set()


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("package.json", '{"dependencies": {"bullmq": "^5.12.0"}}', "repeat-deprecated"),
        ("package.json", '{"dependencies": {"bullmq": "^6.0.0"}}', "repeat-option"),
        ("yarn.lock", '"bullmq@^5.0.0":\n  version "5.41.1"\n', "repeat-deprecated"),
        ("pnpm-lock.yaml", "packages:\n\n  bullmq@6.7.0:\n    resolution: {}\n", "repeat-option"),
        ("README.md", "bullmq 5", "repeat-option"),
    ],
)
def test_repeat_is_judged_by_the_version_of_bullmq(name, content, rule, tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / name).write_text(content)
    (tmp_path / "src").mkdir()
    code = "import { Queue } from 'bullmq'\nawait queue.add('a', {}, { ...JOB, repeat: { every: 1000 } })\n"
    (tmp_path / "src" / "a.ts").write_text(code)
    assert findings(tmp_path) == {("a.ts", 2, rule)}
    # The manifest stands above the folder that was asked for.
    assert findings(tmp_path / "src") == {("a.ts", 2, rule)}


def test_lock_file_says_more_than_the_range_beside_it(tmp_path):
    (tmp_path / "package.json").write_text('{"dependencies": {"bullmq": ">=5"}}')
    lock = {"packages": {"node_modules/bullmq": {"version": "6.7.0"}}}
    (tmp_path / "package-lock.json").write_text(json.dumps(lock))
    read = review_jobs.report([tmp_path]).read
    assert read.versions == {"bullmq (TypeScript/JavaScript)": "6.7.0"}


def test_defaults_of_a_queue_that_another_file_makes_count(tmp_path):
    """All thirteen findings of these rules in a public code base were wrong: its queues are made elsewhere."""
    made = "export const mailQueue = new Queue('mail', { connection, defaultJobOptions: JOB })"
    (tmp_path / "queues.ts").write_text(f"import {{ Queue }} from 'bullmq'\n{made}\n")
    (tmp_path / "worker.ts").write_text("import { Job } from 'bullmq'\nawait mailQueue.add('hello', job.data.id)\n")
    assert findings(tmp_path) == set()
    (tmp_path / "queues.ts").unlink()
    assert findings(tmp_path) == {("worker.ts", 2, "missing-attempts"), ("worker.ts", 2, "missing-retention")}


def test_report_says_what_was_read_and_what_was_not(tmp_path):
    (tmp_path / "worker.py").write_text("from rq import Queue\nimport celery\n")
    (tmp_path / "main.go").write_text('import "github.com/hibiken/asynq"\n')
    (tmp_path / "broken.py").write_text("def broken(:\n")
    (tmp_path / "job.rb").write_text("class Job; end\n")
    (tmp_path / "requirements.txt").write_text("bullmq==3.4.4\nhomemade-queue>=1\ncelery>=5\n")
    read = review_jobs.report([tmp_path]).read
    assert read.files == {"Python": 2, "Go": 1}
    assert read.frameworks == {"Celery": 1, "RQ": 1, "asynq": 1}
    assert read.general_only == ["RQ"]
    assert read.versions == {"bullmq (Python)": "3.4.4"}
    assert read.not_recognised == ["homemade-queue"]
    assert read.not_read == {"Ruby": 1}
    assert [Path(name).name for name in read.not_parsed] == ["broken.py"]


@pytest.mark.parametrize("name", ["Job.java", "plain.py"])
def test_no_findings_without_a_known_queue_come_with_a_warning(name, tmp_path):
    (tmp_path / name).write_text("x = 1\n")
    shown = run(tmp_path).stdout
    assert re.search("nothing is known about this code|0 findings say nothing here", shown)
    assert json.loads(run(tmp_path, "--json").stdout)["read"]["warnings"]


def test_scripts_folder_works_as_a_copy(tmp_path):
    shutil.copytree(SCRIPT.parent, tmp_path / "scripts")
    command = [sys.executable, "-I", tmp_path / "scripts" / SCRIPT.name, SAMPLES / "good"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("text", ["def broken(:\n", "\x00", "const a = `${", "queue.add('x', {", "'" * 3])
def test_files_that_do_not_parse_are_passed_over(text, tmp_path):
    for name in ("a.py", "a.ts", "a.go"):
        (tmp_path / name).write_text(text)
    assert findings(tmp_path) == set()


def run(*args):
    command = [sys.executable, "-I", SCRIPT, *args]  # isolated: the standard library has to be enough
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_large_file_takes_no_longer_than_many_small_ones(tmp_path):
    """Each call searched the whole file: a generated client of a megabyte took more than ten minutes."""
    (tmp_path / "a.py").write_text("import requests\n" + "client.get(1, timeout=2)\n" * 1000)

    def seconds(*paths):
        began = time.process_time()
        review_jobs.review(paths)
        return time.process_time() - began

    small = min(seconds(tmp_path / "a.py") for _ in range(3))
    (tmp_path / "b.py").write_text((tmp_path / "a.py").read_text() * 8)
    # Searched for each call it would be 64 times.
    assert seconds(tmp_path / "b.py") < 24 * small


def test_generated_code_is_not_reviewed(tmp_path):
    (tmp_path / "a.py").write_text("import asyncio\n\n\nasync def f(work):\n    asyncio.create_task(work())\n")
    assert findings(tmp_path)
    (tmp_path / "a.py").write_text("# Code generated by a tool. DO NOT EDIT.\n" + (tmp_path / "a.py").read_text())
    assert findings(tmp_path) == set()


def test_exit_codes_say_clean_findings_and_misuse():
    assert run(SAMPLES / "good").returncode == 0
    assert run(SAMPLES / "bad").returncode == 1
    assert run(SAMPLES / "bad" / "nowhere.py").returncode == 2
    assert run("--fail-on", "sometimes").returncode == 2


def test_severity_decides_what_fails(tmp_path):
    (tmp_path / "a.ts").write_text("const x = await job.waitUntilFinished(events)\n")
    assert run(tmp_path).returncode == 0
    assert run(tmp_path, "--fail-on", "medium").returncode == 1


def test_json_has_all_that_a_report_needs():
    findings = json.loads(run(SAMPLES / "bad", "--json").stdout)["findings"]
    assert findings
    for finding in findings:
        assert all(finding[key] for key in ("rule", "severity", "file", "line", "code", "why", "fix", "proof", "page"))
    order = [review_jobs.SEVERITIES.index(finding["severity"]) for finding in findings]
    assert order == sorted(order), "the worst first"


def test_tests_are_left_out_unless_asked_for(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("import asyncio\n\n\nasync def f(w):\n    asyncio.create_task(w())\n")
    assert run(tmp_path).returncode == 0
    assert run(tmp_path, "--include-tests").returncode == 1
