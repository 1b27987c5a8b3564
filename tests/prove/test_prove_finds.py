"""One known-bad service per invariant, each caught by the fault meant for it, with the reason."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from queuesmith.prove.card import as_text
from queuesmith.prove.invariants import INVARIANTS
from queuesmith.prove.run import Card
from queuesmith.prove.spec import Command, Spec, load

pytestmark = [pytest.mark.fault, pytest.mark.slow]
SERVICES = Path(__file__).parent / "services"
Parcels = Callable[..., Spec]
CardOf = Callable[..., Card]


def broken(card):
    """Fault -> broken invariants."""
    return {row.fault: {miss.invariant for miss in row.broken} for row in card.broken}


@pytest.mark.parametrize(
    ("defect", "fault", "invariant"),
    [
        ("pops", "kill-at-effect", "lost"),
        ("new-key", "lost", "duplicated"),
        ("adds-again", "twice", "duplicated"),
        ("no-takeover", "kill-at-effect", "stuck"),
        ("deaf", "redis-kill", "stuck"),
        ("chokes", "foreign", "stuck"),
        ("gives-up", "outage", "gave up"),
        ("swallows", "refused", "invisible failure"),
        ("dies-of-term", "term", "shutdown"),
        ("submits-forever", "redis-kill", "enqueue"),
        ("sleepy", "quiet", "wake"),
        ("no-crash-budget", "poison", "poison"),
        ("ignores-retry-after", "429", "retry-after"),
    ],
)
def test_a_service_that_breaks_one_promise_is_caught(defect, fault, invariant, parcels, card_of):
    card = card_of(parcels(defect, recovery=5.0, enqueue=0.5, wake=1.0, crashes=3), fault)
    assert invariant in broken(card).get(fault, set()), as_text(card)
    assert "none" not in broken(card)


@pytest.mark.parametrize(
    ("defect", "fault", "invariant"),
    [("hammers", "outage", "hot loop"), ("prints", "twice", "leak"), ("orphans", "twice", "left behind")],
)
def test_a_service_that_breaks_a_promise_of_the_whole_run_is_caught(defect, fault, invariant, parcels, card_of):
    # four: on a crowded machine even a hot loop gets little
    card = card_of(parcels(defect, calls_per_second=4), fault)
    assert broken(card) == {invariant: {invariant}}, as_text(card)


def test_a_deploy_whose_new_command_takes_no_work_is_caught(parcels, card_of):
    spec = parcels(recovery=5.0)
    asleep = dataclasses.replace(spec.service, next=Command(("sleep", "600")))
    card = card_of(dataclasses.replace(spec, service=asleep), "rolling")
    assert "stuck" in broken(card).get("rolling", set()), as_text(card)


def test_a_service_that_grows_is_caught_in_a_soak(parcels, card_of):
    card = card_of(parcels("leaks"), "twice", soak=20.0)
    assert "memory" in broken(card), as_text(card)


def test_every_invariant_has_a_service_that_breaks_it():
    marks = [
        mark
        for test in (
            test_a_service_that_breaks_one_promise_is_caught,
            test_a_service_that_breaks_a_promise_of_the_whole_run_is_caught,
        )
        for mark in test.pytestmark
        if mark.name == "parametrize"
    ]
    assert {case[2] for mark in marks for case in mark.args[1]} | {"memory"} == set(INVARIANTS)


@pytest.mark.parametrize(("defect", "verdict"), [("", "held"), ("new-key", "broken")])
def test_duplicates_may_be_promised_under_the_same_key(defect, verdict, parcels, card_of):
    """The carrier forgets its keys at once, so what is asked again is sold again."""
    spec = parcels(defect, duplicates="same key")
    routes = tuple(dataclasses.replace(route, key_ttl=0.0) for route in spec.providers[0].routes)
    spec = dataclasses.replace(spec, providers=(dataclasses.replace(spec.providers[0], routes=routes),))
    row = next(row for row in card_of(spec, "lost").rows if row.fault == "lost")
    assert row.verdict == verdict, row
    if defect:
        assert "under 2 keys" in row.broken[0].measured


def test_the_story_of_a_duplicate_names_the_moments(parcels, card_of):
    card = card_of(parcels("new-key"), "kill-at-effect")
    story = next(miss.story for row in card.broken for miss in row.broken if miss.invariant == "duplicated")
    sent, bought, killed, again = (
        story.index(part)
        for part in (": sent at", "POST /labels done under key", "SIGKILL worker", "POST /labels done")
    )
    assert sent < bought < killed
    assert story.rindex("POST /labels done") > killed, story
    assert again == bought


def test_an_error_that_is_caught_and_printed_is_not_visible_and_its_job_is_lost(card_of, tmp_path):
    """Seen on a repair: BullMQ counts such a job as completed, and nobody will ever try again."""
    folder = shutil.copytree(SERVICES / "stock_bullmq", tmp_path / "service")
    worker = (folder / "worker.py").read_text()
    caught = """try:
        return await asyncio.to_thread(buy, job.data["parcel"])
    except Exception as error:
        print("failed", job.data["parcel"], error)"""
    kept = 'return await asyncio.to_thread(buy, job.data["parcel"])'
    assert kept in worker
    (folder / "worker.py").write_text(worker.replace(kept, caught))
    (folder / "prove.toml").write_text(
        (folder / "prove.toml").read_text() + '\n[promises]\nrecovery = "4s"\nshutdown = "5s"\n'
    )
    card = card_of(load(folder / "prove.toml"), "refused", "outage")
    broken = {
        row.fault: {miss.invariant: miss.measured for miss in row.broken}
        for row in card.rows
        if row.verdict == "broken"
    }
    assert "nowhere to be seen" in broken["refused"]["invisible failure"], as_text(card)
    assert "completed without their effect" in broken["outage"]["lost"], as_text(card)
