"""A call outside is made once, and one of unknown outcome is set aside."""

import sqlite3
from pathlib import Path

import pytest

from harness.waiting import until_sync
from studyhall.patterns.outside_call import InFlight, Unclear
from studyhall.patterns.outside_call.dbapi import DbApiLedger
from studyhall.patterns.outside_call.sync import SyncOutsideCalls


@pytest.fixture
def ledger(tmp_path: Path) -> DbApiLedger:
    made = DbApiLedger(lambda: sqlite3.connect(tmp_path / "calls.db"))
    made.create()
    return made


def test_an_answer_is_kept_and_the_call_not_made_again(ledger: DbApiLedger):
    sent: list[str] = []

    def send(key: str) -> dict[str, str]:
        sent.append(key)
        return {"label": "L-1"}

    for _ in range(3):
        calls = SyncOutsideCalls(ledger, "carrier", longest=5, key_life=60)  # as after a restart
        assert calls.once("label/p-1", send) == {"label": "L-1"}
    assert len(sent) == 1


@pytest.mark.slow
def test_after_a_lost_answer_the_same_key_is_sent_when_the_first_request_has_ended(ledger: DbApiLedger):
    sent: list[str] = []

    def lost(key: str) -> None:
        sent.append(key)
        raise TimeoutError("no answer")

    calls = SyncOutsideCalls(ledger, "carrier", longest=3, key_life=60)
    with pytest.raises(InFlight):
        calls.once("label/p-2", lost)
    with pytest.raises(InFlight):  # it may still be running there
        calls.once("label/p-2", lost)
    assert len(sent) == 1

    def answered() -> bool:
        try:
            return calls.once("label/p-2", lambda key: sent.append(key) or {"label": "L-2"}) == {"label": "L-2"}
        except InFlight:
            return False

    until_sync(answered, 60)
    assert len(sent) == 2
    assert len(set(sent)) == 1, "the provider recognises it by its key"


def test_without_key_or_look_up_it_waits_for_a_human(ledger: DbApiLedger):
    def lost(key: str) -> None:
        raise TimeoutError("no answer")

    calls = SyncOutsideCalls(ledger, "texts", longest=2)
    with pytest.raises(InFlight):
        calls.once("text/1", lost)

    def set_aside() -> bool:
        try:
            calls.once("text/1", lost)
        except InFlight:
            return False
        except Unclear:
            return True
        return False

    until_sync(set_aside, 60)
    assert [call.key for call in calls.unclear()] == ["text/1"]
    calls.resolve("text/1", done={"sent": True})
    assert calls.once("text/1", lost) == {"sent": True}
