"""From numbers to alerts: one per incident, however many instances look and however the number wobbles.

Promise: an alert is raised when a signal reaches `raise_at` and cleared when it falls below `clear_at`; in
between, nothing changes. The change itself is one conditional write in the database, so of any number of
evaluators exactly one makes it, and a restart forgets nothing. An interval in each of three instances with
a plain threshold sent fifteen alerts for one incident.

When it does NOT hold: an alert is sent at least once. A process that dies between sending and noting it leads
to a second one with the same `signal` and `since`: let the receiver drop that. And nobody raises an alert
when no evaluator runs: watch the watcher from outside, for example with a check on the schedule's last tick.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sqlalchemy import Boolean, Column, Float, String, Table, or_, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from ..core.store import begin, insert, metadata, read

__all__ = ["Alert", "Rule", "evaluate", "raised", "rule_for"]

log = logging.getLogger("health")
LEASE = 30.0  # seconds after which an alert that was begun and not noted is sent again
SENDING = 10.0  # seconds for one alert to go out

health_alerts = Table(
    "health_alerts",
    metadata,
    Column("signal", String(200), primary_key=True),
    Column("raised", Boolean, nullable=False),
    Column("since", Float, nullable=False),
    Column("value", Float, nullable=False),  # when it changed
    Column("announced", Boolean, nullable=False),
    Column("claimed_until", Float),
)
_t = health_alerts.c


@dataclass(frozen=True, slots=True)
class Rule:
    """For signals that match: `Rule("*.oldest", raise_at=60, clear_at=30, because="…")`. First match counts."""

    signal: str
    raise_at: float
    clear_at: float
    because: str = ""

    def __post_init__(self) -> None:
        if not self.clear_at < self.raise_at:
            raise ValueError(f"{self.signal}: clear_at {self.clear_at} must be below raise_at {self.raise_at}")


@dataclass(frozen=True, slots=True)
class Alert:
    """A change: raised or cleared. (signal, since) names it."""

    signal: str
    raised: bool
    since: float
    value: float
    because: str = ""


def rule_for(signal: str, rules: Sequence[Rule]) -> Rule | None:
    return next((rule for rule in rules if fnmatchcase(signal, rule.signal)), None)


async def evaluate(
    store: AsyncEngine,
    signals: Mapping[str, float],
    rules: Sequence[Rule],
    send: Callable[[Alert], Awaitable[object]] | None = None,
) -> list[Alert]:
    """Compare, note changes, send unsent alerts. Returns those that this call sent."""
    now = time.time()
    async with begin(store) as tx:
        for name in sorted(signals):  # one order in all processes: else two evaluators deadlock on PostgreSQL
            rule, value = rule_for(name, rules), signals[name]
            if rule is None:
                continue
            change = {"since": now, "value": value, "announced": False, "claimed_until": None}
            if value >= rule.raise_at:
                row = insert(tx, health_alerts).values(signal=name, raised=True, **change)
                up = {"raised": True, **change}
                await tx.execute(
                    row.on_conflict_do_update(index_elements=["signal"], set_=up, where=_t.raised.is_(False))
                )
            elif value < rule.clear_at:
                this = (_t.signal == name, _t.raised.is_(True))
                await tx.execute(update(health_alerts).where(*this).values(raised=False, **change))
    return [alert for alert in await _claim(store, rules) if await _announce(store, alert, send)]


async def raised(store: AsyncEngine) -> list[Alert]:
    """The raised alerts, oldest first."""
    async with read(store) as connection:
        rows = await connection.execute(select(health_alerts).where(_t.raised.is_(True)).order_by(_t.since, _t.signal))
        return [Alert(row.signal, True, row.since, row.value) for row in rows]


async def _claim(store: AsyncEngine, rules: Sequence[Rule]) -> list[Alert]:
    now = time.time()
    free = or_(_t.claimed_until.is_(None), _t.claimed_until < now)
    claim = update(health_alerts).where(_t.announced.is_(False), free).values(claimed_until=now + LEASE)
    async with begin(store) as tx:
        rows = (await tx.execute(claim.returning(*health_alerts.c))).all()
    alerts = []
    for row in rows:
        rule = rule_for(row.signal, rules)
        alerts.append(Alert(row.signal, row.raised, row.since, row.value, rule.because if rule else ""))
    return sorted(alerts, key=lambda alert: (alert.since, alert.signal))


async def _announce(store: AsyncEngine, alert: Alert, send: Callable[[Alert], Awaitable[object]] | None) -> bool:
    try:
        async with asyncio.timeout(SENDING):
            if send is not None:
                await send(alert)
    except Exception:  # the pager is down: sent again after the lease
        log.exception("an alert could not be sent")
        return False
    this = (_t.signal == alert.signal, _t.since == alert.since)
    async with begin(store) as tx:
        await tx.execute(update(health_alerts).where(*this).values(announced=True))
    return True
