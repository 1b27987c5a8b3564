"""A BullMQ worker for Python: one round trip per job, and none of the stock worker's measured defects."""

from .worker import LOCK_LOST, FailPermanently, LockLost, ReliableWorker, RetryLater

__all__ = ["LOCK_LOST", "FailPermanently", "LockLost", "ReliableWorker", "RetryLater"]
