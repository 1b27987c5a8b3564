"""The faults, in the order of the card and of the run: what breaks most services first.

So even a run that runs out of time has killed a worker, sent requests twice, restarted Redis and cut off a provider.
"""

from . import providers, senders, servers, workers
from .fault import Fault

__all__ = ["FAULTS", "Fault"]

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        workers.none,
        workers.kill_at_effect,
        workers.kill_at_commit,
        senders.twice,
        servers.redis_restart,
        providers.outage,
        servers.broker_kill,
        providers.lost,
        workers.term,
        workers.kill_random,
        senders.failing,
        providers.refused,
        senders.burst,
        providers.rate_limited,
        servers.redis_kill,
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
