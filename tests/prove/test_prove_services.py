"""Shown on code as people write it: tutorial workers lose and duplicate, the patterns of this repository do not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from queuesmith.prove.card import as_text
from queuesmith.prove.run import Card
from queuesmith.prove.spec import load

SERVICES = Path(__file__).parent / "services"
ENVS = Path(__file__).parents[2] / "build" / "bench" / "envs"
pytestmark = pytest.mark.fault
CardOf = Callable[..., Card]


@pytest.fixture(autouse=True)
def _patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "reference"))


def test_reliable_worker_with_markers_is_clean(card_of: CardOf) -> None:
    card = card_of(load(SERVICES / "reliable" / "prove.toml"), "kill-at-effect")
    assert {row.verdict for row in card.rows} == {"held"}, as_text(card)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_reliable_worker_with_markers_is_clean_under_every_fault(
    card_of: CardOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUESMITH_PROVE_SCALE", "1")
    card = card_of(load(SERVICES / "reliable" / "prove.toml"))
    assert not card.broken, as_text(card)


@pytest.mark.full
@pytest.mark.parametrize(
    ("env", "service", "invariants"),
    [
        ("stock", "stock_bullmq", {"duplicated", "stuck"}),
        ("celery", "celery_tutorial", {"duplicated", "stuck"}),
        ("rq", "rq_tutorial", {"duplicated"}),
        ("dramatiq", "dramatiq_tutorial", {"duplicated", "stuck"}),
    ],
)
def test_tutorial_apps_are_caught(
    env: str, service: str, invariants: set[str], card_of: CardOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.lab import NotInstalled, Peer

    try:
        Peer.load(env).install()
    except NotInstalled as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PATH", f"{ENVS / env / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("QUEUESMITH_PROVE_SCALE", "1")
    card = card_of(load(SERVICES / service / "prove.toml"), quick=True)
    assert {one.invariant for row in card.broken for one in row.broken} >= invariants, as_text(card)
