"""Tables of the orders. What consumers write has no unique key per order: only the inbox stops duplicates."""

from sqlalchemy import CheckConstraint, Column, Double, Integer, String, Table, Text

from studyhall.patterns.core.store import metadata

packs = Table(
    "pack",
    metadata,
    Column("id", String(100), primary_key=True),
    Column("title", String(200), nullable=False),
    Column("author", String(100), nullable=False),
    Column("price_cents", Integer, nullable=False),
    Column("seats", Integer, nullable=False),
    Column("seats_free", Integer, nullable=False),
    CheckConstraint("seats_free >= 0 AND seats_free <= seats", name="pack_seats"),
)
orders = Table(
    "orders",  # "order" is a word of SQL
    metadata,
    Column("id", String(100), primary_key=True),
    Column("pack_id", String(100), nullable=False),
    Column("customer", String(200), nullable=False),
    Column("seats", Integer, nullable=False),
    Column("amount_cents", Integer, nullable=False),
    Column("method", String(50), nullable=False),
    Column("status", String(20), nullable=False),  # placed processing cancelling confirmed cancelled
    Column("reason", Text),
    Column("charge_id", String(100)),
    Column("placed_at", Double, nullable=False, index=True),
    Column("updated_at", Double, nullable=False),
)
seat_reservations = Table(
    "seat_reservation",
    metadata,
    Column("order_id", String(100), primary_key=True),
    Column("pack_id", String(100), nullable=False),
    Column("seats", Integer, nullable=False),
)
notifications = Table(
    "notification",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("order_id", String(100), nullable=False, index=True),
    Column("customer", String(200), nullable=False),
    Column("text", Text, nullable=False),
    Column("at", Double, nullable=False),
)
payouts = Table(
    "payout",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("order_id", String(100), nullable=False, index=True),
    Column("author", String(100), nullable=False),
    Column("amount_cents", Integer, nullable=False),
    Column("at", Double, nullable=False),
)
analytics = Table(
    "analytics_sale",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("order_id", String(100), nullable=False, index=True),
    Column("pack_id", String(100), nullable=False),
    Column("seats", Integer, nullable=False),
    Column("amount_cents", Integer, nullable=False),
    Column("at", Double, nullable=False),
)
feed_entries = Table(
    "feed_entry",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("order_id", String(100), nullable=False, index=True),
    Column("text", Text, nullable=False),
    Column("at", Double, nullable=False),
)
