"""The faults by kind; the order here is that of the card: what breaks most services first."""

from . import providers, senders, servers, workers
from .fault import Fault

__all__ = ["FAULTS", "Fault"]

FAULTS: dict[str, Fault] = {
    one.name: one
    for one in (
        workers.none,
        workers.kill_at_effect,
        providers.lost,
        senders.twice,
        senders.burst,
        workers.kill_random,
        workers.term,
        servers.redis_restart,
        workers.kill_at_commit,
        senders.failing,
        providers.refused,
        providers.outage,
        providers.rate_limited,
        servers.redis_kill,
        servers.broker_kill,
        workers.freeze,
        workers.kill_all,
        servers.redis_gone,
        servers.redis_freeze,
        servers.redis_full,
        servers.redis_demoted,
        servers.broker_restart,
        servers.broker_freeze,
        servers.store_locked,
        servers.store_away,
        servers.store_full,
        providers.slow,
        providers.mixed,
        workers.clock_ahead,
        workers.copies,
        workers.rolling,
        workers.poison,
        senders.foreign,
        providers.hang,
        senders.quiet,
    )
}
