"""What became of the ticks of each schedule: started, missed, skipped.

Promise: every slot since the first is accounted for: its tick was started, or it is `missed`, logged and counted;
never both. One that was reported and runs after all (its worker was killed or hung) is removed from the missed list.
Counting is arithmetic, in a thread and before the transaction: an outage of months blocks neither loop nor store.

When it does NOT hold: the latest `REMEMBERED` missed slots are known by name; a tick that is later than these stays
in the list. A changed cron or interval starts its count at the change, unless Redis lost its data at that moment.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sqlalchemy import BigInteger, Column, Integer, String, Table, delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..core.store import begin, insert, metadata, read
from .slots import Tick

__all__ = ["EARLY", "count_skipped", "missed", "missed_slots", "note_start", "past", "schedule_state", "take_over"]

log = logging.getLogger("schedule")
EARLY = 50  # milliseconds before its slot at which a tick may start: another delay would take longer
REMEMBERED = 1_000

schedule_state = Table(
    "schedule_state",
    metadata,
    Column("id", String(60), primary_key=True),
    Column("last_slot", BigInteger, nullable=False),  # the latest slot that was started
    Column("ticks", Integer, nullable=False),
    Column("missed", Integer, nullable=False),
    Column("skipped", Integer, nullable=False),
)
missed_slots = Table(
    "schedule_missed",
    metadata,
    Column("id", String(60), primary_key=True),
    Column("slot", BigInteger, primary_key=True),
)
_t = schedule_state.c


async def past(store: AsyncEngine) -> dict[str, Any]:
    """The rows of `schedule_state` by schedule."""
    async with read(store) as connection:
        return {row.id: row for row in await connection.execute(select(schedule_state))}


async def missed(store: AsyncEngine, schedule_id: str, limit: int = 20) -> list[int]:
    """The latest slots that nobody ran, newest first."""
    slots = select(missed_slots.c.slot).where(missed_slots.c.id == schedule_id)
    async with read(store) as connection:
        return list(await connection.scalars(slots.order_by(missed_slots.c.slot.desc()).limit(limit)))


async def note_start(store: AsyncEngine, tick: Tick, now: Callable[[], Awaitable[int]]) -> None:
    """Count the tick as started, and the slots between the last one and it as missed."""
    while True:  # again only when another tick of this schedule was noted meanwhile
        async with read(store) as connection:
            last = await connection.scalar(select(_t.last_slot).where(_t.id == tick.schedule))
        missed, latest = 0, list[int]()
        # A last slot in the future was noted by a clock that was ahead: nothing is known about those between.
        # Compared with now: a tick that started while this one was on its way is later, but not in the future.
        corrected = last is not None and last > tick.slot and last > await now() + EARLY
        if last is not None and tick.slot > last:
            first = max(last, tick.since)
            missed, latest = await asyncio.to_thread(tick.cadence.missed, first, tick.slot, REMEMBERED)
        async with begin(store) as tx:
            if last is None:
                if await _insert_first(tx, tick):
                    return
                continue
            own_row = _t.id == tick.schedule
            if await tx.scalar(select(_t.last_slot).where(own_row).with_for_update()) != last:
                continue
            values: dict[str, Any] = {"ticks": _t.ticks + 1}
            if corrected or tick.slot > last:
                values |= {"last_slot": tick.slot, "missed": _t.missed + missed}
                await _remember(tx, tick.schedule, latest)
            elif await _forget(tx, tick):
                values["missed"] = _t.missed - 1
            else:
                return  # the same slot again, after a crash or a retry
            await tx.execute(update(schedule_state).where(own_row).values(**values))
        break
    if missed:
        fields = {"schedule": tick.schedule, "missed": missed, "slot": tick.slot}
        log.warning("ticks missed", extra={"fields": fields})


async def count_skipped(store: AsyncEngine, schedule_id: str) -> None:
    async with begin(store) as tx:
        await tx.execute(update(schedule_state).where(_t.id == schedule_id).values(skipped=_t.skipped + 1))


async def take_over(store: AsyncEngine, schedule_id: str, earlier_ids: Sequence[str]) -> None:
    """The past moves to the new id: a slot that ran under an earlier one is not run again."""
    async with begin(store) as tx:
        for old in earlier_ids:
            taken = await tx.scalar(select(_t.id).where(_t.id == schedule_id))
            for table in (schedule_state, missed_slots):
                if taken is None:
                    await tx.execute(update(table).where(table.c.id == old).values(id=schedule_id))
                await tx.execute(delete(table).where(table.c.id == old))


async def _insert_first(tx: AsyncConnection, tick: Tick) -> bool:
    row = {"id": tick.schedule, "last_slot": tick.slot, "ticks": 1, "missed": 0, "skipped": 0}
    new = insert(tx, schedule_state).values(row).on_conflict_do_nothing().returning(_t.id)
    return (await tx.execute(new)).first() is not None


async def _remember(tx: AsyncConnection, schedule_id: str, slots: Sequence[int]) -> None:
    if not slots:
        return
    rows = [{"id": schedule_id, "slot": slot} for slot in slots]
    await tx.execute(insert(tx, missed_slots).on_conflict_do_nothing(), rows)
    own_row = missed_slots.c.id == schedule_id
    by_age = select(missed_slots.c.slot).where(own_row).order_by(missed_slots.c.slot.desc())
    oldest = await tx.scalar(by_age.offset(REMEMBERED).limit(1))
    if oldest is not None:
        await tx.execute(delete(missed_slots).where(own_row, missed_slots.c.slot <= oldest))


async def _forget(tx: AsyncConnection, tick: Tick) -> bool:
    """True: the slot was reported as missed, and no longer is."""
    this = missed_slots.c.id == tick.schedule, missed_slots.c.slot == tick.slot
    return (await tx.execute(delete(missed_slots).where(*this))).rowcount == 1
