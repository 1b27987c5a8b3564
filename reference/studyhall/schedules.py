"""StudyHall's schedules. Applied by every worker at its start; see `patterns/schedule/keeper.py`."""

from .patterns.schedule import Schedule, Schedules
from .patterns.signed_payload import Signer
from .patterns.typed_jobs import JobTypes
from .settings import Settings

# Raise it with every change below, even when you revert one: while a deploy rolls, old instances may restart.
VERSION = 2


def schedules(jobs: JobTypes, settings: Settings, signer: Signer) -> Schedules:
    declared = [
        # At night where the people are. A night that was missed is made up for in the morning, once.
        Schedule("nightly-cleanup", "nightly-cleanup", cron="15 3 * * *", tz=settings.time_zone, jitter=300),
        Schedule("reconcile-documents", "reconcile-documents", every=300),
        # A late health check is worth nothing: skip it, the next one is due.
        Schedule("evaluate-health", "evaluate-health", every=60, when_late="skip"),
    ]
    return Schedules(jobs, declared, owner="studyhall", version=VERSION, sign=signer.sign)
