"""Named priority tiers, set on every job.

Promise: a critical job added to a backlog is the next one fetched; within a tier, first in is first out.

It does not hold for jobs that are already running (nothing is preempted), nor against jobs added elsewhere
with no priority at all: BullMQ serves 0 (or none) before every other number, so a job with `priority: 1` ran
301st behind 300 jobs that had none. That is why every producer must name a tier, and why `normal` is not 0.
A steady stream of critical jobs starves the low ones; the depth and age limits of backpressure show it.
"""

from enum import IntEnum

from .core.failures import Permanent

__all__ = ["Priority", "UnknownPriority", "priority_of"]


class UnknownPriority(Permanent):
    """The priority is not one of the tiers. Use critical, high, normal or low."""


class Priority(IntEnum):
    """Lower number, served earlier."""

    CRITICAL = 1  # somebody is watching a spinner
    HIGH = 100
    NORMAL = 1_000
    LOW = 10_000  # cleanup, analytics


_TIERS: dict[object, Priority] = {tier.name.lower(): tier for tier in Priority} | {tier: tier for tier in Priority}


def priority_of(tier: str | int | Priority) -> Priority:
    """The tier for a name or number; anything else is refused, because bullmq-Python validates nothing."""
    wanted = tier.lower() if isinstance(tier, str) else tier
    if not isinstance(wanted, (str, int)) or wanted is True or wanted not in _TIERS:  # True is 1, but not a tier
        raise UnknownPriority(f"unknown priority {str(tier)[:50]!r}: use one of {', '.join(map(str, _TIERS))}")
    return _TIERS[wanted]
