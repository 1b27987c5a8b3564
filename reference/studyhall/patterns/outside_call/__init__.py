"""An effect outside the database, made once or known to be unclear. Ledgers: `store`, `dbapi`, `redis_ledger`."""

from .calls import OutsideCalls
from .ledger import Call, InFlight, NotMade, Refused, Unclear, check_status

__all__ = ["Call", "InFlight", "NotMade", "OutsideCalls", "Refused", "Unclear", "check_status"]
