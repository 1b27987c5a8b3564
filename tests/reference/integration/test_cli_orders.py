"""`studyhall order`, `saga` and `outbox` as a person or a script uses them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from studyhall import cli_orders, cli_saga
from studyhall.orders.payments import Payments
from studyhall.orders.saga import buy_pack
from studyhall.patterns import outbox, store
from studyhall.patterns.errors import JobError, Permanent
from studyhall.patterns.event_schema import Event
from studyhall.patterns.outbox_relay import Relay
from studyhall.patterns.retry import RetryPolicy
from studyhall.patterns.saga import SagaRunner

Command = Callable[..., Any]


class BrokenPayments(Payments):
    """A provider that takes money and can neither be asked nor give it back."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9")

    async def charge(self, key: str, **order: Any) -> dict[str, Any]:
        raise Permanent("garbled answer for ann@example.com")

    async def find(self, charge_key: str) -> dict[str, Any] | None:
        return None

    async def refund(self, key: str, *, charge_key: str) -> dict[str, Any]:
        raise Permanent("account closed")


@pytest.fixture
def studyhall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command on an own data directory: parsed JSON when it prints some, the result otherwise."""
    monkeypatch.delenv("DATABASE_URL", raising=False)
    app = typer.Typer()
    app.add_typer(cli_saga.app, name="saga")
    app.add_typer(cli_orders.order, name="order")
    app.add_typer(cli_orders.outbox, name="outbox")

    def command(*args: str, fails: int = 0) -> Any:
        result: Result = CliRunner().invoke(app, [*args, "--data-dir", str(tmp_path)])
        if isinstance(result.exception, JobError):  # `studyhall` prints these as one line and exits with 1
            assert fails == 1, result.exception
            return str(result.exception)
        assert result.exit_code == fails, result.output
        return json.loads(result.output) if "--json" in args and not fails else result.output

    return command


def drive(tmp_path: Path) -> None:
    async def go() -> None:
        engine = store.open_store(f"sqlite:///{tmp_path / 'studyhall.db'}")
        never = RetryPolicy(base=0.01, cap=0.01, attempts=1)
        async with BrokenPayments() as payments:
            await SagaRunner(engine, buy_pack(payments, charge=never, refund=never)).resume_due()
        await store.close(engine)

    asyncio.run(go())


def test_order_is_bought_listed_and_shown(studyhall: Command) -> None:
    assert "biology-101" in studyhall("order", "packs")
    bought = studyhall("order", "buy", "biology-101", "--seats", "2", "--id", "o1", "--json")
    assert (bought["id"], bought["status"], bought["amount_cents"]) == ("o1", "placed", 3800)
    assert studyhall("order", "buy", "biology-101", "--seats", "2", "--id", "o1", "--json") == bought
    assert [row["id"] for row in studyhall("order", "list", "--json")] == ["o1"]
    assert studyhall("order", "show", "o1", "--json")["steps"]["charge"] == "pending"
    assert "o1" in studyhall("order", "list")
    assert "pending" in studyhall("order", "show", "o1")
    assert studyhall("outbox", "status", "--json")["waiting"] == 1


def test_wrong_input_says_what_to_do(studyhall: Command) -> None:
    assert "packs: biology-101" in studyhall("order", "buy", "nope", fails=1)
    assert "card_ok or one of" in studyhall("order", "buy", "biology-101", "--card", "gold", fails=2)
    assert "choose one of running" in studyhall("saga", "list", "--state", "lost", fails=2)
    assert "No saga has this id" in studyhall("saga", "show", "nope", fails=1)
    assert "there is no order" in studyhall("order", "show", "nope", fails=1)
    assert "exactly one of" in studyhall("saga", "repair", "x", "--note", "n", fails=2)
    assert "exactly one of" in studyhall(
        "saga", "repair", "x", "--note", "n", "--retry", "--compensate", fails=2
    )
    assert "JSON object" in studyhall(
        "saga", "repair", "x", "--note", "n", "--done", "a", "--result", "[", fails=2
    )
    assert "is `studyhall relay` running?" in studyhall(
        "order", "buy", "biology-101", "--wait", "0.2", fails=1
    )


def test_stuck_saga_is_found_understood_and_repaired(studyhall: Command, tmp_path: Path) -> None:
    studyhall("order", "buy", "biology-101", "--id", "o1")
    drive(tmp_path)
    (stuck,) = studyhall("saga", "list", "--state", "needs_repair", "--json")
    assert stuck["id"] == "o1"
    assert "account closed" in stuck["error"]
    shown = studyhall("saga", "show", "o1", "--json")
    assert shown["history"][-1]["event"] == "needs repair"
    assert {step["name"]: step["state"] for step in shown["steps"]}["charge"] == "undoing"
    told = studyhall("saga", "show", "o1")
    assert "Timeline" in told
    assert "garbled" in told.replace("\n", "")
    assert "ann@example.com" not in told

    assert "mark the step undone" in studyhall(
        "saga", "repair", "o1", "--done", "charge", "--note", "n", fails=1
    )
    repaired = studyhall(
        "saga", "repair", "o1", "--undone", "charge", "--note", "bank paid it back", "--json"
    )
    assert repaired["state"] == "compensating"
    drive(tmp_path)
    assert studyhall("order", "show", "o1", "--json")["status"] == "cancelled"
    assert studyhall("saga", "list", "--json")[0]["state"] == "compensated"
    assert "No saga waits for a human" in studyhall("saga", "list", "--state", "needs_repair")


def test_quarantined_event_is_listed_replayed_and_discarded(studyhall: Command, tmp_path: Path) -> None:
    studyhall("order", "packs")

    class Refusing:
        async def publish(self, events: list[Event]) -> list[Exception | None]:
            return [Permanent("too odd") for _ in events]

    async def quarantine() -> None:
        engine = store.open_store(f"sqlite:///{tmp_path / 'studyhall.db'}")
        async with store.begin(engine) as tx:
            for subject in ("one", "two"):
                await outbox.add(tx, Event(id=subject, type="order.odd.v1", subject=subject, source="test"))
        await Relay(engine, Refusing()).run_once()
        await store.close(engine)

    asyncio.run(quarantine())
    assert [row["event_id"] for row in studyhall("outbox", "quarantine", "list", "--json")] == ["one", "two"]
    assert "too odd" in studyhall("outbox", "quarantine", "list").replace("\n", "")
    assert studyhall("outbox", "replay", "one", "--json") == {"replayed": 1}
    assert studyhall("outbox", "discard", "two", "--why", "test", "--json") == {"discarded": 1}
    assert "not in quarantine" in studyhall("outbox", "replay", "one", fails=1)
    assert studyhall("outbox", "status", "--json")["quarantined"] == 0
