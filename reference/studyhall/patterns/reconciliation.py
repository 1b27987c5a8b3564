"""Reconciliation: compare what the database says should exist with what does, repair, and report.

Promise: every expected key older than `grace` that is still absent at a second look is handed to `repair`
once per run, and the report says which. The database is the truth: after a queue server lost its data, or
somebody deleted the wrong keys, this is what brings the work back.

When it does NOT hold
- `repair` must be safe to repeat (deterministic job id, inbox): what looked absent may be on its way.
- It finds what is missing, not what is wrong. And it hides bugs: a report that is not empty is an alert.
- Two runs at once repair twice. Run it from the scheduler, which starts one per slot.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Collection
from dataclasses import dataclass, field

__all__ = ["Expected", "Reconciled", "reconcile"]

log = logging.getLogger("reconciliation")
Present = Callable[[Collection[str]], Awaitable[Collection[str]]]


@dataclass(frozen=True, slots=True)
class Expected:
    """Something that should exist elsewhere, by its key, since `since` (epoch seconds)."""

    key: str
    since: float


@dataclass(slots=True)
class Reconciled:
    checked: int = 0
    young: int = 0  # within the grace time: still on their way
    late: list[str] = field(default_factory=list)  # appeared between the two looks
    repaired: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # key → why the repair did not work
    left: int = 0  # absent, but over `limit`: next run

    @property
    def clean(self) -> bool:
        return not (self.repaired or self.failed or self.left)

    @property
    def summary(self) -> str:
        return (
            f"reconciled: checked={self.checked} young={self.young} late={len(self.late)} "
            f"repaired={len(self.repaired)} failed={len(self.failed)} left={self.left}"
        )


async def reconcile(
    expected: AsyncIterable[Expected],
    present: Present,
    repair: Callable[[str], Awaitable[None]],
    *,
    grace: float,
    batch: int = 500,
    limit: int = 10_000,
    second_look: float = 0.1,
) -> Reconciled:
    """`present(keys)` returns those that exist. `limit` bounds what a bug in `present` can do in one run."""
    report = Reconciled()

    async def compare(keys: list[str]) -> None:
        report.checked += len(keys)
        absent = await _absent(keys, present)
        if not absent:
            return
        # A job that moves from one state to the next between two reads looks absent for a moment.
        await asyncio.sleep(second_look)
        missing = await _absent(absent, present)
        report.late += [key for key in absent if key not in missing]
        for key in missing:
            if len(report.repaired) + len(report.failed) >= limit:
                report.left += 1
                continue
            try:
                await repair(key)
                report.repaired.append(key)
            except Exception as error:
                report.failed[key] = f"{type(error).__name__}: {error}"[:500]

    page: list[str] = []
    async for item in expected:
        if time.time() - item.since < grace:
            report.young += 1
            continue
        page.append(item.key)
        if len(page) >= batch:
            await compare(page)
            page = []
    await compare(page)
    (log.info if report.clean else log.warning)("%s", report.summary)
    return report


async def _absent(keys: list[str], present: Present) -> list[str]:
    existing = set(await present(keys)) if keys else set()
    return [key for key in keys if key not in existing]
