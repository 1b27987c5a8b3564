"""Repair of sagas by a human: look at what got stuck, then say how it goes on.

Promise: a repair takes the saga away from whoever drives it (new fence number), but not in the middle of a step:
while a living runner is in one, `StepRunning` says so and until when. It is recorded with the person's name
and note, and the next runner goes on from there at once.

When it does not hold
- Nobody checks a claim like "I refunded this by hand". The note is the evidence.
- `force=True` takes the saga in the middle of a step. Its runner's call goes on: it may take effect after it was
  undone, or beside the second call of a retry. Only a provider that knows the key, and refuses what was undone,
  makes that harmless. Meant for a runner that hangs or was frozen; a dead one's lease ends soon.
"""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

from sqlalchemy import Row, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..core.failures import Permanent
from ..core.store import begin
from .definition import Saga
from .store import UnknownSaga, record, redact, sagas, steps

__all__ = ["CannotRepair", "StepRunning", "TooLate", "cancel", "compensate", "mark", "retry"]


# The new direction has its own attempts and time limit.
FROM_NOW_ON = {"since": None, "retry_at": None, "crashes": None}


class TooLate(Permanent):
    """A step that cannot be taken back has begun: the saga goes on."""


class CannotRepair(Permanent):
    """This repair does not fit the saga as it is; the message says why and what would fit."""


class StepRunning(CannotRepair):
    """A living runner is in the middle of a step: taking the saga now would not stop that call."""


async def retry(store: AsyncEngine, saga_id: str, *, by: str, note: str, force: bool = False) -> None:
    """Try the stuck step again, with all its attempts back."""
    async with _taken(store, saga_id, by=by, note=note, force=force, event="repair: retry") as (tx, _):
        stuck = (steps.c.saga_id == saga_id, steps.c.state.in_(("pending", "started", "undoing", "stuck")))
        await tx.execute(update(steps).where(*stuck).values(attempts=0, undo_attempts=0, **FROM_NOW_ON))
        await tx.execute(update(steps).where(*stuck, steps.c.state == "stuck").values(state="undoing"))


async def mark(
    store: AsyncEngine,
    saga_id: str,
    step: str,
    outcome: Literal["done", "undone"],
    *,
    by: str,
    note: str,
    result: Mapping[str, Any] | None = None,
    force: bool = False,
) -> None:
    """Say that a step was done or undone by hand. `result`: what the step's `do` would have returned."""
    event = f"repair: {outcome} by hand"
    async with _taken(store, saga_id, by=by, note=note, force=force, event=event, step=step) as (tx, backward):
        if backward != (outcome == "undone"):
            fits = "undone" if backward else "done"
            raise CannotRepair(f"saga {saga_id} goes {'backward' if backward else 'forward'}: mark the step {fits}")
        values = {"result": dict(result or {}), "sent_at": None} if outcome == "done" else {}
        this = (steps.c.saga_id == saga_id, steps.c.name == step)
        if (await tx.execute(update(steps).where(*this).values(state=outcome, **FROM_NOW_ON, **values))).rowcount != 1:
            all_names = select(steps.c.name).where(steps.c.saga_id == saga_id).order_by(steps.c.position)
            names = ", ".join((await tx.scalars(all_names)).all())
            raise CannotRepair(f"saga {saga_id} has no step {step!r}; its steps: {names}")


async def compensate(store: AsyncEngine, saga_id: str, *, by: str, note: str, force: bool = False) -> None:
    """Stop going forward and take back what was done."""
    event = "repair: compensate"
    async with _taken(store, saga_id, by=by, note=note, force=force, event=event, backward=True) as (tx, _):
        await tx.execute(update(steps).where(steps.c.saga_id == saga_id).values(**FROM_NOW_ON))


async def cancel(tx: AsyncConnection, defined: Mapping[str, Saga], saga_id: str, *, by: str, reason: str) -> bool:
    """See `SagaRunner.cancel`."""
    saga = await _locked(tx, saga_id)
    if saga.backward:
        return False
    if saga.name not in defined:
        raise CannotRepair(f"saga {saga_id} is a {saga.name!r}: cancel it where that is defined")
    final = [step.name for step in defined[saga.name].steps if step.final]
    begun = select(steps.c.name).where(steps.c.saga_id == saga_id, steps.c.state != "pending")
    if (name := (await tx.scalars(begun.where(steps.c.name.in_(final)).limit(1))).first()) is not None:
        raise TooLate(f"saga {saga_id}, {name}: {TooLate.__doc__}")
    await record(tx, saga_id, by, "cancelled", detail=reason)
    values: dict[str, Any] = {"cancel": redact(reason)}
    if await _step_under_way(tx, saga) is None:  # otherwise its driver sees it at its next write
        values |= {"state": "running", "owner": None, "fence": saga.fence + 1, "due_at": time.time()}
    await tx.execute(update(sagas).where(sagas.c.id == saga_id).values(**values))
    return True


@asynccontextmanager
async def _taken(
    store: AsyncEngine,
    saga_id: str,
    *,
    by: str,
    note: str,
    force: bool,
    event: str,
    step: str | None = None,
    backward: bool = False,
) -> AsyncIterator[tuple[AsyncConnection, bool]]:
    """Lock the saga, repair it, then make it due under a new fence."""
    if not note.strip():
        raise CannotRepair("a repair needs a note: what was found, what was done about it")
    async with begin(store) as tx:
        saga = await _locked(tx, saga_id)
        if saga.state in ("completed", "compensated"):
            raise CannotRepair(f"saga {saga_id} is {saga.state}: it has ended, there is nothing to repair")
        if not force and (step_name := await _step_under_way(tx, saga)) is not None:
            left = saga.due_at - time.time()
            raise StepRunning(
                f"saga {saga.id}: {saga.owner} is in step {step_name!r}. {StepRunning.__doc__} Try again when it has "
                f"ended or its lease has, in {left:.0f} s, or force it knowing that the call may still take effect."
            )
        yield tx, saga.backward
        back = saga.backward or backward
        values = {"backward": back, "state": "compensating" if back else "running"}
        free = {"owner": None, "fence": saga.fence + 1, "due_at": time.time(), "updated_at": time.time()}
        await tx.execute(update(sagas).where(sagas.c.id == saga_id).values(**values, **free))
        await record(tx, saga_id, by, event, step=step, detail=note)


async def _locked(tx: AsyncConnection, saga_id: str) -> Row[Any]:
    saga = (await tx.execute(select(sagas).where(sagas.c.id == saga_id).with_for_update())).first()
    if saga is None:
        raise UnknownSaga(f"{saga_id}: {UnknownSaga.__doc__}")
    return saga


async def _step_under_way(tx: AsyncConnection, saga: Row[Any]) -> str | None:
    """The step a living driver is in, if any. Between two steps, and inside a `DbStep`, the fence is enough:
    the driver's next write, before any call, is refused."""
    if saga.owner is None or (saga.due_at or 0.0) <= time.time():
        return None
    started = (steps.c.saga_id == saga.id, steps.c.state.in_(("started", "undoing")))
    return (await tx.scalars(select(steps.c.name).where(*started).limit(1))).first()
