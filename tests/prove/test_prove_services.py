"""Shown on code as people write it: tutorial workers lose and duplicate, the patterns of this repository do not."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from queuesmith.prove.card import as_text
from queuesmith.prove.run import Card
from queuesmith.prove.spec import load

ROOT = Path(__file__).parents[2]
SERVICES = Path(__file__).parent / "services"
RELIABLE, STUDYHALL = SERVICES / "reliable", ROOT / "reference"
ENVS = ROOT / "build" / "bench" / "envs"
pytestmark = [pytest.mark.fault, pytest.mark.slow]
CardOf = Callable[..., Card]


@pytest.fixture(autouse=True)
def _patterns(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "reference"))


@pytest.mark.parametrize(
    ("folder", "faults"), [(RELIABLE, ("kill-at-effect",)), (STUDYHALL, ("kill-at-effect", "lost", "redis-restart"))]
)
def test_our_own_services_keep_their_promises(folder, faults, card_of):
    """A worker with markers; StudyHall's orders: answers lost, the worker dead after the charge, Redis restarted."""
    card = card_of(load(folder / "prove.toml"), *faults)
    assert {row.verdict for row in card.rows} == {"held"}, as_text(card)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("folder", [RELIABLE, STUDYHALL])
def test_our_own_services_keep_their_promises_under_every_fault(folder, card_of, monkeypatch):
    monkeypatch.setenv("QUEUESMITH_PROVE_SCALE", "1")
    card = card_of(load(folder / "prove.toml"))
    assert not card.broken, as_text(card)


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "invariant"),
    [("pop", "lost"), ("cron", "duplicated"), ("outbox-less", "lost"), ("cache-guard", "lost"), ("thread", "lost")],
)
def test_naive_programs_are_caught(how, invariant, card_of, monkeypatch):
    monkeypatch.setenv("HOW", how)
    card = card_of(load(SERVICES / "naive" / "prove.toml"), "kill-random", "twice", "redis-restart")
    assert invariant in {miss.invariant for row in card.broken for miss in row.broken}, as_text(card)


@pytest.mark.full
@pytest.mark.needs_node
def test_the_quick_start_of_bullmq_for_node_is_caught(card_of, node_home, tmp_path):
    folder = shutil.copytree(SERVICES / "bullmq_node", tmp_path / "service")
    (folder / "node_modules").symlink_to(node_home / "node_modules")
    card = card_of(load(folder / "prove.toml"), "lost", "term")
    assert {miss.invariant for row in card.broken for miss in row.broken} >= {"duplicated", "shutdown"}


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("env", "service", "invariants"),
    [
        ("stock", "stock_bullmq", {"duplicated", "stuck"}),
        ("celery", "celery_tutorial", {"duplicated", "stuck"}),
        ("rq", "rq_tutorial", {"duplicated"}),
        ("dramatiq", "dramatiq_tutorial", {"duplicated", "stuck"}),
    ],
)
def test_tutorial_apps_are_caught(env, service, invariants, card_of, monkeypatch):
    from bench.lab import NotInstalled, Peer

    try:
        Peer.load(env).install()
    except NotInstalled as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PATH", f"{ENVS / env / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("QUEUESMITH_PROVE_SCALE", "1")
    # Named, so that each is watched for all of the promised recovery time on a slow machine too.
    card = card_of(load(SERVICES / service / "prove.toml"), "lost", "kill-random", "kill-all")
    assert {miss.invariant for row in card.broken for miss in row.broken} >= invariants, as_text(card)
