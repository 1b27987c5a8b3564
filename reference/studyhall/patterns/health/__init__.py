"""How the queues are, measured so that neither a backlog nor the measuring hides."""

from __future__ import annotations

from .signals import Health, JobSummary, QueueHealth, measure, memory_used, pages, problems

__all__ = ["Health", "JobSummary", "QueueHealth", "measure", "memory_used", "pages", "problems"]
