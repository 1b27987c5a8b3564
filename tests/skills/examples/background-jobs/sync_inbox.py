# [use]
# A Celery task, a Flask view, a script: psycopg, psycopg2 or sqlite3, no event loop
from patterns.sync_inbox import create, once


def add_credit(connection, payment_id: str, payload: dict) -> dict:
    """Safe to call any number of times with the same payment."""

    def effect(connection) -> dict:  # commits together with the marker
        cursor = connection.cursor()
        cursor.execute("UPDATE accounts SET cents = cents + 100 WHERE id = 'ann'")
        return {"added": 100}

    return once(connection, "credits", payment_id, payload, effect)


# [/use]


async def example(redis_url: str, store_url: str) -> None:
    import sqlite3

    connection = sqlite3.connect(store_url.removeprefix("sqlite:///"))
    create(connection)
    connection.execute("CREATE TABLE accounts AS SELECT 'ann' AS id, 0 AS cents")
    for _ in range(3):
        assert add_credit(connection, "payment-1", {"of": "ann"}) == {"added": 100}
    assert connection.execute("SELECT cents FROM accounts").fetchone() == (100,)
    connection.close()
