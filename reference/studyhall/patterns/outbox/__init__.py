"""Outbox: the event is a row in the transaction that made it true; a relay publishes it afterwards."""

from .table import BUS, CHANNEL, add, clock, outbox

__all__ = ["BUS", "CHANNEL", "add", "clock", "outbox"]
