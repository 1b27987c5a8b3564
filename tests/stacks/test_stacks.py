"""The shop on each stack keeps its promises; its twin with default settings does not."""

import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from guide import quotes, stacks
from harness.missing import missing, need_binary
from queuesmith.prove.card import as_text
from queuesmith.stacks import STACKS

ROOT = Path(__file__).parents[2] / "reference" / "stacks"
PAGES = ROOT.parents[1] / "skills" / "background-jobs" / "references" / "stacks"
TOLD = {stack: tomllib.loads((ROOT / stack / "prove.toml").read_text()) for stack in stacks.STACKS}


def card_of(stack, twin, *faults, quick=False):
    try:
        stacks.install(stack)
    except stacks.NotHere as error:
        missing(stacks.STACKS[stack], str(error))
    return stacks.run(stack, twin, *faults, quick=quick)


def broken(card):
    return {miss.invariant for row in card.broken for miss in row.broken}


@pytest.mark.parametrize("stack", stacks.STACKS)
def test_every_stack_promises_the_same(stack):
    def asked(spec):
        probes = [spec["effect"]["query"], spec["failures"]["query"]]
        return [*probes, spec["provider"], spec["promises"], spec["service"]["jobs"]]

    assert asked(TOLD[stack]) == asked(TOLD["celery"])


@pytest.mark.parametrize("stack", stacks.STACKS)
def test_the_published_run_broke_the_defaults_and_not_the_modules(stack):
    results = json.loads((ROOT / stack / "results.json").read_text())
    assert not [name for name, (verdict, _) in results["kept"]["rows"].items() if verdict == "broken"]
    lost = [reason for verdict, reason in results["default"]["rows"].values() if verdict == "broken"]
    assert any("duplicated" in reason for reason in lost)
    assert any("lost" in reason or "stuck" in reason for reason in lost)


SERVICE = {"celery": "shop.py", "bullmq-ts": "shop.ts", "asynq": "main.go", "sqs": "shop.py"}


@pytest.mark.parametrize("stack", stacks.STACKS)
def test_the_shop_of_a_stack_is_small(stack):
    """With the modules that it imports too, but for SQS, whose module brings its own worker."""
    modules = [name for each in STACKS.values() if each.folder == stack for name in each.files if name != "sqlite.ts"]
    texts = [(ROOT / stack / name).read_text() for name in (SERVICE[stack], *(modules if stack != "sqs" else ()))]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    assert len([line for line in lines if line and not line.startswith(("//", "#"))]) <= 400


def test_every_stack_has_a_page_and_each_is_short():
    pages = {path.stem: path.read_text() for path in PAGES.glob("*.md")}
    python = {"rq", "dramatiq", "arq", "taskiq", "huey"}
    assert pages.keys() == {*stacks.STACKS, *python, "celery-django", "bullmq-ts-more", "schedulers", "table"}
    assert {name: quotes.tokens(text) for name, text in pages.items() if quotes.tokens(text) > 2_000} == {}
    # The way to each of them.
    assert all(f"(stacks/{name}.md)" in (PAGES.parent / "stacks.md").read_text() for name in pages)


@pytest.mark.slow
def test_asynq_does_a_key_once_weighs_queues_and_forgets_unique_tasks_as_the_page_says(own_redis):
    go = need_binary("go", how="install Go, https://go.dev/dl")
    done = subprocess.run(
        [go, "test", "-count=1", "./reliable/"],
        cwd=ROOT / "asynq",
        env={**os.environ, "REDIS_ADDR": f"127.0.0.1:{own_redis.port}"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("stack", stacks.STACKS)
def test_a_worker_killed_at_the_effect_neither_loses_nor_duplicates(stack):
    card = card_of(stack, "kept", "kill-at-effect", "twice", quick=True)
    assert not card.broken, as_text(card)
    assert card.proved, as_text(card)


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("stack", stacks.STACKS)
def test_the_defaults_duplicate_what_is_sent_twice(stack):
    card = card_of(stack, "default", "twice", quick=True)
    assert "duplicated" in broken(card), as_text(card)


@pytest.mark.fault
@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stack", stacks.STACKS)
def test_every_fault_of_the_card_is_survived(stack):
    card = card_of(stack, "kept")
    assert not card.broken, as_text(card)
