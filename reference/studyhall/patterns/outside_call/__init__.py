"""An effect outside the database, made once or known to be unclear. Ledgers: `store`, `dbapi`, `redis_hash`."""

from __future__ import annotations

from .calls import OutsideCalls
from .ledger import Call, InFlight, Ledger, NotMade, Refused, State, Unclear, check_status

__all__ = [
    "Call",
    "InFlight",
    "Ledger",
    "NotMade",
    "OutsideCalls",
    "Refused",
    "State",
    "Unclear",
    "check_status",
]
