"""Degraded mode: while Redis is away, requests are accepted into the database and queued when it is back."""

from .producer import Accepted, DegradedProducer

__all__ = ["Accepted", "DegradedProducer"]
