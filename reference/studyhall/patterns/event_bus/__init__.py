"""Event bus: one small interface over four brokers, each of which declares what it can promise."""

from .bus import EVENTS, BrokerUnavailable, Capabilities, EventBus, Handler, Quarantined, topic_of

__all__ = ["EVENTS", "BrokerUnavailable", "Capabilities", "EventBus", "Handler", "Quarantined", "topic_of"]
