"""Queue health: every state in which a job can wait, measured in a few short commands."""

from .signals import Health, QueueHealth, count_stalls, measure, memory_used, problems

__all__ = ["Health", "QueueHealth", "count_stalls", "measure", "memory_used", "problems"]
