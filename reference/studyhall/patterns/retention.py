"""How long everything is kept, in one place.

Promise: finished jobs leave Redis by count and by age, failed ones as soon as the dead-letter sweep has them
in the database (by age if no sweep runs), and the database forgets markers, dead letters and checkpoints after
their time. Redis' memory is bounded by the rate of work, not by its history: by default BullMQ keeps every
finished job forever, kilobytes each for failed ones with their stack traces.

Results that matter live in the database: whoever asks for a result after its job was evicted gets it from
the idempotency marker (`Inbox.seen`), or from the rows that the job wrote.

It does not hold for a queue without workers: BullMQ evicts when a job finishes. Failed jobs are kept
by age alone: with a count, a burst of failures evicts those not archived yet, and the eviction of a
failed child lets its parent run without it.
"""

from dataclasses import dataclass
from typing import Any

__all__ = ["DEFAULT", "Retention"]

DAY = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Retention:
    """`completed_count` jobs per queue at most, none older than `completed_age`; ages in seconds."""

    completed_count: int = 1_000
    completed_age: float = DAY
    failed_age: float = 14 * DAY  # only a safety net: the sweep moves them to the database within seconds
    letters_age: float = 30 * DAY
    markers_age: float = 60 * DAY
    checkpoints_age: float = 60 * DAY

    def __post_init__(self) -> None:
        if self.completed_count < 1 or min(self.completed_age, self.failed_age, self.letters_age) <= 0:
            raise ValueError("retention: keep at least one completed job, and everything for some time")
        # A marker that is gone lets a late duplicate or a replayed dead letter do its work a second time.
        longest = max(self.completed_age, self.failed_age) + self.letters_age
        for name in ("markers_age", "checkpoints_age"):
            if getattr(self, name) < longest:
                raise ValueError(
                    f"retention: {name} must be at least {longest:.0f} s, as long as a job can come back: "
                    "the age of failed or completed jobs plus that of dead letters"
                )

    def job_options(self) -> dict[str, Any]:
        """BullMQ's options, for every job."""
        return {
            "removeOnComplete": {"count": self.completed_count, "age": int(self.completed_age)},
            "removeOnFail": {"age": int(self.failed_age)},
            "stackTraceLimit": 5,
            "keepLogs": 50,
        }


DEFAULT = Retention()
