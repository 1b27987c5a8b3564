"""How the queues are, measured so that neither a backlog nor the measuring hides."""

from .signals import Health, QueueHealth, count_stalls, measure, memory_used, problems

__all__ = ["Health", "QueueHealth", "count_stalls", "measure", "memory_used", "problems"]
