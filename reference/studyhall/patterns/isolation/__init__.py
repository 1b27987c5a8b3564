"""Isolation: CPU-bound and risky work runs in child processes that can be killed."""

from .pool import IsolatedError, ProcessDied, SubprocessPool

__all__ = ["IsolatedError", "ProcessDied", "SubprocessPool"]
