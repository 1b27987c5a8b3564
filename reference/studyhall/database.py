"""StudyHall's database, opened with all of its tables.

SQLAlchemy knows a table once its module is imported. So all are named here: whichever part of StudyHall opens the
database finds every table.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncEngine

from . import db
from .orders import db as orders
from .patterns import checkpoint, lease
from .patterns.core import open_store as stores
from .patterns.dead_letter import archive
from .patterns.deferred_reply import replies
from .patterns.degraded import pending
from .patterns.health import alerts
from .patterns.idempotency import markers
from .patterns.outbox import table as outbox
from .patterns.outside_call import store as outside
from .patterns.saga import store as saga
from .patterns.schedule import history
from .settings import Settings

TABLES = (
    # documents and their results
    db.documents,
    db.graphs,
    db.quizzes,
    db.explanation_sets,
    db.reminders,
    # orders and what their consumers write
    orders.packs,
    orders.orders,
    orders.seat_reservations,
    orders.notifications,
    orders.payouts,
    orders.analytics,
    orders.feed_entries,
    # what the patterns remember
    archive.dead_letters,
    checkpoint.checkpoints,
    alerts.health_alerts,
    history.schedule_state,
    history.missed_slots,
    lease.fences,
    markers.inbox,
    outbox.outbox,
    outside.outside_calls,
    pending.pending_jobs,
    replies.chat_replies,
    saga.sagas,
    saga.steps,
    saga.saga_history,
)


@asynccontextmanager
async def open_database(settings: Settings) -> AsyncIterator[AsyncEngine]:
    """Orders and sagas need no more than this: neither Redis nor a worker."""
    settings.make_data_dir()
    store = stores.open_store(settings.store_url)
    try:
        await stores.create_all(store)
        yield store
    finally:
        await stores.close(store)
